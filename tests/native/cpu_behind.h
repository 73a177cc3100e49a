// A device that is the cpu device but for what a test makes of it. Its driver table is its own.
#pragma once

#include <memory>
#include <utility>

#include "device/device.h"

namespace xmig::device {

class CpuBehind : public Device {
 public:
  explicit CpuBehind(std::unique_ptr<Device> cpu) : cpu_(std::move(cpu)), table_(cpu_->driver()) {}

  const DriverTable& driver() const override { return table_; }
  journal::DeviceDescription describe(int ordinal) const override { return cpu_->describe(ordinal); }
  void set_sequence(uint64_t sequence) override { cpu_->set_sequence(sequence); }
  Fault fault() const override { return cpu_->fault(); }
  void on_fault(void (*callback)(void*), void* user) override { cpu_->on_fault(callback, user); }
  bool hash(std::span<const Chunk> chunks, std::span<uint64_t> hashes, Where where) override {
    return cpu_->hash(chunks, hashes, where);
  }
  uint64_t hash_of(std::span<const std::byte> content) const override { return cpu_->hash_of(content); }
  bool copy(std::span<const Move> moves, Where where) override { return cpu_->copy(moves, where); }
  CUresult load_image(CUmodule* module, std::span<const std::byte> image) override {
    return cpu_->load_image(module, image);
  }
  Collectives& collectives() override { return cpu_->collectives(); }
  std::vector<Global> globals(CUmodule module) override { return cpu_->globals(module); }
  bool bind_global(CUmodule module, uint32_t index, uint64_t address) override {
    return cpu_->bind_global(module, index, address);
  }
  void arm(const Injection& injection, Notify notify, void* user) override { cpu_->arm(injection, notify, user); }

 protected:
  const std::unique_ptr<Device> cpu_;
  DriverTable table_;
};

}  // namespace xmig::device
