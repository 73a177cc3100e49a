// Whole jobs against the real xmig-server: page-locked memory, copies, and memory that runs out or holds nothing.
#include <cstring>

#include "server_jobs.h"

namespace {
namespace memory_jobs {

using namespace harness;

// The program uses its page-locked buffers again at once: a replay must neither read nor write them.
void pinned() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t mix_kernel = kernels.kernels.at("mix");
  const uint64_t address = job.memory(kWords * 8);
  auto* const in = reinterpret_cast<uint64_t*>(job.pin(2 << 20));
  auto* const out = reinterpret_cast<uint64_t*>(job.pinned() + (1 << 20));
  const auto in_address = reinterpret_cast<uint64_t>(in), out_address = reinterpret_cast<uint64_t>(out);
  const uint64_t event = job.make_event();
  for (int step = 0; step < 150; ++step) {
    auto x = numbers(static_cast<uint64_t>(step));
    std::memcpy(in, x.data(), kWords * 8);
    job.append(Op::xmCopyFromPinned,
               Args_xmCopyFromPinned{address, kWords * 8, kWords * 8, 1, 0, in_address, kWords * 8});
    job.launch(mix_kernel, 0, address, 5, kWords);
    job.append(Op::xmCopyToPinned, Args_xmCopyToPinned{address, 512, 512, kWords / 64, 0, out_address, 1024});
    const uint64_t sequence = job.record_event(event, 0);
    if (step % 10 == 3) job.kill_server();
    Job::wait([&] { return job.event_done(event, sequence); });
    mix(x, 5);
    for (uint64_t row = 0; row < kWords / 64; ++row) CHECK(std::memcmp(out + row * 128, x.data() + row * 64, 512) == 0);
    std::memset(in, 0xee, kWords * 8);
    std::memset(out, 0xdd, kWords * 16);
    if (step % 10 == 7) {
      job.kill_server();
      CHECK(job.synchronize() == CUDA_SUCCESS);
      for (uint64_t i = 0; i < kWords * 2; ++i) CHECK(out[i] == 0xddddddddddddddddu);
    }
  }
  check_resumed(job);
  CHECK(job.counters().compared > 0);
}

// A copy from page-locked memory does not wait for the work before it, unless that has yet to write the buffer.
void pinned_ahead() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t kernel = kernels.kernels.at("wait_for"), copy = kernels.kernels.at("copy_bytes");
  const uint64_t address = job.memory(2 << 20), gate = job.memory(8), own = job.memory(2 << 20);
  auto* const in = reinterpret_cast<uint64_t*>(job.pin(4 << 20));
  auto* const other = reinterpret_cast<uint64_t*>(job.pinned() + (2 << 20));
  const auto in_address = reinterpret_cast<uint64_t>(in), other_address = reinterpret_cast<uint64_t>(other);
  const uint64_t work = job.make_stream(), beside = job.make_stream();
  constexpr uint64_t kBytes = 64 << 10;
  const auto bring = [&](uint64_t from) {
    return job.append(Op::xmCopyFromPinned, Args_xmCopyFromPinned{address, kBytes, kBytes, 1, work, from, kBytes});
  };
  const auto is_copied = [&](uint64_t position) { return (job.record(position)->state.load() & 0xff) == journal::kCopied; };
  std::vector<uint64_t> got(kBytes / 8);
  // A move waits for the gate as long as a server waits to hand over, and is given up then.
  const uint64_t rounds = instead_of_kill ? 3 : 12;
  for (uint64_t round = 1; round <= rounds; ++round) {
    // What the device writes before the copy comes from `own`: by a copy, or by a kernel.
    const uint64_t late = 1000 + round;
    job.append(Op::cuMemsetD32Async, Args_cuMemsetD32Async{own, static_cast<uint32_t>(late), kBytes / 4, 0});
    job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{gate, 0, 8, 0});
    CHECK(job.synchronize() == CUDA_SUCCESS);
    std::fill_n(in, kBytes / 8, round);
    std::fill_n(other, kBytes / 8, round);
    job.launch(kernel, work, gate);
    const bool by_kernel = round == rounds;  // from then on, until a snapshot, everything takes its turn
    if (by_kernel) {
      job.launch(copy, work, other_address, own, kBytes);
    } else {
      job.append(Op::xmCopyToPinned, Args_xmCopyToPinned{own, kBytes, kBytes, 1, work, other_address, kBytes});
    }
    const uint64_t in_turn = bring(other_address);
    const uint64_t ahead = bring(in_address);
    if (!by_kernel) Job::wait([&] { return is_copied(ahead); });
    if (round % 3 == 2) job.kill_server();
    CHECK(!is_copied(in_turn));
    std::fill_n(in, by_kernel ? 0 : kBytes / 8, 0);  // the server has brought it; the program could not know yet
    job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{gate, 1, 8, beside});
    CHECK(job.synchronize(beside) == CUDA_SUCCESS && job.synchronize(work) == CUDA_SUCCESS);
    CHECK(is_copied(in_turn) && is_copied(ahead));
    CHECK(job.read(address, got.data(), kBytes) == CUDA_SUCCESS);
    CHECK(std::all_of(got.begin(), got.end(), [&](uint64_t word) { return word == round; }));
    bring(other_address);
    CHECK(job.read(address, got.data(), kBytes, work) == CUDA_SUCCESS);
    CHECK(std::all_of(got.begin(), got.end(), [&](uint64_t word) { return word == (late << 32 | late); }));
  }
  check_resumed(job);
}

// Page-locked memory is an address like any other to a memset.
void sets_pinned() {
  Job job;
  auto* const words = reinterpret_cast<uint32_t*>(job.pin(4096));
  const auto address = reinterpret_cast<uint64_t>(words);
  for (uint32_t step = 1; step <= 20; ++step) {
    std::fill_n(words, 8, 0xdddddddd);
    job.append(Op::cuMemsetD32Async, Args_cuMemsetD32Async{address, step, 4, 0});
    if (step % 4 == 1) job.kill_server();
    CHECK(job.synchronize() == CUDA_SUCCESS);
    for (int i = 0; i < 8; ++i) CHECK(words[i] == (i < 4 ? step : 0xdddddddd));
  }
  check_resumed(job);
  job.append(Op::cuMemsetD32Async, Args_cuMemsetD32Async{journal::kPinnedBase + journal::kPinnedBytes - 8, 1, 4, 0});
  CHECK(job.synchronize() == CUDA_ERROR_INVALID_VALUE);
}

// More is copied from page-locked memory than the server can keep: a snapshot makes room, and none is lost.
void pinned_much() {
  Job job;
  constexpr uint64_t kBytes = journal::kGranule, kCopies = 300;
  const uint64_t address = job.memory(2 * kBytes);
  auto* const in = reinterpret_cast<uint64_t*>(job.pin(kBytes));
  const auto in_address = reinterpret_cast<uint64_t>(in);
  const uint64_t event = job.make_event();
  std::vector<uint64_t> got(1);
  for (uint64_t copy = 1; copy <= kCopies; ++copy) {
    in[0] = copy;
    job.append(Op::xmCopyFromPinned, Args_xmCopyFromPinned{address, kBytes, kBytes, 1, 0, in_address, kBytes});
    job.append(Op::xmCopyFromPinned, Args_xmCopyFromPinned{address + kBytes, kBytes, kBytes, 1, 0, in_address, kBytes});
    const uint64_t sequence = job.record_event(event, 0);
    Job::wait([&] { return job.event_done(event, sequence); });
    in[0] = 0;
    if (copy % 100 != 60) continue;
    job.kill_server();
    CHECK(job.read(address + kBytes, got.data(), 8) == CUDA_SUCCESS);
    CHECK(got[0] == copy);
  }
  check_resumed(job);
}

// A kernel that reads page-locked memory by address: nothing of it is in the journal, so a snapshot follows.
void kernel_reads_pinned() {
  Job job;
  const auto kernels = job.load_kernels();
  job.pin(kWords * 8);
  const uint64_t address = job.memory(kWords * 8);
  for (int step = 0; step < 20; ++step) {
    auto x = numbers(static_cast<uint64_t>(step));
    std::memcpy(job.pinned(), x.data(), kWords * 8);
    job.launch(kernels.kernels.at("copy_bytes"), 0, address, reinterpret_cast<uint64_t>(job.pinned()), kWords * 8);
    CHECK(job.synchronize() == CUDA_SUCCESS);
    std::memset(job.pinned(), 0, kWords * 8);
    if (step % 4 == 1) job.kill_server();
    std::vector<uint64_t> got(kWords);
    CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
    CHECK(got == x);
  }
  check_resumed(job);
}

// The program orders two streams by waiting itself. So must a replay, although nothing on the device says so.
void order_by_waiting() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t mix_kernel = kernels.kernels.at("mix");
  const uint64_t first = job.make_stream(), second = job.make_stream();
  const uint64_t event = job.make_event();
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(1);
  job.write(address, x.data(), kWords * 8, first);
  CHECK(job.synchronize(first) == CUDA_SUCCESS);
  for (int step = 0; step < 40; ++step) {
    job.launch(mix_kernel, first, address, 40, kWords);
    mix(x, 40);
    if (step % 3 == 0) {
      CHECK(job.synchronize(first) == CUDA_SUCCESS);
    } else {
      // Seen in shared memory; the client library says so in the journal.
      const uint64_t sequence = job.record_event(event, first);
      Job::wait([&] { return job.event_done(event, sequence); });
      job.flags_of_next = journal::kKnown;
      const uint64_t position = job.append(Op::cuEventSynchronize, Args_cuEventSynchronize{event});
      if (step % 3 == 1) job.kill_server();
      job.header().threads[0].waiting.store(journal::kNotWaiting);
      (void)position;
    }
    job.launch(mix_kernel, second, address, 1, kWords);
    mix(x, 1);
    if (step % 4 == 2) job.kill_server();
    CHECK(job.synchronize(second) == CUDA_SUCCESS);
  }
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8, second) == CUDA_SUCCESS);
  CHECK(got == x);
  check_resumed(job);
}

void copies_more_than_the_journal() {
  Job::Options options;
  options.ring_bytes = 4 << 20;
  Job job(options);
  std::vector<uint64_t> x((40 << 20) / 8), got(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = i * 0x9e3779b97f4a7c15u;
  const uint64_t address = job.memory(40 << 20);
  std::thread killer([&] {
    for (int i = 0; i < 4; ++i) {
      ::usleep(30'000);
      job.kill_server();
    }
  });
  job.write(address, x.data(), 40 << 20);
  killer.join();
  CHECK(job.read(address, got.data(), 40 << 20) == CUDA_SUCCESS);
  CHECK(got == x);
  check_resumed(job);
}

void memory_is_full() {
  Job::Options options;
  options.memory = 256 << 20;
  Job job(options);
  const uint64_t base = journal::kDeviceBase + (1ull << 32);
  CHECK(job.grow(base, 128 << 20) == CUDA_SUCCESS);
  job.alloc(base, 128 << 20);
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{base, 3, 128 << 20, 0});
  CHECK(job.synchronize() == CUDA_SUCCESS);
  job.snapshot();
  // The shadow takes as much as it needs and nothing more, and that counts as free: the program comes first.
  Reply_cuMemGetInfo_v2 memory{};
  const auto half_is_free = [&] {
    CHECK(job.call(Op::cuMemGetInfo_v2, Args_cuMemGetInfo_v2{}, &memory, sizeof(memory)) == CUDA_SUCCESS);
    return memory.free == 128 << 20;
  };
  // Late devices say so only when everybody who holds it has let go; all others at once.
  const bool late = setup.server.find("/late/") != std::string::npos;
  const auto check_half_is_free = [&] {
    if (late) Job::wait(half_is_free);
    CHECK(half_is_free());
  };
  check_half_is_free();
  CHECK(job.held_bytes("shadow") == 128 << 20);
  CHECK(job.grow(base + (1ull << 30), 96 << 20) == CUDA_SUCCESS);
  CHECK(job.grow(base + (2ull << 30), 64 << 20) == CUDA_ERROR_OUT_OF_MEMORY);
  job.append(Op::xmShrink, Args_xmShrink{base + (1ull << 30), 96 << 20});
  check_half_is_free();
  CHECK(job.grow(base + (2ull << 30), 64 << 20) == CUDA_SUCCESS);
  job.kill_server();
  std::vector<uint8_t> got(1 << 20);
  CHECK(job.read(base + (100 << 20), got.data(), got.size()) == CUDA_SUCCESS);
  for (const uint8_t byte : got) CHECK(byte == 3);
  check_resumed(job);
}

// Who takes a lost server's place has the memory mapped already; or other memory under the same numbers, or what is no more,
// where the next memory comes to lie. Memory comes, goes, and comes back at the same place, all of it again in a replay.
void mapped_ahead() {
  setup.preload = true;
  for (const bool mistaken : {false, true}) {
    setup.mistaken = mistaken;
    Job job;
    const uint64_t base = journal::kDeviceBase + (1ull << 32);
    constexpr uint64_t kPiece = 4 * journal::kGranule, kPieces = 6;
    const auto at = [&](uint64_t piece) { return base + piece * kPiece; };
    const auto fill = [&](uint64_t piece, uint8_t value) {
      job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{at(piece), value, kPiece, 0});
    };
    std::array<uint8_t, kPieces> values{};
    std::vector<uint8_t> got(kPiece);
    for (uint8_t round = 1; round <= 6; ++round) {
      for (uint64_t piece = 0; piece < kPieces; ++piece) {
        if (values[piece] != 0 && (piece + round) % 3 == 0) {
          job.append(Op::xmFree, Args_xmFree{at(piece), 0});
          job.append(Op::xmShrink, Args_xmShrink{at(piece), kPiece});
          values[piece] = 0;
        } else if (values[piece] == 0 && (piece + round) % 2 == 0) {
          CHECK(job.grow(at(piece), kPiece) == CUDA_SUCCESS);
          job.alloc(at(piece), kPiece);
          values[piece] = static_cast<uint8_t>(16 * round + piece);
          fill(piece, values[piece]);
        }
      }
      CHECK(job.synchronize() == CUDA_SUCCESS);
      if (round % 2 == 0) job.snapshot();
      job.kill_server();
      for (uint64_t piece = 0; piece < kPieces; ++piece) {
        if (values[piece] == 0) continue;
        CHECK(job.read(at(piece), got.data(), got.size()) == CUDA_SUCCESS);
        CHECK(got.front() == values[piece] && std::memcmp(got.data(), got.data() + 1, got.size() - 1) == 0);
      }
    }
    check_resumed(job);
  }
}

// A server that prepares while the one before it ends writes nothing: neither into the journal, nor into memory, where what
// the lost one had its device do may still write. What it has written there when it ends is put right.
void prepares_ahead() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t mix_kernel = kernels.kernels.at("mix"), address = job.memory(kWords * 8), stream = job.make_stream();
  auto expected = numbers(7);
  job.write(address, expected.data(), kWords * 8);
  CHECK(job.synchronize() == CUDA_SUCCESS);
  std::atomic<uint32_t> prepared{0};
  setup.prepared = [&](int) {
    const journal::JournalHeader& header = job.header();
    CHECK(header.server_pid.load() == static_cast<uint32_t>(job.lost_server()));
    CHECK(header.generation.load() == ++prepared);
    // While a snapshot was taken nothing ran, and what memory holds is right.
    if (header.committing.load() == 0) job.overwrite_device_memory(0xa5);
  };
  std::vector<uint64_t> got(kWords);
  for (int step = 0; step < 8; ++step) {
    if (step % 3 == 1) job.snapshot();
    job.launch(mix_kernel, stream, address, 3, kWords);
    mix(expected, 3);
    if (step % 2 == 0) CHECK(job.synchronize(stream) == CUDA_SUCCESS);
    job.kill_server();
    CHECK(job.read(address, got.data(), kWords * 8, stream) == CUDA_SUCCESS);
    CHECK(got == expected);
  }
  CHECK(prepared == 8);
  setup.prepared = nullptr;
  check_resumed(job);
}

// Its daemon ends before it may enter, or it lacks something: the job is as it was, and the next server has it.
void prepares_in_vain() {
  std::atomic<int> seen{0};
  std::atomic<bool> hang_up{false};
  setup.prepared = [&](int control) {
    ++seen;
    if (hang_up.exchange(false)) ::shutdown(control, SHUT_RDWR);
  };
  Job job;
  const uint64_t address = job.memory(kWords * 8);
  const auto expected = numbers(3);
  job.write(address, expected.data(), kWords * 8);
  CHECK(job.synchronize() == CUDA_SUCCESS);
  job.snapshot();  // else there is nothing that it could lack
  std::vector<uint64_t> got(kWords);
  for (const bool withheld : {false, true, false, true}) {
    seen = 0;
    if (withheld) job.withhold_memory();
    hang_up = !withheld;
    const uint64_t before = job.counters().recoveries;
    job.kill_server();
    CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
    CHECK(got == expected);
    CHECK(seen == (withheld ? 1 : 2));
    CHECK(job.counters().recoveries == before + 2 && job.counters().garbage == 0);
  }
}

// Programs take most of a device before they use it. A snapshot keeps nothing of zeros, and a recovery makes them again.
void zeros() {
  Job job;
  const auto kernels = job.load_kernels();
  constexpr uint64_t kBytes = 128 << 20, kUsed = 3 * journal::kGranule;
  const uint64_t base = journal::kDeviceBase + (1ull << 32);
  CHECK(job.grow(base, kBytes) == CUDA_SUCCESS);
  job.alloc(base, kBytes);
  const auto snapshot = [&] {
    // The first one after a move copies everything: not that one.
    Job::wait([&] { return !holds_foreign(job) && job.snapshots_are_reported(); });
    CHECK(job.synchronize() == CUDA_SUCCESS);
    job.snapshot();
    return job.counters().snapshot_bytes.load();
  };
  std::vector<uint64_t> got(kWords), expected(kWords);
  for (int round = 0; round < 3; ++round) {
    const uint64_t used = base + round * kUsed;
    // Zeros, something, zeros: at each, a kernel that depends on what it finds is done again after a kill.
    for (int content = 0; content < 3; ++content) {
      std::fill(expected.begin(), expected.end(), 0);
      if (content == 1) expected = numbers(7);
      // Also at first: what nobody has written is undefined, and a replay need not find it again.
      job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{used, 0, kUsed, 0});
      if (content == 1) job.write(used, expected.data(), kWords * 8);
      const uint64_t copied = snapshot();
      CHECK(copied <= 2 * journal::kGranule);  // this content and what the round before left
      job.launch(kernels.kernels.at("mix"), 0, used, 5, kWords);
      CHECK(job.synchronize() == CUDA_SUCCESS);
      job.kill_server();
      CHECK(job.read(used, got.data(), kWords * 8) == CUDA_SUCCESS);
      mix(expected, 5);
      CHECK(got == expected);
      CHECK(job.read(base + kBytes - kWords * 8, got.data(), kWords * 8) == CUDA_SUCCESS);
      CHECK(got == std::vector<uint64_t>(kWords));
    }
  }
  check_resumed(job);
}

// A snapshot copies without a look what the one before it found changed: once more than needed when that has come to rest, and a
// server that dies among these copies leaves a whole snapshot behind.
void changes() {
  Job job({.snapshot_cost = 1e-9});  // after the second snapshot none comes by itself
  const auto kernels = job.load_kernels();
  constexpr uint64_t kChunks = 6;
  const uint64_t base = journal::kDeviceBase + (1ull << 32);
  CHECK(job.grow(base, kChunks * journal::kGranule) == CUDA_SUCCESS);
  job.alloc(base, kChunks * journal::kGranule);
  std::vector<std::vector<uint64_t>> expected;
  for (uint64_t i = 0; i < kChunks; ++i) {
    job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{base + i * journal::kGranule, 0, journal::kGranule, 0});
    expected.push_back(numbers(i));
    job.write(base + i * journal::kGranule, expected[i].data(), kWords * 8);
  }
  const auto change = [&](uint64_t first, uint64_t end) {
    for (uint64_t i = first; i < end; ++i) {
      job.launch(kernels.kernels.at("mix"), 0, base + i * journal::kGranule, 5, kWords);
      mix(expected[i], 5);
    }
    CHECK(job.synchronize() == CUDA_SUCCESS);
  };
  const auto snapshot_copies = [&](uint64_t chunks) {
    job.snapshot();
    CHECK(job.counters().snapshot_bytes == chunks * journal::kGranule);
  };
  // Work that depends on what it finds is done again: what a snapshot has kept must be right.
  const auto check_kept = [&] {
    change(0, kChunks);
    job.kill_server();
    std::vector<uint64_t> got(kWords);
    for (uint64_t i = 0; i < kChunks; ++i) {
      CHECK(job.read(base + i * journal::kGranule, got.data(), kWords * 8) == CUDA_SUCCESS);
      CHECK(got == expected[i]);
    }
  };
  while (job.counters().snapshots < 2) change(0, 1);
  for (int i = 0; i < 3; ++i) {  // at rest but for the first
    change(0, 1);
    job.snapshot();
  }
  change(0, 3);
  snapshot_copies(3);
  change(0, 3);
  snapshot_copies(3);
  change(3, 4);
  snapshot_copies(4);  // three of them as before, in vain
  change(3, 4);
  snapshot_copies(1);
  check_kept();
  for (uint64_t inject = 1; inject <= 4; ++inject) {
    Job::wait([&] { return !holds_foreign(job) && job.snapshots_are_reported(); });
    CHECK(job.synchronize() == CUDA_SUCCESS);
    job.snapshot();
    change(0, 3);
    job.snapshot();
    const uint64_t injected = job.counters().injected, resumed = job.counters().resumed;
    job.inject("snapshot", "kill", inject);
    while (job.counters().injected == injected) {  // a snapshot that comes by itself may find less
      change(0, 4);
      job.snapshot_unless([&] { return job.counters().injected != injected; });
    }
    Job::wait([&] { return job.counters().resumed != resumed; });
    check_kept();
  }
  check_resumed(job);
}

// What the program's allocator has back: a snapshot leaves it out, the next server knows that, and what is taken again is kept again.
void discarded() {
  Job job({.snapshot_cost = 1e-9});  // after the second snapshot none comes by itself
  const auto kernels = job.load_kernels();
  constexpr uint64_t kChunks = 6;
  const uint64_t kept = job.memory(journal::kGranule), segment = job.memory(kChunks * journal::kGranule);
  std::vector<std::vector<uint64_t>> expected;
  const auto fill = [&](uint64_t seed) {
    expected.clear();
    for (uint64_t i = 0; i <= kChunks; ++i) {
      expected.push_back(numbers(seed + i));
      job.write(i == 0 ? kept : segment + (i - 1) * journal::kGranule, expected[i].data(), kWords * 8);
    }
  };
  const auto mix_all = [&] {  // work that depends on what it finds
    for (uint64_t i = 0; i <= kChunks; ++i) {
      const uint64_t at = i == 0 ? kept : segment + (i - 1) * journal::kGranule;
      job.launch(kernels.kernels.at("mix"), 0, at, 5, kWords);
      mix(expected[i], 5);
    }
  };
  const auto right = [&](uint64_t first, uint64_t end) {
    std::vector<uint64_t> got(kWords);
    for (uint64_t i = first; i < end; ++i) {
      CHECK(job.read(i == 0 ? kept : segment + (i - 1) * journal::kGranule, got.data(), kWords * 8) == CUDA_SUCCESS);
      CHECK(got == expected[i]);
    }
  };
  const auto discard = [&](uint64_t first, uint64_t count) {
    const Args_xmDiscard args{segment + first * journal::kGranule, count * journal::kGranule};
    job.append(Op::xmDiscard, args);
  };
  const auto reuse = [&](uint64_t first, uint64_t count) {
    job.append(Op::xmReuse, Args_xmReuse{segment + first * journal::kGranule, count * journal::kGranule});
  };
  uint64_t others = 0;  // of the kernels' variables
  const auto snapshot = [&] {  // of now, and its report
    Job::wait([&] { return !holds_foreign(job) && job.snapshots_are_reported(); });
    CHECK(job.synchronize() == CUDA_SUCCESS);
    job.snapshot();
  };
  const auto snapshot_preserves = [&](uint64_t chunks) {
    snapshot();
    CHECK(job.counters().snapshot_chunks == others + chunks);
  };
  while (job.counters().snapshots < 2) {
    fill(1);
    CHECK(job.synchronize() == CUDA_SUCCESS);
  }
  fill(2);
  snapshot();
  others = job.counters().snapshot_chunks - 1 - kChunks;
  for (uint64_t round = 1; round <= 4; ++round) {
    fill(100 * round);
    mix_all();
    discard(0, kChunks);
    snapshot_preserves(1);
    // Only what lies after the snapshot brings back the rest: in the first rounds a server is lost there, too.
    if (round % 2) job.kill_server();
    reuse(1, 2);
    for (uint64_t i = 2; i <= 3; ++i) job.write(segment + (i - 1) * journal::kGranule, expected[i].data(), kWords * 8);
    if (round > 2) job.kill_server();
    right(0, 1);
    right(2, 4);
    job.launch(kernels.kernels.at("mix"), 0, kept, 5, kWords);
    mix(expected[0], 5);
    snapshot_preserves(3);
    job.kill_server();
    right(0, 1);
    right(2, 4);
    discard(1, 1);
    reuse(0, kChunks);  // some are not discarded
    fill(1000 * round);
    snapshot_preserves(1 + kChunks);
    mix_all();
    job.kill_server();
    right(0, 1 + kChunks);
  }
}

// Not whole granules, or not all of it allocated.
void discarded_wrongly() {
  for (const Args_xmDiscard wrong : {Args_xmDiscard{512, journal::kGranule}, Args_xmDiscard{0, 512}, Args_xmDiscard{0, 0},
                                     Args_xmDiscard{0, 2 * journal::kGranule}, Args_xmDiscard{1ull << 33, journal::kGranule}}) {
    Job job;
    const uint64_t memory = job.memory(journal::kGranule);
    job.append(Op::xmDiscard, Args_xmDiscard{memory + wrong.address, wrong.bytes});
    CHECK(job.synchronize() == CUDA_ERROR_INVALID_VALUE);
    Job::wait([&] { return job.counters().program_errors == 1; });
  }
}

const Added kAdded("", {
    {"pinned", pinned}, {"pinned_ahead", pinned_ahead}, {"sets_pinned", sets_pinned}, {"pinned_much", pinned_much},
    {"kernel_reads_pinned", kernel_reads_pinned}, {"order_by_waiting", order_by_waiting},
    {"copies_more_than_the_journal", copies_more_than_the_journal}, {"memory_is_full", memory_is_full}, {"mapped_ahead", mapped_ahead}, {"prepares_ahead", prepares_ahead},
    {"prepares_in_vain", prepares_in_vain}, {"zeros", zeros},
    {"changes", changes}, {"discarded", discarded}, {"discarded_wrongly", discarded_wrongly},
});

}  // namespace memory_jobs
}  // namespace
