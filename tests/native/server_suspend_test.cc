// Suspension and resumption with the real xmig-server, on cpu devices: what the daemon does, in one process.
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include <filesystem>
#include <set>

#include "server_program.h"

namespace {
namespace suspend_test {

using namespace harness;

// The daemon's part of suspensions of one job.
class Suspension {
 public:
  explicit Suspension(Job& job) : job_(job) {
    job_.on_message([this](const Json& message) { heard_.note(message); });
  }
  ~Suspension() { job_.on_message({}); }

  // `directory`: to files there, else to host memory.
  Json prepare(const std::string& directory = "", uint64_t bytes_hint = 0) {
    const ipc::UniqueFd fd(directory.empty() ? -1 : ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    const int one = fd.get();
    job_.send({{"type", "prepare_suspend"}, {"to", directory.empty() ? "host" : "file"}, {"bytes_hint", bytes_hint}},
              directory.empty() ? std::span<const int>() : std::span(&one, 1));
    return heard_.expect({"prepared", "suspend_failed"});
  }
  Json suspend() {
    job_.send({{"type", "suspend"}});
    return heard_.expect({"suspended", "suspend_failed"});
  }
  void go_on() {
    job_.send({{"type", "continue"}});
    heard_.expect({"continued"});
  }
  Heard& heard() { return heard_; }

 private:
  Job& job_;
  Heard heard_;
};

uint64_t held(Job& job, const std::string& kind, const std::string& name) {
  uint64_t bytes = 0;
  job.with_held([&](const HeldMap& all) {
    for (const auto& [id, one] : all) {
      const bool so = one.fields.at("kind") == kind && one.fields.at("name").get<std::string>().starts_with(name) &&
                      (name != "" || one.fields.at("name") == "");
      if (so) bytes += one.fields.at("bytes").get<uint64_t>();
    }
  });
  return bytes;
}

bool is_suspended(Job& job) {
  return job.header().state.load() == static_cast<uint32_t>(journal::ServerState::kSuspended) &&
         job.header().server_pid.load() == 0;
}

// Nothing happens while the process is suspended, and nothing is of the device.
void check_suspended(Job& job, Program& program) {
  CHECK(is_suspended(job));
  job.leave_suspended();
  CHECK(held(job, "shadow", "") == 0);
  const uint64_t steps = program.steps();
  ::usleep(20'000);
  CHECK(program.steps() <= steps + 1);
}

// To host memory and back, with and without preparation, on the same and another device; later deaths are recovered.
void host() {
  Job job;
  Program program(job);
  program.let_run();
  for (int i = 0; i < 4; ++i) {
    // Where nothing runs no snapshot is due, until the shadow has come back to a device. Otherwise one may bring the rest itself.
    const bool still = i == 0;
    {
      Suspension suspension(job);
      if (i != 1) {
        CHECK(suspension.prepare().at("type") == "prepared");
        program.let_run(i == 2 ? 30 : 1);
      }
      if (still) program.stand_still();
      const Json suspended = suspension.suspend();
      CHECK(suspended.at("type") == "suspended");
      CHECK(suspended.at("bytes").get<uint64_t>() >= 16 << 20);
      check_suspended(job, program);
    }
    const uint64_t before = job.counters().settled;
    CHECK(job.resume(i % 2 == 0 ? "cpu:1" : "cpu:0"));
    if (!still) program.let_run();
    Job::wait([&] { return held(job, "shadow", "memfd") == 0; });  // back on the device
    const bool settled = job.counters().settled != before;
    CHECK(!still || (settled && job.counters().settled_bytes == 0));
    CHECK(!settled || job.counters().settled_bytes < 16 << 20);  // what has not changed has come to the device by then
    program.go_on();
    if (i % 2 == 1) job.kill_server();
    program.let_run();
  }
  program.end();
  CHECK(job.counters().recoveries == 2);
  check_whole(job);
}

// While its shadow comes back to the device: of that nothing stays there.
void while_settling() {
  Job job;
  Program program(job, 64 << 20);  // half of it zeros
  program.let_run();
  for (const char* const device : {"cpu:1", "cpu:0"}) {
    Suspension suspension(job);
    CHECK(suspension.suspend().at("type") == "suspended");
    check_suspended(job, program);
    CHECK(job.resume(device));
    Job::wait([&] { return held(job, "shadow", "") != 0; });
  }
  program.let_run();
  program.end();
  check_whole(job);
}

// What no snapshot has yet is brought, too, while the program runs.
void brings_all() {
  Job job({.snapshot_cost = 1e-9});  // after the second snapshot none is due for a long time
  const uint64_t word = job.memory(8);
  while (job.counters().snapshots < 2) job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{word, 1, 8, 0});
  constexpr uint64_t kBytes = 16 << 20;
  const uint64_t late = job.memory(kBytes);
  job.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{late, 7, kBytes, 0});
  CHECK(job.synchronize() == CUDA_SUCCESS);
  Suspension suspension(job);
  CHECK(suspension.prepare().at("type") == "prepared");
  CHECK(held(job, "shadow", "memfd") >= kBytes);
}

// What was given for it is used, as far as it is long enough, and what is left over is not kept.
void given_room() {
  Job job;
  Program program(job);
  program.let_run();
  job.snapshot();  // so that there is something to bring, however long another one takes
  const auto links = [&] {
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(job.server()) + "/fd")) {
      std::error_code gone;
      const std::string link = std::filesystem::read_symlink(entry, gone).string();
      if (link.find("memfd:given-") != std::string::npos) found.insert(link.substr(0, link.find(' ')));
    }
    return found;
  };
  std::vector<ipc::UniqueFd> given;
  for (int i = 0; i < 4; ++i) {
    given.emplace_back(::memfd_create(("given-" + std::to_string(i)).c_str(), MFD_CLOEXEC));
    CHECK(::ftruncate(given[i].get(), i == 3 ? 4096 : 32 * journal::kGranule) == 0);  // taken from the end
  }
  Suspension suspension(job);
  const int first[] = {given[0].get(), given[1].get()}, second[] = {given[2].get(), given[3].get()};
  job.send({{"type", "room"}}, first);
  job.send({{"type", "room"}}, second);
  CHECK(suspension.prepare().at("type") == "prepared");
  CHECK(links() == (std::set<std::string>{"/memfd:given-0", "/memfd:given-1", "/memfd:given-2"}));
  program.let_run(30);
  CHECK(suspension.suspend().at("type") == "suspended");
  check_suspended(job, program);
  CHECK(job.resume("cpu:1"));
  Job::wait([&] { return held(job, "shadow", "memfd") == 0 && links().empty(); });
  program.end();
  check_whole(job);
}

void files() {
  const auto directory = std::filesystem::temp_directory_path() / ("xmig-suspend-" + std::to_string(::getpid()));
  std::filesystem::create_directory(directory);
  {
    Job job;
    Program program(job);
    program.let_run();
    {
      Suspension suspension(job);
      CHECK(suspension.prepare(directory.string()).at("type") == "prepared");
      program.let_run();
      CHECK(suspension.suspend().at("type") == "suspended");
      check_suspended(job, program);
      CHECK(held(job, "shadow", "memfd") == 0);
      CHECK(held(job, "shadow", "file:") >= 16 << 20);
    }
    CHECK(job.resume("cpu:1"));
    program.let_run();
    Job::wait([&] { return held(job, "shadow", "file:") == 0; });
    job.kill_server();
    program.let_run();
    // From files to host memory: what has not come back to the device yet goes there, too.
    Suspension suspension(job);
    CHECK(suspension.prepare(directory.string()).at("type") == "prepared");
    CHECK(suspension.suspend().at("type") == "suspended");
    check_suspended(job, program);
    CHECK(job.resume("cpu:0"));
    CHECK(suspension.suspend().at("type") == "suspended");
    CHECK(held(job, "shadow", "file:") == 0);
    check_suspended(job, program);
    CHECK(job.resume("cpu:0"));
    program.let_run();
    program.end();
    check_whole(job);
  }
  std::filesystem::remove_all(directory);
}

// Called off at each point: the program runs on, its shadow returns to the device, and nothing stays behind.
void aborts() {
  Job job;
  Program program(job);
  program.let_run();
  Suspension suspension(job);
  for (int point = 0; point < 4; ++point) {
    if (point == 0) {
      job.send({{"type", "prepare_suspend"}, {"to", "host"}, {"bytes_hint", 0}});
    } else {
      CHECK(suspension.prepare().at("type") == "prepared");
    }
    if (point < 2) {
      job.send({{"type", "abort_suspend"}});
    } else {
      CHECK(suspension.suspend().at("type") == "suspended");
      CHECK(is_suspended(job));
      suspension.go_on();
      CHECK(job.header().server_pid.load() == static_cast<uint32_t>(job.server()));
    }
    program.let_run();
    CHECK(is_running(job));
    Job::wait([&] { return held(job, "shadow", "memfd") == 0; });
    if (point == 3) job.kill_server();
    program.let_run();
  }
  program.end();
  CHECK(job.counters().recoveries == 1);
  check_whole(job);
}

// The server dies while it prepares, and while it suspends: recovered where it was.
void dies() {
  Job job;
  Program program(job);
  program.let_run();
  {
    Suspension suspension(job);
    CHECK(suspension.prepare().at("type") == "prepared");
    job.kill_server();
    Job::wait([&] { return job.counters().resumed == 1; });
    program.let_run();
    CHECK(suspension.prepare().at("type") == "prepared");
    const ipc::UniqueFd line = job.line();  // a snapshot that comes by itself may kill it first, and its successor is not to suspend
    job.inject("snapshot", "kill", 1);
    send_to(line.get(), {{"type", "suspend"}});
    Job::wait([&] { return job.counters().resumed == 2; });
    program.let_run();
  }
  program.end();
  check_whole(job);
}

// No room to suspend to, no room to resume in: reported, and nothing has changed.
void no_room() {
  Job job;
  Program program(job);
  program.let_run();
  Suspension suspension(job);
  const Json failed = suspension.prepare("", 1ull << 50);
  CHECK(failed.at("type") == "suspend_failed");
  program.let_run();
  CHECK(suspension.prepare().at("type") == "prepared");
  CHECK(suspension.suspend().at("type") == "suspended");
  check_suspended(job, program);
  for (int i = 0; i < 2; ++i) {
    CHECK(!job.resume("cpu:1", 16 << 20));
    CHECK(job.resume_error() == "no_room");
    Job::wait([&] { return job.server() == -1; });
    CHECK(is_suspended(job));
  }
  CHECK(job.resume("cpu:1", 64 << 20));
  program.let_run();
  program.end();
  check_whole(job);
}

// Each granule of what is in host memory, made another one; twice: as it was.
void change(Job& job) {
  job.with_held([](const HeldMap& all) {
    for (const auto& [id, one] : all) {
      if (!one.fields.at("name").get<std::string>().starts_with("memfd")) continue;
      for (off_t at = 0; at < one.fields.at("bytes").get<off_t>(); at += journal::kGranule) {
        char byte = 0;
        CHECK(::pread(one.fd.get(), &byte, 1, at) == 1);
        byte = static_cast<char>(~byte);
        CHECK(::pwrite(one.fd.get(), &byte, 1, at) == 1);
      }
    }
  });
}

// What came from host memory is not what the snapshot says: nobody gets it, and the job is where it was.
void damaged() {
  Job job;
  Program program(job);
  program.let_run();
  Suspension suspension(job);
  CHECK(suspension.prepare().at("type") == "prepared");
  CHECK(suspension.suspend().at("type") == "suspended");
  check_suspended(job, program);
  change(job);
  CHECK(!job.resume("cpu:1"));
  CHECK(job.resume_error() == "bad_snapshot");
  Job::wait([&] { return job.server() == -1; });
  CHECK(is_suspended(job));
  change(job);
  CHECK(job.resume("cpu:1"));
  program.let_run();
  program.end();
  check_whole(job);
}

// What it has is on the device before a server is given the job: what has not changed is not copied again, what is damaged then
// is, and who has no room, or is to take more than was announced, ends.
void ahead() {
  constexpr uint64_t kMost = 1ull << 30;
  Job job;
  Program program(job);
  program.let_run();
  program.stand_still();
  Suspension suspension(job);
  CHECK(suspension.prepare().at("type") == "prepared");
  CHECK(suspension.suspend().at("type") == "suspended");
  check_suspended(job, program);
  constexpr uint64_t kLittle = 16 << 20;
  for (const auto& [memory, most, code] : {std::tuple{kLittle, kMost, "no_room"}, std::tuple{kMost, kLittle, "bad_snapshot"}}) {
    const auto [pid, control] = spawn_server("cpu:1", memory);
    const Json failed = job.work_ahead(control.get(), 1, most);
    CHECK(failed.at("type") == "move_failed" && failed.at("code") == code);
    ::waitpid(pid, nullptr, 0);
  }
  uint64_t total = 0, copied = 0;
  const auto note = [&](const Json& message) {
    if (message.at("type") != "round") return;
    CHECK(message.at("total_bytes") == total && message.at("settled_bytes") == total);
    copied = message.at("copied_bytes").get<uint64_t>();
  };
  for (const bool again : {true, false}) {
    setup.ahead = [&](int control) {
      change(job);
      const Json damaged = job.work_ahead(control, 1, kMost);
      total = damaged.at("total_bytes").get<uint64_t>();
      CHECK(total >= 16 << 20 && damaged.at("settled_bytes") == 0 && damaged.at("differing_bytes") == total);
      change(job);
      const Json right = job.work_ahead(control, 2, kMost);
      CHECK(right.at("settled_bytes") == total && right.at("copied_bytes") == total);
      if (again) CHECK(job.work_ahead(control, 3, kMost).at("copied_bytes") == 0);
    };
    job.on_message(note);
    CHECK(job.resume("cpu:1"));
    setup.ahead = {};
    CHECK(copied == (again ? 0 : total));  // since the last round began
    program.go_on();
    program.let_run();
    job.kill_server();
    program.let_run();
    program.stand_still();
    if (!again) break;
    Suspension once_more(job);
    CHECK(once_more.suspend().at("type") == "suspended");
    check_suspended(job, program);
  }
  program.go_on();
  program.end();
  check_whole(job);
}

// A file system that is too small. It takes a mount of one's own: without that right, a limit on the size of files.
void full() {
  Job job;
  Program program(job);
  program.let_run();
  const auto directory = std::filesystem::temp_directory_path() / ("xmig-full-" + std::to_string(::getpid()));
  std::filesystem::create_directory(directory);
  const bool mounted = ::mount("tmpfs", directory.c_str(), "tmpfs", 0, "size=8m") == 0;
  if (!mounted) {
    const rlimit limit{8 << 20, 8 << 20};
    CHECK(::prlimit(job.server(), RLIMIT_FSIZE, &limit, nullptr) == 0);
  }
  Suspension suspension(job);
  const Json failed = suspension.prepare(directory.string());
  CHECK(failed.at("type") == "suspend_failed");
  CHECK(failed.at("text").get<std::string>().find("no room") != std::string::npos);
  program.let_run();
  Job::wait([&] { return held(job, "shadow", "file:") == 0; });
  CHECK(suspension.suspend().at("type") == "suspend_failed");  // not prepared: it has nowhere to go
  program.let_run();
  if (mounted) ::umount2(directory.c_str(), MNT_DETACH);
  program.end();
  check_whole(job);
  std::filesystem::remove_all(directory);
}

// For a target that cannot reach the device: shadows on the host until reported otherwise.
void shadow_on_host() {
  Job job;
  Program program(job);
  program.let_run();
  Suspension suspension(job);
  job.send({{"type", "snapshot"}, {"host", true}});
  Job::wait([&] { return held(job, "shadow", "") == 0 && held(job, "shadow", "memfd") != 0; });
  program.let_run();
  job.kill_server();
  program.let_run();
  job.send({{"type", "snapshot"}, {"host", true}});
  Job::wait([&] { return held(job, "shadow", "") == 0; });
  job.send({{"type", "snapshot"}, {"host", false}});
  Job::wait([&] { return held(job, "shadow", "memfd") == 0; });
  program.end();
  check_whole(job);
}

const Added kAdded("suspend_", {
    {"host", host}, {"while_settling", while_settling}, {"brings_all", brings_all}, {"given_room", given_room},
    {"files", files}, {"aborts", aborts}, {"dies", dies}, {"no_room", no_room}, {"damaged", damaged}, {"ahead", ahead}, {"full", full},
    {"shadow_on_host", shadow_on_host},
});

}  // namespace suspend_test
}  // namespace
