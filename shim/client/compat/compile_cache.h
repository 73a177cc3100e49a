// What NVRTC and nvJitLink have compiled, kept from run to run. The genuine driver does that for them, through one of its
// unpublished tables; without it a program compiles the same code at each start: cuDNN's attention takes half a second for
// each direction.
//
// One file for each result, in `xmig` below CUDA_CACHE_PATH, or in $XDG_CACHE_HOME/xmig/compiled, or in
// ~/.cache/xmig/compiled. A file holds its key too, so that no result is taken for another's. CUDA_CACHE_DISABLE=1 turns it
// off and CUDA_CACHE_MAXSIZE is its size in bytes, as the driver's documentation says of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace xmig::client {

class CompileCache {
 public:
  using Key = std::span<const std::byte>;  // everything that the result depends on

  // `folder` is made when something is added. `limit`: of all files together, in bytes.
  CompileCache(std::string folder, uint64_t limit) : folder_(std::move(folder)), limit_(limit) {}

  // As the environment says; nothing where there is to be none, or no place for it.
  static std::optional<CompileCache> of_environment();

  // A file that is damaged, or somebody else's, is not there.
  std::optional<std::vector<std::byte>> find(Key key) const;
  // What was used longest ago goes when there is no room. False: it is not kept.
  bool add(Key key, std::span<const std::byte> data) const;

  const std::string& folder() const { return folder_; }

 private:
  std::string path(Key key) const;
  bool make_room(uint64_t bytes) const;

  std::string folder_;
  uint64_t limit_;
};

}  // namespace xmig::client
