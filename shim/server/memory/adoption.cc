#include "server/memory/adoption.h"

#include <string>
#include <utility>

namespace xmig::server {

Result<> Adoption::adopt(Hosted memory) {
  const uint64_t id = memory.id;
  const bool foreign = memory.foreign;
  if (static_cast<uint32_t>(memory.ordinal) >= services_.contexts.count()) {
    return Error{"memory of a device that this server does not have"};
  }
  // An image is a file, of no device: to adopt it opens none.
  if (memory.kind != HostedKind::kImage) services_.contexts.use(static_cast<uint32_t>(memory.ordinal));
  Status result = foreign ? services_.injector.at_import(++imports_) : Status{};
  if (result) {
    switch (memory.kind) {
      case HostedKind::kDevice: result = memory_.hosting.adopt(std::move(memory)); break;
      case HostedKind::kShadow: result = memory_.shadow.adopt(std::move(memory)); break;
      case HostedKind::kImage: result = memory_.images.adopt(std::move(memory)); break;
    }
  }
  services_.faults.check(result);
  if (result) return {};
  return Error{"memory " + std::to_string(id) + " cannot be mapped (" + services_.device.text(result) + ")",
               foreign && result.problem() == Problem::kUnreachable ? "no_peer" : "failed"};
}

}  // namespace xmig::server
