// Streams of ours beside that of a launch, for collectives that go on while other work does, and what says in one stream how far
// another has come.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <utility>

namespace xmig::client {

struct Context;

// An event of ours. Its context, and it with that, may be reset meanwhile.
class Mark {
 public:
  Mark() = default;
  ~Mark();
  Mark(const Mark&) = delete;
  // In a stream of this context.
  CUresult record(Context& context, CUstream stream);
  CUresult await(CUstream stream) const;

 private:
  CUevent event_ = nullptr;
  Context* context_ = nullptr;
};

// Of one executable graph: a stream for each communicator. Under graphs_mutex().
class Lanes {
 public:
  Lanes() = default;
  ~Lanes();
  Lanes(const Lanes&) = delete;
  // Made when it is needed first.
  CUresult find(Context& context, uint64_t communicator, CUstream& stream);

 private:
  struct Own {
    CUstream stream = nullptr;
    uint64_t id = 0;
    bool there() const;
  };
  std::map<std::pair<Context*, uint64_t>, Own> own_;
};

}  // namespace xmig::client
