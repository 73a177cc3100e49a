// Where ranks meet, and communicators that are made ahead.
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "check.h"
#include "device/device.h"
#include "ipc/seqpacket.h"
#include "ops.h"
#include "server/channel/daemon.h"
#include "server/channel/meetings.h"
#include "server/channel/requests.h"
#include "server/cuda/objects/communicator_place.h"
#include "server/cuda/objects/prepared_communicators.h"
#include "server/snapshot/snapshot_file.h"

namespace {

using namespace xmig;
using namespace xmig::server;

// What nobody wants any more holds nobody up, whether that is known before a rank begins to wait or while it does.
void meetings() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kForEver{600};
  Daemon nobody;
  Meetings meetings(nobody, "");
  std::atomic<bool> unwanted{true};
  const auto waits = [&] { return meetings.attend("meeting", 0, 2, "offer", kForEver, [&] { return unwanted.load(); }); };
  const auto began = Clock::now();
  CHECK(waits().why() == "it is not wanted any more");
  for (int i = 0; i < 200; ++i) {
    unwanted = false;
    std::thread other([&] {
      if (i % 2 != 0) std::this_thread::sleep_for(std::chrono::microseconds(50 * (i % 8)));
      unwanted = true;
      meetings.look_again();
    });
    CHECK(waits().why() == "it is not wanted any more");
    other.join();
  }
  CHECK(Clock::now() - began < kForEver / 10);
  // The answer that all have come stands, though an earlier one comes behind it.
  unwanted = false;
  std::atomic<bool> met{false};
  std::thread rank([&] {
    const Result<std::vector<std::string>> offers = waits();
    CHECK(offers && offers->size() == 2);
    met = true;
  });
  while (!met) {
    meetings.met({"meeting", 0, {"offer", "other"}, "", ""});
    meetings.met({"meeting", 0, {}, "1", ""});
  }
  rank.join();
  meetings.close();
  CHECK(waits().why() == "the server ends");
}

// A server's communicators, and the daemon, which lets each rank find that it is the only one.
class Maker {
 public:
  Maker() {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    socket_ = ipc::UniqueFd(ends[0]);
    daemon_.attach(ipc::UniqueFd(ends[1]));
    CHECK(device_->start() && contexts_.open());
    Args_xmCommInit args{};
    args.ranks = 1;
    args.join_time = 60'000;
    name_ = meeting_of(place_of(args, {}).group, kJoin);
    std::vector<std::byte> stored(sizeof(journal::RecordHeader) + sizeof(args));
    journal::RecordHeader head{};
    head.op = static_cast<uint16_t>(Op::xmCommInit);
    head.flags = journal::kSynchronous;
    head.size = static_cast<uint32_t>(stored.size());
    std::memcpy(stored.data(), &head, sizeof(head));
    std::memcpy(stored.data() + sizeof(head), &args, sizeof(args));
    content_.objects.add(stored);
  }

  void prepare(uint64_t attempt) { made.prepare(attempt, name_, content_); }
  bool takes() {
    const auto real = made.take(name_, 0, [] {});
    if (real) real->abort();
    return real != nullptr;
  }
  // Whoever is being made waits for the daemon's answer.
  void waits() {
    const std::string before = waiting_.value("meeting", "");
    while (waiting_.value("meeting", "") == before) waiting_ = next("meet");  // offers are repeated
  }
  // Which of them is made, or is not and why. `first`: the one that waits is answered before.
  std::pair<uint64_t, std::string> result(bool first = true) {
    if (first) meetings_.met({waiting_["meeting"], 0, {waiting_["offer"]}, "", ""});
    const nlohmann::json result = next("communicator_prepared");
    return {result["attempt"], result["why"]};
  }

 private:
  nlohmann::json next(std::string_view type) {
    while (true) {
      std::array<std::byte, 4096> buffer;
      const ipc::Received received = ipc::receive_message(socket_.get(), buffer);
      CHECK(received.bytes != 0);
      const auto* const text = reinterpret_cast<const char*>(buffer.data());
      nlohmann::json message = nlohmann::json::parse(text, text + received.bytes);
      if (message["type"] == type) return message;
    }
  }

  static constexpr std::array<int, 1> kOrdinals{0};
  const std::unique_ptr<device::Device> device_ = device::open("cpu", kOrdinals, 1 << 20);
  ipc::UniqueFd socket_;
  Daemon daemon_;
  Log log_{daemon_};
  Contexts contexts_{*device_, 1};
  Meetings meetings_{daemon_, ""};
  SnapshotContent content_;
  std::string name_;
  nlohmann::json waiting_ = nlohmann::json::object();

 public:
  PreparedCommunicators made{*device_, contexts_, meetings_, daemon_, log_};
};

// A rank may take what one move has prepared when the next move, of it or of another, is being prepared already.
void prepared_communicators() {
  using Result = std::pair<uint64_t, std::string>;
  Maker maker;
  maker.prepare(1);
  maker.waits();
  CHECK((maker.result() == Result{1, ""}));
  maker.prepare(2);
  maker.prepare(3);
  maker.waits();
  const std::array<uint64_t, 1> first{1}, second{2};
  maker.made.use(first);
  CHECK(maker.takes() && !maker.takes());
  CHECK((maker.result() == Result{2, ""}));
  maker.waits();
  CHECK((maker.result() == Result{3, ""}));
  maker.made.use(second);
  maker.made.forget(3);
  CHECK(maker.takes());
  // Whoever wanted these is no more: what waits is not begun, and what is being made is given up.
  maker.prepare(4);
  maker.prepare(5);
  maker.waits();
  maker.made.forget_all();
  CHECK((maker.result(false) == Result{4, "it is not wanted any more"}));
  maker.prepare(6);
  maker.waits();
  CHECK((maker.result() == Result{6, ""}));
}

}  // namespace

int main() {
  meetings();
  prepared_communicators();
  return 0;
}
