#include "device/cpu/collectives.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>

#include "device/cpu/mesh.h"
#include "device/cpu/sums.h"
#include "device/device.h"

namespace xmig::device {
namespace {

using cpu::Incoming;
using cpu::Label;
using cpu::Mesh;
using cpu::Outgoing;
using journal::CollectiveKind;
using journal::CollectiveOperation;
using journal::DataType;
using journal::Reduction;

template <typename Byte>
std::span<Byte> memory(uint64_t address, uint64_t bytes) {
  return {reinterpret_cast<Byte*>(address), bytes};
}

// One operation of one rank.
class Run {
 public:
  Run(Mesh& mesh, const CollectiveOperation& operation, uint64_t number)
      : mesh_(mesh),
        operation_(operation),
        type_(static_cast<DataType>(operation.type)),
        element_(journal::size_of(type_)),
        label_{number, operation.count, operation.kind, operation.type, operation.reduction, operation.peer, 0, 0} {
    // Two ranks that scale by different numbers do the same operation.
    if (label_.reduction > static_cast<uint32_t>(Reduction::kScaledSum)) label_.reduction = static_cast<uint32_t>(Reduction::kScaledSum);
  }

  Result<> operator()() {
    switch (static_cast<CollectiveKind>(operation_.kind)) {
      case CollectiveKind::kAllReduce: return all_reduce();
      case CollectiveKind::kReduce: return reduce();
      case CollectiveKind::kReduceScatter: return reduce_scatter();
      default: return move();
    }
  }

 private:
  uint32_t me() const { return mesh_.rank(); }
  uint32_t ranks() const { return mesh_.ranks(); }
  bool root() const { return operation_.peer == me(); }
  uint64_t whole() const { return operation_.count * element_; }

  void sends(uint32_t to, uint64_t offset, uint64_t bytes) {
    if (bytes != 0) outgoing_.push_back({to, label_, memory<const std::byte>(operation_.send + offset, bytes)});
  }
  void receives(uint32_t from, uint64_t offset, uint64_t bytes) {
    if (bytes != 0) incoming_.push_back({from, label_, memory<std::byte>(operation_.receive + offset, bytes)});
  }
  Result<> exchange() {
    Result<> done = mesh_.exchange(outgoing_, incoming_);
    outgoing_.clear();
    incoming_.clear();
    ++label_.phase;
    return done;
  }

  // Nothing is computed.
  Result<> move() {
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      switch (static_cast<CollectiveKind>(operation_.kind)) {
        case CollectiveKind::kBroadcast:
          if (root()) sends(rank, 0, whole());
          if (rank == operation_.peer) receives(rank, 0, whole());
          break;
        case CollectiveKind::kAllGather:
          sends(rank, 0, whole());
          receives(rank, rank * whole(), whole());
          break;
        case CollectiveKind::kAllToAll:
          sends(rank, rank * whole(), whole());
          receives(rank, rank * whole(), whole());
          break;
        case CollectiveKind::kGather:
          if (rank == operation_.peer) sends(rank, 0, whole());
          if (root()) receives(rank, rank * whole(), whole());
          break;
        case CollectiveKind::kScatter:
          if (root()) sends(rank, rank * whole(), whole());
          if (rank == operation_.peer) receives(rank, 0, whole());
          break;
        default: return Error{"an operation of a kind that there is not"};
      }
    }
    return exchange();
  }

  // What this rank brings, scaled if the operator wants it so.
  std::span<const std::byte> input(uint64_t bytes) {
    const std::span<const std::byte> plain = memory<const std::byte>(operation_.send, bytes);
    const auto reduction = static_cast<Reduction>(operation_.reduction);
    uint64_t scalar = operation_.scalar;
    if (reduction == Reduction::kScaledSumByDevice) {
      std::memcpy(&scalar, reinterpret_cast<const void*>(operation_.scalar), element_);
    } else if (reduction == Reduction::kAverage && cpu::is_floating(type_)) {
      scalar = cpu::share(type_, ranks());
    } else if (reduction != Reduction::kScaledSum) {
      return plain;
    }
    scaled_.assign(plain.begin(), plain.end());
    cpu::scale(type_, scalar, scaled_.data(), bytes / element_);
    return scaled_;
  }

  // The others' inputs, of `bytes` each, and this rank's own: in the order of the ranks.
  void expect(uint64_t bytes) {
    parts_.resize(ranks() * bytes);
    for (uint32_t rank = 0; rank < ranks() && bytes != 0; ++rank) {
      if (rank != me()) incoming_.push_back({rank, label_, std::span(parts_).subspan(rank * bytes, bytes)});
    }
  }
  void fold(std::span<const std::byte> own, std::byte* to) {
    const uint64_t bytes = own.size();
    if (bytes == 0) return;
    std::memcpy(parts_.data() + me() * bytes, own.data(), bytes);
    for (uint32_t rank = 1; rank < ranks(); ++rank) {
      cpu::reduce(type_, static_cast<Reduction>(operation_.reduction), parts_.data(), parts_.data() + rank * bytes, bytes / element_);
    }
    if (static_cast<Reduction>(operation_.reduction) == Reduction::kAverage && !cpu::is_floating(type_)) {
      cpu::divide(type_, ranks(), parts_.data(), bytes / element_);
    }
    std::memcpy(to, parts_.data(), bytes);
  }

  // Each rank sums its share of the elements, and gives it to all.
  Result<> all_reduce() {
    const auto first = [&](uint32_t rank) { return operation_.count * rank / ranks() * element_; };
    const std::span<const std::byte> mine = input(whole());
    const auto share = [&](uint32_t rank) { return mine.subspan(first(rank), first(rank + 1) - first(rank)); };
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (rank != me() && !share(rank).empty()) outgoing_.push_back({rank, label_, share(rank)});
    }
    expect(share(me()).size());
    if (Result<> done = exchange(); !done) return done;
    auto* const result = reinterpret_cast<std::byte*>(operation_.receive);
    fold(share(me()), result + first(me()));
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (rank == me()) continue;
      if (!share(me()).empty()) outgoing_.push_back({rank, label_, std::span<const std::byte>(result + first(me()), share(me()).size())});
      receives(rank, first(rank), share(rank).size());
    }
    return exchange();
  }

  Result<> reduce() {
    const std::span<const std::byte> mine = input(whole());
    if (root()) {
      expect(whole());
    } else {
      outgoing_.push_back({operation_.peer, label_, mine});
    }
    if (Result<> done = exchange(); !done || !root()) return done;
    fold(mine, reinterpret_cast<std::byte*>(operation_.receive));
    return {};
  }

  Result<> reduce_scatter() {
    const std::span<const std::byte> mine = input(whole() * ranks());
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      if (rank != me()) outgoing_.push_back({rank, label_, mine.subspan(rank * whole(), whole())});
    }
    expect(whole());
    if (Result<> done = exchange(); !done) return done;
    fold(mine.subspan(me() * whole(), whole()), reinterpret_cast<std::byte*>(operation_.receive));
    return {};
  }

  Mesh& mesh_;
  const CollectiveOperation& operation_;
  const DataType type_;
  const uint64_t element_;
  Label label_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::vector<std::byte> scaled_, parts_;
};

bool between_two(const CollectiveOperation& operation) {
  return operation.kind == static_cast<uint32_t>(CollectiveKind::kSend) || operation.kind == static_cast<uint32_t>(CollectiveKind::kReceive);
}

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(std::unique_ptr<Mesh> mesh, Content content, std::function<void()> failed)
      : state_(std::make_shared<State>(std::move(mesh), content, std::move(failed))) {}
  ~HostCommunicator() override { state_->abort(); }  // threads of streams may still be inside

  void abort() override { state_->abort(); }
  bool unfinished() override { return state_->begun.load() != state_->ended.load(); }
  std::optional<Error> failure() override {
    const std::lock_guard lock(state_->mutex);
    return state_->failure;
  }

  CUresult begin(const DriverTable& driver, CUstream stream, std::vector<CollectiveOperation> operations) {
    auto work = std::make_unique<Work>(Work{state_, state_->begun.load(), std::move(operations)});
    state_->begun.fetch_add(1);
    const CUresult result = driver.cuLaunchHostFunc(stream, &Work::run, work.get());
    if (result == CUDA_SUCCESS) {
      work.release();
    } else {
      state_->begun.fetch_sub(1);
    }
    return result;
  }

 private:
  struct State {
    State(std::unique_ptr<Mesh> of, Content what, std::function<void()> hears)
        : mesh(std::move(of)), content(what), failed(std::move(hears)) {}

    void abort() {
      mesh->abort();
      const std::lock_guard lock(mutex);
      changed.notify_all();
    }
    // In the order in which they were begun. False: it was aborted first.
    bool wait_for_turn(uint64_t turn) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return mesh->aborted() || ended.load() == turn; });
      return !mesh->aborted();
    }
    void end() {
      const std::lock_guard lock(mutex);
      ended.fetch_add(1);
      changed.notify_all();
    }
    void fail(const Error& why) {
      {
        const std::lock_guard lock(mutex);
        if (!failure) failure = why;
      }
      failed();
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return mesh->aborted(); });
    }

    const std::unique_ptr<Mesh> mesh;
    const Content content;
    const std::function<void()> failed;
    std::atomic<uint64_t> begun{0}, ended{0};  // groups
    uint64_t operations = 0;                   // of the thread whose turn it is
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Error> failure;  // guarded by mutex
  };

  struct Work {
    std::shared_ptr<State> state;
    uint64_t turn;
    std::vector<CollectiveOperation> operations;

    static void CUDA_CB run(void* self) {
      const std::unique_ptr<Work> work(static_cast<Work*>(self));
      State& state = *work->state;
      if (state.wait_for_turn(work->turn)) {
        if (const Result<> done = work->run_all(); !done && !state.mesh->aborted()) state.fail(done.error());
      }
      state.end();
    }

    Result<> run_all() {
      if (state->content == Content::kNone) return {};
      try {
        for (const CollectiveOperation& one : operations) {
          if (between_two(one)) continue;
          if (Result<> done = Run(*state->mesh, one, ++state->operations)(); !done) return done;
        }
        return run_pairs();
      } catch (const std::bad_alloc&) {
        return Error{"no host memory for a collective"};
      }
    }

    // Sends and receives of a group go on at the same time.
    Result<> run_pairs() {
      std::vector<Outgoing> outgoing;
      std::vector<Incoming> incoming;
      for (const CollectiveOperation& one : operations) {
        if (!between_two(one)) continue;
        const Label label{0, one.count, static_cast<uint32_t>(CollectiveKind::kSend), one.type, 0, 0, 0, 0};
        const uint64_t bytes = one.count * journal::size_of(static_cast<DataType>(one.type));
        if (one.kind == static_cast<uint32_t>(CollectiveKind::kSend)) {
          outgoing.push_back({one.peer, label, memory<const std::byte>(one.send, bytes)});
        } else {
          incoming.push_back({one.peer, label, memory<std::byte>(one.receive, bytes)});
        }
      }
      return state->mesh->exchange(outgoing, incoming);
    }
  };

  const std::shared_ptr<State> state_;
};

class HostCollectives final : public Collectives {
 public:
  HostCollectives(const DriverTable& driver, Content content) : driver_(driver), content_(content) {}

  Result<std::unique_ptr<Communicator>> join(const Place& place, const Meeting& meet, std::function<void()> failed) override {
    Result<std::unique_ptr<Mesh>> mesh = Mesh::connect(place, meet);
    if (!mesh) return mesh.error();
    return std::unique_ptr<Communicator>(std::make_unique<HostCommunicator>(std::move(*mesh), content_, std::move(failed)));
  }

  Status run(std::span<Part> parts) override {
    for (Part& part : parts) {
      auto& communicator = static_cast<HostCommunicator&>(*part.communicator);
      part.enter();
      const CUresult result = communicator.begin(driver_, static_cast<CUstream>(part.stream), std::move(part.operations));
      if (result != CUDA_SUCCESS) return status_of(result);
    }
    return {};
  }

 private:
  const DriverTable& driver_;
  const Content content_;
};

}  // namespace

std::unique_ptr<Collectives> host_collectives(const DriverTable& driver, Content content) {
  return std::make_unique<HostCollectives>(driver, content);
}

}  // namespace xmig::device
