// What the daemon asks of a server for moves and suspension.
//
// The target of a move has the job's files and an executor, but not the job: until `take` the journal is another's. What it
// is requested to do takes long, so that the executor's thread does it, while this one goes on listening.
#include <unistd.h>

#include <iterator>
#include <utility>

#include "server/control/server.h"

namespace xmig::server {
namespace {

constexpr int kFailedExit = 1;
constexpr const char* kNotServing = "the job has not begun, or is being recovered";
constexpr const char* kNotOpen = "the job's devices cannot be opened; its log says why";

}  // namespace

void Server::begin_move() {
  make_executor();
  thread_ = std::thread([this] {
    try {
      move();
    } catch (const device::Unavailable& error) {  // a device that the program has begun to use meanwhile, or begins to use
      log_(Level::kError, error.what());
      if (!serving_) daemon_.move_failed("failed", error.what());
      daemon_.hang_up();
      ::_exit(kFailedExit);
    }
  });
}

std::optional<int> Server::add_step(Step step) {
  if (!assignment_ || assignment_->mode != AssignMode::kMove || begun_) {
    log_(Level::kError, "the daemon sends of a move, and there is none");
    return std::nullopt;
  }
  if (std::holds_alternative<Take>(step)) begun_ = true;
  const std::lock_guard lock(steps_mutex_);
  steps_.push_back(std::move(step));
  steps_changed_.notify_one();
  return std::nullopt;
}

// The executor's thread.
void Server::move() {
  Result<> made = executor_->incoming().begin_move(assignment_->first_id);
  bool taken = false;
  while (made && !taken) {
    std::unique_lock lock(steps_mutex_);
    steps_changed_.wait(lock, [&] { return leaves_ || !steps_.empty(); });
    if (leaves_) return;
    Step step = std::move(steps_.front());
    steps_.pop_front();
    lock.unlock();
    taken = std::holds_alternative<Take>(step);
    made = make_step(step);
  }
  if (!made) {
    daemon_.move_failed(made.error().code, made.why());
    end_idle();
  }
  serving_ = reports_openings_ = true;
  if (const Result<> ended = executor_->run(); !ended) lose(ended.error());
}

Result<> Server::make_step(Step& step) {
  Incoming& incoming = executor_->incoming();
  if (auto* const add = std::get_if<MemoryAdd>(&step)) return incoming.import(std::move(add->memory));
  if (const auto* const round = std::get_if<Round>(&step)) return incoming.round(round->number, round->snapshot);
  if (const auto* const take = std::get_if<Take>(&step)) {
    if (Result<> opened = open(devices_of_job()); !opened) return opened;  // and those that the program has begun to use meanwhile
    enter_job();
    prepared_.use(take->communicators);
    return executor_->take(take->snapshot);
  }
  incoming.forget(std::get<MemoryDrop>(step).id);
  return {};
}

std::optional<int> Server::operator()(MemoryDrop& request) {
  if (assignment_) return add_step(request);
  preload_.drop(request.id);
  physical_.drop_ahead(request.id);
  return std::nullopt;
}

std::optional<int> Server::operator()(Round& request) { return add_step(request); }

std::optional<int> Server::operator()(Take& request) { return add_step(request); }

std::optional<int> Server::operator()(Handover&) {
  if (!begun_) {
    daemon_.handover_failed("this server has no job");
  } else if (!executes()) {
    daemon_.handover_failed(kNotOpen);
  } else {
    executor_->hand_over();
  }
  return std::nullopt;
}

std::optional<int> Server::operator()(Room& request) {
  std::move(request.slabs.begin(), request.slabs.end(), std::back_inserter(room_));
  return std::nullopt;
}

std::optional<int> Server::operator()(PrepareSuspend& request) {
  request.room = std::exchange(room_, {});
  if (!serving_) {
    daemon_.suspend_failed(kNotServing);
  } else if (!executes()) {
    daemon_.suspend_failed(kNotOpen);
  } else {
    executor_->departure().request(std::move(request));
  }
  return std::nullopt;
}

std::optional<int> Server::operator()(Suspend&) {
  if (!serving_) {
    daemon_.suspend_failed(kNotServing);
  } else if (!executes()) {
    daemon_.suspend_failed(kNotOpen);
  } else {
    executor_->suspend();
  }
  return std::nullopt;
}

std::optional<int> Server::operator()(AbortSuspend& request) {
  if (serving_ && executes()) executor_->departure().request(request);
  return std::nullopt;
}

}  // namespace xmig::server
