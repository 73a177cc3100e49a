// Running work that may fault, and living on.
//
// A worker runs a kernel, or touches memory that may not be there, inside guarded(): a SIGSEGV, SIGBUS, SIGFPE, SIGILL
// or SIGABRT of that thread then ends the work and comes back as the error that a GPU would report. In every other
// thread, and outside guarded(), the handlers do what the process had installed before.
//
// The work is left with siglongjmp: it must own nothing that a destructor would give back.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

namespace xmig::device::cpu {

struct Trap {
  int error = 0;          // CUresult
  int signal = 0;         // 0: the kernel reported so itself
  uint64_t address = 0;   // of the access
  const char* text = "";  // of fail()
  const char* file = "";
  int line = 0;

  std::string describe() const;
};

// Once per process, when the first cpu device is opened.
void install_fault_handlers();

// Handlers run on a stack of their own: a kernel may have used up its thread's. One per worker thread.
class AlternateStack {
 public:
  AlternateStack();
  ~AlternateStack();
  AlternateStack(const AlternateStack&) = delete;
  AlternateStack& operator=(const AlternateStack&) = delete;

 private:
  void* memory_;
  void* previous_;
  unsigned long previous_bytes_;
  int previous_flags_;
};

// False if the work trapped.
bool run_guarded(void (*work)(void*), void* argument, Trap& trap);

template <typename Work>
bool guarded(Trap& trap, Work&& work) {
  return run_guarded([](void* w) { (*static_cast<std::remove_reference_t<Work>*>(w))(); }, &work, trap);
}

// Leaves the work that this thread runs guarded. An error that the work found itself.
[[noreturn]] void leave_guarded(int error, const char* text, const char* file, int line);

}  // namespace xmig::device::cpu
