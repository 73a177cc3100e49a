#include "client/journal/thread.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bitset>
#include <mutex>

#include "client/bootstrap/message.h"
#include "client/bootstrap/process.h"
#include "client/journal/diversion.h"

namespace xmig::client {

constinit thread_local Thread* current_thread = nullptr;

namespace {

std::mutex slots_mutex;
constinit std::bitset<journal::kMaxThreads> slots_taken;  // ours: the header's copy is only for the server to read

void free_slot(uint32_t slot) {
  if (process.phase.load() != Phase::kRunning) return;  // a forked child: the slot is its parent's
  auto& shared = process.header->threads[slot];
  shared.waiting.store(journal::kNotWaiting, std::memory_order_release);
  std::atomic_ref(shared.tid).store(0, std::memory_order_release);
  const std::lock_guard lock(slots_mutex);
  slots_taken.reset(slot);
}

void end_of_thread(void* data) {
  auto* const thread = static_cast<Thread*>(data);
  if (diverting()) diversion().thread_ended(*thread);
  if (thread->slot != Thread::kNoSlot) free_slot(thread->slot);
  current_thread = nullptr;
  delete thread;
}

// A pthread key, not a thread_local destructor: it runs after those, which may still call the driver, and it runs again
// if another key's destructor does.
pthread_key_t thread_key() {
  static const pthread_key_t key = [] {
    pthread_key_t created;
    pthread_key_create(&created, end_of_thread);
    return created;
  }();
  return key;
}

}  // namespace

Thread& create_thread() {
  current_thread = new Thread;
  pthread_setspecific(thread_key(), current_thread);
  return *current_thread;
}

bool take_slot(Thread& thread) {
  const std::lock_guard lock(slots_mutex);
  for (uint32_t i = 0; i < journal::kMaxThreads; ++i) {
    if (slots_taken[i]) continue;
    slots_taken.set(i);
    auto& shared = process.header->threads[i];
    shared.waiting.store(journal::kNotWaiting, std::memory_order_relaxed);
    std::atomic_ref(shared.tid).store(static_cast<uint32_t>(::syscall(SYS_gettid)), std::memory_order_release);
    thread.slot = i;
    return true;
  }
  static std::atomic_flag reported;
  if (!reported.test_and_set()) {
    say("more than %u threads use the driver at the same time: the calls of further ones fail with "
        "CUDA_ERROR_OUT_OF_MEMORY until a thread ends", journal::kMaxThreads);
  }
  return false;
}

}  // namespace xmig::client
