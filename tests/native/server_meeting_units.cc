// Where ranks meet, and communicators that are made ahead.
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
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
    meetings.met({"meeting", 0, {"offer", "other"}, "", "", "name"});
    meetings.met({"meeting", 0, {}, "1", ""});
  }
  rank.join();
  meetings.close();
  CHECK(waits().why() == "the server ends");
}

// The daemon's end of a server's socket.
class Heard {
 public:
  explicit Heard(Daemon& daemon) {
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    socket_ = ipc::UniqueFd(ends[0]);
    daemon.attach(ipc::UniqueFd(ends[1]));
  }
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
  // Of the next offer in this meeting, with what its rank says that it was answered.
  std::string answer_in(std::string_view meeting) {
    while (true) {
      const nlohmann::json message = next("meet");
      if (message["meeting"] == meeting) return message["answer"];
    }
  }
  // Of so many offers, are any in this meeting?
  bool hears(std::string_view meeting, int offers) {
    bool found = false;
    for (int i = 0; i < offers; ++i) found |= next("meet")["meeting"] == meeting;
    return found;
  }

 private:
  ipc::UniqueFd socket_;
};

// A daemon may end when it has answered one rank and not the others: the next one hears them all, until it says that all are answered.
void offers_after_the_answer() {
  constexpr std::chrono::milliseconds kRepeat{5};
  Daemon daemon;
  std::optional<Heard> heard(std::in_place, daemon);
  Meetings meetings(daemon, "", kRepeat);
  const auto begin = [&](const std::string& meeting, uint32_t rank, std::chrono::milliseconds patience = std::chrono::minutes(1)) {
    return std::thread([&meetings, meeting, rank, patience] {
      CHECK(static_cast<bool>(meetings.attend(meeting, rank, 2, "offer", patience)) == (meeting != "refused"));
    });
  };
  std::thread one = begin("one", 0);
  CHECK(heard->answer_in("one").empty() && heard->answer_in("one").empty());
  std::thread refused = begin("refused", 0);
  CHECK(heard->answer_in("refused").empty());
  meetings.met({"one", 0, {"offer", "other"}, "", "", "name"});
  meetings.met({"refused", 0, {}, "", "why"});
  one.join();
  refused.join();
  // What is refused is offered no more; what is answered is, to another daemon, too, whose answer changes nothing.
  while (heard->answer_in("one").empty()) {}
  for (int i = 0; i < 3; ++i) CHECK(heard->answer_in("one") == "name");
  daemon.detach();
  heard.emplace(daemon);
  CHECK(heard->answer_in("one") == "name");
  meetings.met({"one", 0, {"another", "other"}, "", "", "another name"});
  for (int i = 0; i < 3; ++i) CHECK(heard->answer_in("one") == "name");
  CHECK(!heard->hears("refused", 3));
  // Until all are answered; what another rank of this server offers goes on.
  std::thread two = begin("two", 1);
  CHECK(heard->answer_in("two").empty());
  meetings.met({"one", 0, {}, "", "", "", true});
  meetings.met({"two", 1, {}, "", "", "", true});  // of an earlier meeting of this name: who waits goes on waiting
  heard->hears("one", 3);                          // which were on their way
  CHECK(!heard->hears("one", 10) && heard->answer_in("two").empty());
  meetings.met({"two", 1, {"other", "offer"}, "", "", "name"});
  two.join();
  while (heard->answer_in("two").empty()) {}
  // Or nobody waits any more.
  std::thread three = begin("three", 0, std::chrono::milliseconds(200));
  CHECK(heard->answer_in("three").empty());
  meetings.met({"three", 0, {"offer", "other"}, "", "", "name"});
  three.join();
  while (heard->hears("three", 4)) {}
}

// A server's communicators, and the daemon, which lets each rank find that it is the only one.
class Maker {
 public:
  Maker() {
    CHECK(device_->start() && contexts_.open(0));
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
    // Offers are repeated, also of what is answered.
    while (waiting_.value("meeting", "") == before || !waiting_.value("answer", "").empty()) waiting_ = heard_.next("meet");
  }
  // Which of them is made, or is not and why. `first`: the one that waits is answered before.
  std::pair<uint64_t, std::string> result(bool first = true) {
    if (first) meetings_.met({waiting_["meeting"], 0, {waiting_["offer"]}, "", "", "name"});
    const nlohmann::json result = heard_.next("communicator_prepared");
    return {result["attempt"], result["why"]};
  }

 private:
  static constexpr std::array<int, 1> kOrdinals{0};
  const std::unique_ptr<device::Device> device_ = device::open("cpu", kOrdinals, 1 << 20);
  Daemon daemon_;
  Heard heard_{daemon_};
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
  offers_after_the_answer();
  prepared_communicators();
  return 0;
}
