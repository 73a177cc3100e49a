// A stream: a queue of work and the thread that does it, one piece after another.
#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "device/cpu/module.h"

namespace xmig::device::cpu {

class Context;
class Stream;

// Work of a stream, up to and including a position.
struct Reach {
  std::shared_ptr<Stream> stream;
  uint64_t position;
  bool done() const;
};

// One cuEventRecord.
struct Recording {
  Reach reach;
  std::atomic<int64_t> nanoseconds{0};  // CLOCK_MONOTONIC, 0: not yet
};

struct KernelWork {
  std::shared_ptr<Module> module;
  const Function* function;
  xmig_dim3 grid, block;
  uint32_t shared_bytes;
  std::vector<std::byte> parameters;
  uint64_t forbidden = 0;  // what a parameter points to, which the kernel's device may not touch
};
struct CopyWork {
  uint64_t destination, destination_pitch, source, source_pitch, width, height;
  std::unique_ptr<std::byte[]> snapshot;  // the source, where it was pageable host memory
};
struct FillWork {
  uint64_t destination, pitch, width, height;  // width in elements
  uint32_t value, element;                     // bytes of an element
};
struct RecordWork {
  std::shared_ptr<Recording> recording;
};
struct WaitWork {
  Reach reach;
};
struct WriteValueWork {
  uint64_t address, value;
  uint32_t bytes;
};
struct WaitValueWork {
  uint64_t address, value;
  uint32_t bytes, flags;
};
struct HostWork {
  CUhostFn function;
  void* user;
};
// All the work of a graph, in an order that its edges allow.
struct GraphBody;
struct GraphWork {
  std::shared_ptr<GraphBody> body;
};
// A conditional node. The value is one that kernels of the same launch have set.
struct ChoiceWork {
  uint64_t condition;
  CUgraphConditionalNodeType type;
  std::vector<std::shared_ptr<GraphBody>> bodies;
};
using Work = std::variant<KernelWork, CopyWork, FillWork, RecordWork, WaitWork, WriteValueWork, WaitValueWork, HostWork,
                          GraphWork, ChoiceWork>;
struct GraphBody {
  std::vector<Work> work;
  std::map<uint64_t, uint32_t> conditions;  // and what each is when a launch begins
  std::vector<std::vector<CUgraph>> inside;  // the bodies of its conditional nodes
};

enum class StreamKind : uint8_t { kLegacy, kBlocking, kNonBlocking };

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(std::shared_ptr<Context> context, StreamKind kind) : context_(std::move(context)), kind_(kind) {}

  Context& context() { return *context_; }
  StreamKind kind() const { return kind_; }

  // Positions count pieces of work, from 1.
  uint64_t enqueued() const { return enqueued_; }
  bool reached(uint64_t position) const { return completed_.load() >= position; }
  bool idle() const { return reached(enqueued_); }

  // Under the device's lock. The thread is made by the first piece of work.
  uint64_t push(Work work, uint64_t sequence);
  // No more work will come; what is enqueued is still done.
  void close();
  bool closed() const { return closed_; }

  std::shared_ptr<GraphBody> capturing;  // while it is captured: where its work goes instead
  CUgraph captured = nullptr;
  CUgraphNode last_captured = nullptr;

  uint64_t legacy_seen = 0;  // position of the legacy stream that this stream already waits for

  // Threads of streams that have not ended yet, in the whole process.
  static std::atomic<int>& threads();

 private:
  struct Item {
    uint64_t sequence;
    Work work;
  };
  void run();
  // The next batch; empty when the stream is closed and everything is done.
  std::vector<Item> take();

  const std::shared_ptr<Context> context_;
  const StreamKind kind_;
  uint64_t enqueued_ = 0;
  std::atomic<uint64_t> completed_{0};
  bool started_ = false;

  std::mutex mutex_;
  std::condition_variable condition_;
  std::vector<Item> queue_;
  std::atomic<bool> waiting_{false};  // something is queued, or closed
  bool sleeping_ = false;
  bool closed_ = false;
};

}  // namespace xmig::device::cpu
