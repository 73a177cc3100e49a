#include "server/cuda/handlers/modules.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "journal/module_info.h"
#include "server/cuda/objects/loading.h"

namespace xmig::server {
namespace {

// What of a module is remembered by which key: see Module::settings.
constexpr uint64_t kGlobalSetting = 1ull << 63;
constexpr uint64_t kLoaded = 1ull << 62;

}  // namespace

Modules::Modules(const Session& session, ModulePreload& preload, Streams& streams, Variables& variables, const Addresses& addresses)
    : device_(session.device),
      driver_(session.device.driver()),
      contexts_(session.services.contexts),
      log_(session.services.log),
      faults_(session.services.faults),
      memory_(session.memory),
      objects_(session.objects),
      current_(session.current),
      preload_(preload),
      streams_(streams),
      variables_(variables),
      addresses_(addresses),
      linker_(driver_) {}

void Modules::destroy_all() {
  objects_.modules.for_each([&](uint32_t, const Module& module) { driver_.cuModuleUnload(module.real); });
}

CUresult Modules::on_xmImage(Record& record) {
  Args_xmImage args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const std::lock_guard lock(memory_.mutex);
  note_image(args.image, memory_.images.add_piece(args.image, args.total, args.offset, record.payload()));
  return CUDA_SUCCESS;
}

// An image that is not complete is the load's error, which is where the program can do something about it.
void Modules::note_image(uint64_t number, Status status) {
  if (status) return;
  log_(Level::kInfo, "module image " + std::to_string(number) + " cannot be had: " + device_.text(status));
}

CUresult Modules::on_xmImageFile(Record& record) {
  Args_xmImageFile args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const std::span<std::byte> payload = record.payload();
  const std::string path(reinterpret_cast<const char*>(payload.data()), payload.size());
  const std::lock_guard lock(memory_.mutex);
  note_image(args.image, memory_.images.add_file(args.image, args.total, args.offset, path.c_str()));
  return CUDA_SUCCESS;
}

CUresult Modules::on_xmModuleLoad(Record& record) {
  Args_xmModuleLoad args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.module);
  const std::span<const std::byte> image = memory_.images.bytes(args.image);
  memory_.images.tried(args.image);
  if (image.empty()) return CUDA_ERROR_INVALID_IMAGE;
  Module* const slot = objects_.modules.place(index);
  if (!slot) {
    current_.garbage("a new module has a number that is taken, or none");
    return CUDA_ERROR_INVALID_HANDLE;
  }
  // This may take as long as compiling does: the watchdog must see the end of the work before it.
  streams_.mark_work();
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

CUresult Modules::on_xmKernel(Record& record) {
  Args_xmKernel args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.function, journal::Kind::kFunction)) return CUDA_ERROR_INVALID_HANDLE;
  Kernel* const kernel = objects_.kernel(journal::handle_index(args.function));
  if (!kernel) return CUDA_ERROR_INVALID_HANDLE;
  streams_.mark_work();  // as in a module's load
  contexts_.use(record.header().ordinal);
  if (const CUresult result = load_kernel(driver_, *kernel); result != CUDA_SUCCESS) return result;
  Module* const module = objects_.modules.find(journal::handle_index(args.function) >> kKernelBits);
  module->settings.try_emplace({args.function, kLoaded}, objects_.records.keep(record.sequence(), record.stored()));
  if (current_.mode == Mode::kRestore) return CUDA_SUCCESS;  // nobody asks
  const std::vector<journal::ParameterInfo> parameters = describe_parameters(driver_, *kernel);
  journal::KernelInfo info{static_cast<uint32_t>(parameters.size()), *kernel->parameter_bytes, {}, 0};
  info.variable_bytes = variables_.bytes_for(journal::handle_index(args.function) >> kKernelBits, *module,
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

CUresult Modules::on_xmModuleInfo(Record& record) {
  Args_xmModuleInfo args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const Module* const module = objects_.modules.find(journal::handle_index(args.module));
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (args.offset > module->description.size()) return CUDA_ERROR_INVALID_VALUE;
  record.set_reply(module->description.data() + args.offset, module->description.size() - args.offset);
  return CUDA_SUCCESS;
}

CUresult Modules::on_xmLink(Record& record) {
  Args_xmLink args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  streams_.mark_work();  // as in a module's load
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

CUresult Modules::on_xmLinkEnd(Record& record) {
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

CUresult Modules::on_xmBindGlobal(Record& record) {
  Args_xmBindGlobal args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.module, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  Module* const module = objects_.modules.find(journal::handle_index(args.module));
  if (!module) return CUDA_ERROR_INVALID_HANDLE;
  if (args.index >= module->globals.size()) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t bytes = module->globals[args.index].bytes;
  if (!addresses_.live(args.address, bytes)) return CUDA_ERROR_INVALID_VALUE;
  // Binding gives the variable its initial value. Where a recovery binds again, memory already has what it should have.
  std::vector<std::byte> content;
  if (current_.mode != Mode::kRun) {
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

CUresult Modules::on_cuFuncSetAttribute(Record& record) {
  Args_cuFuncSetAttribute args;
  CUfunction function = nullptr;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!objects_.translate(args.hfunc, &function)) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult result = driver_.cuFuncSetAttribute(function, args.attrib, args.value);
  if (result != CUDA_SUCCESS) return result;
  Module* const module = objects_.modules.find(journal::handle_index(args.hfunc) >> kKernelBits);
  const auto key = std::pair(args.hfunc, static_cast<uint64_t>(args.attrib));
  module->settings[key] = objects_.records.keep(record.sequence(), record.stored());
  return CUDA_SUCCESS;
}

CUresult Modules::on_cuModuleUnload(Record& record) {
  Args_cuModuleUnload args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  if (!journal::handle_is(args.hmod, journal::Kind::kModule)) return CUDA_ERROR_INVALID_HANDLE;
  const uint32_t index = journal::handle_index(args.hmod);
  return objects_.modules.find(index) ? unload(index) : CUDA_ERROR_INVALID_HANDLE;
}

CUresult Modules::unload(uint32_t index) {
  const CUresult result = driver_.cuModuleUnload(objects_.modules.find(index)->real);
  variables_.forget(index);
  objects_.modules.erase(index);
  return result;
}

}  // namespace xmig::server
