// How the variables of one module lie where they are kept, in the program's memory:
//
//   a header, an entry for each variable, their names                        the directory
//   for each variable its content, at a multiple of 16                        nothing, until it has been written
//   for those whose first content has addresses, what that was as well
//
// The place is the program's: a later server checks every number that it finds there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/result.h"
#include "device/image.h"

namespace xmig::server {

struct KeptVariable {
  std::string name;
  uint64_t bytes = 0;
  uint64_t content = 0;  // where it lies, from the beginning of the place
  uint64_t first = 0;    // and what it was when the module was loaded; 0: that is the same for every server
  bool written = false;  // since then; if not, there is no content
};

inline constexpr uint64_t kMaxVariableDirectory = 256ull << 20;

// Gives each its place. How much it takes in all; 0: more than an address can say.
uint64_t place_variables(std::vector<KeptVariable>& variables);

std::vector<std::byte> serialise_variables(const std::vector<KeptVariable>& variables, uint64_t bytes);
// How long the directory is that begins so; 0: it is none. `bytes`: of the place.
uint64_t variable_directory_bytes(std::span<const std::byte> begin, uint64_t bytes);
// Of a place of so many bytes.
Result<std::vector<KeptVariable>> parse_variables(std::span<const std::byte> directory, uint64_t bytes);

}  // namespace xmig::server
