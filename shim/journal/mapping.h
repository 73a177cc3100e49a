// A range of address space with an owner.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace xmig::journal {

class Mapping {
 public:
  Mapping() = default;
  // Takes ownership of what mmap() returned; MAP_FAILED makes an empty one, and errno says why.
  Mapping(void* address, size_t bytes) {
    if (address != MAP_FAILED) {
      data_ = static_cast<std::byte*>(address);
      size_ = bytes;
    }
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    if (this != &other) {
      reset();
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  ~Mapping() { reset(); }

  // At any address.
  static Mapping anywhere(int fd, size_t bytes, int protection = PROT_READ | PROT_WRITE) {
    return {::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0), bytes};
  }
  // At this address, and only if nothing is there yet (errno EEXIST otherwise).
  static Mapping at(uint64_t address, int fd, size_t bytes, int protection = PROT_READ | PROT_WRITE) {
    return {::mmap(reinterpret_cast<void*>(address), bytes, protection, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0),
            bytes};
  }
  // Keep a range of addresses free of anything else: no memory, no access.
  static Mapping reserve(uint64_t address, size_t bytes) {
    return {::mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0),
            bytes};
  }

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  explicit operator bool() const { return data_ != nullptr; }
  void reset() {
    if (data_) ::munmap(data_, size_);
    data_ = nullptr;
    size_ = 0;
  }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace xmig::journal
