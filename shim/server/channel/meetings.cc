#include "server/channel/meetings.h"

#include <pthread.h>

#include <algorithm>

namespace xmig::server {

Meetings::~Meetings() {
  close();
  if (repeating_.joinable()) repeating_.join();
}

Result<std::vector<std::string>> Meetings::attend(const std::string& meeting, uint32_t rank, uint32_t ranks, const std::string& offer,
                                                  std::chrono::milliseconds patience, const std::function<bool()>& unwanted) {
  const auto deadline = Clock::now() + patience;
  const auto key = std::pair(meeting, rank);
  const auto is_unwanted = [&] { return unwanted && unwanted(); };
  std::unique_lock lock(mutex_);
  if (closed_) return Error{"the server ends"};
  if (is_unwanted()) return Error{"it is not wanted any more"};
  Offered& mine = offered_[key];
  if (mine.ranks != 0 && mine.waits) return Error{"rank " + std::to_string(rank) + " of this communicator is being made already"};
  mine = {};
  mine.ranks = ranks;
  mine.offer = offer;
  if (!repeating_.joinable()) repeating_ = std::thread([this] { repeat(); });
  changed_.notify_all();
  changed_.wait_until(lock, deadline, [&] { return closed_ || mine.answered || is_unwanted(); });
  if (mine.answered && mine.refused.empty()) {
    std::vector<std::string> offers = std::move(mine.offers);
    mine.waits = false;
    // Whoever waits has come before, and waits no longer than that.
    mine.until = Clock::now() + patience;
    mine.next = {};  // at once, with the answer: mostly that is the end
    changed_.notify_all();
    return offers;
  }
  const std::string who = mine.missing.empty() ? "the daemon has not answered" : "missing: rank " + mine.missing;
  const std::string why = mine.answered  ? mine.refused
                          : closed_      ? "the server ends"
                          : is_unwanted() ? "it is not wanted any more"
                                          : "not all of " + std::to_string(ranks) + " ranks came within " +
                                                std::to_string(patience.count() / 1000) + " s; " + who;
  offered_.erase(key);
  return Error{why};
}

void Meetings::repeat() {
  ::pthread_setname_np(::pthread_self(), "meetings");
  std::unique_lock lock(mutex_);
  while (!closed_) {
    const auto now = Clock::now();
    std::erase_if(offered_, [now](const auto& one) { return one.second.until <= now; });
    const auto due = std::find_if(offered_.begin(), offered_.end(), [now](const auto& one) { return one.second.next <= now; });
    if (due == offered_.end()) {
      auto next = now + std::chrono::hours(1);
      for (const auto& [key, one] : offered_) next = std::min({next, one.next, one.until});
      changed_.wait_until(lock, next);
      continue;
    }
    const auto [meeting, rank] = due->first;
    Offered& one = due->second;
    one.next = now + repeat_;
    const uint32_t ranks = one.ranks;
    const std::string offer = one.offer;
    const std::string answer = one.waits ? "" : one.answer;
    lock.unlock();
    daemon_.meet(meeting, rank, ranks, offer, answer);
    lock.lock();
  }
}

void Meetings::met(Met answer) {
  const std::lock_guard lock(mutex_);
  const auto found = offered_.find({answer.meeting, answer.rank});
  if (found == offered_.end()) return;  // it has given up
  Offered& one = found->second;
  if (one.answered) {
    // What else comes was on its way before the answer, or it is another daemon's, which is the same.
    if (answer.over && !one.waits) offered_.erase(found);
    return;
  }
  if (answer.over) return;  // of what this rank has given up before
  one.missing = std::move(answer.missing);
  one.refused = std::move(answer.refused);
  one.offers = std::move(answer.offers);
  one.answer = std::move(answer.answer);
  one.answered = one.missing.empty();
  changed_.notify_all();
}

void Meetings::look_again() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Meetings::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace xmig::server
