// A program that never rests, and what its servers say: for tests of moves and suspension.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>

#include "server_mover.h"

namespace harness {

inline constexpr uint64_t kWords = 4096;

// The kernel `mix`, on the host.
inline void mix(std::vector<uint64_t>& x, uint64_t rounds) {
  for (uint64_t i = 0; i < x.size(); ++i) {
    uint64_t v = x[i] + i;
    for (uint64_t r = 0; r < rounds; ++r) v = (v ^ (v >> 29)) * 0xbf58476d1ce4e5b9u + r;
    x[i] = v;
  }
}

inline bool is_running(Job& job) {
  return job.header().state.load() == static_cast<uint32_t>(journal::ServerState::kRunning);
}

// A program that goes on changing memory on a thread of its own, and looks at it all the time.
class Program {
 public:
  explicit Program(Job& job, uint64_t constant_bytes = 32 << 20) : job_(job) {
    kernel_ = job_.load_kernels().kernels.at("mix");
    address_ = job_.memory(kWords * 8);
    constant_ = job_.memory(constant_bytes);
    stream_ = job_.make_stream();
    event_ = job_.make_event();
    x_.resize(kWords);
    for (uint64_t i = 0; i < kWords; ++i) x_[i] = 7 + i * i;
    job_.write(address_, x_.data(), kWords * 8, stream_);
    weights_.resize(constant_bytes);
    // Half of it zeros. The rest is another in each tile by a word of each page: to make up all of it takes seconds with a
    // sanitizer.
    constexpr size_t kTile = 8 << 20, kPage = 4096;
    std::mt19937_64 random(3);
    std::vector<uint64_t> half(kTile / 2 / 8);
    for (uint64_t& word : half) word = random();
    for (size_t tile = 0; tile < weights_.size(); tile += kTile) {
      for (size_t word = 0; word < half.size(); word += kPage / 8) ++half[word];
      std::memcpy(weights_.data() + tile, half.data(), std::min(kTile / 2, weights_.size() - tile));
    }
    job_.write(constant_, weights_.data(), weights_.size(), stream_);
    thread_ = std::thread([this] { run(); });
  }
  ~Program() { end(); }
  // Everything is as it should be.
  void end() {
    if (!thread_.joinable()) return;
    ending_ = true;
    thread_.join();
    std::vector<uint64_t> got(kWords);
    CHECK(job_.read(address_, got.data(), kWords * 8) == CUDA_SUCCESS);
    CHECK(got == x_);
    std::vector<uint8_t> weights(weights_.size());
    CHECK(job_.read(constant_, weights.data(), weights.size()) == CUDA_SUCCESS);
    CHECK(weights == weights_);
  }
  uint64_t steps() const { return steps_; }
  // It has done what it has begun, and nothing follows until it may go on: there is nothing that a snapshot would be due for.
  void stand_still() {
    still_ = true;
    Job::wait([&] { return stands_.load(); });
  }
  void go_on() { still_ = false; }
  // Until it has done so many more.
  void let_run(uint64_t steps = 3) {
    const uint64_t until = steps_ + steps;
    Job::wait([&] { return steps_ >= until; });
  }

 private:
  void run() {
    uint64_t scratch = 0;
    for (uint64_t step = 0; !ending_; ++step) {
      for (; still_; ::usleep(1000)) stands_ = true;
      stands_ = false;
      for (uint64_t i = 0; i < 4; ++i) {
        job_.launch(kernel_, stream_, address_, 3 + i, kWords);
        mix(x_, 3 + i);
      }
      if (step % 7 == 0) {
        // Memory comes and goes.
        if (scratch != 0) {
          job_.append(Op::xmFree, Args_xmFree{scratch, 0});
          if (step % 21 == 14) {
            job_.append(Op::xmShrink, Args_xmShrink{scratch, 4 << 20});
            CHECK(job_.grow(scratch, 4 << 20) == CUDA_SUCCESS);
          }
          job_.alloc(scratch, 3 << 20);
        } else {
          scratch = job_.memory(3 << 20);
        }
        job_.append(Op::cuMemsetD8Async, Args_cuMemsetD8Async{scratch, static_cast<uint8_t>(1 + step % 2), 3 << 20, stream_});
      }
      job_.record_event(event_, stream_);
      job_.append(Op::cuStreamWaitEvent, Args_cuStreamWaitEvent{0, event_, 0});
      std::vector<uint64_t> got(kWords);
      CHECK(job_.read(address_, got.data(), kWords * 8, stream_) == CUDA_SUCCESS);
      CHECK(got == x_);
      ++steps_;
    }
  }

  Job& job_;
  uint64_t kernel_ = 0, address_ = 0, constant_ = 0, stream_ = 0, event_ = 0;
  std::vector<uint64_t> x_;
  std::vector<uint8_t> weights_;
  std::atomic<bool> ending_{false}, still_{false}, stands_{false};
  std::atomic<uint64_t> steps_{0};
  std::thread thread_;
};

inline void check_whole(Job& job) {
  CHECK(job.counters().differing == 0);
  CHECK(job.counters().garbage == 0);
  CHECK(job.counters().program_errors == 0);
}

}  // namespace harness
