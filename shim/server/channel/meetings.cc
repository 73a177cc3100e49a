#include "server/channel/meetings.h"

#include <algorithm>

namespace xmig::server {
namespace {

constexpr std::chrono::seconds kRepeat{1};

}  // namespace

Result<std::vector<std::string>> Meetings::attend(const std::string& meeting, uint32_t rank, uint32_t ranks, const std::string& offer,
                                                  std::chrono::milliseconds patience, const std::function<bool()>& unwanted) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  const auto key = std::pair(meeting, rank);
  std::unique_lock lock(mutex_);
  if (!waiting_.try_emplace(key).second) return Error{"rank " + std::to_string(rank) + " of this communicator is being made already"};
  Waiting& mine = waiting_.at(key);
  Result<std::vector<std::string>> result = Error{"the server ends"};
  const auto is_unwanted = [&] { return unwanted && unwanted(); };
  while (!closed_) {
    if (is_unwanted()) {
      result = Error{"it is not wanted any more"};
      break;
    }
    lock.unlock();
    daemon_.meet(meeting, rank, ranks, offer);
    lock.lock();
    const auto until = std::min(deadline, std::chrono::steady_clock::now() + kRepeat);
    changed_.wait_until(lock, until, [&] { return closed_ || mine.answered || is_unwanted(); });
    if (mine.answered) {
      result = mine.refused.empty() ? Result(std::move(mine.offers)) : Result<std::vector<std::string>>(Error{mine.refused});
      break;
    }
    if (closed_) break;
    if (is_unwanted()) continue;
    if (std::chrono::steady_clock::now() < deadline) continue;
    const std::string who = mine.missing.empty() ? "the daemon has not answered" : "missing: rank " + mine.missing;
    result = Error{"not all of " + std::to_string(ranks) + " ranks came within " + std::to_string(patience.count() / 1000) + " s; " + who};
    break;
  }
  waiting_.erase(key);
  return result;
}

void Meetings::met(Met answer) {
  const std::lock_guard lock(mutex_);
  const auto found = waiting_.find({answer.meeting, answer.rank});
  if (found == waiting_.end()) return;  // it has given up
  Waiting& waiting = found->second;
  if (waiting.answered) return;  // what came last was on its way before that
  waiting.missing = std::move(answer.missing);
  waiting.refused = std::move(answer.refused);
  waiting.offers = std::move(answer.offers);
  waiting.answered = waiting.missing.empty();
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
