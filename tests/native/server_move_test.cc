// Moves between two devices of the real xmig-server, on cpu devices: what the daemon does, in one process.
#include "server/clock.h"
#include "server_mover.h"
#include "server_program.h"

namespace {
namespace move_test {

using namespace harness;

// Nothing is executed after the move, so that no snapshot is due: the shadow comes to the new device all the same, once the driver
// is quiet, and the snapshot that drops the foreign one copies nothing.
void settles() {
  Job job;
  Program program(job);
  program.let_run();
  program.stand_still();
  Move move(job, "cpu:1");
  CHECK(move.round().at("type") == "round");
  CHECK(move.handover().at("type") == "handed_over");
  move.take();
  const uint64_t resumed = move.target().expect_phase("resumed").at("t");
  move.finish();
  Job::wait([&] { return !holds_foreign(job); });
  CHECK(xmig::server::now_ns() - resumed >= 500'000'000);
  CHECK(job.counters().settled == 1 && job.counters().settled_bytes == 0);
  program.go_on();
  program.let_run();
  job.kill_server();
  program.let_run();
  program.end();
  check_whole(job);
}

// Back and forth; the foreign shadow goes after each, once the driver is quiet, and has come to the new device before the
// snapshot that drops it. What is killed before or afterwards recovers on the new device.
void moves() {
  Job job;
  Program program(job);
  program.let_run();
  for (int i = 0; i < 6; ++i) {
    Move move(job, i % 2 == 0 ? "cpu:1" : "cpu:0");
    const Json first = move.round();
    CHECK(first.at("type") == "round");
    CHECK(first.at("copied_bytes").get<uint64_t>() >= 16 << 20);
    CHECK(first.at("total_bytes").get<uint64_t>() ==
          first.at("settled_bytes").get<uint64_t>() + first.at("differing_bytes").get<uint64_t>());
    const Json second = move.round();
    CHECK(second.at("copied_bytes").get<uint64_t>() < 16 << 20);  // what has not changed is not copied again
    program.let_run();
    const Json handed = move.handover();
    CHECK(handed.at("type") == "handed_over");
    CHECK(handed.at("stopped_t").get<uint64_t>() <= handed.at("drained_t").get<uint64_t>());
    const uint64_t steps = program.steps();
    if (i % 2 == 0) CHECK(move.round(false).at("type") == "round");
    CHECK(program.steps() <= steps + 1);  // until it is taken the program stands still
    move.take();
    const uint64_t resumed = move.target().expect_phase("resumed").at("t"), before = job.counters().settled;
    move.finish();
    program.let_run();
    const bool lost = i % 2 == 1;
    if (lost) job.kill_server();
    program.let_run();
    Job::wait([&] { return !holds_foreign(job); });
    // A recovery that takes long takes a snapshot, and so does a program that runs for as long as nobody waits for a shadow: such
    // a snapshot brings what is not there yet itself.
    const bool settled = job.counters().settled != before;
    CHECK((lost && !settled) || xmig::server::now_ns() - resumed >= 500'000'000);
    CHECK(!settled || job.counters().settled_bytes < 16 << 20);
    if (!lost) job.kill_server();
    program.let_run();
  }
  program.end();
  CHECK(job.counters().recoveries == 6);
  check_whole(job);
}

// Memory that the program asks for while the shadow comes to the new device is the program's, and so it is when the server
// is lost in the middle of that.
void grows_while_settling() {
  Job job;
  Program program(job, 128 << 20);  // half of it zeros
  program.let_run();
  for (const bool lost : {false, true}) {
    Move move(job, lost ? "cpu:0" : "cpu:1", lost ? 1ull << 30 : 256 << 20);
    move.run();
    Job::wait([&] { return own_shadow(job) != 0; });
    if (lost) {
      job.kill_server();
    } else {
      job.memory(96 << 20);  // there is room for this or for the shadow
    }
    program.let_run();
    Job::wait([&] { return !holds_foreign(job); });
  }
  program.end();
  CHECK(job.counters().recoveries == 1);
  check_whole(job);
}

// At each point the target dies: before it has resumed the source goes on, afterwards the job is recovered where it went.
void aborts() {
  Job job;
  Program program(job);
  program.let_run();
  for (int point = 0; point < 8; ++point) {
    Move move(job, point == 7 ? "cpu:0" : "cpu:1");
    if (point >= 1) CHECK(move.round().at("type") == "round");
    if (point == 2) {
      job.send({{"type", "snapshot"}});
      move.kill_target();
    }
    if (point >= 3) {
      CHECK(move.handover().at("type") == "handed_over");
      if (point >= 4) move.take();
      if (point == 5) move.target().expect_phase("mapped");
      if (point == 6) move.target().expect_phase("restored");
      if (point == 7) move.target().expect_phase("resumed");
      move.kill_target();
      CHECK(point > 3 || !move.target().passed("resumed"));
      CHECK(point < 7 || move.target().passed("resumed"));
      move.settle();
    }
    program.let_run();
    Job::wait([&] { return is_running(job); });
    CHECK(job.header().server_pid.load() == static_cast<uint32_t>(job.server()));
  }
  program.end();
  CHECK(job.counters().recoveries >= 1);
  check_whole(job);
}

// The source dies: before the handover it is recovered, after it the target goes on.
void source_dies() {
  Job job;
  Program program(job);
  program.let_run();
  {
    Move move(job, "cpu:1");
    CHECK(move.round().at("type") == "round");
    job.kill_server();
    Job::wait([&] { return job.counters().resumed == 1; });
    program.let_run();
  }
  {
    Move move(job, "cpu:1");
    CHECK(move.round().at("type") == "round");
    CHECK(move.handover().at("type") == "handed_over");
    const pid_t source = job.server();
    ::kill(source, SIGSTOP);  // dead for all that it does; its end is the switch's
    move.take();
    move.target().expect_phase("resumed");
    move.finish();
    program.let_run();
  }
  program.end();
  CHECK(job.counters().recoveries == 1);
  check_whole(job);
}

// Both die between the handover and `resumed`: the source's memory is what is left.
void both_die() {
  Job job;
  Program program(job);
  program.let_run();
  {
    Move move(job, "cpu:1");
    CHECK(move.round().at("type") == "round");
    CHECK(move.handover().at("type") == "handed_over");
    move.take();
    move.kill_target();
    if (move.target().passed("resumed")) {
      move.finish();
    } else {
      job.kill_server();
    }
    Job::wait([&] { return job.counters().resumed == 1; });
  }
  program.let_run();
  program.end();
  check_whole(job);
}

// Without any round, and with rounds that race with the source's snapshots.
void unprepared() {
  Job job;
  Program program(job);
  program.let_run();
  {
    Move move(job, "cpu:1");
    move.run(0);
    program.let_run();
  }
  {
    Move move(job, "cpu:0");
    CHECK(move.snapshot_source().at("type") == "snapshot");
    for (int i = 0; i < 5; ++i) {
      job.send({{"type", "snapshot"}});
      CHECK(move.round(false).at("type") == "round");
    }
    move.run(1);
    program.let_run();
  }
  program.end();
  CHECK(job.counters().recoveries == 0);
  check_whole(job);
}

// A job that has not executed anything, and one that has only just begun.
void young() {
  Job job;
  {
    Move move(job, "cpu:1");
    move.run(0);
  }
  Program program(job);
  program.let_run();
  program.end();
  check_whole(job);
}

// A target that is too small says so, and nothing has happened; one that is smaller, but large enough, will do.
void smaller() {
  Job job;
  Program program(job);
  program.let_run();
  {
    Move move(job, "cpu:1", 16 << 20);
    const Json answer = move.round();
    CHECK(answer.at("type") == "move_failed");
    CHECK(answer.at("code") == "no_room");
    move.target().expect({"closed"});
    program.let_run();
  }
  {
    Move move(job, "cpu:1", 64 << 20);
    move.run();
    program.let_run();
    job.kill_server();
    program.let_run();
  }
  program.end();
  check_whole(job);
}

// A program that was informed that its devices reach each other's memory moves to no devices that do not, as the blind ones. It
// goes on where it is.
void promised() {
  Job job({.device = "cpu:0,1"});
  const uint64_t address = job.memory(4096);
  const std::vector<uint64_t> written(512, 7);
  job.write(address, written.data(), 4096);
  CHECK(job.synchronize() == CUDA_SUCCESS);
  job.header().peers_promised.fetch_or(1ull << (0 * journal::kMaxDevices + 1));
  {
    Move move(job, "cpu:2,3");
    const Json answer = move.target().expect({"move_failed"});
    CHECK(answer.at("text").get<std::string>().find("its device 0 reaches the memory of its device 1") != std::string::npos);
    move.target().expect({"closed"});
  }
  std::vector<uint64_t> got(512);
  CHECK(job.read(address, got.data(), 4096) == CUDA_SUCCESS);
  CHECK(got == written);
}

const Added kAdded("move_", {
    {"settles", settles}, {"moves", moves}, {"aborts", aborts}, {"source_dies", source_dies}, {"both_die", both_die}, {"unprepared", unprepared},
    {"young", young}, {"smaller", smaller}, {"grows_while_settling", grows_while_settling}, {"promised", promised},
});

}  // namespace move_test
}  // namespace
