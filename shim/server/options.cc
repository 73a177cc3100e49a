#include "server/options.h"

#include <charconv>
#include <cstring>
#include <string_view>

#include "journal/layout.h"

namespace xmig::server {
namespace {

template <typename T>
bool parse_number(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() && !text.empty();
}

// "late", or "0,2": the program's ordinals.
bool parse_open(std::string_view text, uint64_t& bits) {
  bits = 0;
  if (text == "late") return true;
  for (std::string_view rest = text;;) {
    const size_t comma = rest.find(',');
    uint32_t ordinal = 0;
    if (!parse_number(rest.substr(0, comma), ordinal) || ordinal >= journal::kMaxDevices) return false;
    bits |= uint64_t{1} << ordinal;
    if (comma == std::string_view::npos) return true;
    rest.remove_prefix(comma + 1);
  }
}

}  // namespace

bool parse_device(std::string_view text, Options& options) {
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  options.device_kind = text.substr(0, colon);
  options.ordinals.clear();
  for (std::string_view rest = text.substr(colon + 1);;) {
    const size_t comma = rest.find(',');
    int ordinal = 0;
    if (!parse_number(rest.substr(0, comma), ordinal) || ordinal < 0) return false;
    options.ordinals.push_back(ordinal);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  return options.ordinals.size() <= journal::kMaxDevices;
}

std::string Options::device() const {
  std::string text = device_kind;
  for (size_t i = 0; i < ordinals.size(); ++i) text += (i ? "," : ":") + std::to_string(ordinals[i]);
  return text;
}

Result<Options> parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    std::string_view name = argv[i];
    std::string_view value;
    if (const size_t equals = name.find('='); equals != std::string_view::npos) {
      value = name.substr(equals + 1);
      name = name.substr(0, equals);
    } else if (i + 1 < argc) {
      value = argv[++i];
    }
    bool good = !value.empty();
    if (name == "--device") {
      good = good && parse_device(value, options);
    } else if (name == "--memory") {
      good = good && parse_number(value, options.memory_bytes);
    } else if (name == "--open") {
      good = good && parse_open(value, options.open);
    } else if (name == "--control-fd") {
      good = good && parse_number(value, options.control_fd) && options.control_fd >= 0;
    } else if (name == "--runtime-dir") {
      options.runtime_dir = value;
    } else if (name == "--address") {
      options.address = value;
    } else {
      return Error{
          "unknown option " + std::string(name) +
          "; usage: xmig-server --device KIND:ORDINAL[,ORDINAL] [--memory BYTES] [--open late|ORDINAL[,ORDINAL]] --control-fd N [--runtime-dir DIR] [--address ADDRESS]"};
    }
    if (!good) return Error{"option " + std::string(name) + " cannot be '" + std::string(value) + "'"};
  }
  if (options.device_kind.empty() || options.control_fd < 0) {
    return Error{"--device and --control-fd are needed; this program is started by xmigd, not by hand"};
  }
  return options;
}

}  // namespace xmig::server
