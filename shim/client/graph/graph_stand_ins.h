// Device memory that stands in for page-locked memory in a graph of the driver's.
//
// Whether and how often the body of a conditional node runs, only the device knows, so a copy of page-locked memory in it can
// be no record; and without one nothing would say, after the loss of a server, which bytes it has read and which the program
// has already. So these copies become copies within the device. Records ahead of the graph bring what is read, records behind
// it take back what was written: those the journal keeps as it keeps all others. (docs/decisions/0024-conditional-nodes.md)
//
// What no body has written is not taken back either, since the program may have written there meanwhile: a word on the device
// says for each copy whether it was made, and a function that runs in this process, once, as all host functions do, looks.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "client/graph/graph.h"

namespace xmig::client {

// Under graphs_mutex().
class StandIns {
 public:
  StandIns() = default;
  ~StandIns();
  StandIns(const StandIns&) = delete;

  // The copies of this node, which does nothing else. `sure`: every launch makes them.
  void take(Node& node, bool sure);
  // Is it an address in page-locked memory that a copy has taken some of?
  bool has_taken(uint64_t address) const;
  // When all are known: takes memory, and makes them copies within the device.
  CUresult settle();

  CUresult before(CUstream stream);
  CUresult after(CUstream stream);

  // Memory whose last launch is over is given back; nothing waits for it, since programs change graphs while they run.
  static void give_back();
  static void context_reset(const Context& context);

 private:
  // The last launch in a context's streams: an event of that context's.
  struct Use {
    Context* context;
    uint64_t resets;  // of the context, so far: with the next one the event is gone
    CUevent event;
    bool over() const;
    void forget() const;
  };
  // What was left, until it can be given back. An allocation has a number that is never used twice: a context takes its memory
  // with it, and somebody else may have the address by then.
  struct Leftover;
  static std::vector<Leftover>& leftovers();
  static uint64_t& resets_of(const Context& context);
  CUresult note_use(CUstream stream);

  struct Rows {
    uint64_t address, pitch, width, height;
    uint64_t end() const { return address + (height - 1) * pitch + width; }
    bool operator==(const Rows&) const = default;
  };
  struct Taken {
    Node* node;
    bool sure, to_host;
    Rows host, device;
    uint64_t stand_in = 0;  // where host.address is on the device
    uint64_t word = 0;      // that becomes 1 when the copy is made; 0: none
  };
  // Page-locked memory whose copies overlap: one piece of our memory.
  struct Range {
    uint64_t start, end;
    int ordinal;
    uint64_t at = 0;  // in our memory of this device
  };
  // Rows that bodies may have written.
  struct Written {
    Rows host;
    int ordinal;
    uint64_t stand_in;
    uint32_t word;  // the how manieth of this device
  };
  struct Memory {
    uint64_t address = 0, bytes = 0;
    uint64_t words_at = 0;
    uint32_t words = 0;
  };
  struct Returned;

  CUresult allocate(std::vector<Taken>& taken, std::vector<Written>& written);
  CUresult bring(const std::vector<Taken>& taken);
  CUresult take_back(const std::vector<Written>& written);

  std::vector<Taken> taken_;      // until they are settled
  std::map<int, Memory> memory_;  // by ordinal
  std::vector<Operation> before_, after_;
  std::shared_ptr<const Returned> returned_;  // null: all that is written is sure to be
  void* copies_ = nullptr;                    // page-locked: what `returned_` is about
  std::vector<Use> uses_;
};

}  // namespace xmig::client
