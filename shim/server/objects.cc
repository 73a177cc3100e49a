#include "server/objects.h"

#include <algorithm>

namespace xmig::server {

std::vector<StoredRecord> Objects::stored() {
  std::vector<StoredRecord> all;
  streams.for_each([&](uint32_t, const Stream& stream) { all.push_back(stream.creation); });
  events.for_each([&](uint32_t, const Event& event) { all.push_back(event.creation); });
  for (const auto& [address, pin] : pins) all.push_back(pin.creation);
  for (const auto& [which, limit] : limits) all.push_back(limit.creation);
  graphs.for_each([&](uint32_t, const GraphExec& graph) { all.push_back(graph.creation); });
  modules.for_each([&](uint32_t, const Module& module) {
    all.push_back(module.creation);
    for (const auto& [what, setting] : module.settings) all.push_back(setting);
  });
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
  return all;
}

}  // namespace xmig::server
