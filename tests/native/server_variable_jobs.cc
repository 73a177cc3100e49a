// Whole jobs against a server whose device places modules' variables itself (placing_device.cc): what kernels leave in
// variables for which the program has never requested.
#include <array>

#include "server_jobs.h"

namespace {
namespace variable_jobs {

using namespace harness;

constexpr uint64_t kWordsOfUntouched = 1 << 17;

// A loaded module whose kernel `count` counts in variables, and what they have to be.
class Counting {
 public:
  explicit Counting(Job& job) : job_(job), loaded_(job.load_kernels()), out_(job.memory(32)) {
    CHECK(loaded_.globals.empty());  // none that the program would place
  }

  // As the client does before it launches a module's first kernel. How much memory the place takes.
  uint64_t give_place() {
    std::array<std::byte, 4096> description;
    CHECK(job_.call(Op::xmKernel, Args_xmKernel{kernel("count")}, description.data(), description.size()) == CUDA_SUCCESS);
    journal::KernelInfo info;
    std::memcpy(&info, description.data(), sizeof(info));
    if (info.variable_bytes == 0) return 0;
    place_ = job_.memory(info.variable_bytes);
    job_.append(Op::xmVariables, Args_xmVariables{loaded_.module, place_, info.variable_bytes});
    return info.variable_bytes;
  }
  void launch() {
    job_.launch(kernel("count"), 0, out_);
    ++now_;
    history_[now_ * 7919 % history_.size()] += now_;
  }
  void check() {
    std::array<uint64_t, 4> got{};
    CHECK(job_.read(out_, got.data(), sizeof(got)) == CUDA_SUCCESS);
    uint64_t sum = 0;
    for (size_t i = 0; i < history_.size(); ++i) sum += history_[i] * (i + 1);
    CHECK(got[0] == now_ && got[1] == now_ - 5 && got[2] == sum && got[3] == (now_ - 5) % 256);
  }
  // One more, and everything as it should be.
  void step() {
    launch();
    check();
  }
  uint64_t kernel(const char* name) const { return loaded_.kernels.at(name); }
  uint64_t module() const { return loaded_.module; }
  uint64_t out() const { return out_; }
  uint64_t place() const { return place_; }
  uint64_t now() const { return now_; }

 private:
  Job& job_;
  Job::Loaded loaded_;
  uint64_t out_, place_ = 0;
  uint64_t now_ = 5;
  std::vector<uint64_t> history_ = std::vector<uint64_t>(20000);
};

// Across servers that die, with and without a snapshot since the last change.
void kept() {
  Job job;
  Counting counting(job);
  CHECK(counting.give_place() > 8 * (20000 + 2 * 6 + kWordsOfUntouched));
  CHECK(counting.give_place() == 0);  // it has one
  for (int i = 1; i <= 40; ++i) {
    counting.launch();
    if (i % 7 == 0) job.kill_server();
    if (i % 10 == 0) job.snapshot();
    if (i % 10 == 5) job.kill_server();
    counting.check();
  }
  check_resumed(job);
}

// Snapshots all the time, servers that die at any moment.
void kept_at_random() {
  Job job({.snapshot_cost = 0.9});
  Counting counting(job);
  counting.give_place();
  std::mt19937 random(11);
  for (int i = 0; i < 25; ++i) {
    const uint64_t steps = 1 + random() % 60;
    for (uint64_t k = 0; k < steps; ++k) counting.launch();
    if (i % 5 == 0) job.snapshot();  // a busy machine may have come to none by itself
    ::usleep(random() % 20'000);
    job.kill_server();
    counting.step();
  }
  CHECK(job.counters().snapshots > 0);
  check_resumed(job);
}

// Who takes the place has the module already, and its variables as the image has them.
void kept_preloaded() {
  setup.preload = true;
  kept();
}

// From the first moment of a snapshot the device's memory is the state, and variables are in it.
void kept_when_a_snapshot_begins() {
  Job job;
  Counting counting(job);
  counting.give_place();
  for (uint64_t i = 1; i <= 6; ++i) {
    job.inject("snapshot", "kill", i % 3);  // before anything was copied, and after the first chunks were
    while (job.counters().injected != i) {  // a snapshot that comes by itself may have taken what was there
      counting.step();
      job.snapshot_unless([&] { return job.counters().injected == i; });
    }
    Job::wait([&] { return job.counters().resumed == i; });
    counting.check();
    counting.step();
  }
  check_resumed(job);
}

// Where the first kernel came between the last snapshot and the one in which the server dies.
void first_used_before_a_snapshot_that_fails() {
  Job job;
  Counting counting(job);
  job.snapshot();
  counting.give_place();
  counting.step();
  job.inject("snapshot", "kill", 1);
  while (job.counters().injected == 0) {
    counting.step();
    job.snapshot_unless([&] { return job.counters().injected != 0; });
  }
  Job::wait([&] { return job.counters().resumed == 1; });
  counting.step();
  job.kill_server();
  counting.step();
  check_resumed(job);
}

// A fault takes the context, and what was in variables then.
void kept_after_faults() {
  Job job;
  Counting counting(job);
  counting.give_place();
  for (uint64_t i = 1; i <= 4; ++i) {
    counting.step();
    if (i % 2 == 0) job.snapshot();
    for (int k = 0; k < 5; ++k) counting.launch();
    job.inject("kernel", "fault", job.sequence() + 1, CUDA_ERROR_ILLEGAL_ADDRESS);
    // The server may hear of it after the next launch.
    Job::wait([&] {
      counting.step();
      return job.counters().resumed == i;
    });
  }
  CHECK(job.counters().program_errors == 0);
  check_resumed(job);
}

// Words with addresses are each server's own, until the program changes them: then all of the word is the program's.
void addresses_are_each_servers() {
  Job job;
  Counting counting(job);
  counting.give_place();
  const auto look = [&] {
    std::array<uint64_t, 2> seen{};
    job.launch(counting.kernel("get_address"), 0, counting.out());
    CHECK(job.read(counting.out(), seen.data(), sizeof(seen)) == CUDA_SUCCESS);
    return seen;
  };
  const auto first = look();
  CHECK(first[0] == first[1] && first[0] != 0);
  counting.step();
  job.snapshot();
  job.kill_server();
  const auto second = look();
  CHECK(second[0] == second[1] && second[1] != first[1]);
  counting.step();
  const uint64_t changed = second[0] ^ 0x1234;  // only a half of it
  job.launch(counting.kernel("set_address"), 0, changed);
  for (int i = 0; i < 4; ++i) {
    counting.step();
    if (i % 2 == 0) job.snapshot();
    job.kill_server();
    CHECK(look()[0] == changed);
  }
  // That it looked at addresses is what made answers differ.
  CHECK(job.counters().resumed != 0 && job.counters().garbage == 0 && job.counters().program_errors == 0);
}

// The program asks for one of them after all: before the first kernel, and later.
void some_have_twins() {
  Job job;
  Counting counting(job);
  const auto ask = [&](std::string_view name, uint64_t twin) {
    const auto payload = std::as_bytes(std::span(name));
    journal::GlobalSize size{};
    const uint64_t requested = job.append(Op::xmGlobal, Args_xmGlobal{counting.module()}, payload, sizeof(size));
    CHECK(job.finish(requested, &size, sizeof(size)) == CUDA_SUCCESS);
    job.append(Op::xmTwin, Args_xmTwin{counting.module(), twin}, payload);
  };
  const uint64_t odd = job.memory(4), counter = job.memory(9);
  ask("odd", odd);
  const std::array<uint8_t, 3> set = {7, 0, 9};
  job.write(odd, set.data(), set.size());
  counting.give_place();
  counting.step();
  ask("counter", counter);
  for (int i = 1; i <= 12; ++i) {
    if (i % 4 == 0) job.kill_server();
    if (i % 6 == 0) job.snapshot();
    uint64_t seen = 0;
    CHECK(job.read(counter, &seen, sizeof(seen)) == CUDA_SUCCESS && seen == counting.now());
    counting.step();
    if (i % 3 == 0) job.kill_server();
    std::array<uint8_t, 3> got{};
    CHECK(job.read(odd, got.data(), got.size()) == CUDA_SUCCESS);
    CHECK(got[0] == 7 && got[1] == counting.now() - 5 && got[2] == 9);
  }
  check_resumed(job);
}

// The same image twice, one of them unloaded and loaded again: each module has its own.
void modules_come_and_go() {
  Job job;
  Counting first(job), unused(job);
  first.give_place();
  for (int round = 0; round < 3; ++round) {
    Counting second(job);
    second.give_place();
    for (int i = 0; i < 4; ++i) {
      first.step();
      second.step();
      if (i == 1) job.kill_server();
      if (i == 2) job.snapshot();
      second.step();
      if (i == 2) job.kill_server();
    }
    job.append(Op::cuModuleUnload, Args_cuModuleUnload{second.module()});
    job.append(Op::xmFree, Args_xmFree{second.place(), 0});
    if (round == 1) job.snapshot();
    job.kill_server();
    first.step();
  }
  unused.give_place();
  unused.step();
  check_resumed(job);
}

// A variable that nobody has written since costs no copy; a byte of it one.
void snapshots_copy_what_was_written() {
  Job job({.snapshot_cost = 1e-9});
  Counting counting(job);
  counting.give_place();
  const uint64_t fill = counting.kernel("fill"), read_all = counting.kernel("read_all"), take = counting.kernel("take");
  uint64_t seen = 1, sum = 0;
  job.launch(take, 0, counting.out());
  CHECK(job.read(counting.out(), &seen, sizeof(seen)) == CUDA_SUCCESS && seen == 0);
  job.snapshot();
  job.launch(fill, 0, uint64_t{77});
  job.snapshot();
  const uint64_t with_fill = job.counters().snapshot_bytes;
  CHECK(with_fill >= kWordsOfUntouched * 8);
  job.launch(take, 0, counting.out());
  job.snapshot();
  // What the last snapshot copied is copied once more without a look; then nothing is left but what this kernel writes itself.
  job.launch(take, 0, counting.out());
  job.snapshot();
  job.launch(take, 0, counting.out());
  job.snapshot();
  CHECK(job.counters().snapshot_bytes < with_fill);
  job.kill_server();
  job.launch(take, 0, counting.out());
  CHECK(job.read(counting.out(), &seen, sizeof(seen)) == CUDA_SUCCESS && seen == 1);
  job.launch(read_all, 0, counting.out());
  CHECK(job.read(counting.out(), &seen, sizeof(seen)) == CUDA_SUCCESS);
  for (uint64_t i = 0; i < kWordsOfUntouched; ++i) sum += (77 + i) * (i + 1);
  CHECK(seen == sum);
  check_resumed(job);
}

// Modules on two devices, each with its variables.
void on_two_devices() {
  Job job({.device = "cpu:0,1"});
  Counting first(job);
  first.give_place();
  job.ordinal = 1;
  Counting second(job);
  second.give_place();
  for (uint64_t i = 0; i < 9; ++i) {
    for (uint16_t device : {0, 1, 1}) {
      job.ordinal = device;
      (device == 0 ? first : second).step();
    }
    if (i % 3 == 0) job.snapshot();
    if (i % 3 != 1) job.kill_server();
  }
  job.ordinal = 0;
  first.step();
  job.ordinal = 1;
  second.step();
  check_resumed(job);
}

// The program has written over what it does not own: then it is informed, and does not go on with what variables were at first.
void overwritten() {
  Job job;
  Counting counting(job);
  counting.give_place();
  counting.step();
  job.snapshot();
  job.launch(counting.kernel("scribble"), 0, counting.place());
  CHECK(job.synchronize() == CUDA_SUCCESS);
  job.snapshot();
  job.kill_server();
  Job::wait([&] { return job.counters().garbage == 1; });
  std::array<uint64_t, 4> got{};
  CHECK(job.read(counting.out(), got.data(), sizeof(got)) != CUDA_SUCCESS);
  CHECK(job.header().state.load() == static_cast<uint32_t>(journal::ServerState::kLost));
}

// What the program says of a place is checked.
void bad_places() {
  Job job;
  Counting counting(job);
  const uint64_t memory = job.memory(4 << 20);
  const auto refused = [&](uint64_t module, uint64_t address, uint64_t bytes) {
    job.append(Op::xmVariables, Args_xmVariables{module, address, bytes});
    const bool so = job.synchronize() != CUDA_SUCCESS;
    CHECK(job.call(Op::xmContextReset, Args_xmContextReset{99, 0, 0}) == CUDA_SUCCESS);  // of nothing; the error is over
    return so;
  };
  CHECK(refused(counting.module(), memory, 16));                                        // too small
  CHECK(refused(counting.module(), memory + (3 << 20), 2 << 20));                       // not all of it is the program's
  CHECK(refused(journal::make_handle(journal::Kind::kModule, 4711), memory, 4 << 20));  // no such module
  CHECK(refused(counting.kernel("count"), memory, 4 << 20));
  CHECK(counting.give_place() != 0);
  counting.step();
  CHECK(refused(counting.module(), memory, 4 << 20));  // a second one
  counting.step();
}

// To host memory, and from there to another server.
void suspended() {
  Job job;
  Counting counting(job);
  counting.give_place();
  for (int i = 0; i < 3; ++i) {
    for (int k = 0; k < 5; ++k) counting.step();
    counting.launch();
    Heard heard;
    job.on_message([&](const Json& message) { heard.note(message); });
    if (i != 1) {
      job.send({{"type", "prepare_suspend"}, {"to", "host"}, {"bytes_hint", 0}});
      CHECK(heard.expect({"prepared", "suspend_failed"}).at("type") == "prepared");
      counting.step();
    }
    job.send({{"type", "suspend"}});
    CHECK(heard.expect({"suspended", "suspend_failed"}).at("type") == "suspended");
    job.on_message({});
    job.leave_suspended();
    CHECK(job.resume(i % 2 == 0 ? "cpu:1" : "cpu:0"));
    counting.step();
    if (i == 1) job.kill_server();
    counting.step();
  }
  CHECK(job.counters().differing == 0 && job.counters().garbage == 0 && job.counters().program_errors == 0);
}

const Added kAdded("variables_", {
    {"kept", kept}, {"kept_at_random", kept_at_random}, {"kept_preloaded", kept_preloaded},
    {"kept_when_a_snapshot_begins", kept_when_a_snapshot_begins},
    {"first_used_before_a_snapshot_that_fails", first_used_before_a_snapshot_that_fails}, {"kept_after_faults", kept_after_faults},
    {"addresses_are_each_servers", addresses_are_each_servers},
    {"some_have_twins", some_have_twins}, {"modules_come_and_go", modules_come_and_go},
    {"snapshots_copy_what_was_written", snapshots_copy_what_was_written}, {"on_two_devices", on_two_devices},
    {"overwritten", overwritten}, {"bad_places", bad_places}, {"suspended", suspended},
});

}  // namespace variable_jobs
}  // namespace
