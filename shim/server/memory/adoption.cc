#include "server/memory/adoption.h"

#include <string>
#include <utility>

namespace xmig::server {
namespace {

bool is_about_peers(CUresult result) {
  switch (result) {
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
    case CUDA_ERROR_PEER_ACCESS_NOT_ENABLED:
    case CUDA_ERROR_TOO_MANY_PEERS:
    case CUDA_ERROR_INVALID_DEVICE:  // of cuMemSetAccess: a device without a way to the memory's
    case CUDA_ERROR_NOT_SUPPORTED:   // of cuMemImportFromShareableHandle, likewise
      return true;
    default: return false;
  }
}

}  // namespace

Result<> Adoption::adopt(Hosted memory) {
  const uint64_t id = memory.id;
  const bool foreign = memory.foreign;
  if (static_cast<uint32_t>(memory.ordinal) >= services_.contexts.count()) {
    return Error{"memory of a device that this server does not have"};
  }
  services_.contexts.use(static_cast<uint32_t>(memory.ordinal));
  CUresult result = foreign ? services_.injector.at_import(++imports_) : CUDA_SUCCESS;
  if (result == CUDA_SUCCESS) {
    switch (memory.kind) {
      case HostedKind::kDevice: result = memory_.hosting.adopt(std::move(memory)); break;
      case HostedKind::kShadow: result = memory_.shadow.adopt(std::move(memory)); break;
      case HostedKind::kImage: result = memory_.images.adopt(std::move(memory)); break;
    }
  }
  services_.faults.check(result);
  if (result == CUDA_SUCCESS) return {};
  return Error{"memory " + std::to_string(id) + " cannot be mapped (CUDA error " + std::to_string(result) + ")",
               foreign && is_about_peers(result) ? "no_peer" : "failed"};
}

}  // namespace xmig::server
