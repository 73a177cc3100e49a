// What a stream's thread does with each piece of work.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>

#include "device/cpu/guard.h"
#include "device/cpu/injections.h"
#include "device/cpu/stream.h"

namespace xmig::device::cpu {

class Worker {
 public:
  explicit Worker(Context& context) : context_(context) {}

  // Does it for record t_sequence, or drops it if the context has a sticky error. Faults end up as the context's sticky error.
  void run(Work& work);

 private:
  void run(KernelWork& work);
  void run(CopyWork& work);
  void run(FillWork& work);
  void run(RecordWork& work);
  void run(WaitWork& work);
  void run(WriteValueWork& work);
  void run(WaitValueWork& work);
  void run(HostWork& work);
  void run(GraphWork& work);
  void run(ChoiceWork& work);
  void run(GraphBody& body);

  void inject(const ArmedInjection& armed, const std::string& where);
  // Memory for the blocks of one launch, zeroed.
  std::byte* shared_memory(size_t bytes);

  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };

  Context& context_;
  const AlternateStack stack_;
  std::unique_ptr<std::byte, Free> shared_;
  size_t shared_bytes_ = 0;
};

}  // namespace xmig::device::cpu
