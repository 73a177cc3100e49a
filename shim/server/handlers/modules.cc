// Module images, modules, kernels.
#include <algorithm>
#include <cstring>
#include <string>

#include "journal/module_info.h"
#include "server/executor/executor.h"
#include "server/objects/loading.h"

namespace xmig::server {
namespace {

// What of a module is remembered by which key: see Module::settings.
constexpr uint64_t kGlobalSetting = 1ull << 63;
constexpr uint64_t kLoaded = 1ull << 62;
constexpr uint64_t kVariables = 1ull << 61;

}  // namespace

CUresult Executor::on_xmImage(Record& record) {
  Args_xmImage args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(memory_.mutex);
  note_image(args.image, memory_.images.add_piece(args.image, args.total, args.offset, record.payload()));
  return CUDA_SUCCESS;
}

// An image that is not complete is the load's error, which is where the program can do something about it.
void Executor::note_image(uint64_t number, CUresult result) {
  if (result == CUDA_SUCCESS) return;
  log_(Level::kInfo, "module image " + std::to_string(number) + " cannot be had: CUDA error " + std::to_string(result));
}

CUresult Executor::on_xmImageFile(Record& record) {
  Args_xmImageFile args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const std::span<std::byte> payload = record.payload();
  const std::string path(reinterpret_cast<const char*>(payload.data()), payload.size());
  const std::lock_guard lock(memory_.mutex);
  note_image(args.image, memory_.images.add_file(args.image, args.total, args.offset, path.c_str()));
  return CUDA_SUCCESS;
}

CUresult Executor::on_xmModuleLoad(Record& record) {
  Args_xmModuleLoad args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.module);
  const std::span<const std::byte> image = memory_.images.bytes(args.image);
  memory_.images.tried(args.image);
  if (image.empty()) return CUDA_ERROR_INVALID_IMAGE;
  Module* const slot = objects_.modules.place(index);
  if (!slot) {
    garbage("a new module has a number that is taken, or none");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  // This may take as long as compiling does: the watchdog must see the end of the work before it.
  mark_work();
  contexts_.use(record.header().ordinal);
  Module module;
  if (auto loaded = preload_.take(index, record.header().ordinal, *memory_.images.memory(args.image))) {
    module = std::move(*loaded);
  } else if (const CUresult result = load_module(device_, log_, image, module); result != CUDA_SUCCESS) {
    return result;
  }
  module.owner = {record.header().context, record.header().ordinal};
  module.image = args.image;
  module.creation = objects_.records.keep(record.sequence(), record.stored());
  *slot = std::move(module);
  record.set_reply(slot->description.data(), slot->description.size(), slot->description.size());
  return CUDA_SUCCESS;
}

CUresult Executor::on_xmKernel(Record& record) {
  Args_xmKernel args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.function, journal::Kind::kFunction)) return CUDA_ERROR_INVALID_HANDLE;
  Kernel* const kernel = objects_.kernel(journal::handle_index(args.function));
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  mark_work();  // as in a module's load
  contexts_.use(record.header().ordinal);
  if (const CUresult result = load_kernel(driver_, *kernel); result != CUDA_SUCCESS) return result;
  Module* const module = objects_.modules.find(journal::handle_index(args.function) >> kKernelBits);
  module->settings.try_emplace({args.function, kLoaded}, objects_.records.keep(record.sequence(), record.stored()));
  if (mode_ == Mode::kRestore) return CUDA_SUCCESS;  // nobody asks
  const std::vector<journal::ParameterInfo> parameters = describe_parameters(driver_, *kernel);
  journal::KernelInfo info{static_cast<uint32_t>(parameters.size()), *kernel->parameter_bytes, {}, 0};
  info.variable_bytes = placed_.bytes_for(journal::handle_index(args.function) >> kKernelBits, *module,
                                          memory_.images.bytes(module->image));
  for (uint32_t i = 0; i < journal::kFunctionAttributes; ++i) {
    int value = 0;
    const auto attribute = static_cast<CUfunction_attribute>(i);
    if (driver_.cuFuncGetAttribute(&value, attribute, kernel->real) == CUDA_SUCCESS) info.attributes[i] = value;
  }
  std::vector<std::byte> out;
  append(out, info);
  for (const journal::ParameterInfo& parameter : parameters) append(out, parameter);
  record.set_reply(out.data(), out.size(), out.size());
  return CUDA_SUCCESS;
}

// --- variables that the device placed ---------------------------------------------------------------------------

CUresult Executor::on_xmGlobal(Record& record) {
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

CUresult Executor::on_xmTwin(Record& record) {
  Args_xmTwin args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const std::span<const std::byte> payload = record.payload();
  const std::string name(reinterpret_cast<const char*>(payload.data()), payload.size());
  const CUresult result = add_twin(journal::handle_index(args.module), args.address, name);
  if (result != CUDA_SUCCESS) return result;
  Variable& variable = variables_.at(args.address);
  if (mode_ == Mode::kRun) {
    faults_.check(driver_.cuCtxSynchronize());  // the twin has nothing of it yet
    faults_.check(driver_.cuMemcpyDtoDAsync_v2(variable.address, variable.real, variable.known.size(), nullptr));
    from_variable(variable);
  } else {
    to_variable(variable);  // memory is as the lost server left it
  }
  return CUDA_SUCCESS;
}

CUresult Executor::add_twin(uint32_t module, uint64_t address, std::string name) {
  const Module* const there = objects_.modules.find(module);
  if (!there) return CUDA_ERROR_INVALID_HANDLE;
  contexts_.use(there->owner.ordinal);
  CUdeviceptr real = 0;
  size_t bytes = 0;
  const CUresult result = driver_.cuModuleGetGlobal_v2(&real, &bytes, there->real, name.c_str());
  if (result != CUDA_SUCCESS) return result;
  if (!live(address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  variables_[address] = {module, address, std::move(name), real, std::vector<std::byte>(bytes)};
  return CUDA_SUCCESS;
}

// The end counts, too: programs name ranges by their two ends. The twin's own memory is larger than the variable.
CUdeviceptr Executor::variable_at(uint64_t address) const {
  auto after = variables_.upper_bound(address);
  if (after == variables_.begin()) return address;
  const Variable& variable = (--after)->second;
  return address - variable.address <= variable.known.size() ? variable.real + (address - variable.address) : address;
}

// A server that has just come finds the twin's content in memory, and the variable as the image has it.
void Executor::to_variable(Variable& variable) {
  const Module* const module = objects_.modules.find(variable.module);
  contexts_.use(module->owner.ordinal);
  const size_t bytes = variable.known.size();
  faults_.check(driver_.cuCtxSynchronize());
  faults_.check(driver_.cuMemcpyDtoDAsync_v2(variable.real, variable.address, bytes, nullptr));
  faults_.check(driver_.cuMemcpyDtoHAsync_v2(variable.known.data(), variable.real, bytes, nullptr));
  faults_.check(driver_.cuStreamSynchronize(nullptr));
}

// For a snapshot: what has been written to the variable since the last one.
void Executor::from_variable(Variable& variable) {
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

CUresult Executor::on_xmVariables(Record& record) {
  Args_xmVariables args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.module);
  Module* const module = objects_.modules.find(index);
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (!live(args.address, args.bytes)) return CUDA_ERROR_INVALID_VALUE;
  CUresult result;
  if (mode_ == Mode::kRun) {
    mark_work();  // as in a module's load
    CUstream stream = nullptr;
    contexts_.use(module->owner.ordinal);
    // Before a kernel of the module runs, only copies to variables with twins can be under way.
    const bool has_twins = std::any_of(variables_.begin(), variables_.end(),
                                       [&](const auto& twin) { return twin.second.module == index; });
    if (has_twins) faults_.check(driver_.cuCtxSynchronize());
    result = graph_stream(module->owner.ordinal, &stream);
    if (result == CUDA_SUCCESS) {
      result = placed_.create(index, *module, memory_.images.bytes(module->image), args.address, args.bytes, stream);
    }
  } else {
    result = placed_.adopt(index, *module, args.address, args.bytes);
  }
  if (result != CUDA_SUCCESS) return result;
  module->settings[{kVariables, 0}] = objects_.records.keep(record.sequence(), record.stored());
  if (mode_ != Mode::kObjects) return CUDA_SUCCESS;
  // Memory is as the lost server left it.
  if (const Result<> restored = restore_variables(); !restored) broken_ = restored.why();
  return CUDA_SUCCESS;
}

// A server that has just come has memory again: variables become what that says.
Result<> Executor::restore_variables() {
  const auto module = [this](uint32_t index) -> const Module& { return *objects_.modules.find(index); };
  const auto streams = [this](uint32_t ordinal) {
    CUstream stream = nullptr;
    faults_.check(graph_stream(ordinal, &stream));
    return stream;
  };
  const Result<> restored = placed_.restore(module, streams);
  if (!restored) {
    faults_.check(static_cast<CUresult>(restored.error().number));
    return restored;
  }
  for (auto& [address, variable] : variables_) to_variable(variable);  // some of them are the same
  if (!placed_.learn([this](uint32_t ordinal) { return granules_.where(ordinal); })) {
    faults_.give_up(sequence_, "the device could not hash the variables of its modules");
  }
  return {};
}

CUresult Executor::on_xmModuleInfo(Record& record) {
  Args_xmModuleInfo args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const Module* const module = objects_.modules.find(journal::handle_index(args.module));
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (args.offset > module->description.size()) return CUDA_ERROR_INVALID_VALUE;
  record.set_reply(module->description.data() + args.offset, module->description.size() - args.offset);
  return CUDA_SUCCESS;
}

CUresult Executor::on_xmLink(Record& record) {
  Args_xmLink args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  mark_work();  // as in a module's load
  contexts_.use(record.header().ordinal);
  const std::span<const std::byte> shared = record.payload();
  const std::vector<std::byte> payload(shared.begin(), shared.end());  // the program may change the ring meanwhile
  const auto image = [this](uint64_t number) { return memory_.images.bytes(number); };
  // The rest of an answer is there already, but for a server that has come in between.
  if (args.offset == 0 || linker_.answered() != args.link) {
    if (const CUresult error = linker_.link(args.link, args.complete != 0, payload, image); error != CUDA_SUCCESS) {
      return error;
    }
    faults_.check(static_cast<CUresult>(linker_.reply().result));  // it may be work before it that has failed
  }
  const std::vector<std::byte>& answer = linker_.answer();
  std::vector<std::byte> reply;
  append(reply, linker_.reply());
  const size_t room = record.header().reply - std::min<size_t>(reply.size(), record.header().reply);
  const auto rest = std::span(answer).subspan(std::min<size_t>(args.offset, answer.size()));
  const auto piece = rest.first(std::min(rest.size(), room));
  reply.insert(reply.end(), piece.begin(), piece.end());
  record.set_reply(reply.data(), reply.size());
  return CUDA_SUCCESS;
}

CUresult Executor::on_xmLinkEnd(Record& record) {
  Args_xmLinkEnd args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const std::span<const std::byte> payload = record.payload();
  const std::lock_guard lock(memory_.mutex);
  for (size_t at = 0; at + sizeof(uint64_t) <= payload.size(); at += sizeof(uint64_t)) {
    uint64_t number = 0;
    std::memcpy(&number, payload.data() + at, sizeof(number));
    memory_.images.tried(number);
  }
  linker_.end(args.link);
  return CUDA_SUCCESS;
}

CUresult Executor::on_xmBindGlobal(Record& record) {
  Args_xmBindGlobal args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  Module* const module = objects_.modules.find(journal::handle_index(args.module));
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (args.index >= module->globals.size()) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t bytes = module->globals[args.index].bytes;
  if (!live(args.address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  // Binding gives the variable its initial value. Where a recovery binds again, memory already has what it should have.
  std::vector<std::byte> content;
  if (mode_ != Mode::kRun) {
    content.resize(bytes);
    const CUresult result = driver_.cuMemcpyDtoHAsync_v2(content.data(), args.address, bytes, nullptr);
    if (result != CUDA_SUCCESS) return result;
    if (const CUresult done = driver_.cuStreamSynchronize(nullptr); done != CUDA_SUCCESS) return done;
  }
  if (!device_.bind_global(module->real, args.index, args.address)) return CUDA_ERROR_INVALID_VALUE;
  module->settings[{kGlobalSetting, args.index}] = objects_.records.keep(record.sequence(), record.stored());
  if (content.empty()) return CUDA_SUCCESS;
  const CUresult result = driver_.cuMemcpyHtoDAsync_v2(args.address, content.data(), bytes, nullptr);
  return result == CUDA_SUCCESS ? driver_.cuStreamSynchronize(nullptr) : result;
}

CUresult Executor::on_cuFuncSetAttribute(Record& record) {
  Args_cuFuncSetAttribute args;
  CUfunction function = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!translate(journal::Kind::kFunction, args.hfunc, &function)) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult result = driver_.cuFuncSetAttribute(function, args.attrib, args.value);
  if (result != CUDA_SUCCESS) return result;
  Module* const module = objects_.modules.find(journal::handle_index(args.hfunc) >> kKernelBits);
  const auto key = std::pair(args.hfunc, static_cast<uint64_t>(args.attrib));
  module->settings[key] = objects_.records.keep(record.sequence(), record.stored());
  return CUDA_SUCCESS;
}

CUresult Executor::on_cuModuleUnload(Record& record) {
  Args_cuModuleUnload args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.hmod, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.hmod);
  return objects_.modules.find(index) ? unload(index) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult Executor::unload(uint32_t index) {
  const CUresult result = driver_.cuModuleUnload(objects_.modules.find(index)->real);
  std::erase_if(variables_, [&](const auto& entry) { return entry.second.module == index; });
  placed_.forget(index);
  objects_.modules.erase(index);
  return result;
}

CUresult Executor::on_cuStreamDestroy_v2(Record& record) {
  Args_cuStreamDestroy_v2 args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.hStream, journal::Kind::kStream)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.hStream);
  const Stream* const stream = objects_.streams.find(index);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  leave_work(stream->real);
  const CUresult result = driver_.cuStreamDestroy_v2(stream->real);
  objects_.streams.erase(index);
  return result;
}

}  // namespace xmig::server
