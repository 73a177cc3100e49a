// Launches that only the device can judge: cooperative ones, and clusters of blocks. Whether they fit it depends on the
// kernel, its shape and the device; so the first launch of each shape waits for the driver's own answer, and what it took
// once is queued like any other from then on.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>
#include <span>

namespace xmig::client {

struct Function;

// Everything that the device's answer depends on.
struct LaunchShape {
  uint64_t function = 0;
  std::array<unsigned int, 3> grid{}, block{};
  unsigned int shared_bytes = 0;
  bool cooperative = false;
  std::array<unsigned int, 3> cluster{};    // {0, 0, 0}: none given
  std::array<unsigned int, 3> preferred{};  // likewise

  auto operator<=>(const LaunchShape&) const = default;
};

// Is it such a launch? Then `shape` is completed by what the attributes say.
bool device_must_judge(const Function& function, std::span<const CUlaunchAttribute> attributes, LaunchShape& shape);

// Has the device taken one of this shape?
bool accepted_before(const LaunchShape& shape);
void accepted(const LaunchShape& shape);
// Something was set on the function, or its number will be used again.
void forget_launches(const Function& function);

}  // namespace xmig::client
