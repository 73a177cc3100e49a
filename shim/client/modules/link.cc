// The driver's linker. It runs where the driver is: each call that adds an input sends it and has the server add it, so that
// what is wrong with it is reported there, as natively; the last one brings the image. journal/link_request.h has the messages.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "client/bootstrap/message.h"
#include "client/journal/append.h"
#include "client/journal/context.h"
#include "client/modules/image.h"
#include "client/modules/modules.h"
#include "journal/link_request.h"
#include "local.h"

namespace xmig::client {
namespace {

constexpr size_t kPiece = 64 << 10;
constexpr uint64_t kMaxImage = 1ull << 30;

using Options = std::vector<journal::LinkOption>;

struct Input {
  uint64_t image;
  uint32_t type;
  Options options;
  std::string name;
};

// Where the program wants to read what the linker has to say: a buffer, and the option value that says how long it is and
// from then on how much is in it.
struct Log {
  char* buffer = nullptr;
  void** bytes = nullptr;
  uint32_t room = 0;

  void size_at(void** value) {
    bytes = value;
    room = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(*value));
  }
  void write(std::span<const std::byte> text) const {
    if (!buffer || room == 0) return;
    const size_t fitting = std::min<size_t>(text.size(), room - 1);
    std::memcpy(buffer, text.data(), fitting);
    buffer[fitting] = 0;
    *bytes = reinterpret_cast<void*>(fitting);
  }
};

struct Link {
  uint64_t number = 0;
  Options options;
  Log info, error;
  std::vector<Input> inputs;
  std::vector<std::byte> image;
};

std::mutex mutex;  // over all links: linking is no hot path
std::set<Link*>& links() {
  static auto* const all = new std::set<Link*>;
  return *all;
}

Link* find(CUlinkState state) {
  auto* const link = reinterpret_cast<Link*>(state);
  return links().contains(link) ? link : nullptr;
}

CUresult read_options(unsigned int count, const CUjit_option* names, void** values, Options& options, Link* link) {
  if (count != 0 && (!names || !values)) return CUDA_ERROR_INVALID_VALUE;
  if (count > journal::kMaxLinkOptions / 2) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned int i = 0; i < count; ++i) {
    const CUjit_option name = names[i];
    if (journal::is_number(name)) {
      options.push_back({static_cast<uint32_t>(name), 0, reinterpret_cast<uint64_t>(values[i])});
    } else if (link && name == CU_JIT_INFO_LOG_BUFFER) {
      link->info.buffer = static_cast<char*>(values[i]);
    } else if (link && name == CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES) {
      link->info.size_at(&values[i]);
    } else if (link && name == CU_JIT_ERROR_LOG_BUFFER) {
      link->error.buffer = static_cast<char*>(values[i]);
    } else if (link && name == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) {
      link->error.size_at(&values[i]);
    } else if (static_cast<uint32_t>(name) >= CU_JIT_NUM_OPTIONS) {
      return CUDA_ERROR_INVALID_VALUE;
    } else if (!journal::is_answer(name)) {
      complain("the linker's option %d is not supported: the call returned CUDA_ERROR_NOT_SUPPORTED", name);
      return CUDA_ERROR_NOT_SUPPORTED;
    }
  }
  return CUDA_SUCCESS;
}

template <typename T>
void put(std::vector<std::byte>& to, const T* values, size_t count = 1) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(values);
  to.insert(to.end(), bytes, bytes + sizeof(T) * count);
}

std::vector<std::byte> request_of(const Link& link) {
  std::vector<std::byte> payload;
  const journal::LinkRequest request{static_cast<uint32_t>(link.options.size()),
                                     static_cast<uint32_t>(link.inputs.size())};
  put(payload, &request);
  put(payload, link.options.data(), link.options.size());
  for (const Input& input : link.inputs) {
    const journal::LinkInput one{input.image, input.type, static_cast<uint32_t>(input.options.size()),
                                 static_cast<uint32_t>(input.name.size()), 0};
    put(payload, &one);
    put(payload, input.options.data(), input.options.size());
    put(payload, input.name.data(), input.name.size());
    payload.resize(journal::align8(payload.size()));
  }
  return payload;
}

// Have the server do what the link's inputs ask for; all of the answer.
CUresult ask(const Link& link, bool complete, journal::LinkReply& reply, std::vector<std::byte>& answer) {
  const std::vector<std::byte> payload = request_of(link);
  if (payload.size() > journal::kMaxPayload || link.inputs.size() > journal::kMaxLinkInputs) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  std::vector<std::byte> piece(kPiece);
  uint64_t all = 0;
  for (;;) {
    const Args_xmLink args{.link = link.number, .offset = answer.size(), .complete = complete, .reserved = 0};
    const Slice slice{payload.data(), payload.size()};
    Pending pending = start(Op::xmLink, &args, sizeof(args), {&slice, 1}, piece.size());
    size_t used = 0;
    if (const CUresult error = finish(pending, piece.data(), piece.size(), &used); error != CUDA_SUCCESS) return error;
    if (used < sizeof(reply)) return CUDA_ERROR_UNKNOWN;
    const uint64_t before = reply.image_bytes;
    std::memcpy(&reply, piece.data(), sizeof(reply));
    if (!answer.empty() && reply.image_bytes != before) {  // another server's linker, and another image: from its beginning
      answer.clear();
      continue;
    }
    all = uint64_t{reply.image_bytes} + reply.info_bytes + reply.error_bytes;
    if (reply.image_bytes > kMaxImage) return CUDA_ERROR_UNKNOWN;
    if (answer.size() >= all) break;
    const size_t more = std::min<uint64_t>(used - sizeof(reply), all - answer.size());
    if (more == 0) return CUDA_ERROR_UNKNOWN;
    answer.insert(answer.end(), piece.begin() + sizeof(reply), piece.begin() + static_cast<long>(sizeof(reply) + more));
    if (answer.size() == all) break;
  }
  answer.resize(all);
  return static_cast<CUresult>(reply.result);
}

// The same, and the program's logs are written.
CUresult ask(Link& link, bool complete, std::vector<std::byte>* image) {
  journal::LinkReply reply{};
  std::vector<std::byte> answer;
  const CUresult result = ask(link, complete, reply, answer);
  if (answer.size() != reply.image_bytes + reply.info_bytes + reply.error_bytes) return result;  // the call itself failed
  const std::span text = std::span(answer).subspan(reply.image_bytes);
  link.info.write(text.first(reply.info_bytes));
  link.error.write(text.subspan(reply.info_bytes));
  answer.resize(reply.image_bytes);
  if (image) *image = std::move(answer);
  return result;
}

void forget_images(uint64_t link, std::span<const Input> inputs) {
  std::vector<uint64_t> numbers;
  for (const Input& input : inputs) numbers.push_back(input.image);
  const Args_xmLinkEnd args{.link = link};
  const Slice slice{numbers.data(), numbers.size() * sizeof(uint64_t)};
  append(Op::xmLinkEnd, &args, sizeof(args), {&slice, 1});
}

CUresult add(CUlinkState state, CUjitInputType type, std::span<const std::byte> data, const char* name,
             unsigned int count, const CUjit_option* options, void** values) {
  const Thread& thread = this_thread();
  if (const Current now = current(thread); now.error != CUDA_SUCCESS) return now.error;
  const std::lock_guard lock(mutex);
  Link* const link = find(state);
  if (!link) return CUDA_ERROR_INVALID_HANDLE;
  if (data.empty() || static_cast<uint32_t>(type) >= CU_JIT_NUM_INPUT_TYPES) return CUDA_ERROR_INVALID_VALUE;
  Input input{0, static_cast<uint32_t>(type), {}, name ? name : ""};
  if (const CUresult error = read_options(count, options, values, input.options, nullptr); error != CUDA_SUCCESS) {
    return error;
  }
  // The driver takes a text to end with a zero, whatever its length says.
  std::vector<std::byte> text;
  if (type == CU_JIT_INPUT_PTX && data.back() != std::byte{0}) {
    text.assign(data.begin(), data.end());
    text.push_back(std::byte{0});
    data = text;
  }
  bool as_file = false;  // it may be in a file that is gone before the link is
  if (const CUresult error = send_image(data, &input.image, &as_file); error != CUDA_SUCCESS) return error;
  link->inputs.push_back(std::move(input));
  const CUresult result = ask(*link, false, nullptr);
  if (result != CUDA_SUCCESS) {
    complain("an input of %zu bytes cannot be linked: CUDA error %d", data.size(), result);
    forget_images(0, std::span(link->inputs).last(1));
    link->inputs.pop_back();
  }
  return result;
}

}  // namespace

CUresult cuLinkCreate_v2(unsigned int numOptions, CUjit_option* options, void** optionValues, CUlinkState* stateOut) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!stateOut) return CUDA_ERROR_INVALID_VALUE;
  const Thread& thread = this_thread();
  if (const Current now = current(thread); now.error != CUDA_SUCCESS) return now.error;
  static std::atomic<uint64_t> next{1};
  auto link = std::make_unique<Link>();
  link->number = next.fetch_add(1);
  const CUresult error = read_options(numOptions, options, optionValues, link->options, link.get());
  if (error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(mutex);
  links().insert(link.get());
  *stateOut = reinterpret_cast<CUlinkState>(link.release());
  return CUDA_SUCCESS;
}

CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void* data, size_t size, const char* name,
                          unsigned int numOptions, CUjit_option* options, void** optionValues) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!data) return CUDA_ERROR_INVALID_VALUE;
  return add(state, type, {static_cast<const std::byte*>(data), size}, name, numOptions, options, optionValues);
}

CUresult cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char* path, unsigned int numOptions,
                          CUjit_option* options, void** optionValues) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!path) return CUDA_ERROR_INVALID_VALUE;
  size_t bytes = 0;
  const std::vector<std::byte> data = read_image_file(path, &bytes);
  if (data.empty()) return CUDA_ERROR_FILE_NOT_FOUND;
  return add(state, type, std::span(data).first(bytes), path, numOptions, options, optionValues);
}

CUresult cuLinkComplete(CUlinkState state, void** cubinOut, size_t* sizeOut) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const Thread& thread = this_thread();
  if (const Current now = current(thread); now.error != CUDA_SUCCESS) return now.error;
  const std::lock_guard lock(mutex);
  Link* const link = find(state);
  if (!link) return CUDA_ERROR_INVALID_HANDLE;
  if (!cubinOut) return CUDA_ERROR_INVALID_VALUE;
  if (link->image.empty()) {
    const CUresult result = ask(*link, true, &link->image);
    if (result != CUDA_SUCCESS) {
      complain("%zu inputs cannot be linked: CUDA error %d", link->inputs.size(), result);
      return result;
    }
  }
  *cubinOut = link->image.data();
  if (sizeOut) *sizeOut = link->image.size();
  return CUDA_SUCCESS;
}

CUresult cuLinkDestroy(CUlinkState state) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  const std::lock_guard lock(mutex);
  const std::unique_ptr<Link> link(find(state));
  if (!link) return CUDA_ERROR_INVALID_HANDLE;
  links().erase(link.get());
  if (!link->inputs.empty()) forget_images(link->number, link->inputs);
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
