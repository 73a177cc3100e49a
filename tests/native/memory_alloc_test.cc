// Allocators of the client: random operations against a server that checks, the rule for memory freed in stream order,
// out of memory, mappings, pointer queries.
#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "client/journal/append.h"
#include "client/memory/cached_blocks.h"
#include "client/memory/memory.h"
#include "client/memory/memory_backing.h"
#include "client/memory/memory_heap.h"
#include "client/memory/memory_progress.h"
#include "client/memory/pool.h"
#include "local.h"
#include "memory_fake.h"

namespace client = xmig::client;
using namespace xmig::client;
using fake::server;

namespace {

constexpr uint64_t kMiB = 1ull << 20;

CUdeviceptr alloc(size_t bytes) {
  CUdeviceptr address = 0;
  CHECK(client::cuMemAlloc_v2(&address, bytes) == CUDA_SUCCESS);
  return address;
}

CUdeviceptr alloc_async(size_t bytes, CUstream stream) {
  CUdeviceptr address = 0;
  CHECK(client::cuMemAllocAsync(&address, bytes, stream) == CUDA_SUCCESS);
  return address;
}

size_t random_size(std::mt19937_64& random) {
  const unsigned shift = static_cast<unsigned>(random() % 24);
  return 1 + random() % (1ull << shift);
}

// Everything is free: the cache may hold memory, but no more, and giving it back leaves nothing.
void check_empty() {
  CHECK(server.live.empty());
  for (const auto& pool : pools_of(-1)) {
    CHECK(pool->heap.use().used == 0);
    pool->heap.release(0);
    CHECK(pool->heap.use().reserved == 0);
  }
  for (int ordinal = 0; ordinal < 2; ++ordinal) {
    Backing& memory = backing(ordinal);
    CHECK(memory.bytes().cached == memory.bytes().grown);
    memory.trim(0);
    CHECK(memory.bytes().cached == 0 && memory.bytes().bare == xmig::journal::kDeviceSpan);
  }
  CHECK(server.backed.empty());
}

void random_operations(uint64_t seed) {
  std::mt19937_64 random(seed);
  struct Live {
    CUdeviceptr address;
    size_t bytes;
    uint64_t mark;
  };
  std::vector<Live> live;
  const auto mark = [](const Live& l) { std::memcpy(reinterpret_cast<void*>(l.address), &l.mark, sizeof(l.mark)); };
  const auto check = [](const Live& l) {
    uint64_t found = 0;
    std::memcpy(&found, reinterpret_cast<void*>(l.address), sizeof(found));
    CHECK(found == l.mark);
  };
  for (int i = 0; i < 4000; ++i) {
    const CUstream stream = fake::stream(static_cast<uint32_t>(random() % 3));
    switch (random() % 8) {
      case 0:
      case 1:
      case 2:
      case 3: {
        Live l{0, random_size(random) + 8, random()};
        const bool async = random() % 2;
        const CUresult result =
            async ? client::cuMemAllocAsync(&l.address, l.bytes, stream) : client::cuMemAlloc_v2(&l.address, l.bytes);
        if (result == CUDA_ERROR_OUT_OF_MEMORY) break;
        CHECK(result == CUDA_SUCCESS);
        CHECK(l.address % 256 == 0);
        mark(l);
        live.push_back(l);
        break;
      }
      case 7:
        if (random() % 8 == 0) CHECK(client::cuStreamSynchronize(stream) == CUDA_SUCCESS);
        break;
      default:
        if (live.empty()) break;
        std::swap(live[random() % live.size()], live.back());
        check(live.back());
        if (random() % 2) {
          CHECK(client::cuMemFreeAsync(live.back().address, stream) == CUDA_SUCCESS);
        } else {
          CHECK(client::cuMemFree_v2(live.back().address) == CUDA_SUCCESS);
        }
        live.pop_back();
    }
    // The server saw no overlap; the pointer query knows every one.
    if (!live.empty()) {
      const Live& l = live[random() % live.size()];
      CUdeviceptr base = 0;
      size_t bytes = 0;
      CHECK(client::cuMemGetAddressRange_v2(&base, &bytes, l.address + random() % l.bytes) == CUDA_SUCCESS);
      CHECK(base == l.address && bytes == l.bytes);
    }
  }
  for (const Live& l : live) {
    check(l);
    CHECK(client::cuMemFree_v2(l.address) == CUDA_SUCCESS);
  }
  CHECK(synchronize_users(current_context()) == CUDA_SUCCESS);
  check_empty();
}

// Can work of this stream get that block, when it takes more than a granule holds? What it takes it keeps.
bool obtains(CUstream stream, size_t bytes, CUdeviceptr wanted, std::vector<CUdeviceptr>& kept) {
  bool obtained = false;
  for (size_t taken = 0; taken <= xmig::journal::kGranule; taken += bytes) {
    kept.push_back(alloc_async(bytes, stream));
    obtained = obtained || kept.back() == wanted;
  }
  return obtained;
}

void stream_order() {
  const CUstream one = fake::stream(1), two = fake::stream(2);
  CUmemoryPool pool = nullptr;
  CHECK(client::cuDeviceGetDefaultMemPool(&pool, 0) == CUDA_SUCCESS);
  cuuint64_t keep = ~0ull;
  CHECK(client::cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep) == CUDA_SUCCESS);
  for (const size_t bytes : {size_t{4096}, size_t{1 * kMiB}, size_t{8 * kMiB}}) {
    std::vector<CUdeviceptr> kept;
    const CUdeviceptr first = alloc_async(bytes, one);
    CHECK(client::cuMemFreeAsync(first, one) == CUDA_SUCCESS);
    CHECK(alloc_async(bytes, one) == first);  // its own stream, at once
    CHECK(client::cuMemFreeAsync(first, one) == CUDA_SUCCESS);
    CHECK(!obtains(two, bytes, first, kept));  // another stream: not before a wait
    CHECK(client::cuStreamSynchronize(two) == CUDA_SUCCESS);
    CHECK(!obtains(two, bytes, first, kept));  // nor after a wait for the wrong stream
    CHECK(client::cuStreamSynchronize(one) == CUDA_SUCCESS);
    CHECK(obtains(two, bytes, first, kept));
    // A wait that came before the free covers nothing.
    const CUdeviceptr late = alloc_async(bytes, one);
    const uint64_t before = last_sequence();
    CHECK(client::cuMemFreeAsync(late, one) == CUDA_SUCCESS);
    memory_event_synchronized(memory_stream_key(one), before);
    CHECK(!obtains(two, bytes, late, kept));
    memory_event_synchronized(memory_stream_key(one), last_sequence());
    CHECK(obtains(two, bytes, late, kept));
    // Memory of a destroyed stream waits for the context.
    const CUdeviceptr last = alloc_async(bytes, one);
    CHECK(client::cuMemFreeAsync(last, one) == CUDA_SUCCESS);
    memory_stream_destroyed(one);
    CHECK(!obtains(one, bytes, last, kept));
    CHECK(synchronize_users(current_context()) == CUDA_SUCCESS);
    CHECK(obtains(one, bytes, last, kept));
    for (const CUdeviceptr address : kept) CHECK(client::cuMemFree_v2(address) == CUDA_SUCCESS);
    CHECK(client::cuMemPoolTrimTo(pool, 0) == CUDA_SUCCESS);
  }
  // The per-thread stream of another thread is another stream.
  const CUdeviceptr mine = alloc_async(4 * kMiB, CU_STREAM_PER_THREAD);
  CHECK(client::cuMemFreeAsync(mine, CU_STREAM_PER_THREAD) == CUDA_SUCCESS);
  CUdeviceptr theirs = 0;
  std::thread([&] { theirs = alloc_async(4 * kMiB, CU_STREAM_PER_THREAD); }).join();
  CHECK(theirs != mine);
  CHECK(client::cuMemFree_v2(theirs) == CUDA_SUCCESS);

  cuuint64_t reserved = 0, used = 1, high = 0;
  CHECK(client::cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) == CUDA_SUCCESS);
  CHECK(client::cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used) == CUDA_SUCCESS);
  CHECK(client::cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &high) == CUDA_SUCCESS);
  CHECK(reserved > 0 && used == 0 && high >= 8 * kMiB);
  CHECK(client::cuMemPoolTrimTo(pool, 0) == CUDA_SUCCESS);
  CHECK(client::cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) == CUDA_SUCCESS);
  CHECK(reserved == 0);
  keep = 0;
  CHECK(client::cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep) == CUDA_SUCCESS);
  check_empty();
}

void out_of_memory() {
  server.capacity = 64 * kMiB;
  std::vector<CUdeviceptr> all;
  CUdeviceptr address = 0;
  while (client::cuMemAlloc_v2(&address, 2 * kMiB) == CUDA_SUCCESS) all.push_back(address);
  CHECK(all.size() == 32);  // to the last byte
  CHECK(client::cuMemAlloc_v2(&address, 1) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(server.live_bytes() == 64 * kMiB);
  // Memory freed in stream order, and what a pool holds, is used before giving up.
  CHECK(client::cuMemFree_v2(all.back()) == CUDA_SUCCESS);
  all.back() = alloc_async(2 * kMiB, fake::stream(1));
  CHECK(client::cuMemFreeAsync(all.back(), fake::stream(1)) == CUDA_SUCCESS);
  all.back() = alloc(2 * kMiB);
  CHECK(client::cuMemAlloc_v2(&address, 1) == CUDA_ERROR_OUT_OF_MEMORY);
  // A failed record leaves nothing behind.
  CHECK(client::cuMemFree_v2(all.back()) == CUDA_SUCCESS);
  server.fail_next = "xmAlloc";
  CHECK(client::cuMemAlloc_v2(&address, 2 * kMiB) == CUDA_ERROR_UNKNOWN);
  all.back() = alloc(2 * kMiB);
  server.fail_next = "xmFree";
  CHECK(client::cuMemFree_v2(all.back()) == CUDA_ERROR_UNKNOWN);
  for (const CUdeviceptr a : all) CHECK(client::cuMemFree_v2(a) == CUDA_SUCCESS);
  CHECK(client::cuMemFree_v2(all.front()) == CUDA_ERROR_INVALID_VALUE);
  // Different sizes: what is cached in pieces is given back for one large block.
  CHECK(client::cuMemFree_v2(alloc(60 * kMiB)) == CUDA_SUCCESS);
  CHECK(client::cuMemFree_v2(alloc(64 * kMiB)) == CUDA_SUCCESS);
  CHECK(client::cuMemAlloc_v2(&address, 64 * kMiB + 1) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(client::cuMemAlloc_v2(&address, ~0ull) == CUDA_ERROR_OUT_OF_MEMORY);
  check_empty();
  server.capacity = 1ull << 30;
}

void plentiful() {
  // Backing comes in large steps: most allocations do not wait.
  const size_t before = server.count("xmGrow");
  std::vector<CUdeviceptr> all;
  for (int i = 0; i < 64; ++i) all.push_back(alloc(1 * kMiB));
  CHECK(server.count("xmGrow") - before == 2);
  size_t free = 0, total = 0;
  CHECK(client::cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS && total - free == 64 * kMiB);
  for (const CUdeviceptr a : all) CHECK(client::cuMemFree_v2(a) == CUDA_SUCCESS);
  CHECK(client::cuMemGetInfo_v2(&free, &total) == CUDA_SUCCESS && total == free);
  const size_t grown = server.count("xmGrow");
  for (int i = 0; i < 100; ++i) CHECK(client::cuMemFree_v2(alloc(3 * kMiB)) == CUDA_SUCCESS);
  CHECK(server.count("xmGrow") == grown);
  check_empty();
}

void mappings() {
  server.capacity = 32 * kMiB;
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  CUdeviceptr range = 0;
  CHECK(client::cuMemAddressReserve(&range, 64 * kMiB, 0, 0, 0) == CUDA_SUCCESS);
  CUmemGenericAllocationHandle handles[2];
  for (auto& handle : handles) CHECK(client::cuMemCreate(&handle, 16 * kMiB, &properties, 0) == CUDA_SUCCESS);
  CUmemGenericAllocationHandle more = 0;
  CHECK(client::cuMemCreate(&more, 2 * kMiB, &properties, 0) == CUDA_ERROR_OUT_OF_MEMORY);  // promised to the two
  CHECK(server.backed.empty());
  CHECK(client::cuMemMap(range, 16 * kMiB, 0, handles[0], 0) == CUDA_SUCCESS);
  CHECK(client::cuMemMap(range + 8 * kMiB, 16 * kMiB, 0, handles[1], 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemMap(range + 16 * kMiB, 16 * kMiB, 0, handles[1], 0) == CUDA_SUCCESS);
  CHECK(client::cuMemMap(range + 32 * kMiB, 16 * kMiB, 0, handles[1], 0) == CUDA_ERROR_NOT_SUPPORTED);
  CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CHECK(client::cuMemSetAccess(range, 32 * kMiB, &access, 1) == CUDA_SUCCESS);
  unsigned long long flags = 0;
  CHECK(client::cuMemGetAccess(&flags, &properties.location, range + 20 * kMiB) == CUDA_SUCCESS);
  CHECK(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  // One tensor across two handles is one range to copies.
  CHECK(client::cuMemcpyDtoD_v2(range + 20 * kMiB, range + 4 * kMiB, 12 * kMiB) == CUDA_SUCCESS);
  CHECK(client::cuMemcpyDtoD_v2(range + 20 * kMiB, range + 4 * kMiB, 12 * kMiB + 1) == CUDA_ERROR_INVALID_VALUE);
  // Unmapped and mapped again, the content is there.
  std::memset(reinterpret_cast<void*>(range), 7, 16);
  CHECK(client::cuMemUnmap(range, 16 * kMiB) == CUDA_SUCCESS);
  CHECK(client::cuMemcpyDtoD_v2(range + 16 * kMiB, range, 1) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemMap(range, 16 * kMiB, 0, handles[0], 0) == CUDA_SUCCESS);
  CHECK(*reinterpret_cast<char*>(range + 15) == 7);
  // Mapped elsewhere, it comes along; if there is no room for both, nothing has changed.
  CHECK(client::cuMemUnmap(range, 16 * kMiB) == CUDA_SUCCESS);
  CHECK(client::cuMemMap(range + 40 * kMiB, 16 * kMiB, 0, handles[0], 0) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(client::cuMemMap(range + 8 * kMiB, 16 * kMiB, 0, handles[0], 0) == CUDA_ERROR_INVALID_VALUE);
  server.capacity = 48 * kMiB;
  CHECK(client::cuMemMap(range + 40 * kMiB, 16 * kMiB, 0, handles[0], 0) == CUDA_SUCCESS);
  CHECK(*reinterpret_cast<char*>(range + 40 * kMiB + 15) == 7);
  CHECK(client::cuMemUnmap(range + 40 * kMiB, 16 * kMiB) == CUDA_SUCCESS);
  CHECK(client::cuMemMap(range, 16 * kMiB, 0, handles[0], 0) == CUDA_SUCCESS);
  CHECK(*reinterpret_cast<char*>(range + 15) == 7);
  server.capacity = 32 * kMiB;
  CHECK(client::cuMemAddressFree(range, 64 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  // Released while mapped: gone with the mapping. Two mappings may be unmapped at once.
  CHECK(client::cuMemRetainAllocationHandle(&more, reinterpret_cast<void*>(range)) == CUDA_SUCCESS);
  CHECK(more == handles[0]);
  for (const auto handle : handles) CHECK(client::cuMemRelease(handle) == CUDA_SUCCESS);
  CHECK(client::cuMemRelease(more) == CUDA_SUCCESS);
  CHECK(client::cuMemUnmap(range, 24 * kMiB) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemUnmap(range, 32 * kMiB) == CUDA_SUCCESS);
  CHECK(server.backed.empty());
  // The place can be used again by others.
  CHECK(client::cuMemCreate(&more, 32 * kMiB, &properties, 0) == CUDA_SUCCESS);
  CHECK(client::cuMemMap(range + 8 * kMiB, 32 * kMiB, 0, more, 0) == CUDA_SUCCESS);
  CHECK(client::cuMemUnmap(range + 8 * kMiB, 32 * kMiB) == CUDA_SUCCESS);
  CHECK(client::cuMemRelease(more) == CUDA_SUCCESS);
  CHECK(client::cuMemRelease(more) == CUDA_ERROR_INVALID_VALUE);
  CHECK(client::cuMemAddressFree(range, 64 * kMiB) == CUDA_SUCCESS);
  server.capacity = 1ull << 30;
  check_empty();
}

void pointers() {
  const CUdeviceptr device = alloc(1000);
  unsigned int type = 0;
  CHECK(client::cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device + 999) == CUDA_SUCCESS);
  CHECK(type == CU_MEMORYTYPE_DEVICE);
  CHECK(client::cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device + 1000) ==
        CUDA_ERROR_INVALID_VALUE);
  int local = 0;
  const auto stack = reinterpret_cast<CUdeviceptr>(&local);
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      CU_POINTER_ATTRIBUTE_DEVICE_POINTER};
  int ordinal = 0;
  CUdeviceptr pointer = 1;
  void* data[] = {&type, &ordinal, &pointer};
  CHECK(client::cuPointerGetAttributes(3, attributes, data, stack) == CUDA_SUCCESS);
  CHECK(type == 0 && ordinal == -2 && pointer == 0);
  CHECK(client::cuPointerGetAttributes(3, attributes, data, device + 8) == CUDA_SUCCESS);
  CHECK(type == CU_MEMORYTYPE_DEVICE && ordinal == 0 && pointer == device + 8);
  CHECK(client::cuMemHostRegister_v2(&local, sizeof(local), 0) == CUDA_SUCCESS);
  CHECK(client::cuMemHostRegister_v2(&local, sizeof(local), 0) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CHECK(client::cuPointerGetAttributes(3, attributes, data, stack) == CUDA_SUCCESS);
  CHECK(type == CU_MEMORYTYPE_HOST && ordinal == 0 && pointer == 0);
  CHECK(client::cuMemHostGetDevicePointer_v2(&pointer, &local, 0) == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(client::cuMemHostUnregister(&local) == CUDA_SUCCESS);
  CHECK(client::cuMemHostUnregister(&local) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  // A global belongs to its module; a reset takes everything of a context away.
  uint64_t global = 0;
  CHECK(allocate_global(64, &global) == CUDA_SUCCESS);
  CHECK(client::cuMemFree_v2(global) == CUDA_ERROR_INVALID_VALUE);
  CHECK(free_global(global) == CUDA_SUCCESS);
  server.live.clear();
  memory_context_reset(current_context());
  CHECK(client::cuMemFree_v2(device) == CUDA_ERROR_INVALID_VALUE);
  size_t pitch = 0;
  CUdeviceptr rows = 0;
  CHECK(client::cuMemAllocPitch_v2(&rows, &pitch, 1000, 10, 4) == CUDA_SUCCESS && pitch == 1024);
  CHECK(client::cuMemFree_v2(rows) == CUDA_SUCCESS);
  check_empty();
}

void threads() {
  std::vector<std::thread> all;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    all.emplace_back([seed] {
      std::mt19937_64 random(seed);
      const CUstream stream = fake::stream(static_cast<uint32_t>(seed));
      std::vector<CUdeviceptr> live;
      for (int i = 0; i < 2000; ++i) {
        if (random() % 2 || live.empty()) {
          live.push_back(alloc_async(random_size(random), stream));
        } else {
          CHECK(client::cuMemFreeAsync(live.back(), stream) == CUDA_SUCCESS);
          live.pop_back();
        }
        if (random() % 64 == 0) CHECK(client::cuStreamSynchronize(stream) == CUDA_SUCCESS);
      }
      for (const CUdeviceptr address : live) CHECK(client::cuMemFree_v2(address) == CUDA_SUCCESS);
    });
  }
  for (std::thread& thread : all) thread.join();
  CHECK(synchronize_users(current_context()) == CUDA_SUCCESS);
  check_empty();
}

// An allocator of the program's own keeps segments, and says which parts of them it has given out.
void cached_blocks_of_a_program() {
  constexpr uint64_t kGranule = xmig::journal::kGranule;
  constexpr uint64_t kGranules = 10;
  CachedBlocks blocks;
  const CUdeviceptr segment = alloc(kGranules * kGranule);
  const auto discarded = [&](std::vector<uint64_t> expected) {
    for (uint64_t& granule : expected) granule = segment + granule * kGranule;
    return server.discarded == std::set<uint64_t>(expected.begin(), expected.end());
  };
  blocks.allocated(segment, 512);  // of nobody's segment yet
  CHECK(discarded({}));
  blocks.segment(segment, kGranules * kGranule);
  CHECK(discarded({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  // A block brings back the granules that it has bytes of, and each stays for as long as one has any.
  blocks.allocated(segment + kGranule - 512, 513);
  CHECK(discarded({2, 3, 4, 5, 6, 7, 8, 9}));
  blocks.allocated(segment + kGranule + 1024, 2 * kGranule);
  CHECK(discarded({4, 5, 6, 7, 8, 9}));
  blocks.freed(segment + kGranule - 512, 513);
  CHECK(discarded({0, 4, 5, 6, 7, 8, 9}));
  blocks.freed(segment + kGranule + 1024, 2 * kGranule);
  CHECK(server.discarded.size() == kGranules);

  // Against what a plain count of bytes says, with as few records as there are runs of granules.
  std::mt19937_64 random(7);
  std::map<uint64_t, uint64_t> given;  // offset, bytes
  for (int i = 0; i < 3000; ++i) {
    const uint64_t offset = random() % (kGranules * kGranule / 512) * 512;
    const uint64_t bytes = std::min(random_size(random), kGranules * kGranule - offset);
    const auto next = given.upper_bound(offset);
    const bool free = (next == given.end() || next->first >= offset + round_to_units(bytes)) &&
                      (next == given.begin() || std::prev(next)->first + round_to_units(std::prev(next)->second) <= offset);
    if (free) {
      blocks.allocated(segment + offset, bytes);
      given.emplace(offset, bytes);
    } else if (next != given.begin() && random() % 2) {
      blocks.freed(segment + std::prev(next)->first, std::prev(next)->second);
      given.erase(std::prev(next));
    }
    std::set<uint64_t> idle;
    for (uint64_t granule = 0; granule < kGranules; ++granule) idle.insert(segment + granule * kGranule);
    for (const auto& [start, size] : given) {
      const uint64_t last = (start + round_to_units(size) - 1) / kGranule;
      for (uint64_t granule = start / kGranule; granule <= last; ++granule) idle.erase(segment + granule * kGranule);
    }
    CHECK(server.discarded == idle);
  }
  for (const auto& [offset, bytes] : given) blocks.freed(segment + offset, bytes);
  const size_t before = server.count("xmDiscard") + server.count("xmReuse");
  blocks.allocated(segment, kGranules * kGranule);
  blocks.freed(segment, kGranules * kGranule);
  CHECK(server.count("xmDiscard") + server.count("xmReuse") == before + 2);

  // A segment that has gone is nobody's again, and one that has come back begins anew.
  blocks.segment_gone(segment, kGranules * kGranule);
  CHECK(client::cuMemFree_v2(segment) == CUDA_SUCCESS && server.discarded.empty());
  const CUdeviceptr again = alloc(kGranules * kGranule);
  blocks.freed(again, 512);
  CHECK(server.discarded.empty() && !blocks.given_up());

  // What does not add up ends it: all of it is preserved, and nobody is believed any more.
  blocks.segment(again, 3 * kGranule);
  blocks.allocated(again, 1024);
  blocks.freed(again, 2048);
  CHECK(blocks.given_up() && server.discarded.empty());
  blocks.segment(again, 3 * kGranule);
  CHECK(server.discarded.empty());
  CHECK(client::cuMemFree_v2(again) == CUDA_SUCCESS);

  CachedBlocks twice;
  const CUdeviceptr third = alloc(kGranules * kGranule);
  twice.segment(third, 2 * kGranule);
  twice.segment(third + 1, kGranule);  // not whole granules: nothing happens
  twice.segment(1, kGranule);
  twice.allocated(third, kGranule);
  twice.allocated(third + 512, kGranule);  // what is in use already
  CHECK(twice.given_up() && server.discarded.empty());
  CHECK(client::cuMemFree_v2(third) == CUDA_SUCCESS);
  check_empty();
}

extern "C" size_t xmigNameNumbers(const uint64_t* addresses, const uint64_t* bytes, const uint32_t* types, size_t count, int blocks);
extern "C" void xmigForgetNumbers(uint64_t address, uint64_t bytes);

// Numbers that are named are so until their memory is somebody else's, and not a record longer.
void named_numbers_end_with_their_memory() {
  constexpr uint64_t kGranule = xmig::journal::kGranule;
  using Named = std::map<uint64_t, uint64_t>;
  const auto name = [](uint64_t address, uint64_t bytes, int blocks, uint32_t type = 2) {  // float32
    return xmigNameNumbers(&address, &bytes, &type, 1, blocks);
  };
  // Of an allocation of the driver's.
  const CUdeviceptr plain = alloc(kGranule);
  CHECK(name(plain + 512, 1024, 0) == 1 && server.named == Named({{plain + 512, 1024}}));
  CHECK(name(plain, 1024, 1) == 0);                      // no allocator reports its blocks
  CHECK(name(plain + 2, 1024, 0) == 0);                  // not where a number can be
  CHECK(name(plain, 1022, 0) == 0 && name(plain, 0, 0) == 0 && name(plain, 1024, 0, 4) == 0);
  CHECK(name(plain + kGranule - 512, 1024, 0) == 0);     // behind its end
  CHECK(name(~0ull - 511, 1024, 0) == 0);
  const size_t records = server.count("xmNameNumbers");
  CHECK(name(plain + 512, 1024, 0) == 1 && server.count("xmNameNumbers") == records);  // it is already
  CHECK(name(plain + 1024, 1024, 0) == 1 && server.named == Named({{plain + 1024, 1024}}));  // overlaps: the last counts
  const size_t forgotten = server.count("xmForgetNumbers");
  xmigForgetNumbers(plain, 1024);
  CHECK(server.named.size() == 1 && server.count("xmForgetNumbers") == forgotten);  // nothing of it is named
  xmigForgetNumbers(plain + 2044, 4);
  CHECK(server.named.empty());
  CHECK(name(plain + 512, 1024, 0) == 1);
  CHECK(client::cuMemFree_v2(plain) == CUDA_SUCCESS && server.named.empty());
  const CUdeviceptr again = alloc(kGranule);
  CHECK(again == plain && name(plain + 512, 1024, 0) == 1 && server.named.size() == 1);  // nothing was left of the first name
  CHECK(client::cuMemFree_v2(again) == CUDA_SUCCESS);

  // Of blocks of an allocator.
  CachedBlocks& blocks = cached_blocks();
  const CUdeviceptr segment = alloc(4 * kGranule);
  blocks.segment(segment, 4 * kGranule);
  CHECK(name(segment, 1024, 1) == 0);  // in use by nobody
  blocks.allocated(segment, 1024);
  blocks.allocated(segment + 1024, 1000);
  CHECK(name(segment, 1024, 1) == 1 && name(segment + 1024, 1000, 1) == 1 && server.named.size() == 2);
  blocks.freed(segment, 1024);
  CHECK(server.named == Named({{segment + 1024, 1000}}));
  blocks.allocated(segment, 1024);  // it is another tensor's now
  CHECK(server.named.size() == 1);
  CHECK(name(segment, 1024, 1) == 1 && server.named.size() == 2);
  blocks.segment_gone(segment, 4 * kGranule);
  CHECK(server.named.empty() && name(segment, 1024, 1) == 0);
  blocks.segment(segment, 4 * kGranule);
  blocks.allocated(segment, 1024);
  CHECK(name(segment, 1024, 1) == 1);
  blocks.freed(segment + 2 * kGranule, 512);  // does not add up: nobody knows any more when blocks end
  CHECK(blocks.given_up() && server.named.empty() && name(segment, 1024, 1) == 0);
  CHECK(client::cuMemFree_v2(segment) == CUDA_SUCCESS);
  check_empty();
}

}  // namespace

int main() {
  for (uint64_t seed = 1; seed <= 20; ++seed) random_operations(seed);
  server.capacity = 96 * kMiB;
  for (uint64_t seed = 21; seed <= 30; ++seed) random_operations(seed);
  server.capacity = 1ull << 30;
  stream_order();
  out_of_memory();
  plentiful();
  mappings();
  pointers();
  threads();
  cached_blocks_of_a_program();
  named_numbers_end_with_their_memory();
}
