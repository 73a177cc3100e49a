#include "nvml/kernel.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace xmig::nvml {
namespace {

constexpr const char* kVendor = "0x10de";  // NVIDIA

std::optional<std::string> line_of(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "re");
  if (!file) return std::nullopt;
  std::array<char, 256> line{};
  const bool read = std::fgets(line.data(), line.size(), file) != nullptr;
  std::fclose(file);
  const std::string_view text = read ? std::string_view(line.data()) : std::string_view();
  const std::string_view content = text.substr(0, text.find('\n'));
  if (content.empty()) return std::nullopt;
  return std::string(content);
}

const char* file_of(Link what) {
  switch (what) {
    case Link::kCurrentGeneration: return "current_link_speed";
    case Link::kCurrentWidth: return "current_link_width";
    case Link::kMostGeneration: return "max_link_speed";
    case Link::kMostWidth: return "max_link_width";
  }
  return "";
}

// By the transfers of a lane: "16.0 GT/s PCIe".
std::optional<unsigned int> generation_of(double gigatransfers) {
  constexpr std::array kGenerations{2.5, 5.0, 8.0, 16.0, 32.0, 64.0};
  for (unsigned int i = 0; i < kGenerations.size(); ++i) {
    if (gigatransfers == kGenerations[i]) return i + 1;
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> kernel_driver_version() { return line_of("/sys/module/nvidia/version"); }

std::optional<unsigned int> link_of(const Device& device, Link what) {
  std::array<char, 64> folder;
  std::snprintf(folder.data(), folder.size(), "/sys/bus/pci/devices/%04x:%02x:%02x.0/", static_cast<unsigned int>(device.domain),
                static_cast<unsigned int>(device.bus), static_cast<unsigned int>(device.slot));
  // A device of another kind may have such an address, too.
  if (line_of(std::string(folder.data()) + "vendor") != kVendor) return std::nullopt;
  const std::optional<std::string> text = line_of(std::string(folder.data()) + file_of(what));
  if (!text) return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(text->c_str(), &end);
  if (end == text->c_str()) return std::nullopt;  // "Unknown"
  if (what == Link::kCurrentGeneration || what == Link::kMostGeneration) return generation_of(value);
  return value >= 1 && value <= 32 ? std::optional(static_cast<unsigned int>(value)) : std::nullopt;
}

}  // namespace xmig::nvml
