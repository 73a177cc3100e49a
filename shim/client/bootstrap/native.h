// The genuine driver instead of ours: for a program that was started without a daemon and reported
// XMIG_WITHOUT_DAEMON=native. Every exported function asks here first, so the answer costs one load. In the same place the
// calls are noted, if that is wanted (requested.h).
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace xmig::client {

// Generated: the exported functions, in the order of their slots.
extern const char* const kNativeNames[];
extern const int kNativeCount;

// Is there anything to be done before the shim answers? True until it is known that there is not.
extern constinit std::atomic<bool> detour;
void* take_detour(int slot);

// The genuine function of a slot; nullptr if the shim answers (also where the genuine driver has no such function).
inline void* native_function(int slot) {
  return detour.load(std::memory_order_acquire) ? take_detour(slot) : nullptr;
}

// Where a library may be installed, for who may not ask for it by its plain name.
std::vector<std::string> installed_paths(const std::string& soname);

// Find and load the genuine libcuda.so.1. On failure nothing changes, one line says why, and false is returned.
bool load_native();

}  // namespace xmig::client
