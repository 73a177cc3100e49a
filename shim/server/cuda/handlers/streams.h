// Which stream a record's work goes into, and on which device: the program's streams, and ours where the program's cannot be used.
//
// Each device's memory is mapped for that device only, like any that the program gets natively, unless the program has requested
// more (peers.h). So invariants:
//   A copy or a fill is put into a stream of the device whose memory it touches, or is a copy that names both contexts.
//   Where the program's stream is another device's, ours waits for it, and it for ours: the order is the stream's.
//   The calling thread's current context is that of the stream's device when work is enqueued (translate(), on_device_of()).
//
// The executor's thread alone. The executor begins a record and asks afterwards which stream it has used; handlers translate.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "driver_table.h"
#include "journal/layout.h"
#include "server/cuda/handlers/asides.h"
#include "server/cuda/handlers/session.h"

namespace xmig::server {

class Streams {
 public:
  explicit Streams(const Session& session);
  Streams(const Streams&) = delete;
  void destroy_all();  // the program's and ours; nothing uses them any more

  // --- the executor's
  struct Used {
    CUstream stream = nullptr;
    uint32_t ordinal = 0;  // of which device it is
  };
  void begin() { used_.reset(); }
  // By the record; that is the last one then.
  const std::optional<Used>& finish() {
    if (used_) last_ = *used_;
    return used_;
  }
  const Used& last() const { return last_; }  // that any record has used
  // Those with work that is not done; the ordinal's context is current.
  const std::vector<CUstream>& busy(uint32_t ordinal);

  // --- handlers'
  // The program's handle becomes ours, and is what the record uses.
  bool translate(uint64_t handle, CUstream* real) { return translate(handle, current_.record.header().ordinal, real); }
  // The same where a default stream is that of this device.
  bool translate(uint64_t handle, uint32_t ordinal, CUstream* real);
  // The device of the record's stream, or of its context if it names none.
  uint32_t ordinal() const {
    if (capture_) return capture_->ordinal;
    return used_ ? used_->ordinal : current_.record.header().ordinal;
  }
  // The device whose memory this is; the stream's, if it is none's.
  uint32_t home_of(uint64_t address) const;
  // `work`, which gets a stream, on that device, in the order of `stream`. Where that is another device's, which may not reach the
  // memory, it goes into a stream of ours.
  template <typename Work>
  CUresult on_device_of(uint32_t home, CUstream stream, Work&& work) {
    if (capture_ || home == ordinal()) {
      contexts_.use(ordinal());  // a snapshot that was taken meanwhile may have left another one
      return work(stream);
    }
    return aside(home, stream, std::forward<Work>(work));
  }
  // The same where memory at this address is.
  template <typename Work>
  CUresult where_it_is(uint64_t address, CUstream stream, Work&& work) {
    return on_device_of(home_of(address), stream, std::forward<Work>(work));
  }
  // In a stream of ours in any case.
  template <typename Work>
  CUresult aside(uint32_t home, CUstream stream, Work&& work) {
    CUstream other = nullptr;
    if (const CUresult result = asides_.step(ordinal(), stream, home, &other); result != CUDA_SUCCESS) return result;
    const CUresult result = work(other);
    const CUresult back = asides_.come_back(ordinal(), stream, home, other);
    return result == CUDA_SUCCESS ? back : result;
  }
  // Behind all work, so that its end can be seen from another thread. Done where time does not matter.
  void mark_work();
  // Ours, of this device: publishes events whose own stream cannot (events.h). It gets work.
  CUstream publisher();
  CUstream existing_publisher(uint32_t ordinal) const { return publishers_[ordinal]; }

  // While a graph is made, translate() answers with the stream that it is captured from, one of ours.
  CUresult for_graphs(uint32_t ordinal, CUstream* stream);
  void capture(CUstream stream, uint32_t ordinal) { capture_ = {stream, ordinal}; }
  void end_capture() { capture_.reset(); }
  bool captures() const { return capture_.has_value(); }

  void created(uint64_t handle, CUstream real, const Record& record);
  // It is about to be destroyed: its work goes on.
  void leave(CUstream gone);
  CUresult on_cuStreamDestroy_v2(Record& record);

 private:
  CUstream thread_stream(uint32_t ordinal);

  const DriverTable& driver_;
  Contexts& contexts_;
  Faults& faults_;
  Objects& objects_;
  Granules& granules_;
  Progress& progress_;
  Working& working_;
  Current& current_;
  Asides asides_;
  std::vector<CUstream> thread_streams_;  // [thread slot * ordinals + ordinal]: per-thread default streams
  std::array<CUstream, journal::kMaxDevices> publishers_{};
  std::array<CUstream, journal::kMaxDevices> graph_streams_{};  // graphs are captured from these
  std::optional<Used> capture_;
  std::optional<Used> used_;
  Used last_;
};

}  // namespace xmig::server
