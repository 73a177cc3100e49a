// On which processor the server's executor sleeps and wakes: a program that says where it runs, and others that interfere.
#include <sched.h>

#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "processors.h"
#include "server_jobs.h"

namespace {
namespace placement_jobs {

using namespace harness;
using namespace std::chrono_literals;

bool same(const cpu_set_t& a, const cpu_set_t& b) { return CPU_EQUAL(&a, &b); }

// The server's thread of this name; 0: there is none.
pid_t thread_of(pid_t server, const std::string& name) {
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(server) + "/task")) {
    std::string comm;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, comm);
    if (comm == name) return std::stoi(task.path().filename());
  }
  return 0;
}

// Where a thread ran last.
int processor_of(pid_t server, pid_t thread) {
  std::ifstream file("/proc/" + std::to_string(server) + "/task/" + std::to_string(thread) + "/stat");
  std::string word;
  std::getline(file, word, ')');  // pid (comm)
  for (int field = 3; field <= 39; ++field) file >> word;
  return std::stoi(word);
}

constexpr int64_t kDear = 90'000, kCheap = -1'000'000'000;  // to wake the server anywhere, in ns

// A job whose program runs on one processor of at least two, where it takes long to wake the server.
struct Placed {
  const cpu_set_t all = mask_of(0);
  const std::vector<int> list = processors();
  Job job;
  pid_t executor = 0;

  Placed() {
    CHECK(job.synchronize() == CUDA_SUCCESS);
    Job::wait([&] { return (executor = thread_of(job.server(), "executor")) != 0; });
    CHECK(same(mask_of(executor), all));
    job.wake_up = kDear;
  }
  int first() const { return list.front(); }
  int last() const { return list.back(); }
  void say(uint32_t processor) { job.header().threads[0].processor.store(processor); }
  uint32_t sleeping() { return job.header().server_sleeping.load(); }
  // The program runs there, and the server sleeps there.
  void settle_on(int processor) {
    run_on(processor);
    say(static_cast<uint32_t>(processor) + 1);
    Job::wait([&] {
      const auto began = std::chrono::steady_clock::now();
      CHECK(job.synchronize() == CUDA_SUCCESS);
      // Looked at afterwards: it may have come there before, while this thread did not run.
      const bool beside = sleeping() >= journal::kAsleepOn || same(mask_of(executor), only(processor));
      // Now and then it sleeps anywhere, to see how long that takes.
      while (std::chrono::steady_clock::now() - began < 20ms) {
        if (!sleeps_on(processor)) continue;
        CHECK(beside || std::chrono::steady_clock::now() - began >= 2ms);  // a program that does not rest is left alone
        return true;
      }
      return false;
    });
  }
  bool sleeps_on(int processor) {
    return sleeping() == journal::kAsleepOn + static_cast<uint32_t>(processor) && same(mask_of(executor), only(processor));
  }
  bool sleeps_anywhere() { return sleeping() == journal::kAsleep && same(mask_of(executor), all); }
};

// False, and it says so: on one processor there is nothing to choose from.
bool can_choose() {
  if (processors().size() >= 2) return true;
  std::puts("this test needs two processors: nothing was tested");
  return false;
}

// It sleeps where the program's thread runs, and may use what it could when it does something else, or when the program no
// longer says where it is. Its usher never runs there.
void settles() {
  if (!can_choose()) return;
  Placed test;
  for (const int processor : {test.first(), test.last()}) {
    test.settle_on(processor);
    const pid_t usher = thread_of(test.job.server(), "usher");
    CHECK(usher != 0);
    cpu_set_t others = test.all;
    CPU_CLR(processor, &others);
    CHECK(same(mask_of(usher), others));
    test.say(0);
    CHECK(test.job.grow(journal::kDeviceBase + (uint64_t{64 + static_cast<unsigned>(processor)} << 21), journal::kGranule) == CUDA_SUCCESS);
    Job::wait([&] { return test.sleeps_anywhere(); });
  }
}

// It executes there what it is woken for there, and goes on sleeping there.
void runs_beside() {
  if (!can_choose()) return;
  Placed test;
  for (const int processor : {test.first(), test.last()}) {
    test.settle_on(processor);
    // It may have something else to do just then, which it does elsewhere.
    Job::wait([&] {
      CHECK(test.job.synchronize() == CUDA_SUCCESS);
      Job::wait([&] { return test.sleeps_on(processor); });
      return processor_of(test.job.server(), test.executor) == processor;
    });
  }
  // What might make a thread is not executed by one that is bound, and nothing of a whole training is wrong.
  train(test.job, 20);
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(test.job.server()) + "/task")) {
    const pid_t thread = std::stoi(task.path().filename());
    if (thread == test.executor || thread == thread_of(test.job.server(), "usher")) continue;
    CHECK(same(mask_of(thread), test.all));
  }
}

// Somebody on another processor rings: the executor is brought to a processor that is not the one it was bound to, and may use
// all of them. It does not depend on being woken itself.
void usher() {
  if (!can_choose()) return;
  Placed test;
  test.settle_on(test.first());
  run_on(test.last());
  journal::JournalHeader& header = test.job.header();
  test.say(0);
  // As a client that finds itself elsewhere.
  header.server_sleeping.store(journal::kAwake);
  header.doorbell.fetch_add(1);
  const uint64_t position = test.job.append(Op::cuStreamSynchronize, Args_cuStreamSynchronize{0});
  header.caller.store(static_cast<uint32_t>(test.last()) + 1);
  header.usher.fetch_add(1);
  journal::futex_wake(header.usher);
  CHECK(test.job.finish(position) == CUDA_SUCCESS);
  Job::wait([&] { return test.sleeps_anywhere(); });
}

// The program's next record comes just as its rest is over, and finds the server awake: the rest begins anew with it.
void rests_after_the_last_record() {
  if (!can_choose()) return;
  Placed test;
  journal::JournalHeader& header = test.job.header();
  int tried = 0;
  Job::wait([&] {
    test.settle_on(test.first());
    CHECK(test.job.synchronize() == CUDA_SUCCESS);
    Job::wait([&] { return test.sleeping() == journal::kAsleep || test.sleeps_on(test.first()); });
    // Nobody rings for who is awake: the server executes the record when its sleep is over.
    header.server_sleeping.store(journal::kAwake);
    const auto appended = std::chrono::steady_clock::now();
    const uint64_t position = test.job.append(Op::cuStreamSynchronize, Args_cuStreamSynchronize{0});
    const auto* const record = reinterpret_cast<const journal::RecordHeader*>(test.job.at(position));
    while ((record->state.load() & 0xff) != journal::kReplied) {
      if (std::chrono::steady_clock::now() - appended < 20ms) continue;
      // It was no rest but a long sleep already, or this thread did not run for that long.
      header.doorbell.fetch_add(1);
      journal::futex_wake(header.doorbell);
      CHECK(test.job.finish(position) == CUDA_SUCCESS);
      return false;
    }
    // Somebody else may have to bind it. It may also have rested meanwhile, if this thread did not run: hence several tries.
    for (const auto executed = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - executed < 1ms;) {
      if (test.sleeps_on(test.first())) return false;
    }
    return ++tried == 10;
  });
}

// The program's thread is on another processor than last time.
void moves_with_the_program() {
  if (!can_choose()) return;
  Placed test;
  for (int i = 0; i < 6; ++i) test.settle_on(i % 2 == 0 ? test.first() : test.last());
}

// Numbers that are no processor of the server's.
void nonsense() {
  if (!can_choose()) return;
  Placed test;
  for (const uint32_t reported : {~0u, 0x80000000u, uint32_t{CPU_SETSIZE} + 1, uint32_t{CPU_SETSIZE}, 0u}) {
    test.settle_on(test.first());
    test.say(reported);
    CHECK(test.job.synchronize() == CUDA_SUCCESS);
    Job::wait([&] { return test.sleeps_anywhere(); });
  }
  // And words that only the server writes.
  journal::JournalHeader& header = test.job.header();
  header.heard.store(12345);
  header.heard_at.store(~0ull);
  header.gave_way_at.store(~0ull);
  header.caller.store(~0u);
  header.usher.fetch_add(77);
  journal::futex_wake(header.usher);
  test.settle_on(test.last());
}

// Programs that found that it took longer so: for a while it sleeps anywhere.
void reported_that_it_is_late() {
  if (!can_choose()) return;
  Placed test;
  test.settle_on(test.first());
  for (int i = 0; i < 12; ++i) {
    Job::wait([&] {
      test.job.header().late.fetch_add(1);
      CHECK(test.job.synchronize() == CUDA_SUCCESS);
      return test.sleeps_anywhere();
    });
  }
  // For a long while by now, whatever the program says.
  for (int i = 0; i < 20; ++i) {
    CHECK(test.job.synchronize() == CUDA_SUCCESS);
    Job::wait([&] { return test.sleeping() != journal::kAwake; });
    CHECK(test.sleeping() == journal::kAsleep);
  }
}

// An administrator binds the executor's thread while it sleeps: that stays.
void bound_by_others() {
  if (!can_choose()) return;
  Placed test;
  test.settle_on(test.first());
  const cpu_set_t theirs = only(test.last());
  CHECK(::sched_setaffinity(test.executor, sizeof(theirs), &theirs) == 0);
  for (int i = 0; i < 20; ++i) {
    CHECK(test.job.synchronize() == CUDA_SUCCESS);
    CHECK(test.job.grow(journal::kDeviceBase + (uint64_t{512} + i) * journal::kGranule, journal::kGranule) == CUDA_SUCCESS);
    CHECK(same(mask_of(test.executor), theirs));
  }
  // And gives it all of them back: it settles again.
  CHECK(::sched_setaffinity(test.executor, sizeof(test.all), &test.all) == 0);
  test.settle_on(test.first());
}

// Or every thread of the server, to the very processor that the executor sleeps on.
void whole_server_bound() {
  if (!can_choose()) return;
  Placed test;
  test.settle_on(test.first());
  const cpu_set_t theirs = only(test.first());
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(test.job.server()) + "/task")) {
    CHECK(::sched_setaffinity(std::stoi(task.path().filename()), sizeof(theirs), &theirs) == 0);
  }
  Job::wait([&] {
    const uint64_t address = journal::kDeviceBase + (2048 + test.job.sequence()) * journal::kGranule;
    CHECK(test.job.grow(address, journal::kGranule) == CUDA_SUCCESS);
    std::this_thread::sleep_for(3ms);  // it looks when the program rests
    return test.sleeping() == journal::kAsleep && same(mask_of(test.executor), theirs);
  });
}

// The program's thread goes before every other on its processor, and never lets go of it: the server comes all the same.
void real_time_program() {
  if (!can_choose()) return;
  Placed test;
  test.settle_on(test.first());
  sched_param parameter{};
  parameter.sched_priority = 1;
  if (::sched_setscheduler(0, SCHED_FIFO, &parameter) != 0) return void(std::puts("no right to real-time classes: nothing was tested"));
  journal::JournalHeader& header = test.job.header();
  const uint64_t position = test.job.append(Op::cuStreamSynchronize, Args_cuStreamSynchronize{0});
  header.usher.fetch_add(1);  // as the client does when the server has not run
  journal::futex_wake(header.usher);
  const auto* const record = reinterpret_cast<const journal::RecordHeader*>(test.job.at(position));
  while ((record->state.load() & 0xff) != journal::kReplied) journal::cpu_relax();
}

// It is woken quickly wherever it sleeps: it sleeps anywhere, and has no usher. Nor where nobody says how long it takes, nor where
// what is reported is nonsense.
void where_waking_is_cheap() {
  Placed test;
  for (const int64_t reported : {kCheap, int64_t{0}, int64_t{1} << 62, int64_t{1} << 40}) {
    test.job.wake_up = reported;
    test.say(1);
    for (int i = 0; i < 5; ++i) {
      CHECK(test.job.synchronize() == CUDA_SUCCESS);
      Job::wait([&] { return test.sleeping() != journal::kAwake; });
      std::this_thread::sleep_for(3ms);
      CHECK(test.sleeping() < journal::kAsleepOn && same(mask_of(test.executor), test.all));
      CHECK(thread_of(test.job.server(), "usher") == 0);
    }
  }
}

// It finds out that it has become quicker to wake it anywhere, and does so; and that it has become slow again.
void looks_again() {
  if (!can_choose()) return;
  Placed test;
  test.settle_on(test.first());
  const auto until = [&](auto done) {
    Job::wait([&] {
      CHECK(test.job.synchronize() == CUDA_SUCCESS);
      std::this_thread::sleep_for(3ms);
      return done();
    });
  };
  test.job.wake_up = kCheap;
  int anywhere = 0;
  until([&] { return (anywhere = test.sleeps_anywhere() ? anywhere + 1 : 0) == 5; });
  test.job.wake_up = kDear;
  until([&] { return test.sleeps_on(test.first()); });
}

const Added kAdded("placement_", {
    {"settles", settles},
    {"where_waking_is_cheap", where_waking_is_cheap},
    {"looks_again", looks_again},
    {"runs_beside", runs_beside},
    {"usher", usher},
    {"rests_after_the_last_record", rests_after_the_last_record},
    {"moves_with_the_program", moves_with_the_program},
    {"nonsense", nonsense},
    {"reported_that_it_is_late", reported_that_it_is_late},
    {"bound_by_others", bound_by_others},
    {"whole_server_bound", whole_server_bound},
    {"real_time_program", real_time_program},
});

}  // namespace placement_jobs
}  // namespace
