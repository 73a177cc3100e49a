// Module images of the program: kept in files that outlive the server.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "journal/mapping.h"
#include "server/memory/physical.h"

namespace xmig::server {

inline constexpr uint64_t kMaxImageBytes = 4ull << 30;

class Images {
 public:
  explicit Images(Physical& physical) : physical_(physical) {}

  // A piece of an image that travels through the journal.
  Status add_piece(uint64_t number, uint64_t total, uint64_t offset, std::span<const std::byte> piece);
  // An image that lies in a file, `offset` bytes in.
  Status add_file(uint64_t number, uint64_t total, uint64_t offset, const std::string& path);
  // All bytes of it; empty if it is not here, or not complete.
  std::span<const std::byte> bytes(uint64_t number);
  // It is for one load, which has been tried: from now on it is needed only as long as its module is there.
  void tried(uint64_t number);
  // A snapshot was committed: images that were tried and are not among `needed` go.
  void release_unneeded(const std::vector<uint64_t>& needed);

  Status adopt(Hosted memory);
  // A move: the server that holds this memory gives it up. False if it is none of these.
  bool forget(uint64_t id) {
    return std::erase_if(images_, [&](const auto& entry) { return entry.second.memory.id == id; }) != 0;
  }
  // The daemon hands an image back by name: its number, and whether it lies in a file of the program's.
  struct Name {
    uint64_t number;
    bool file;
  };
  static std::optional<Name> parse_name(std::string_view name);
  // Where it lies; null if it is not here.
  const Hosted* memory(uint64_t number) const {
    const auto found = images_.find(number);
    return found == images_.end() ? nullptr : &found->second.memory;
  }

  struct State {
    uint64_t number, received;
  };
  // Of those that a recovery would need.
  std::vector<State> states(const std::vector<uint64_t>& needed) const;
  // Recovery: what a snapshot says of an image. False if it is not here, or shorter than that.
  bool restore(const State& state);

  template <typename F>
  void for_each(F&& f) const {
    for (const auto& [number, image] : images_) f(image.memory);
  }

 private:
  struct Image {
    bool is_needed(uint64_t number, const std::vector<uint64_t>& needed) const {
      return !tried || std::find(needed.begin(), needed.end(), number) != needed.end();
    }
    Hosted memory;  // address: the offset of the image in the file
    uint64_t received = 0;
    journal::Mapping mapping;
    size_t skipped = 0;  // bytes of the mapping before the image
    bool tried = false;
  };
  void hold(uint64_t number, uint64_t total, uint64_t offset, ipc::UniqueFd fd, const char* kind, Image& image);

  Physical& physical_;
  std::map<uint64_t, Image> images_;
};

}  // namespace xmig::server
