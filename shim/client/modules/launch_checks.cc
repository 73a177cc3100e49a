#include "client/modules/launch_checks.h"

#include <mutex>
#include <set>

#include "client/modules/modules.h"

namespace xmig::client {
namespace {

std::mutex shapes_mutex;
std::set<LaunchShape>& shapes = *new std::set<LaunchShape>;  // never destroyed: programs launch from exit handlers

template <typename Dimensions>
std::array<unsigned int, 3> three(const Dimensions& of) {
  return {of.x, of.y, of.z};
}

}  // namespace

bool device_must_judge(const Function& function, std::span<const CUlaunchAttribute> attributes, LaunchShape& shape) {
  for (const CUlaunchAttribute& attribute : attributes) {
    const CUlaunchAttributeValue& value = attribute.value;
    switch (attribute.id) {
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE: shape.cooperative |= value.cooperative != 0; break;
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: shape.cluster = three(value.clusterDim); break;
      case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION: shape.preferred = three(value.preferredClusterDim); break;
      default: break;
    }
  }
  constexpr std::array<unsigned int, 3> kNone{}, kOne{1, 1, 1};
  const auto plain = [&](const auto& dimensions) { return dimensions == kNone || dimensions == kOne; };
  return shape.cooperative || function.clustered() || !plain(shape.cluster) || !plain(shape.preferred);
}

bool accepted_before(const LaunchShape& shape) {
  const std::lock_guard lock(shapes_mutex);
  return shapes.contains(shape);
}

void accepted(const LaunchShape& shape) {
  const std::lock_guard lock(shapes_mutex);
  shapes.insert(shape);
}

void forget_launches(const Function& function) {
  const std::lock_guard lock(shapes_mutex);
  shapes.erase(shapes.lower_bound({.function = function.handle}), shapes.lower_bound({.function = function.handle + 1}));
}

}  // namespace xmig::client
