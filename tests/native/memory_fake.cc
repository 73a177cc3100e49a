#include "memory_fake.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "client/bootstrap/job_log.h"
#include "client/bootstrap/process.h"
#include "client/bootstrap/starter.h"
#include "client/journal/append.h"
#include "client/memory/memory.h"
#include "client/memory/memory_progress.h"
#include "client/stream/callbacks.h"
#include "local.h"

namespace fake {

Server server;
thread_local int ordinal = 0;

namespace {

using xmig::journal::Kind;

std::recursive_mutex lock;
thread_local uint64_t sequence_of_thread = 0;
uint64_t sequence = 0;
std::byte staging[xmig::journal::kStagingBytes];

bool overlaps(const std::map<uint64_t, uint64_t>& ranges, uint64_t address, uint64_t bytes) {
  const auto next = ranges.lower_bound(address);
  if (next != ranges.end() && next->first < address + bytes) return true;
  return next != ranges.begin() && std::prev(next)->first + std::prev(next)->second > address;
}

bool covered(const std::map<uint64_t, uint64_t>& ranges, uint64_t address, uint64_t bytes) {
  for (const uint64_t end = address + bytes; address < end;) {
    auto it = ranges.upper_bound(address);
    if (it == ranges.begin()) return false;
    --it;
    if (it->first + it->second <= address) return false;
    address = it->first + it->second;
  }
  return true;
}

CUresult grow(uint64_t address, uint64_t bytes) {
  CHECK(address % xmig::journal::kGranule == 0 && bytes && bytes % xmig::journal::kGranule == 0);
  CHECK(!overlaps(server.backed, address, bytes));
  if (server.backed_bytes() + bytes > server.capacity) return CUDA_ERROR_OUT_OF_MEMORY;
  void* const at = ::mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  CHECK(reinterpret_cast<uint64_t>(at) == address);
  server.backed.emplace(address, bytes);
  return CUDA_SUCCESS;
}

CUresult shrink(uint64_t address, uint64_t bytes) {
  const auto it = server.backed.find(address);
  CHECK(it != server.backed.end() && it->second == bytes);
  CHECK(!overlaps(server.live, address, bytes));
  ::munmap(reinterpret_cast<void*>(address), bytes);
  server.backed.erase(it);
  return CUDA_SUCCESS;
}

void copy_rows(uint64_t to, uint64_t to_pitch, uint64_t from, uint64_t from_pitch, uint64_t width, uint64_t height) {
  for (uint64_t row = 0; row < height; ++row) {
    std::memcpy(reinterpret_cast<void*>(to + row * to_pitch), reinterpret_cast<void*>(from + row * from_pitch), width);
  }
}

template <typename T>
T arguments(const void* args, size_t bytes) {
  T out;
  CHECK(bytes == sizeof(T));
  std::memcpy(&out, args, bytes);
  return out;
}

uint64_t span(uint64_t pitch, uint64_t width, uint64_t height) { return (height - 1) * pitch + width; }

// `reply`: where the reply's bytes go.
CUresult execute(xmig::Op op, const void* args, size_t bytes, std::span<const xmig::client::Slice> slices,
                 std::vector<std::byte>* reply) {
  using namespace xmig;
  const std::lock_guard guard(lock);
  sequence_of_thread = ++sequence;
  const char* const name = kOpInfo[static_cast<size_t>(op)].name;
  server.records.emplace_back(name);
  if (server.fail_next == name) {
    server.fail_next.clear();
    return CUDA_ERROR_UNKNOWN;
  }
  std::vector<std::byte> payload;
  for (const client::Slice& slice : slices) {
    const size_t at = payload.size();
    payload.resize(at + slice.bytes);
    if (slice.data) std::memcpy(payload.data() + at, slice.data, slice.bytes);
  }
  CHECK(payload.size() <= journal::kMaxPayload);
  switch (op) {
    case Op::xmGrow: {
      const auto a = arguments<Args_xmGrow>(args, bytes);
      return grow(a.address, a.bytes);
    }
    case Op::xmShrink: {
      const auto a = arguments<Args_xmShrink>(args, bytes);
      return shrink(a.address, a.bytes);
    }
    case Op::xmAlloc: {
      const auto a = arguments<Args_xmAlloc>(args, bytes);
      CHECK(a.bytes && covered(server.backed, a.address, a.bytes));
      CHECK(!overlaps(server.live, a.address, a.bytes));
      server.live.emplace(a.address, a.bytes);
      return CUDA_SUCCESS;
    }
    case Op::xmFree: {
      const auto it = server.live.find(arguments<Args_xmFree>(args, bytes).address);
      CHECK(it != server.live.end());
      server.discarded.erase(server.discarded.lower_bound(it->first), server.discarded.lower_bound(it->first + it->second));
      std::erase_if(server.named, [&](const auto& one) { return one.first >= it->first && one.first < it->first + it->second; });
      server.live.erase(it);
      return CUDA_SUCCESS;
    }
    case Op::xmNameNumbers: {
      const auto a = arguments<Args_xmNameNumbers>(args, bytes);
      CHECK(a.bytes && covered(server.live, a.address, a.bytes));
      std::erase_if(server.named, [&](const auto& one) { return one.first < a.address + a.bytes && a.address < one.first + one.second; });
      server.named.emplace(a.address, a.bytes);
      return CUDA_SUCCESS;
    }
    case Op::xmForgetNumbers: {
      const auto a = arguments<Args_xmForgetNumbers>(args, bytes);
      std::erase_if(server.named, [&](const auto& one) { return one.first < a.address + a.bytes && a.address < one.first + one.second; });
      return CUDA_SUCCESS;
    }
    case Op::xmDiscard:
    case Op::xmReuse: {
      static_assert(sizeof(Args_xmDiscard) == sizeof(Args_xmReuse));
      const auto a = arguments<Args_xmDiscard>(args, bytes);
      CHECK(a.bytes && (a.address | a.bytes) % journal::kGranule == 0 && covered(server.live, a.address, a.bytes));
      for (uint64_t granule = a.address; granule < a.address + a.bytes; granule += journal::kGranule) {
        if (op == Op::xmReuse) {
          server.discarded.erase(granule);
        } else {
          server.discarded.insert(granule);
        }
      }
      return CUDA_SUCCESS;
    }
    case Op::xmCopyFromHost: {
      const auto a = arguments<Args_xmCopyFromHost>(args, bytes);
      CHECK(covered(server.live, a.destination, span(a.pitch, a.width, a.height)));
      CHECK(payload.size() == a.width * a.height);
      copy_rows(a.destination, a.pitch, reinterpret_cast<uint64_t>(payload.data()), a.width, a.width, a.height);
      return CUDA_SUCCESS;
    }
    case Op::xmCopyFromPinned: {
      const auto a = arguments<Args_xmCopyFromPinned>(args, bytes);
      CHECK(covered(server.live, a.destination, span(a.pitch, a.width, a.height)));
      CHECK(a.width * a.height <= journal::kGranule);
      copy_rows(a.destination, a.pitch, a.source, a.source_pitch, a.width, a.height);
      return CUDA_SUCCESS;
    }
    case Op::xmCopyToPinned: {
      const auto a = arguments<Args_xmCopyToPinned>(args, bytes);
      CHECK(covered(server.live, a.source, span(a.pitch, a.width, a.height)));
      copy_rows(a.destination, a.destination_pitch, a.source, a.pitch, a.width, a.height);
      return CUDA_SUCCESS;
    }
    case Op::xmCopyToHost: {
      const auto a = arguments<Args_xmCopyToHost>(args, bytes);
      CHECK(covered(server.live, a.source, span(a.pitch, a.width, a.height)));
      if (a.staging == ~0ull) {
        reply->resize(a.width * a.height);
        copy_rows(reinterpret_cast<uint64_t>(reply->data()), a.width, a.source, a.pitch, a.width, a.height);
      } else {
        CHECK(a.staging % journal::kStagingSlotBytes == 0 && a.width * a.height <= journal::kStagingSlotBytes);
        copy_rows(reinterpret_cast<uint64_t>(staging + a.staging), a.width, a.source, a.pitch, a.width, a.height);
      }
      return CUDA_SUCCESS;
    }
    case Op::xmCopy2D: {
      const auto a = arguments<Args_xmCopy2D>(args, bytes);
      copy_rows(a.destination, a.destination_pitch, a.source, a.source_pitch, a.width, a.height);
      return CUDA_SUCCESS;
    }
    case Op::cuMemcpyDtoDAsync_v2: {
      const auto a = arguments<Args_cuMemcpyDtoDAsync_v2>(args, bytes);
      std::memmove(reinterpret_cast<void*>(a.dstDevice), reinterpret_cast<void*>(a.srcDevice), a.ByteCount);
      return CUDA_SUCCESS;
    }
    case Op::cuMemsetD16Async: {
      const auto a = arguments<Args_cuMemsetD16Async>(args, bytes);
      std::fill_n(reinterpret_cast<uint16_t*>(a.dstDevice), a.N, a.us);
      return CUDA_SUCCESS;
    }
    case Op::cuMemGetInfo_v2: {
      const Reply_cuMemGetInfo_v2 info{server.capacity - server.backed_bytes(), server.capacity};
      reply->resize(sizeof(info));
      std::memcpy(reply->data(), &info, sizeof(info));
      return CUDA_SUCCESS;
    }
    default:
      return CUDA_SUCCESS;
  }
}

struct Answer {
  CUresult result;
  std::vector<std::byte> reply;
};
thread_local std::map<uint64_t, Answer> answers;

}  // namespace

uint64_t Server::backed_bytes() const {
  uint64_t sum = 0;
  for (const auto& [address, bytes] : backed) sum += bytes;
  return sum;
}
uint64_t Server::live_bytes() const {
  uint64_t sum = 0;
  for (const auto& [address, bytes] : live) sum += bytes;
  return sum;
}
size_t Server::count(const std::string& name) const {
  return static_cast<size_t>(std::count(records.begin(), records.end(), name));
}

CUstream stream(uint32_t index) {
  return reinterpret_cast<CUstream>(xmig::journal::make_handle(Kind::kStream, index));
}

}  // namespace fake

namespace xmig::client {

constinit Process process;  // without a job: nothing is shared with others

CUresult enter() { return CUDA_SUCCESS; }

uint64_t create_handle(journal::Kind kind) {
  static std::atomic<uint32_t> next{1};
  return journal::make_handle(kind, next.fetch_add(1));
}
void free_handle(uint64_t) {}

CUresult append(Op op, const void* args, size_t bytes) { return fake::execute(op, args, bytes, {}, nullptr); }
CUresult append(Op op, const void* args, size_t bytes, std::span<const Slice> slices) {
  return fake::execute(op, args, bytes, slices, nullptr);
}

Pending start(Op op, const void* args, size_t bytes, std::span<const Slice> slices, size_t) {
  fake::Answer answer;
  answer.result = fake::execute(op, args, bytes, slices, &answer.reply);
  fake::answers.emplace(last_sequence(), std::move(answer));
  return {.position = last_sequence()};
}

CUresult finish(Pending& pending, void* reply, size_t reply_bytes, size_t* used) {
  CHECK(!fake::answers.empty() && fake::answers.begin()->first == pending.position);  // in order
  const fake::Answer answer = std::move(fake::answers.begin()->second);
  fake::answers.erase(fake::answers.begin());
  const size_t bytes = std::min(reply_bytes, answer.reply.size());
  if (bytes) std::memcpy(reply, answer.reply.data(), bytes);
  if (used) *used = bytes;
  return answer.result;
}

CUresult call(Op op, const void* args, size_t bytes, void* reply, size_t reply_bytes) {
  Pending pending = start(op, args, bytes, {}, reply_bytes);
  return finish(pending, reply, reply_bytes);
}

uint64_t last_sequence() { return fake::sequence_of_thread; }
int current_ordinal() { return fake::ordinal; }
uint64_t current_context() {
  return fake::ordinal < 0 ? 0 : journal::make_handle(journal::Kind::kContext, static_cast<uint32_t>(fake::ordinal));
}
bool host_functions_are_waiting() { return false; }
bool valid_stream(CUstream stream) {
  const auto value = reinterpret_cast<uint64_t>(stream);
  return value <= 2 || journal::handle_is(value, journal::Kind::kStream);
}
CUstream default_stream() { return CU_STREAM_LEGACY; }
std::byte* staging() { return fake::staging; }

StreamHome stream_home(CUstream) { return {current_context(), current_ordinal()}; }

CUresult synchronize_context(uint64_t) {
  const CUresult result = append(Op::cuCtxSynchronize, nullptr, 0);
  if (result == CUDA_SUCCESS) memory_context_synchronized();
  return result;
}

CUresult cuStreamSynchronize(CUstream stream) {
  const Args_cuStreamSynchronize args{reinterpret_cast<uint64_t>(stream)};
  const CUresult result = append(Op::cuStreamSynchronize, &args, sizeof(args));
  if (result == CUDA_SUCCESS) memory_stream_synchronized(stream);
  return result;
}

CUresult share_memory(int, int) { return CUDA_SUCCESS; }

CUresult check_ordinal(int ordinal) { return ordinal >= 0 && ordinal < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }

// What is reported is nobody's here.
void keep_line(std::string_view) {}
bool write_to_starter(std::string_view) { return false; }

}  // namespace xmig::client
