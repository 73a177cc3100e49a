#pragma once

#include <cstdint>
#include <string>

namespace xmig::device {

// How much memory of GPUs is in use, requested before there is a context: by NVML. Where there is none, or it does not
// answer, nothing is known.
class UsedMemory {
 public:
  UsedMemory();
  ~UsedMemory();
  UsedMemory(const UsedMemory&) = delete;

  // Bytes in use, by whomever, of the GPU with this UUID (16 bytes); 0: not known.
  uint64_t of(const char* uuid) const;

 private:
  void* library_ = nullptr;
};

}  // namespace xmig::device
