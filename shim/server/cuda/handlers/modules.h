// Module images, modules, kernels. The executor's thread alone; images lie under ProcessMemory::mutex.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "server/cuda/handlers/addresses.h"
#include "server/cuda/handlers/session.h"
#include "server/cuda/handlers/streams.h"
#include "server/cuda/handlers/variables.h"
#include "server/cuda/objects/linker.h"
#include "server/cuda/objects/module_preload.h"

namespace xmig::server {

class Modules {
 public:
  Modules(const Session& session, ModulePreload& preload, Streams& streams, Variables& variables, const Addresses& addresses);
  Modules(const Modules&) = delete;
  void destroy_all();

  CUresult unload(uint32_t index);

  CUresult on_xmImage(Record& record);
  CUresult on_xmImageFile(Record& record);
  CUresult on_xmModuleLoad(Record& record);
  CUresult on_xmModuleInfo(Record& record);
  CUresult on_xmKernel(Record& record);
  CUresult on_xmLink(Record& record);
  CUresult on_xmLinkEnd(Record& record);
  CUresult on_xmBindGlobal(Record& record);
  CUresult on_cuFuncSetAttribute(Record& record);
  CUresult on_cuModuleUnload(Record& record);

 private:
  void note_image(uint64_t number, Status status);

  device::Device& device_;
  const DriverTable& driver_;
  Contexts& contexts_;
  Log& log_;
  Faults& faults_;
  ProcessMemory& memory_;
  Objects& objects_;
  Current& current_;
  ModulePreload& preload_;
  Streams& streams_;
  Variables& variables_;
  const Addresses& addresses_;
  Linker linker_;
};

}  // namespace xmig::server
