#include "device/cpu/guard.h"

#include <cuda.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "device/cpu/log.h"

namespace xmig::device::cpu {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr size_t kStackBytes = 64 << 10;

struct Frame {
  sigjmp_buf environment;
  Trap trap;
};
thread_local Frame* t_frame = nullptr;

struct sigaction g_previous[NSIG];

int error_of(int signal, int code) {
  switch (signal) {
    case SIGBUS:  // beyond the end of what backs a mapping there is no memory, whatever the alignment
      return code == BUS_ADRERR ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_ERROR_MISALIGNED_ADDRESS;
    case SIGFPE:
      return CUDA_ERROR_LAUNCH_FAILED;
    case SIGILL:
      return CUDA_ERROR_ILLEGAL_INSTRUCTION;
    case SIGABRT:  // assert() of the C library
      return CUDA_ERROR_ASSERT;
    default:
      return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
}

const char* name_of(int signal) {
  switch (signal) {
    case SIGSEGV: return "SIGSEGV";
    case SIGBUS: return "SIGBUS";
    case SIGFPE: return "SIGFPE";
    case SIGILL: return "SIGILL";
    default: return "SIGABRT";
  }
}

void handle(int signal, siginfo_t* info, void* context) {
  if (Frame* frame = t_frame) {
    frame->trap = {error_of(signal, info->si_code), signal, reinterpret_cast<uint64_t>(info->si_addr), "", "", 0};
    siglongjmp(frame->environment, 1);
  }
  const struct sigaction& previous = g_previous[signal];
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal);
  } else {
    // Back to how it was: the instruction runs again, or the signal is sent again, and ends the process as it would
    // have.
    sigaction(signal, &previous, nullptr);
    if (info->si_code <= 0) raise(signal);
  }
}

}  // namespace

std::string Trap::describe() const {
  char out[512];
  if (signal == 0) {
    std::snprintf(out, sizeof(out), "%.300s, %.150s:%d", text, file, line);
  } else if (signal == SIGABRT) {
    std::snprintf(out, sizeof(out), "%s", name_of(signal));
  } else {
    std::snprintf(out, sizeof(out), "%s at 0x%llx", name_of(signal), static_cast<unsigned long long>(address));
  }
  return out;
}

void install_fault_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const int signal : kSignals) {
      struct sigaction action{};
      action.sa_sigaction = handle;
      // SA_NODEFER: the handler is left by a jump that restores no signal mask.
      action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
      sigemptyset(&action.sa_mask);
      if (sigaction(signal, &action, &g_previous[signal]) != 0)
        XMIG_CPU_LOG("no handler for signal %d: a kernel's fault will end the server", signal);
    }
  });
}

AlternateStack::AlternateStack() {
  memory_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  stack_t previous{};
  if (memory_ != MAP_FAILED) {
    const stack_t ours{memory_, 0, kStackBytes};
    sigaltstack(&ours, &previous);
  } else {
    sigaltstack(nullptr, &previous);
  }
  previous_ = previous.ss_sp;
  previous_bytes_ = previous.ss_size;
  previous_flags_ = previous.ss_flags;
}

AlternateStack::~AlternateStack() {
  const stack_t previous{previous_, previous_flags_ & SS_DISABLE, previous_bytes_};
  sigaltstack(&previous, nullptr);
  if (memory_ != MAP_FAILED) munmap(memory_, kStackBytes);
}

[[gnu::noinline]] bool run_guarded(void (*work)(void*), void* argument, Trap& trap) {
  Frame frame;
  Frame* const outer = t_frame;
  if (sigsetjmp(frame.environment, 0) == 0) {
    t_frame = &frame;
    work(argument);
    t_frame = outer;
    return true;
  }
  t_frame = outer;
  trap = frame.trap;
  return false;
}

void leave_guarded(int error, const char* text, const char* file, int line) {
  if (!t_frame) std::abort();  // a kernel's thread of its own called fail(): there is no way back from there
  t_frame->trap = {error, 0, 0, text, file, line};
  siglongjmp(t_frame->environment, 1);
}

}  // namespace xmig::device::cpu
