// What the daemon does in a move, for tests: forwards the source's memory, asks for rounds, switches.
#pragma once

#include <condition_variable>
#include <deque>
#include <set>

#include "server_harness.h"

namespace harness {

// Messages of a server, kept until somebody asks for them.
class Heard {
 public:
  void note(const Json& message) {
    const std::lock_guard lock(mutex_);
    if (message.at("type") == "phase") phases_.insert(message.at("name"));
    messages_.push_back(message);
    changed_.notify_all();
  }
  // The first of these types that has come, or comes; those before it are dropped.
  Json expect(const std::set<std::string>& types) {
    std::unique_lock lock(mutex_);
    while (true) {
      while (!messages_.empty()) {
        const Json message = messages_.front();
        messages_.pop_front();
        if (types.contains(message.at("type"))) return message;
      }
      CHECK(changed_.wait_for(lock, std::chrono::seconds(60)) == std::cv_status::no_timeout || !messages_.empty());
    }
  }
  bool passed(const std::string& phase) {
    const std::lock_guard lock(mutex_);
    return phases_.contains(phase);
  }
  Json expect_phase(const std::string& name) {
    while (true) {
      const Json message = expect({"phase", "move_failed", "closed"});
      CHECK(message.at("type") == "phase");
      if (message.at("name") == name) return message;
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Json> messages_;
  std::set<std::string> phases_;
};

// The daemon's part of one move.
class Move {
 public:
  Move(Job& job, std::string device, uint64_t memory = 1ull << 30) : job_(job), device_(std::move(device)) {
    auto [pid, control] = spawn_server(device_, memory);
    target_ = pid;
    control_ = std::move(control);
    listener_ = std::thread([this, socket = control_.get()] { listen(socket); });
    heard_.expect({"hello"});
    const std::vector<int> files = job_.files();
    send_to(control_.get(),
            {{"type", "assign"},
             {"job", "test"},
             {"mode", "move"},
             {"client_pid", ::getpid()},
             {"snapshot_cost", 0.005},
             {"first_id", 1'000'000 * ++moves_}},
            files);
    job_.on_message([this](const Json& message) { forward(message); });
    job_.with_held([&](const HeldMap& held) {
      const std::lock_guard lock(mutex_);
      for (const auto& [id, memory] : held) add(id, memory);
    });
  }
  ~Move() {
    job_.on_message({});
    if (!switched_) ::kill(target_, SIGKILL);
    if (!switched_) ::waitpid(target_, nullptr, 0);
    if (listener_.joinable()) listener_.join();
  }

  Json snapshot_source(Json snapshot = {{"type", "snapshot"}}) {
    job_.send(snapshot);
    return source_.expect({"snapshot", "snapshot_stands"});
  }
  Json round(bool snapshot = true) {
    if (snapshot) last_snapshot_ = snapshot_source().at("number");
    send_to(control_.get(), {{"type", "round"}, {"number", ++rounds_}, {"snapshot", last_snapshot_}});
    return heard_.expect({"round", "move_failed"});
  }
  Json handover() {
    job_.send({{"type", "handover"}});
    const Json answer = source_.expect({"handed_over", "handover_failed"});
    if (answer.at("type") == "handed_over") last_snapshot_ = answer.at("snapshot");
    return answer;
  }
  void take() { send_to(control_.get(), {{"type", "take"}, {"snapshot", last_snapshot_}}); }
  // The source goes on.
  void go_on() {
    job_.send({{"type", "continue"}});
    source_.expect({"continued"});
  }
  void kill_target() {
    ::kill(target_, SIGKILL);
    heard_.expect({"closed"});
  }
  // The target is dead: whose is the job?
  void settle() {
    if (heard_.passed("resumed")) {
      finish();
    } else {
      go_on();
    }
  }
  Heard& target() { return heard_; }
  Heard& source() { return source_; }

  // After `resumed`: the source is killed, its device memory is dropped.
  void finish() {
    job_.on_message({});
    stop_listening();
    HeldMap memory;
    job_.with_held([&](HeldMap& held) {
      const std::lock_guard lock(mutex_);
      for (auto& [id, one] : held) {
        if (one.fields.at("kind") == "device") continue;
        if (dropped_.contains(id)) continue;
        if (is_foreign(one)) one.fields["foreign"] = true;
        CHECK(memory.try_emplace(id, Held{one.fields, std::move(one.fd)}).second);
      }
      for (auto& [id, one] : mine_) CHECK(memory.try_emplace(id, std::move(one)).second);
    });
    switched_ = true;
    job_.switch_to(device_, target_, std::move(control_), std::move(memory));
  }

  // The whole of it.
  void run(int rounds = 2) {
    for (int i = 0; i < rounds; ++i) CHECK(round().at("type") == "round");
    CHECK(handover().at("type") == "handed_over");
    take();
    heard_.expect_phase("resumed");
    finish();
  }

 private:
  static bool is_foreign(const Held& held) {
    return held.fields.at("kind") == "shadow" && held.fields.at("name") == "";
  }

  // Shadows and images of the source, in the order in which they come.
  void add(uint64_t id, const Held& held) {
    if (held.fields.at("kind") == "device" || !forwarded_.insert(id).second) return;
    Json message = held.fields;
    if (is_foreign(held)) message["foreign"] = true;
    const int fd = held.fd.get();
    send_to(control_.get(), message, std::span(&fd, 1));
  }
  void forward(const Json& message) {
    if (message.at("type") == "memory") {
      const uint64_t id = message.at("id");
      if (message.at("op") == "add") {
        job_.with_held([&](const HeldMap& held) {
          const std::lock_guard lock(mutex_);
          if (const auto found = held.find(id); found != held.end()) add(id, found->second);
        });
      } else {
        const std::lock_guard lock(mutex_);
        if (forwarded_.erase(id) != 0) send_to(control_.get(), {{"type", "memory"}, {"op", "drop"}, {"id", id}});
      }
    }
    source_.note(message);
  }

  // The socket stays open; what comes later is the job's supervisor's to read.
  void stop_listening() {
    stopping_ = true;
    if (listener_.joinable()) listener_.join();
  }
  void listen(int socket) {
    std::vector<std::byte> buffer(64 << 10);
    timeval patience{0, 20'000};
    ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    while (!stopping_) {
      ipc::Received received = ipc::receive_message(socket, buffer, 5);
      if (received.error == EAGAIN || received.error == EINTR) continue;
      if (received.bytes == 0) break;
      const Json message =
          Json::parse(reinterpret_cast<char*>(buffer.data()), reinterpret_cast<char*>(buffer.data()) + received.bytes);
      job_.count(message);
      if (std::getenv("HARNESS_TRACE")) std::fprintf(stderr, "target: %s\n", message.dump().c_str());
      if (message.at("type") == "log") std::fprintf(stderr, "target: %s\n", message.at("text").get<std::string>().c_str());
      if (message.at("type") == "memory") {
        const std::lock_guard lock(mutex_);
        const uint64_t id = message.at("id");
        if (message.at("op") == "add") {
          Json held = message;
          held.erase("change");
          CHECK(mine_.try_emplace(id, Held{std::move(held), std::move(received.fds.at(0))}).second);
        } else if (mine_.erase(id) == 0) {
          dropped_.insert(id);  // of the source
        }
      }
      heard_.note(message);
    }
    timeval none{0, 0};
    ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof(none));
    heard_.note({{"type", "closed"}});
  }

  static inline uint64_t moves_ = 0;
  Job& job_;
  const std::string device_;
  pid_t target_ = -1;
  ipc::UniqueFd control_;
  std::thread listener_;
  std::atomic<bool> stopping_{false};
  bool switched_ = false;
  uint64_t rounds_ = 0, last_snapshot_ = 0;
  Heard heard_, source_;
  std::mutex mutex_;
  std::set<uint64_t> forwarded_, dropped_;
  HeldMap mine_;
};

// After a move, until the first own snapshot of the server that has the job now.
inline bool holds_foreign(Job& job) {
  bool any = false;
  job.with_held([&](const HeldMap& held) {
    for (const auto& [id, one] : held) any |= one.fields.value("foreign", false);
  });
  return any;
}

// Of the shadow, in the memory of the device that the job is on.
inline uint64_t own_shadow(Job& job) {
  uint64_t bytes = 0;
  job.with_held([&](const HeldMap& held) {
    for (const auto& [id, one] : held) {
      const bool on_device = one.fields.at("kind") == "shadow" && one.fields.at("name") == "";
      if (on_device && !one.fields.value("foreign", false)) bytes += one.fields.at("bytes").get<uint64_t>();
    }
  });
  return bytes;
}

// Instead of a kill: the job goes to the other of two devices. True if it could.
inline bool move_away(Job& job) {
  Move move(job, job.options().device == "cpu:0" ? "cpu:1" : "cpu:0", job.options().memory);
  if (move.round(false).at("type") != "round" || move.handover().at("type") != "handed_over") return false;
  move.take();
  move.target().expect_phase("resumed");
  move.finish();
  ++job.counters().recoveries;
  ++job.counters().resumed;
  return true;
}

// Tests by name. Each file adds its own before main; `prefix`: what their names begin with.
using Tests = std::map<std::string, void (*)()>;
inline Tests& tests() {
  static Tests all;
  return all;
}
struct Added {
  Added(const std::string& prefix, const Tests& of_file) {
    for (const auto& [name, test] : of_file) CHECK(tests().emplace(prefix + name, test).second);
  }
};

}  // namespace harness
