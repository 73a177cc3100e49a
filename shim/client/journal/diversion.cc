#include "client/journal/diversion.h"

namespace xmig::client {

constinit std::atomic<int> diversions{0};

namespace {
constinit std::atomic<Diversion*> diverts{nullptr};
}

Diversion& diversion() {
  (void)diversions.load(std::memory_order_acquire);  // who has seen one sees who takes it
  return *diverts.load(std::memory_order_relaxed);
}

void begin_diversion(Diversion& by) {
  diverts.store(&by, std::memory_order_relaxed);
  diversions.fetch_add(1);
}

void end_diversion() { diversions.fetch_sub(1); }

}  // namespace xmig::client
