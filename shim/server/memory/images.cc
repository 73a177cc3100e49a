#include "server/memory/images.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "ipc/whole.h"

namespace xmig::server {
namespace {

std::string make_name(const char* kind, uint64_t number) { return kind + std::to_string(number); }

}  // namespace

std::optional<Images::Name> Images::parse_name(std::string_view name) {
  const size_t colon = name.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::string_view digits = name.substr(colon + 1);
  Name parsed{0, name.substr(0, colon) == "file"};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), parsed.number);
  const bool known = parsed.file || name.substr(0, colon) == "image";
  return known && error == std::errc{} && end == digits.data() + digits.size() ? std::optional(parsed) : std::nullopt;
}

void Images::hold(uint64_t number, uint64_t total, uint64_t offset, ipc::UniqueFd fd, const char* kind,
                  Image& image) {
  image.memory = {physical_.next_id(), HostedKind::kImage, 0, offset, total, make_name(kind, number), std::move(fd)};
  physical_.daemon().memory_add(image.memory);
}

Status Images::add_piece(uint64_t number, uint64_t total, uint64_t offset, std::span<const std::byte> piece) {
  if (total == 0 || total > kMaxImageBytes || offset > total || piece.size() > total - offset) {
    return Problem::kInvalid;
  }
  auto found = images_.find(number);
  if (found == images_.end()) {
    ipc::UniqueFd fd(::memfd_create("xmig-image", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(total)) != 0) return Problem::kNoMemory;
    found = images_.try_emplace(number).first;
    hold(number, total, 0, std::move(fd), "image:", found->second);
  }
  Image& image = found->second;
  image.tried = false;
  // A replay brings pieces that are here already; in the first run they come in order.
  if (image.memory.bytes != total || image.memory.address != 0 || offset > image.received) {
    return Problem::kInvalid;
  }
  if (!ipc::write_all(image.memory.fd.get(), piece, offset)) return Problem::kNoMemory;
  image.received = std::max(image.received, offset + piece.size());
  return {};
}

Status Images::add_file(uint64_t number, uint64_t total, uint64_t offset, const std::string& path) {
  if (const auto found = images_.find(number); found != images_.end()) {
    found->second.tried = false;
    return {};  // a replay: the file that was meant is the one that is held
  }
  if (total == 0 || total > kMaxImageBytes || offset + total < offset) return Problem::kInvalid;
  // Not blocking: the path may name anything. The server is the job's user and may read what the program may.
  ipc::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) return Problem::kNoFile;
  if (offset + total > static_cast<uint64_t>(status.st_size)) return Problem::kBadImage;
  Image& image = images_.try_emplace(number).first->second;
  hold(number, total, offset, std::move(fd), "file:", image);
  image.received = total;
  return {};
}

std::span<const std::byte> Images::bytes(uint64_t number) {
  const auto found = images_.find(number);
  if (found == images_.end() || found->second.received != found->second.memory.bytes) return {};
  Image& image = found->second;
  if (!image.mapping) {
    image.skipped = image.memory.address % kPage;
    const auto start = static_cast<off_t>(image.memory.address - image.skipped);
    const size_t length = image.memory.bytes + image.skipped;
    image.mapping = journal::Mapping(
        ::mmap(nullptr, length, PROT_READ, MAP_PRIVATE, image.memory.fd.get(), start), length);
    if (!image.mapping) return {};
  }
  return {image.mapping.data() + image.skipped, image.memory.bytes};
}

void Images::tried(uint64_t number) {
  if (const auto found = images_.find(number); found != images_.end()) found->second.tried = true;
}

void Images::release_unneeded(const std::vector<uint64_t>& needed) {
  std::erase_if(images_, [&](const auto& entry) {
    const auto& [number, image] = entry;
    if (image.is_needed(number, needed)) return false;
    physical_.daemon().memory_drop(image.memory.id);
    return true;
  });
}

Status Images::adopt(Hosted memory) {
  const auto name = parse_name(memory.name);
  struct stat status {};
  if (!name || memory.bytes == 0 || memory.bytes > kMaxImageBytes ||
      ::fstat(memory.fd.get(), &status) != 0 || memory.address + memory.bytes < memory.address ||
      memory.address + memory.bytes > static_cast<uint64_t>(status.st_size)) {
    return Problem::kInvalid;
  }
  physical_.taken(memory.id);
  Image& image = images_.try_emplace(name->number).first->second;
  image.received = name->file ? memory.bytes : 0;
  image.memory = std::move(memory);
  image.tried = true;  // unless the snapshot or the replay says otherwise
  return {};
}

std::vector<Images::State> Images::states(const std::vector<uint64_t>& needed) const {
  std::vector<State> all;
  for (const auto& [number, image] : images_) {
    if (image.is_needed(number, needed)) all.push_back({number, image.received});
  }
  return all;
}

bool Images::restore(const State& state) {
  const auto found = images_.find(state.number);
  if (found == images_.end() || state.received > found->second.memory.bytes) return false;
  found->second.received = std::max(found->second.received, state.received);
  found->second.tried = false;
  return true;
}

}  // namespace xmig::server
