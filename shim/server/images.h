// Module images of the program: kept in files that outlive the server.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "journal/mapping.h"
#include "server/physical.h"

namespace xmig::server {

inline constexpr uint64_t kMaxImageBytes = 4ull << 30;

class Images {
 public:
  explicit Images(Physical& physical) : physical_(physical) {}

  // A piece of an image that travels through the journal.
  CUresult add_piece(uint64_t number, uint64_t total, uint64_t offset, std::span<const std::byte> piece);
  // An image that lies in a file, `offset` bytes in.
  CUresult add_file(uint64_t number, uint64_t total, uint64_t offset, const std::string& path);
  // All bytes of it; empty if it is not here, or not complete.
  std::span<const std::byte> bytes(uint64_t number);
  // Nothing refers to it any more: give it back. Unknown numbers are ignored.
  void drop(uint64_t number);

  CUresult adopt(Hosted memory);

  struct State {
    uint64_t number, received;
  };
  std::vector<State> states() const;
  // Recovery: what a cut says of an image. False if it is not here, or shorter than that.
  bool restore(const State& state);

  template <typename F>
  void for_each(F&& f) const {
    for (const auto& [number, image] : images_) f(image.memory);
  }

 private:
  struct Image {
    Hosted memory;  // address: the offset of the image in the file
    uint64_t received = 0;
    journal::Mapping mapping;
    size_t skipped = 0;  // bytes of the mapping before the image
  };
  void hold(uint64_t number, uint64_t total, uint64_t offset, ipc::UniqueFd fd, const char* kind, Image& image);

  Physical& physical_;
  std::map<uint64_t, Image> images_;
};

}  // namespace xmig::server
