// A process in communicators: it stops, stands still and takes its snapshots with the other ranks (snapshot/group_snapshot.h).
#include <string>

#include "server/clock.h"
#include "server/executor/executor.h"

namespace xmig::server {

using Stage = GroupSnapshot::Stage;

namespace {

constexpr uint64_t kPatienceWhenFull = 1'000'000'000;  // ns
// ns that a rank goes on so that it stops right behind a collective (GRACE of groups.py is longer), if it has had one lately; and so that it
// stops where others have.
constexpr uint64_t kGrace = 50'000'000, kLately = 1'000'000'000, kShortGrace = 20'000'000;
constexpr uint64_t kGraceOfWaiting = 5'000'000;  // ns without a record, while its program waits for the device

bool makes_a_communicator(Op op) { return op == Op::xmCommInit || op == Op::xmCommSplit; }

// Ranks that have executed equally many of these since they were equal have done the same, as far as can be seen from outside.
// Copies to the host are none of them: often one rank alone writes the log.
bool changes_memory(Op op) {
  switch (op) {
    case Op::xmCopyToHost:
    case Op::xmCopyToPinned: return false;
    case Op::xmFirstLaunch:
    case Op::xmCommGroup:
    case Op::xmAlloc:
    case Op::xmFree:
    case Op::xmDiscard:
    case Op::xmReuse: return true;
    default: break;
  }
  const WorkClass work = kRecordInfos[static_cast<size_t>(op)].work;
  return work == WorkClass::kLaunch || work == WorkClass::kCopy;
}

}  // namespace

// Between two batches. False: whether to take a snapshot is its own affair.
bool Executor::take_part(bool idle, uint64_t now) {
  constexpr const char* kWhy = "the process is in a communicator since a moment ago: it is moved, or suspended, with a round of all ranks; try again";
  const uint32_t leaves = interrupts_.take(Interrupts::kHandover | Interrupts::kSuspend);
  if (leaves & Interrupts::kHandover) daemon_.handover_failed(kWhy);
  if (leaves & Interrupts::kSuspend) departure_.fail_suspend(kWhy);
  while (std::optional<GroupSnapshot::Step> step = group_.next()) make(*step, now);
  switch (group_.stage()) {
    case Stage::kNone: break;
    case Stage::kStopping: stop_with_the_group(now, false); return true;
    case Stage::kDraining:
      if (device_idle()) hold(now);
      return true;
    case Stage::kStopped:
    case Stage::kHeld: return true;
  }
  if (!handlers_.collectives.entangled() || (interrupts_.pending() & Interrupts::kPause)) return false;
  if (held_up_by_the_group(now)) {
    forsakes_the_group_ = true;
    return false;
  }
  const std::optional<Schedule::Stop> stop = proposed_stop(idle, now);
  if (stop && !replay_.running() && group_.wanted(now)) daemon_.group_wanted(stop->reason);
  return true;
}

// The program waits for room in the journal, and the group could not stand still for long: another rank waits for a collective that
// this one's program will call only when there is room. To wait on would be for ever.
bool Executor::held_up_by_the_group(uint64_t now) {
  const journal::JournalHeader& header = job_.header();
  const bool full = header.trimmed_waiters.load(std::memory_order_relaxed) != 0 && !replay_.running() &&
                    header.tail.load(std::memory_order_relaxed) == current_.position;
  if (!full || snapshot_copy_.under_way()) {
    full_since_ = 0;
  } else if (full_since_ == 0) {
    full_since_ = now;
  }
  const bool has_none = header.round_forsaken.load() != 0;  // that fits: one more costs nothing
  return full && (has_none || now - full_since_ >= kPatienceWhenFull);
}

// Until the next snapshot of all ranks, they have none that fits this one's.
void Executor::forsake_the_group() {
  forsakes_the_group_ = false;
  full_since_ = 0;
  if (job_.header().round_forsaken.exchange(1) != 0) return;
  log_(Level::kWarning,
       "the journal was full and the other ranks could not stand still: a snapshot was taken alone. Until their next one, none of the ranks "
       "can be recovered. A larger journal (XMIG_JOURNAL_MIB) or page-locked memory for what is copied to the device avoids it");
}

void Executor::make(GroupSnapshot::Step& step, uint64_t now) {
  if (placement_.bound()) placement_.leave();
  if (auto* const stop = std::get_if<GroupStop>(&step)) {
    if (group_.stage() == Stage::kHeld) return;
    const uint64_t round = stop->round;
    group_.stop(std::move(*stop), now);
    group_executed_at_ = now;
    const bool copying = snapshot_copy_.under_way();  // the snapshot would wait for it, and everybody for that
    if (!handlers_.collectives.making() && !replay_.running() && !copying) return;
    daemon_.group_busy(round, replay_.running() ? "the process is being recovered"
                              : copying         ? "a checkpoint copies its snapshot"
                                                : "a communicator is being made");
    group_.end();
  } else if (auto* const hold = std::get_if<GroupHold>(&step)) {
    if (group_.stage() != Stage::kStopped || group_.round() != hold->round) return;
    handlers_.collectives.incomplete(hold->gone, hold->round);
    if (hold->suspends) group_.suspend();
    group_.enter(Stage::kDraining, now);
  } else if (auto* const take = std::get_if<GroupTake>(&step)) {
    if (group_.held() == take->round && take->round != 0) take_with_the_group(*take);
  } else if (auto* const go_on = std::get_if<GroupContinue>(&step)) {
    if (group_.round() == go_on->round) go_on_alone();
  } else if (group_.stage() != Stage::kHeld) {
    go_on_alone();
  }
}

// If it has come as far as it is to, and if possible right behind a collective: there all ranks have executed the same, and replicas hold
// the same. Looked at behind each record: further than the others it must not go. Who is right behind one already goes on to the next, as
// those do that are not: otherwise it would stand for longer.
bool Executor::stop_with_the_group(uint64_t now, bool executed) {
  if (group_.stage() != Stage::kStopping) return false;
  if (executed) group_executed_at_ = now;
  if (!handlers_.collectives.reached(group_.targets())) return false;
  group_.arrive(now);
  if (now < group_goes_on_until(now)) return false;
  stopped_with_the_group(now);
  return true;
}

void Executor::stopped_with_the_group(uint64_t now) {
  group_.enter(Stage::kStopped, now);
  publish_executed();
  daemon_.group_stopped(group_.round(), handlers_.collectives.counts(), behind_collective_, work_);
}

// It is far enough, and may stop anywhere: for how long is it to look for the place where the others are? 0: it is there, has passed it,
// has had no collective for long, or its program waits for what a snapshot brings.
uint64_t Executor::group_goes_on_until(uint64_t now) const {
  const journal::JournalHeader& header = job_.header();
  if (header.trimmed_waiters.load(std::memory_order_relaxed) != 0 || now - collective_at_ > kLately) return 0;
  if (collective_at_ > group_.arrived_at()) return 0;
  const bool first = group_.targets().empty() && !group_.behind();
  if (!first && (!group_.behind() || !behind_collective_ || *behind_collective_ >= *group_.behind())) return 0;
  const uint64_t until = group_.arrived_at() + (first ? kGrace : kShortGrace);
  // Its program waits for the device, which may wait for a rank that has stopped.
  const bool waits = header.tail.load(std::memory_order_relaxed) == current_.position && waited_for() != journal::kNotWaiting;
  return waits ? std::min(until, std::max(group_.arrived_at(), group_executed_at_) + kGraceOfWaiting) : until;
}

// The next record would keep the round from succeeding.
bool Executor::stop_in_front_of(Op next, uint64_t now) {
  if (group_.stage() != Stage::kStopping || !makes_a_communicator(next) || !handlers_.collectives.reached(group_.targets())) return false;
  stopped_with_the_group(now);
  return true;
}

void Executor::count_work(Op op) {
  work_ += changes_memory(op);
  if (op == Op::xmCommGroup) {
    behind_collective_ = 0;
    collective_at_ = now_ns();
  } else if (const WorkClass work = kRecordInfos[static_cast<size_t>(op)].work; work == WorkClass::kLaunch || work == WorkClass::kCopy) {
    if (behind_collective_) ++*behind_collective_;
  }
}

// Everything that a snapshot needs, and nothing that anybody would miss if there will be none.
void Executor::hold(uint64_t now) {
  handlers_.outside.collectives = false;  // they are done
  if (external_waits()) {
    daemon_.group_busy(group_.round(), "work of the device waits for the program");
    return go_on_alone();
  }
  come_to_rest();
  if (group_.suspends()) departure_.choose_place();
  handlers_.variables.keep();
  job_.header().round_prepared.store(group_.round());
  const Snapshots::Moment moment{current_.position, current_.sequence, errors_.all(), handlers_};
  snapshots_.begin(moment);
  rested_at_ = now;
  if (const Result<> prepared = snapshots_.prepare(moment); !prepared) {
    no_snapshot(prepared.why());
    daemon_.group_busy(group_.round(), prepared.why());
    return go_on_alone();
  }
  group_.enter(Stage::kHeld, now_ns());
  daemon_.group_held(group_.round());
}

// From here on, whoever recovers this process or another rank goes on from this round.
void Executor::take_with_the_group(const GroupTake& take) {
  if (take.moves) job_.header().round_renewed.store(group_.round());
  if (take.suspends || take.pauses) job_.header().round_suspended.store(group_.round());
  job_.header().round_decided.store(group_.round());
  const Snapshots::Moment moment{current_.position, current_.sequence, errors_.all(), handlers_};
  snapshot_taken(snapshots_.finish(moment, relocation_.settling()), "the group's", rested_at_, group_.stopped_at(), group_.round());
  interrupts_.take(Interrupts::kSnapshot);
  interrupts_.snapshot_decided();
  job_.header().round_prepared.store(0);
  job_.header().round_forsaken.store(0);
  handlers_.collectives.snapshot_taken();
  full_since_ = 0;
  forsakes_the_group_ = false;  // what it was wanted for is done
  const uint64_t stopped = group_.stopped_at();
  group_.end();
  if (take.leaves) return departure_.hand_over(stopped);
  if (take.suspends) return departure_.suspend_with_the_group(stopped);
  if (take.pauses) {
    stay_paused(snapshots_.number());
    job_.header().round_suspended.store(0);  // a program that is restored from its dump has been suspended with the others
    return;
  }
  if (!take.communicators.empty()) handlers_.collectives.renew(take.communicators);
}

void Executor::go_on_alone() {
  if (group_.stage() == Stage::kHeld) snapshots_.abandon();
  if (group_.suspends()) departure_.stay();
  handlers_.collectives.complete_again();
  job_.header().round_prepared.store(0);
  group_.end();
  schedule_.rested(now_ns());
}

Result<> Executor::take_snapshot_of_round(uint64_t round) {
  come_to_rest();
  const uint64_t start = now_ns();
  handlers_.variables.keep();
  handlers_.collectives.incomplete_as_in(round);
  const Snapshots::Moment moment{current_.position, current_.sequence, errors_.all(), handlers_};
  snapshots_.begin(moment);
  Result<Snapshots::Taken> taken = snapshots_.take(moment, false);
  if (!taken) return taken.error();
  job_.header().round_decided.store(round);
  snapshot_taken(std::move(*taken), "the lost server was taking it", start, 0, round);
  handlers_.collectives.snapshot_taken();
  return {};
}

}  // namespace xmig::server
