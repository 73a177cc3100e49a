#include "server/cuda/objects/communicator_place.h"

#include <xxhash.h>

#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "common/hex.h"

namespace xmig::server {
namespace {

std::vector<std::string> strings_of(std::span<const std::byte> payload) {
  std::vector<std::string> strings;
  const std::string text(reinterpret_cast<const char*>(payload.data()), payload.size());
  for (size_t at = 0, end; (end = text.find('\0', at)) != std::string::npos; at = end + 1) strings.push_back(text.substr(at, end - at));
  return strings;
}

}  // namespace

device::GroupId derived(const device::GroupId& group, const std::string& how) {
  std::string text(reinterpret_cast<const char*>(group.data()), group.size());
  text += how;
  device::GroupId id{};
  for (size_t part = 0; part < 2; ++part) {
    const XXH128_hash_t hash = XXH3_128bits_withSeed(text.data(), text.size(), part);
    std::memcpy(id.data() + part * sizeof(hash), &hash, sizeof(hash));
  }
  return id;
}

std::string meeting_of(const device::GroupId& group, const std::string& what) {
  return to_hex(derived(group, "meeting " + what));
}

device::Place place_of(const Args_xmCommInit& args, std::span<const std::byte> payload) {
  device::Place place;
  static_assert(sizeof(args.group) == sizeof(place.group));
  std::memcpy(place.group.data(), args.group, sizeof(args.group));
  place.rank = args.rank;
  place.ranks = args.ranks;
  place.patience = std::chrono::milliseconds(args.operation_time);
  std::vector<std::string> strings = strings_of(payload);
  if (strings.empty()) return place;
  place.library = std::move(strings[0]);
  place.settings.assign(std::make_move_iterator(strings.begin() + 1), std::make_move_iterator(strings.end()));
  return place;
}

}  // namespace xmig::server
