#include "server/cuda/handlers/variables.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace xmig::server {
namespace {

constexpr uint64_t kPlaceSetting = 1ull << 61;  // a key of Module::settings

}  // namespace

Variables::Variables(const Session& session, Streams& streams)
    : driver_(session.device.driver()),
      contexts_(session.services.contexts),
      faults_(session.services.faults),
      live_(session.memory.live),
      images_(session.memory.images),
      objects_(session.objects),
      granules_(session.granules),
      streams_(streams),
      current_(session.current),
      placed_(session.device, contexts_, session.services.log) {}

void Variables::forget(uint32_t module) {
  std::erase_if(twins_, [&](const auto& entry) { return entry.second.module == module; });
  placed_.forget(module);
}

void Variables::keep() {
  for (auto& [address, variable] : twins_) from_variable(variable);
  if (!placed_.keep([this](uint32_t ordinal) { return granules_.where(ordinal); })) {
    faults_.give_up(current_.sequence, "the device could not keep the variables of its modules");
  }
}

std::vector<std::byte> Variables::translated(std::span<const std::byte> parameters) const {
  std::vector<std::byte> changed;
  for (size_t at = 0; at + sizeof(uint64_t) <= parameters.size(); at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, parameters.data() + at, sizeof(word));
    const CUdeviceptr there = twin_at(word);
    if (there == word) continue;
    if (changed.empty()) changed.assign(parameters.begin(), parameters.end());
    std::memcpy(changed.data() + at, &there, sizeof(there));
  }
  return changed;
}

CUresult Variables::on_xmGlobal(Record& record) {
  Args_xmGlobal args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const Module* const module = objects_.modules.find(journal::handle_index(args.module));
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  const std::span<const std::byte> payload = record.payload();
  const std::string name(reinterpret_cast<const char*>(payload.data()), payload.size());
  CUdeviceptr address = 0;
  size_t bytes = 0;
  const CUresult result = driver_.cuModuleGetGlobal_v2(&address, &bytes, module->real, name.c_str());
  if (result != CUDA_SUCCESS) return result;
  const journal::GlobalSize size{bytes};
  record.set_reply(&size, sizeof(size));
  return CUDA_SUCCESS;
}

CUresult Variables::on_xmTwin(Record& record) {
  Args_xmTwin args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const std::span<const std::byte> payload = record.payload();
  const std::string name(reinterpret_cast<const char*>(payload.data()), payload.size());
  const CUresult result = add_twin(journal::handle_index(args.module), args.address, name);
  if (result != CUDA_SUCCESS) return result;
  Variable& variable = twins_.at(args.address);
  if (current_.mode == Mode::kRun) {
    faults_.check(driver_.cuCtxSynchronize());  // the twin has nothing of it yet
    faults_.check(driver_.cuMemcpyDtoDAsync_v2(variable.address, variable.real, variable.known.size(), nullptr));
    from_variable(variable);
  } else {
    to_variable(variable);  // memory is as the lost server left it
  }
  return CUDA_SUCCESS;
}

CUresult Variables::add_twin(uint32_t module, uint64_t address, std::string name) {
  const Module* const there = objects_.modules.find(module);
  if (!there) return CUDA_ERROR_INVALID_HANDLE;
  contexts_.use(there->owner.ordinal);
  CUdeviceptr real = 0;
  size_t bytes = 0;
  const CUresult result = driver_.cuModuleGetGlobal_v2(&real, &bytes, there->real, name.c_str());
  if (result != CUDA_SUCCESS) return result;
  if (!live_.contains(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  twins_[address] = {module, address, std::move(name), real, std::vector<std::byte>(bytes)};
  return CUDA_SUCCESS;
}

// The end counts, too: programs name ranges by their two ends. The twin's own memory is larger than the variable.
CUdeviceptr Variables::twin_at(uint64_t address) const {
  auto after = twins_.upper_bound(address);
  if (after == twins_.begin()) return address;
  const Variable& variable = (--after)->second;
  return address - variable.address <= variable.known.size() ? variable.real + (address - variable.address) : address;
}

// A server that has just come finds the twin's content in memory, and the variable as the image has it.
void Variables::to_variable(Variable& variable) {
  const Module* const module = objects_.modules.find(variable.module);
  contexts_.use(module->owner.ordinal);
  const size_t bytes = variable.known.size();
  faults_.check(driver_.cuCtxSynchronize());
  faults_.check(driver_.cuMemcpyDtoDAsync_v2(variable.real, variable.address, bytes, nullptr));
  faults_.check(driver_.cuMemcpyDtoHAsync_v2(variable.known.data(), variable.real, bytes, nullptr));
  faults_.check(driver_.cuStreamSynchronize(nullptr));
}

// For a snapshot: what has been written to the variable since the last one.
void Variables::from_variable(Variable& variable) {
  const Module* const module = objects_.modules.find(variable.module);
  contexts_.use(module->owner.ordinal);
  std::vector<std::byte> now(variable.known.size());
  faults_.check(driver_.cuCtxSynchronize());
  faults_.check(driver_.cuMemcpyDtoHAsync_v2(now.data(), variable.real, now.size(), nullptr));
  faults_.check(driver_.cuStreamSynchronize(nullptr));
  if (now == variable.known) return;
  faults_.check(driver_.cuMemcpyDtoDAsync_v2(variable.address, variable.real, now.size(), nullptr));
  faults_.check(driver_.cuStreamSynchronize(nullptr));
  variable.known = std::move(now);
}

CUresult Variables::on_xmVariables(Record& record) {
  Args_xmVariables args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.module);
  Module* const module = objects_.modules.find(index);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (!live_.contains(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  CUresult result;
  if (current_.mode == Mode::kRun) {
    streams_.mark_work();  // as in a module's load
    CUstream stream = nullptr;
    contexts_.use(module->owner.ordinal);
    // Before a kernel of the module runs, only copies to variables with twins can be under way.
    const bool has_twins = std::any_of(twins_.begin(), twins_.end(),
                                       [&](const auto& twin) { return twin.second.module == index; });
    if (has_twins) faults_.check(driver_.cuCtxSynchronize());
    result = streams_.for_graphs(module->owner.ordinal, &stream);
    if (result == CUDA_SUCCESS) {
      result = placed_.create(index, *module, images_.bytes(module->image), args.address, args.bytes, stream);
    }
  } else {
    result = placed_.adopt(index, *module, args.address, args.bytes);
  }
  if (result != CUDA_SUCCESS) return result;
  module->settings[{kPlaceSetting, 0}] = objects_.records.keep(record.sequence(), record.stored());
  if (current_.mode != Mode::kObjects) return CUDA_SUCCESS;
  // Memory is as the lost server left it.
  if (const Result<> restored = restore(); !restored) current_.broken = restored.why();
  return CUDA_SUCCESS;
}

// A server that has just come has memory again: variables become what that says.
Result<> Variables::restore() {
  const auto module = [this](uint32_t index) -> const Module& { return *objects_.modules.find(index); };
  const auto streams = [this](uint32_t ordinal) {
    CUstream stream = nullptr;
    faults_.check(streams_.for_graphs(ordinal, &stream));
    return stream;
  };
  if (const Result<> restored = placed_.restore(module, streams); !restored) {
    faults_.check(static_cast<CUresult>(restored.error().number));
    return restored;
  }
  for (auto& [address, variable] : twins_) to_variable(variable);  // some of them are the same
  if (!placed_.learn([this](uint32_t ordinal) { return granules_.where(ordinal); })) {
    faults_.give_up(current_.sequence, "the device could not hash the variables of its modules");
  }
  return {};
}

}  // namespace xmig::server
