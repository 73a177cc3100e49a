// Ranks of the host's collectives that find each other: on one node by name, on different ones by address.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/cpu/mesh.h"
#include "device_harness.h"

using device::Place;
using device::cpu::Incoming;
using device::cpu::Label;
using device::cpu::Mesh;
using device::cpu::Outgoing;

namespace {

// Where ranks meet. What they offer may be changed on the way.
class Table {
 public:
  explicit Table(size_t ranks) : offers_(ranks) {}

  std::vector<std::string> meet(size_t rank, const std::string& offer) {
    std::unique_lock lock(mutex_);
    offers_[rank] = offer;
    ++came_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return came_ == offers_.size(); });
    return offers_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> offers_;
  size_t came_ = 0;
};

Place place(uint32_t rank, uint32_t ranks, const std::string& address) {
  Place made;
  made.group.fill(std::byte{7});
  made.rank = rank;
  made.ranks = ranks;
  made.patience = std::chrono::seconds(10);
  made.address = address;
  return made;
}

// Each rank gives its number to each other one. What went wrong, by rank.
std::vector<std::string> exchange(const std::vector<std::string>& addresses, std::vector<std::string>* offers = nullptr) {
  const auto ranks = static_cast<uint32_t>(addresses.size());
  Table table(ranks);
  std::vector<std::string> wrong(ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto meet = [&](const std::string& offer) {
        if (offers) (*offers)[rank] = offer;
        return Result(table.meet(rank, offer));
      };
      Result<std::unique_ptr<Mesh>> mesh = Mesh::connect(place(rank, ranks, addresses[rank]), meet);
      if (!mesh) {
        wrong[rank] = mesh.why();
        return;
      }
      std::vector<uint32_t> mine(ranks, rank), theirs(ranks, ~0u);
      std::vector<Outgoing> outgoing;
      std::vector<Incoming> incoming;
      for (uint32_t other = 0; other < ranks; ++other) {
        outgoing.push_back({other, Label{}, std::as_bytes(std::span(&mine[other], 1))});
        incoming.push_back({other, Label{}, std::as_writable_bytes(std::span(&theirs[other], 1))});
      }
      if (Result<> done = (*mesh)->exchange(outgoing, incoming); !done) wrong[rank] = done.why();
      for (uint32_t other = 0; other < ranks; ++other) {
        if (theirs[other] != other) wrong[rank] += " nothing of " + std::to_string(other);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return wrong;
}

void check_well(const std::vector<std::string>& wrong) {
  for (const std::string& one : wrong) {
    if (!one.empty()) std::fprintf(stderr, "%s\n", one.c_str());
    CHECK(one.empty());
  }
}

}  // namespace

TEST(mesh_of_one_node) {
  std::vector<std::string> offers(3);
  check_well(exchange({"", "", ""}, &offers));
  for (const std::string& offer : offers) CHECK(offer.find(' ') == std::string::npos);  // nothing of it is on a network
}

TEST(mesh_of_several_nodes) {
  std::vector<std::string> offers(4);
  check_well(exchange({"127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.3"}, &offers));
  CHECK(offers[1].find(" 7f000002 ") != std::string::npos);
  check_well(exchange({"::1", "::1"}));
}

TEST(mesh_addresses_that_are_none) {
  const auto unused = [](const std::string&) { return Result<std::vector<std::string>>(Error{"nobody meets"}); };
  CHECK(Mesh::connect(place(0, 2, "nowhere"), unused).why() == "the node's address nowhere is none");
  for (const char* const offer : {"", "xmig-", "xmig-0123456789abcdef0123456789abcdeg", "xmig-0123456789abcdef0123456789abcdef ",
                                  "xmig-0123456789abcdef0123456789abcdef 7f000001", "xmig-0123456789abcdef0123456789abcdef 7f0001 80",
                                  "xmig-0123456789abcdef0123456789abcdef 7f000001 0", "xmig-0123456789abcdef0123456789abcdef 7f000001 65536",
                                  "xmig-0123456789abcdef0123456789abcdef 7f000001 80 ", "xmig-0123456789abcdef0123456789abcdef 7f00000g 80",
                                  "xmig-0123456789abcdef0123456789abcdef  7f000001 80"}) {
    const auto meet = [&](const std::string& mine) { return Result(std::vector<std::string>{offer, mine}); };
    Result<std::unique_ptr<Mesh>> mesh = Mesh::connect(place(1, 2, "127.0.0.1"), meet);
    CHECK(!mesh && mesh.why().find("rank 0 cannot be reached: what it says is no address") != std::string::npos);
  }
  const auto of_one_node = [](const std::string& mine) { return Result(std::vector<std::string>{mine.substr(0, 37), mine}); };
  Result<std::unique_ptr<Mesh>> mesh = Mesh::connect(place(1, 2, "127.0.0.1"), of_one_node);
  CHECK(!mesh && mesh.why().find("is not of a job of several nodes") != std::string::npos);
  const auto nobody = [](const std::string& mine) {
    return Result(std::vector<std::string>{"xmig-0123456789abcdef0123456789abcdef 7f000002 1", mine});
  };
  mesh = Mesh::connect(place(1, 2, "127.0.0.1"), nobody);
  CHECK(!mesh && mesh.why().find("rank 0 cannot be reached: Connection refused") != std::string::npos);
}

// Whoever does not know the group's secret is left, and the others are not disturbed.
TEST(mesh_strangers) {
  Table table(2);
  const auto connect = [](const std::string& offer, std::string_view text) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(offer.substr(offer.rfind(' ') + 1))));
    ::inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    const int stranger = ::socket(AF_INET, SOCK_STREAM, 0);
    CHECK(::connect(stranger, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    CHECK(::send(stranger, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size()));
    return stranger;
  };
  std::vector<int> strangers;
  std::thread other([&] {
    const auto meet = [&](const std::string& offer) { return Result(table.meet(1, offer)); };
    CHECK(static_cast<bool>(Mesh::connect(place(1, 2, "127.0.0.2"), meet)));
  });
  const auto meet = [&](const std::string& offer) {
    strangers = {connect(offer, "GET / HTTP/1.1\r\n\r\n" + std::string(100, ' ')), connect(offer, "")};
    ::shutdown(strangers[1], SHUT_WR);
    return Result(table.meet(0, offer));
  };
  CHECK(static_cast<bool>(Mesh::connect(place(0, 2, "127.0.0.1"), meet)));
  other.join();
  for (const int stranger : strangers) ::close(stranger);
}

// A rank that ends before it has connected would be waited for until nobody waits any more.
TEST(mesh_of_one_that_ends) {
  const auto began = std::chrono::steady_clock::now();
  for (const char* const address : {"", "127.0.0.1"}) {
    Table table(2);
    std::thread other([&] {
      const auto ends = [&](const std::string& offer) -> Result<std::vector<std::string>> {
        table.meet(1, offer);
        return Error{"it ends"};
      };
      CHECK(!Mesh::connect(place(1, 2, address), ends));
    });
    const auto meet = [&](const std::string& offer) { return Result(table.meet(0, offer)); };
    const Result<std::unique_ptr<Mesh>> mesh = Mesh::connect(place(0, 2, address), meet);
    CHECK(!mesh && mesh.error().code == device::kSevered);
    other.join();
  }
  // And certainly while it is waited for.
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in there{};
  there.sin_family = AF_INET;
  ::inet_pton(AF_INET, "127.0.0.2", &there.sin_addr);
  socklen_t length = sizeof(there);
  CHECK(::bind(listener, reinterpret_cast<sockaddr*>(&there), length) == 0 && ::listen(listener, 4) == 0);
  CHECK(::getsockname(listener, reinterpret_cast<sockaddr*>(&there), &length) == 0);
  const std::string offer = "xmig-0123456789abcdef0123456789abcdef 7f000002 " + std::to_string(ntohs(there.sin_port));
  std::thread other([&] {
    const int connected = ::accept(listener, nullptr, nullptr);
    char hello[64];
    CHECK(::recv(connected, hello, sizeof(hello), 0) > 0);
    ::close(connected);
    ::close(listener);
  });
  const auto meet = [&](const std::string& mine) { return Result(std::vector<std::string>{mine, offer}); };
  const Result<std::unique_ptr<Mesh>> mesh = Mesh::connect(place(0, 2, "127.0.0.1"), meet);
  CHECK(!mesh && mesh.error().code == device::kSevered && mesh.why().find("rank 1 cannot be reached: it has ended") != std::string::npos);
  other.join();
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(20));
}
