// Whole jobs against the real xmig-server on the cpu device: what survives a lost server, and what a program sees.
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <utility>

#include "device/cpu/bulk.h"
#include "ipc/whole.h"
#include "server/snapshot/snapshot_file.h"
#include "server_jobs.h"

namespace {
namespace jobs {

using namespace harness;

void undisturbed() {
  Job job;
  train(job, 200);
  CHECK(job.counters().recoveries == 0);
  Job::wait([&] { return job.counters().snapshots != 0; });
}

// Who is killed faster than it can get anywhere gets nowhere: how long it lives is counted in steps.
void kills() {
  Job job;
  std::mt19937 random(1);
  std::atomic<uint64_t> steps{0};
  std::atomic<bool> done{false};
  std::thread killer([&] {
    while (!done) {
      // Mostly while it works, sometimes while it recovers.
      const uint64_t until = random() % 5 != 0 ? steps + random() % 150 : 0;
      Job::wait([&] { return steps >= until || done; });
      ::usleep(random() % (until != 0 ? 2'000 : 50'000));
      job.kill_server();
      Job::wait([&] { return job.server() > 0; });
    }
  });
  while (job.counters().recoveries <= 5) train(job, kUnderThreadSanitizer ? 1000 : 3000, [&](int) { ++steps; });
  done = true;
  killer.join();
  check_resumed(job);
  CHECK(job.counters().recoveries > 5);
}

// Lost in the middle of each kind of thing, and, while replaying, lost again.
void injections() {
  for (const char* kind : {"kill", "fault"}) {
    for (const char* point : {"record", "kernel", "copy", "snapshot"}) {
      Job job;
      train(job, 60, [&](int step) {
        if (step % 15 != 5) return;
        Job::wait([&] { return is_running(job) && job.counters().recoveries >= job.counters().injected; });
        job.inject(point, kind, std::string(point) == "snapshot" ? 1 : job.sequence() + 3);
        if (std::string(point) != "snapshot") {
          // The server reads its messages in order: it is armed when it answers the next one.
          const uint64_t paused = job.counters().paused;
          job.send({{"type", "pause"}});
          Job::wait([&] { return job.counters().paused != paused; });
          return job.send({{"type", "continue"}});
        }
        // It injections in a snapshot that copies something. One that comes by itself may have taken what was there: it is changed.
        const uint64_t before = job.counters().injected, changing = job.memory(2 << 20);
        for (uint8_t value = 1; job.counters().injected == before; ++value) {
          job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{changing, value, 2 << 20, 0});
          job.snapshot_unless([&] { return job.counters().injected != before; });
        }
      });
      check_resumed(job);
      Job::wait([&] { return job.counters().injected == 4; });
      Job::wait([&] { return job.counters().recoveries >= job.counters().injected; });
    }
  }
}

void lost_again_in_replay() {
  Job job;
  // Two servers are lost in the middle of their replay. Known to them from the beginning: requested when it has begun, it would
  // come too late for a short one. Several kills, because after a snapshot there is little to replay.
  train(job, 60, [&](int step) {
    if (step == 10) job.inject("replay", "kill", 5), job.inject("replay", "kill", 5);
    if (step != 0 && step % 10 == 0) job.kill_server();
  });
  const uint64_t word = job.memory(8);
  while (job.counters().injected < 2) {
    for (uint8_t i = 0; i < 50; ++i) job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{word, i, 8, 0});
    CHECK(job.synchronize() == CUDA_SUCCESS);
    job.kill_server();
    CHECK(job.synchronize() == CUDA_SUCCESS);
  }
  check_resumed(job);
  CHECK(job.counters().injected == 2 && job.counters().recoveries >= 4);
}

// A fault that is the program's own comes back from the replay, and goes to the program; a reset clears it.
void program_error() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(1);
  job.write(address, x.data(), kWords * 8);
  job.launch(kernels.kernels.at("mix"), 0, address, 2, kWords);
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
  job.launch(kernels.kernels.at("trap"), 0, 0);
  CHECK(job.synchronize() == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(job.header().context_error.load() == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_ERROR_LAUNCH_FAILED);
  Job::wait([&] { return job.counters().faults == 2 && job.counters().program_errors == 1; });
  // It stays across the loss of a server, until the context is reset.
  job.kill_server();
  CHECK(job.synchronize() == CUDA_ERROR_LAUNCH_FAILED);
  CHECK(job.call(Op::xmContextReset, Args_xmContextReset{1, 0, 0}) == CUDA_SUCCESS);
  CHECK(job.header().context_error.load() == 0);
  const auto again = job.load_kernels();
  const uint64_t other = job.memory(kWords * 8);
  job.write(other, x.data(), kWords * 8);
  job.launch(again.kernels.at("mix"), 0, other, 2, kWords);
  CHECK(job.read(other, got.data(), kWords * 8) == CUDA_SUCCESS);
  mix(x, 2);
  CHECK(got == x);
  job.kill_server();
  CHECK(job.read(other, got.data(), kWords * 8) == CUDA_SUCCESS);
  CHECK(got == x && job.counters().program_errors == 1);
}

// The culprit is one of many that were under way when its fault was seen, on two streams, and much that the program did
// before was not waited for. Exactly what came before it is done when the program is informed.
void error_among_others() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t other = job.make_stream();
  const uint64_t address = job.memory(kWords * 8), beside = job.memory(kWords * 8);
  job.write(address, numbers(1).data(), kWords * 8);
  job.write(beside, numbers(2).data(), kWords * 8);
  CHECK(job.synchronize() == CUDA_SUCCESS);
  std::atomic<uint64_t> culprit{0};
  job.on_message([&](const Json& message) {
    if (message.at("type") == "program_error") culprit = message.at("sequence").get<uint64_t>();
  });
  for (int i = 0; i < 400; ++i) {
    job.launch(kernels.kernels.at("mix"), i % 3 ? 0 : other, i % 3 ? address : beside, 2, kWords);
  }
  job.launch(kernels.kernels.at("trap"), other, 0);
  const uint64_t trap = job.sequence();
  for (int i = 0; i < 400; ++i) {
    job.launch(kernels.kernels.at("mix"), i % 3 ? 0 : other, i % 3 ? address : beside, 2, kWords);
  }
  // Nobody asks: it is found out all the same.
  Job::wait([&] { return job.header().context_error.load() == CUDA_ERROR_LAUNCH_FAILED; });
  Job::wait([&] { return culprit != 0; });
  CHECK(culprit == trap);
  CHECK(job.counters().program_errors == 1);
  CHECK(job.counters().faults == 2);
  CHECK(job.synchronize() == CUDA_ERROR_LAUNCH_FAILED);
}

// A queued call that cannot be executed is not lost silently.
void queued_error() {
  Job job;
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{journal::kDeviceBase, 1, 64, 0});
  CHECK(job.synchronize() == CUDA_ERROR_INVALID_VALUE);
  // The harness hears of it on its own thread.
  Job::wait([&] { return job.counters().program_errors == 1; });
}

// The client's callback thread, as the library has one.
class Callbacks {
 public:
  Callbacks(Job& job, std::function<void()> function)
      : job_(job), function_(std::move(function)), thread_([this] { run(); }) {}
  ~Callbacks() {
    stop_ = true;
    job_.header().callback_doorbell.fetch_add(1);
    journal::futex_wake(job_.header().callback_doorbell);
    thread_.join();
  }
  std::atomic<uint64_t> runs{0};

 private:
  void run() {
    journal::JournalHeader& header = job_.header();
    while (!stop_) {
      const uint32_t rung = header.callback_doorbell.load();
      const uint64_t taken = header.callbacks_taken.load();
      if (taken == header.callbacks_posted.load()) {
        journal::futex_wait(header.callback_doorbell, rung, std::chrono::milliseconds(100));
        continue;
      }
      const uint64_t position = header.callbacks[taken % journal::kCallbackSlots].load();
      auto* const record = job_.record(position);
      uint32_t expected = journal::kPosted;
      const bool mine = record->state.compare_exchange_strong(expected, journal::kRunningCallback);
      header.callbacks_taken.store(taken + 1);
      if (!mine) continue;
      ++runs;
      function_();
      record->state.store(journal::kAcknowledged);
      journal::futex_wake(record->state);
    }
  }
  Job& job_;
  const std::function<void()> function_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void host_functions() {
  Job job;
  Callbacks callbacks(job, [random = std::mt19937(4)]() mutable { ::usleep(random() % 2000); });
  const uint64_t stream = job.make_stream();
  const uint64_t address = job.memory(64);
  std::mt19937 random(3);
  constexpr int kCalls = 300;
  for (int i = 0; i < kCalls; ++i) {
    job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{address, static_cast<unsigned char>(i), 64, stream});
    job.append(Op::xmHostFunc, Args_xmHostFunc{0, 0, stream, 0, 0});
    if (i % 30 == 11) {
      ::usleep(random() % 3000);
      job.kill_server();
    }
    if (i % 50 == 49) CHECK(job.synchronize(stream) == CUDA_SUCCESS);
  }
  CHECK(job.synchronize(stream) == CUDA_SUCCESS);
  CHECK(callbacks.runs == kCalls);
  check_resumed(job);
}

// The function waits for a call that comes later in the journal: a snapshot in between must not wait for the function.
void host_function_needs_the_program() {
  Job job;
  std::atomic<bool> go{false};
  Callbacks callbacks(job, [&] { Job::wait([&] { return go.load(); }); });
  const uint64_t stream = job.make_stream(), other = job.make_stream();
  const uint64_t address = job.memory(64);
  for (int i = 0; i < 20; ++i) {
    go = false;
    job.append(Op::xmHostFunc, Args_xmHostFunc{0, 0, stream, 0, 0});
    ::usleep(5000);
    job.send({{"type", "snapshot"}});
    if (i % 5 == 2) job.kill_server();
    uint64_t word;
    CHECK(job.read(address, &word, sizeof(word), other) == CUDA_SUCCESS);
    go = true;
    CHECK(job.synchronize(stream) == CUDA_SUCCESS);
  }
  CHECK(callbacks.runs == 20);
}

// More than the journal holds, and never a wait.
void never_synchronises() {
  Job::Options options;
  options.ring_bytes = 4 << 20;
  Job job(options);
  const auto kernels = job.load_kernels();
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(9);
  job.write(address, x.data(), kWords * 8);
  for (int i = 0; i < 60'000; ++i) {
    job.launch(kernels.kernels.at("mix"), 0, address, 1, 8);
    if (i % 20'000 == 10'000) job.kill_server();
  }
  std::vector<uint64_t> first(x.begin(), x.begin() + 8), got(8);
  for (int i = 0; i < 60'000; ++i) mix(first, 1);
  CHECK(job.read(address, got.data(), 64) == CUDA_SUCCESS);
  CHECK(got == first);
  check_resumed(job);
}

// One thread waits for something long; another one's calls go on.
void waits_are_apart() {
  Job job;
  std::atomic<bool> go{false};
  Callbacks callbacks(job, [&] { Job::wait([&] { return go.load(); }); });
  const uint64_t slow = job.make_stream(), fast = job.make_stream();
  const uint64_t b = job.memory(64);
  job.append(Op::xmHostFunc, Args_xmHostFunc{0, 0, slow, 0, 0});
  std::atomic<bool> slow_done{false};
  std::thread waiter([&] {
    CHECK(job.synchronize(slow, 1) == CUDA_SUCCESS);
    slow_done = true;
  });
  uint64_t word = 0;
  for (int i = 0; i < 100; ++i) CHECK(job.read(b, &word, sizeof(word), fast) == CUDA_SUCCESS);
  CHECK(!slow_done);
  go = true;
  waiter.join();
}

void garbage() {
  for (int i = 0; i < 6; ++i) {
    Job job;
    uint64_t word = 0;
    const uint64_t address = job.memory(64);
    CHECK(job.read(address, &word, 8) == CUDA_SUCCESS);
    // A good record, then one that is none.
    const uint64_t position = job.header().tail.load();
    auto* const head = reinterpret_cast<journal::RecordHeader*>(job.at(position));
    std::memset(static_cast<void*>(head), 0, 256);
    head->size = i == 0 ? 8 : i == 1 ? 1 << 30 : i == 2 ? 61 : 128;
    head->op = i == 3 ? 60000 : static_cast<uint16_t>(Op::cuStreamSynchronize);
    head->flags = journal::kSynchronous;
    head->sequence = i == 4 ? 77 : job.sequence() + 1;
    if (i == 5) head->payload = 1 << 20;
    job.header().tail.store(position + 128);
    job.ring_doorbell();
    Job::wait([&] { return job.counters().garbage == 1; });
    CHECK(job.header().state.load() == static_cast<uint32_t>(journal::ServerState::kLost));
    CHECK(job.synchronize() != CUDA_SUCCESS);
  }
}

// The daemon dies and comes back: the server tells it all, and is still replaced when it is lost.
void daemon_comes_back() {
  Job::Options options;
  char directory[] = "/tmp/xmig-test-XXXXXX";
  CHECK(::mkdtemp(directory));
  Job job(options);
  job.runtime_dir = directory;
  job.kill_server();  // its successor knows the directory
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(5);
  job.write(address, x.data(), kWords * 8);
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
  job.lose_daemon();
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
  const uint64_t late = job.memory(kWords * 8);  // grown while there is no daemon
  job.write(late, x.data(), kWords * 8);
  CHECK(job.synchronize() == CUDA_SUCCESS);

  const std::string path = std::string(directory) + "/control.sock";
  ipc::UniqueFd listening(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strcpy(name.sun_path, path.c_str());
  CHECK(::bind(listening.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)) == 0);
  CHECK(::listen(listening.get(), 4) == 0);
  job.adopt_connection(ipc::UniqueFd(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  Job::wait([&] { return job.counters().announced == 1; });
  CHECK(job.held() >= 2);
  job.kill_server();
  CHECK(job.read(late, got.data(), kWords * 8) == CUDA_SUCCESS);
  CHECK(got == x);
  check_resumed(job);
  ::unlink(path.c_str());
  ::rmdir(directory);
}

void pauses() {
  Job job;
  const uint64_t address = job.memory(kWords * 8);
  auto x = numbers(5);
  job.write(address, x.data(), kWords * 8);
  job.send({{"type", "pause"}});
  Job::wait([&] { return job.counters().paused == 1; });
  const uint64_t executed = job.header().executed.load();
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{address, 0, 8, 0});
  ::usleep(50'000);
  CHECK(job.header().executed.load() == executed);
  job.send({{"type", "continue"}});
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS);
  CHECK(got[0] == 0 && got[1] == x[1]);
  Job::wait([&] { return job.counters().continued == 1; });
}

// Of an earlier copy, only what was written since is copied again.
void copies_are_increments() {
  Job job;
  const uint64_t written = job.memory(4 * journal::kGranule), left = job.memory(4 * journal::kGranule);
  const auto x = numbers(7);
  const auto copied = [&](uint64_t since, uint64_t again) {
    job.send({{"type", "pause"}, {"snapshot", true}});
    Job::wait([&] { return job.counters().paused == again; });
    const uint64_t number = job.counters().paused_snapshot;
    job.send({{"type", "copy_snapshot"}, {"number", number}, {"since", since}});
    job.send({{"type", "continue"}});
    Job::wait([&] { return job.counters().copied == again; });
    const Copied copied = job.take_copied();
    const auto content = server::read_snapshot_file(copied.file.get());
    CHECK(content && content->number == number);
    std::vector<uint64_t> addresses;
    for (const auto& chunk : content->chunks) {
      if (chunk.slot == 0) continue;
      const auto slab = std::ranges::find_if(copied.slabs, [&](const auto& one) {
        return chunk.slot >= one.address && chunk.slot - one.address < one.bytes;
      });
      CHECK(slab != copied.slabs.end());
      if (slab->fd) addresses.push_back(chunk.address);
    }
    return std::pair(number, addresses);
  };
  for (const uint64_t address : {written, left}) job.write(address, x.data(), kWords * 8);
  CHECK(job.synchronize() == CUDA_SUCCESS);
  const auto [first, all] = copied(0, 1);
  CHECK(all.size() >= 2);
  CHECK(copied(first, 2).second.empty());
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{written, 9, kWords * 8, 0});
  CHECK(job.synchronize() == CUDA_SUCCESS);
  const auto [third, changed] = copied(first, 3);
  CHECK(changed == std::vector<uint64_t>{written / journal::kGranule * journal::kGranule});
  CHECK(copied(third, 4).second.empty());
  CHECK(copied(0, 5).second.size() == all.size());
  CHECK(job.counters().differing == 0);
}

// A lossy copy has named numbers with fewer bits, and is what its file says. Nothing that was rounded is taken for what the program has.
void copies_may_be_lossy() {
  constexpr uint32_t kFloat32 = 2;
  Job job;
  const uint64_t state = job.memory(3 * journal::kGranule), left = job.memory(journal::kGranule);
  std::vector<float> x(3 * journal::kGranule / sizeof(float));
  std::mt19937 random(5);
  for (float& one : x) one = std::ldexp(static_cast<float>(random() | 1), -static_cast<int>(random() % 60));
  // From the middle of the first granule to that of the third.
  const uint64_t first = journal::kGranule / 2, named = 2 * journal::kGranule;
  uint64_t paused = 0;
  struct Lossy {
    uint64_t number = 0;
    std::vector<float> state;
    std::set<uint64_t> copied;
    nlohmann::json rounded;
  };
  std::mutex mutex;
  nlohmann::json rounded;
  job.on_message([&](const nlohmann::json& message) {
    const std::lock_guard lock(mutex);
    if (message.at("type") == "snapshot_copied") rounded = message.at("rounded");
  });
  const auto copy = [&](uint64_t since, uint32_t keep_bits) {
    Lossy found;
    job.send({{"type", "pause"}, {"snapshot", true}});
    ++paused;
    Job::wait([&] { return job.counters().paused == paused; });
    found.number = job.counters().paused_snapshot;
    job.send({{"type", "copy_snapshot"}, {"number", found.number}, {"since", since}, {"keep_bits", keep_bits}});
    job.send({{"type", "continue"}});
    Job::wait([&] { return job.counters().copied == paused; });
    const Copied copied = job.take_copied();
    const auto content = server::read_snapshot_file(copied.file.get());
    CHECK(content && content->number == found.number);
    found.state.resize(x.size());
    for (const auto& chunk : content->chunks) {
      if (chunk.slot == 0) continue;
      const auto slab = std::ranges::find_if(copied.slabs, [&](const auto& one) {
        return chunk.slot >= one.address && chunk.slot - one.address < one.bytes;
      });
      CHECK(slab != copied.slabs.end());
      if (!slab->fd) continue;
      found.copied.insert(chunk.address);
      std::vector<std::byte> bytes(journal::kGranule);
      CHECK(ipc::read_all(slab->fd.get(), bytes, chunk.slot - slab->address));
      CHECK(device::cpu::hash_content(bytes) == chunk.hash);  // a server that restores it checks that
      if (chunk.address >= state && chunk.address < state + 3 * journal::kGranule) {
        std::memcpy(found.state.data() + (chunk.address - state) / sizeof(float), bytes.data(), bytes.size());
      }
    }
    const std::lock_guard lock(mutex);
    found.rounded = rounded;
    return found;
  };
  const auto check = [&](const Lossy& found, uint32_t keep_bits, uint64_t from, uint64_t bytes) {
    for (size_t i = 0; i < x.size(); ++i) {
      const bool may = i * sizeof(float) >= from && i * sizeof(float) < from + bytes;
      uint32_t word = 0;
      std::memcpy(&word, &found.state[i], sizeof(word));
      if (may) {
        CHECK((word & ((1u << (23 - keep_bits)) - 1)) == 0 && std::abs(found.state[i] - x[i]) <= std::ldexp(std::abs(x[i]), -1 - static_cast<int>(keep_bits)));
      } else {
        CHECK(found.state[i] == x[i]);
      }
    }
  };
  job.write(state, x.data(), x.size() * sizeof(float));
  job.write(left, x.data(), 4096);
  CHECK(job.synchronize() == CUDA_SUCCESS);
  const Lossy unnamed = copy(0, 8);
  check(unnamed, 8, 0, 0);
  CHECK(unnamed.rounded.empty());
  job.append(Op::xmNameNumbers, Args_xmNameNumbers{state + first, named, kFloat32, 0});
  CHECK(job.synchronize() == CUDA_SUCCESS);
  const Lossy exact = copy(0, 0);
  check(exact, 0, 0, 0);
  CHECK(exact.rounded.empty());
  const Lossy lossy = copy(exact.number, 8);
  check(lossy, 8, first, named);
  CHECK(lossy.copied.size() == 3 && !lossy.copied.contains(left));  // what has no such numbers is an increment, as always
  const nlohmann::json& about = lossy.rounded.at(0);
  CHECK(lossy.rounded.size() == 1 && about.at("type") == "float32" && about.at("ranges") == 1 && about.at("bytes") == named);
  CHECK(about.at("changed") > x.size() / 2 && about.at("largest_relative") <= std::ldexp(1.0, -9));
  CHECK(about.at("largest_relative") > std::ldexp(1.0, -11) && about.at("largest_absolute") > 0.0);
  // An exact one counts on nothing of it, whatever it is an increment to; but on an exact one that came later.
  const Lossy after = copy(lossy.number, 0);
  CHECK(after.copied.size() == 3);
  check(after, 0, 0, 0);
  const Lossy again = copy(lossy.number, 8);
  check(again, 8, first, named);
  CHECK(job.counters().differing == 0);

  // The program has never had other numbers, and the next server knows the names, too.
  std::vector<float> got(x.size());
  CHECK(job.read(state, got.data(), got.size() * sizeof(float)) == CUDA_SUCCESS && got == x);
  job.kill_server();
  CHECK(job.read(state, got.data(), got.size() * sizeof(float)) == CUDA_SUCCESS && got == x);
  check_resumed(job);
  check(copy(0, 5), 5, first, named);

  // They end with a record about them, and with the memory.
  job.append(Op::xmNameNumbers, Args_xmNameNumbers{left, 4096, kFloat32, 0});
  job.append(Op::xmForgetNumbers, Args_xmForgetNumbers{state + first + 4, 4});
  CHECK(job.synchronize() == CUDA_SUCCESS);
  const Lossy fewer = copy(0, 5);
  check(fewer, 5, 0, 0);
  CHECK(fewer.rounded.at(0).at("bytes") == 4096);
  job.append(Op::xmFree, Args_xmFree{left, 0});
  CHECK(job.synchronize() == CUDA_SUCCESS);
  CHECK(copy(0, 5).rounded.empty());
}

// What the other ranks have was compared with one snapshot: of a newer one nothing is known, and nothing reported.
void unique_copies_are_of_one_snapshot() {
  Job job;
  const uint64_t address = job.memory(journal::kGranule);
  const auto x = numbers(7);
  std::mutex mutex;
  std::vector<uint64_t> made;
  job.on_message([&](const Json& message) {
    const std::lock_guard lock(mutex);
    if (message.at("type") == "copies_made") made.push_back(message.at("snapshot"));
  });
  uint64_t before = 0;
  for (int step = 0; step < 20; ++step) {
    job.write(address, x.data(), kWords * 8);
    job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{address, static_cast<uint8_t>(step), 64, 0});
    CHECK(job.synchronize() == CUDA_SUCCESS);
    job.snapshot();
    const uint64_t number = job.header().snapshot.load() >> 1;
    CHECK(number > before);
    if (before != 0) {
      job.send({{"type", "copy_unique"}, {"snapshot", before}, {"bytes", 1 << 30}});
      CHECK(job.synchronize() == CUDA_SUCCESS);  // its thread has time to be wrong
    }
    job.send({{"type", "copy_unique"}, {"snapshot", number}, {"bytes", 1 << 30}});
    Job::wait([&] {
      const std::lock_guard lock(mutex);
      return !made.empty();
    });
    const std::lock_guard lock(mutex);
    CHECK(std::exchange(made, {}) == std::vector<uint64_t>{number});
    before = number;
  }
  job.on_message(nullptr);
}

// The copy is what the snapshot was, whatever the program does meanwhile and afterwards.
void snapshots_are_copied() {
  Job job;
  const uint64_t address = job.memory(kWords * 8), beside = job.memory(journal::kGranule);
  const auto x = numbers(5), y = numbers(6);
  job.write(address, x.data(), kWords * 8);
  CHECK(job.synchronize() == CUDA_SUCCESS);
  job.send({{"type", "pause"}, {"snapshot", true}});
  Job::wait([&] { return job.counters().paused == 1; });
  const uint64_t number = job.counters().paused_snapshot;
  CHECK(number != 0 && number == job.header().snapshot.load() >> 1);
  job.send({{"type", "copy_snapshot"}, {"number", number}});
  job.send({{"type", "continue"}});
  job.write(address, y.data(), kWords * 8);
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{beside, 7, journal::kGranule, 0});
  job.snapshot();
  Job::wait([&] { return job.counters().copied == 1; });

  const Copied copied = job.take_copied();
  const auto content = server::read_snapshot_file(copied.file.get());
  CHECK(content && content->number == number);
  size_t found = 0;
  for (const auto& chunk : content->chunks) {
    if (chunk.slot == 0) continue;
    const auto slab = std::ranges::find_if(copied.slabs, [&](const auto& one) {
      return chunk.slot >= one.address && chunk.slot - one.address < one.bytes;
    });
    CHECK(slab != copied.slabs.end());
    const uint64_t granule = address / journal::kGranule * journal::kGranule;
    if (chunk.address != granule) continue;
    ++found;
    std::vector<uint64_t> got(kWords);
    CHECK(ipc::read_all(slab->fd.get(), std::as_writable_bytes(std::span(got)), chunk.slot - slab->address + (address - granule)));
    CHECK(got == x);
  }
  CHECK(found == 1);

  // One that is not the last any more is refused.
  job.send({{"type", "copy_snapshot"}, {"number", number}});
  Job::wait([&] { return job.counters().not_copied == 1; });
  // A pause may be taken back before it stands, and one that nobody wants is no error if that is what is meant.
  for (const bool again : {false, true}) {
    if (!again) job.send({{"type", "pause"}});
    job.send({{"type", "continue"}, {"if_paused", true}});
    std::vector<uint64_t> got(kWords);
    CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS && got == y);
  }
  job.kill_server();
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8) == CUDA_SUCCESS && got == y);
  check_resumed(job);
}

// Processor time of all threads, in ns.
uint64_t processor_time(pid_t pid) {
  uint64_t sum = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
    uint64_t spent = 0;
    std::ifstream(task.path() / "schedstat") >> spent;
    sum += spent;
  }
  return sum;
}

// Where the last kernel was, though copies have been elsewhere since; and elsewhere once that stream has gone. The blind device
// refuses anything else.
void snapshots_go_with_kernels() {
  Job job;
  const auto kernels = job.load_kernels();
  const uint64_t launches = job.make_stream(), copies = job.make_stream();
  const uint64_t address = job.memory(kWords * 8), beside = job.memory(kWords * 8);
  auto x = numbers(3);
  job.write(address, x.data(), kWords * 8, launches);
  const auto step = [&](uint64_t stream) {
    job.launch(kernels.kernels.at("mix"), stream, address, 2, kWords);
    mix(x, 2);
    job.write(beside, numbers(5).data(), kWords * 8, copies);
    CHECK(job.synchronize() == CUDA_SUCCESS);
    job.snapshot();
  };
  for (const uint64_t stream : {launches, uint64_t{0}, launches}) step(stream);
  job.append(Op::cuStreamDestroy_v2, Args_cuStreamDestroy_v2{launches});
  job.snapshot();
  step(copies);
  job.kill_server();  // the next one restores memory before it has launched anything
  step(copies);
  check_resumed(job);
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8, copies) == CUDA_SUCCESS);
  CHECK(got == x);
  CHECK(job.counters().recoveries == 1);
}

// Work in a stream of the second device, while the first is current: each device's memory is hashed in a stream of its own. The
// client takes such a kernel in a graph only, as natively; wherever it comes from, it runs on its own device, in the stream's order.
void snapshots_of_two_devices() {
  Job job({.device = "cpu:0,1"});
  const auto kernels = job.load_kernels();
  const uint64_t other = journal::make_handle(journal::Kind::kStream, 1);
  job.append(Op::cuStreamCreateWithPriority, Args_cuStreamCreateWithPriority{other, CU_STREAM_NON_BLOCKING, 0}, {}, 0, 0, 1);
  const uint64_t address = job.memory(kWords * 8);
  auto expected = numbers(3);
  job.write(address, expected.data(), kWords * 8);
  CHECK(job.synchronize() == CUDA_SUCCESS);
  job.launch(kernels.kernels.at("mix"), other, address, 2, kWords);
  mix(expected, 2);
  job.snapshot();
  std::vector<uint64_t> got(kWords);
  CHECK(job.read(address, got.data(), kWords * 8, other) == CUDA_SUCCESS && got == expected);
  CHECK(job.counters().recoveries == 0 && job.counters().program_errors == 0);
}

// Once what was begun is done (a snapshot may be due first) nothing runs, and nothing polls.
void idle_uses_no_cpu() {
  Job job;
  train(job, 20);
  uint64_t least = ~0ull;
  for (int i = 0; i < 10 && least > 500'000; ++i) {
    const uint64_t before = processor_time(job.server());
    ::usleep(500'000);
    least = std::min(least, processor_time(job.server()) - before);
  }
  CHECK(least <= 500'000);
}

const Added kAdded("", {
    {"undisturbed", undisturbed}, {"kills", kills}, {"injections", injections}, {"lost_again_in_replay", lost_again_in_replay},
    {"program_error", program_error}, {"error_among_others", error_among_others}, {"queued_error", queued_error},
    {"host_functions", host_functions}, {"host_function_needs_the_program", host_function_needs_the_program},
    {"never_synchronises", never_synchronises}, {"waits_are_apart", waits_are_apart}, {"garbage", garbage},
    {"daemon_comes_back", daemon_comes_back}, {"pauses", pauses}, {"snapshots_are_copied", snapshots_are_copied},
    {"copies_are_increments", copies_are_increments}, {"copies_may_be_lossy", copies_may_be_lossy}, {"unique_copies_are_of_one_snapshot", unique_copies_are_of_one_snapshot},
    {"idle_uses_no_cpu", idle_uses_no_cpu},
    {"snapshots_go_with_kernels", snapshots_go_with_kernels}, {"snapshots_of_two_devices", snapshots_of_two_devices},
});

}  // namespace jobs
}  // namespace
