#include "device/null/linker.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "device/image.h"

namespace xmig::device {
namespace {

struct State {
  char* log = nullptr;  // of errors
  void** log_bytes = nullptr;
  std::string text;             // PTX
  std::vector<std::byte> last;  // of anything else, which nobody here can put together

  void fail(const char* what, const std::string& why) const {
    if (!log || !log_bytes) return;
    const auto room = reinterpret_cast<uintptr_t>(*log_bytes);
    const int length = std::snprintf(log, room, "%s: %s", what, why.c_str());
    *log_bytes = reinterpret_cast<void*>(static_cast<uintptr_t>(length));
  }
};

State& state_of(CUlinkState state) { return *reinterpret_cast<State*>(state); }

// One text has each of these once, at its beginning.
std::string without_header(std::string_view text) {
  std::string rest;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1) + 1;
    const std::string_view line = text.substr(0, end);
    if (!line.starts_with(".version") && !line.starts_with(".target") && !line.starts_with(".address_size")) rest += line;
    text.remove_prefix(end);
  }
  return rest;
}

CUresult create(unsigned int count, CUjit_option* options, void** values, CUlinkState* out) {
  auto* const state = new State;
  for (unsigned int i = 0; i < count; ++i) {
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER) state->log = static_cast<char*>(values[i]);
    if (options[i] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) state->log_bytes = &values[i];
  }
  *out = reinterpret_cast<CUlinkState>(state);
  return CUDA_SUCCESS;
}

CUresult add(CUlinkState handle, CUjitInputType type, void* data, size_t bytes, const char* name, unsigned int,
             CUjit_option*, void**) {
  State& state = state_of(handle);
  const Bytes given{static_cast<const std::byte*>(data), bytes};
  if (type == CU_JIT_INPUT_LIBRARY) {
    constexpr std::string_view kArchive = "!<arch>\n";
    const std::string_view text(static_cast<const char*>(data), bytes);
    return text.starts_with(kArchive) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
  }
  if (const Result<Image> image = read_any(given); !image) {
    state.fail(name, image.why());
    return result_of(image.error());
  }
  if (type == CU_JIT_INPUT_PTX) {
    const std::string_view text(static_cast<const char*>(data), ::strnlen(static_cast<const char*>(data), bytes));
    state.text += state.text.empty() ? std::string(text) : without_header(text);
    state.text += '\n';
  } else {
    state.last.assign(given.begin(), given.end());
  }
  return CUDA_SUCCESS;
}

CUresult complete(CUlinkState handle, void** image, size_t* bytes) {
  State& state = state_of(handle);
  if (state.text.empty() && state.last.empty()) {
    state.fail("link", "there is nothing to link");
    return CUDA_ERROR_INVALID_IMAGE;
  }
  if (state.text.empty()) {
    *image = state.last.data();
    *bytes = state.last.size();
  } else {
    *image = state.text.data();
    *bytes = state.text.size() + 1;
  }
  return CUDA_SUCCESS;
}

}  // namespace

void add_linker_functions(DriverTable& table) {
  table.cuLinkCreate_v2 = create;
  table.cuLinkAddData_v2 = add;
  table.cuLinkComplete = complete;
  table.cuLinkDestroy = [](CUlinkState state) {
    delete &state_of(state);
    return CUDA_SUCCESS;
  };
}

}  // namespace xmig::device
