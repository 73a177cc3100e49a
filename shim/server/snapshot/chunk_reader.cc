#include "server/snapshot/chunk_reader.h"

#include <cerrno>
#include <cstring>
#include <mutex>
#include <system_error>
#include <utility>

#include "ipc/whole.h"

namespace xmig::server {

using journal::kGranule;

void ChunkReader::read(ReadChunks request) {
  stop();
  stopping_ = false;
  const uint64_t number = request.number;
  try {
    thread_ = std::thread([this, request = std::move(request)] { run(request); });
  } catch (const std::system_error& error) {
    services_.daemon.chunks_read(number, 0, {}, std::string("there is no thread: ") + error.what());
  }
}

void ChunkReader::stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void ChunkReader::run(const ReadChunks& request) {
  const auto still = staging_.begin_batch_unless(stopping_);
  if (!still) return;
  const std::unordered_map<uint64_t, uint64_t> slots = look(request.chunks);
  std::vector<StagingCopy::Piece> from_device;
  std::vector<uint64_t> found;
  Result<> copied;
  size_t examined = 0;
  for (; examined < request.chunks.size() && found.size() < kChunksAtOnce && copied; ++examined) {
    const auto at = slots.find(request.chunks[examined].second);
    if (at == slots.end()) continue;
    copied = copy(at->second, request.memory.get(), found.size() * kGranule, from_device);
    found.push_back(examined);
  }
  if (copied && !from_device.empty()) copied = granules_.staging_copy().to_plain(from_device);
  if (copied) {
    services_.daemon.chunks_read(request.number, examined, found, "");
  } else {
    services_.daemon.chunks_read(request.number, 0, {}, copied.why());
  }
}

// Slots by hash, of what the last snapshot has. At the same address it is a replica; elsewhere it is equal by chance.
std::unordered_map<uint64_t, uint64_t> ChunkReader::look(const std::vector<ChunkHash>& chunks) const {
  std::unordered_map<uint64_t, uint64_t> addresses, slots;
  for (const auto& [address, hash] : chunks) addresses.emplace(hash, address);
  const std::lock_guard lock(memory_.mutex);
  for (const ChunkState& chunk : snapshots_.chunks()) {
    const auto wanted = addresses.find(chunk.hash);
    if (chunk.slot == 0 || wanted == addresses.end()) continue;
    if (wanted->second == chunk.address) {
      slots[chunk.hash] = chunk.slot;
    } else {
      slots.emplace(chunk.hash, chunk.slot);
    }
  }
  return slots;
}

Result<> ChunkReader::copy(uint64_t slot, int to, uint64_t offset, std::vector<StagingCopy::Piece>& from_device) const {
  std::optional<Shadow::PlainAt> plain;
  {
    const std::lock_guard lock(memory_.mutex);
    plain = memory_.shadow.plain_at(slot);
  }
  if (!plain) {
    from_device.push_back({slot, to, offset, ordinal_of_slot(slot)});
    return {};
  }
  std::vector<std::byte> buffer(kGranule);
  if (ipc::read_all(plain->fd, buffer, plain->offset) && ipc::write_all(to, buffer, offset)) return {};
  return Error{std::string("host memory cannot be copied: ") + std::strerror(errno)};
}

}  // namespace xmig::server
