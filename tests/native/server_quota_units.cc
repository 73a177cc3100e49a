// A job's memory quota, shared by processes that are killed at any moment (server/sharing/quota.h).
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <vector>

#include "check.h"
#include "server/sharing/quota.h"

namespace {

using namespace xmig;
using namespace xmig::server;
using journal::kGranule;

constexpr uint64_t kDevice = 77;
constexpr uint64_t kQuota = 48 * kGranule;

// What the daemon makes.
struct Shared {
  explicit Shared(uint32_t slots) {
    CHECK(::ftruncate(file, sizeof(quota::Page)) == 0 && ::fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    mapping = journal::Mapping::anywhere(file, sizeof(quota::Page));
    page().header.magic = quota::kMagic;
    page().header.used = slots;
    for (uint32_t i = 0; i < slots; ++i) {
      page().slots[i].state = 2;
      page().slots[i].device = kDevice;
    }
  }
  ~Shared() { ::close(file); }
  quota::Page& page() { return *reinterpret_cast<quota::Page*>(mapping.data()); }
  uint64_t sum() {
    uint64_t granules = 0;
    for (uint32_t i = 0; i < page().header.used; ++i) granules += page().slots[i].claim.load() >> quota::kSequenceBits;
    return granules * kGranule;
  }

  const int file = ::memfd_create("quota", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  journal::Mapping mapping;
};

void use(Quota& quota, const Shared& shared, uint64_t slot) {
  const std::vector<uint64_t> slots{slot};
  CHECK(quota.use(shared.file, slots, kQuota));
}

void claims() {
  Shared shared(3);
  Quota a, b;
  use(a, shared, 0);
  use(b, shared, 1);
  CHECK(a.left(0) == kQuota && a.claim(0, 30 * kGranule, 5) && b.left(0) == 18 * kGranule);
  CHECK(!b.claim(0, 19 * kGranule, 3) && b.claim(0, 18 * kGranule, 4) && a.left(0) == 0);
  CHECK(!a.claim(0, 31 * kGranule, 6) && shared.sum() == kQuota);
  a.set(0, 10 * kGranule, 7);  // it gives back
  CHECK(b.left(0) == 20 * kGranule && b.claim(0, 38 * kGranule, 5));
  shared.page().slots[2].device = kDevice + 1;  // another device's is another quota
  Quota c;
  use(c, shared, 2);
  CHECK(c.left(0) == kQuota && c.claim(0, kQuota, 1) && !c.claim(0, kQuota + kGranule, 2) && a.left(0) == 0);
  shared.page().slots[1].state = 0;  // the daemon frees a slot
  CHECK(a.left(0) == 38 * kGranule);
}

// What a server that takes over finds counted.
void taken_over() {
  Shared shared(1);
  Quota first, next;
  use(first, shared, 0);
  CHECK(first.claim(0, 10 * kGranule, 1000));
  first.set(0, 4 * kGranule, 1003);
  use(next, shared, 0);
  next.take_over(0, 6 * kGranule, 900);  // at the snapshot before: the claim stays
  CHECK(next.counted(0, 901) && next.counted(0, 1003) && !next.counted(0, 1004) && shared.sum() == 4 * kGranule);
  // A claim that is older than the snapshot, also where the word has too few bits for the number.
  const uint64_t late = (3ull << quota::kSequenceBits) + 7;
  first.set(0, 4 * kGranule, late - 10);
  next.take_over(0, 4 * kGranule, late);
  CHECK(!next.counted(0, late) && next.counted(0, late - 10));
  next.take_over(0, 4 * kGranule, late - 20);
  CHECK(next.counted(0, late - 10) && !next.counted(0, late - 9));
  // One that would be too old to be distinguished from a later one is stored anew by the next snapshot.
  first.set(0, 4 * kGranule, 1);
  first.refresh(1ull << 31);
  CHECK(shared.page().slots[0].claim.load() == ((4ull << quota::kSequenceBits) | 1));
  first.refresh(late);
  next.take_over(0, 4 * kGranule, late + 3);
  CHECK(shared.sum() == 4 * kGranule && next.counted(0, late) && !next.counted(0, late + 1));
  // Nobody has claimed anything yet.
  Shared fresh(1);
  Quota one;
  use(one, fresh, 0);
  one.take_over(0, 0, 12);
  CHECK(one.counted(0, 12) && !one.counted(0, 13) && fresh.sum() == 0);
}

// One process, as its server's executor does it: what it has is what its slot says when it begins, and it takes and gives until it is killed.
[[noreturn]] void claim_for_ever(const Shared& shared, uint64_t slot, uint32_t seed) {
  Quota quota;
  use(quota, shared, slot);
  std::minstd_rand random(seed);
  uint64_t has = reinterpret_cast<quota::Page*>(shared.mapping.data())->slots[slot].claim.load() >> quota::kSequenceBits;
  for (uint64_t sequence = 1;; ++sequence) {
    if (random() % 4 == 0 && has != 0) {
      has -= random() % has + 1;
      quota.set(0, has * kGranule, sequence);
    } else if (quota.claim(0, (has + 1) * kGranule, sequence)) {
      ++has;
    }
  }
}

// However many are killed, wherever they are: there is never more than the quota, the lock is free, and all of it can be claimed again.
void killed_at_any_moment() {
  constexpr uint32_t kProcesses = 4;
  Shared shared(kProcesses);
  std::vector<pid_t> children(kProcesses, 0);
  std::minstd_rand random(20261129);
  const auto start = [&](uint32_t slot) {
    const uint32_t seed = static_cast<uint32_t>(random());
    children[slot] = ::fork();
    CHECK(children[slot] >= 0);
    if (children[slot] == 0) claim_for_ever(shared, slot, seed);
  };
  for (uint32_t slot = 0; slot < kProcesses; ++slot) start(slot);
  for (int kills = 0; kills < 300; ++kills) {
    ::usleep(static_cast<useconds_t>(random() % 3000));
    CHECK(shared.sum() <= kQuota);
    const uint32_t slot = static_cast<uint32_t>(random() % kProcesses);
    CHECK(::kill(children[slot], SIGKILL) == 0 && ::waitpid(children[slot], nullptr, 0) == children[slot]);
    start(slot);
  }
  for (const pid_t child : children) CHECK(::kill(child, SIGKILL) == 0 && ::waitpid(child, nullptr, 0) == child);
  CHECK(shared.sum() <= kQuota);
  Quota left;
  use(left, shared, 0);
  const uint64_t others = shared.sum() - (shared.page().slots[0].claim.load() >> quota::kSequenceBits) * kGranule;
  CHECK(!left.claim(0, kQuota - others + kGranule, 1) && left.claim(0, kQuota - others, 1) && left.left(0) == 0);
}

void what_is_no_page() {
  const std::vector<uint64_t> slots{0};
  const int file = ::memfd_create("quota", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  Quota quota;
  CHECK(!quota.use(file, slots, kQuota));
  CHECK(::ftruncate(file, sizeof(quota::Page)) == 0);
  CHECK(!quota.use(file, slots, kQuota));  // it may shrink
  CHECK(::fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK(!quota.use(file, slots, kQuota) && !quota.use(-1, slots, kQuota));
  ::close(file);
}

}  // namespace

int main() {
  claims();
  taken_over();
  killed_at_any_moment();
  what_is_no_page();
  return 0;
}
