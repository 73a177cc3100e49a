// $CUDA_VISIBLE_DEVICES, as far as it is read without the daemon (which reads it whole: xmigd/devices/visible.py).
#pragma once

#include <algorithm>
#include <string_view>

namespace xmig {

// It is a list up to the first entry that names no device: with none before that, there are no devices.
inline bool names_devices(std::string_view list) {
  list.remove_prefix(std::min(list.find_first_not_of(' '), list.size()));
  return !list.empty() && ((list[0] >= '0' && list[0] <= '9') || list.starts_with("GPU-") || list.starts_with("MIG-"));
}

}  // namespace xmig
