#include "server/cuda/objects/linker.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "server/records/reader.h"

namespace xmig::server {
namespace {

constexpr size_t kLogBytes = 16 << 10;

// A log that the driver has written: up to its first zero.
std::span<const std::byte> text_of(const std::array<char, kLogBytes>& log) {
  return std::as_bytes(std::span(log).first(::strnlen(log.data(), log.size())));
}

}  // namespace

struct Linker::Options {
  std::vector<CUjit_option> options;
  std::vector<void*> values;

  void add(CUjit_option option, uint64_t value) {
    options.push_back(option);
    values.push_back(reinterpret_cast<void*>(value));
  }
  bool read(Reader& reader, uint32_t count) {
    if (count > journal::kMaxLinkOptions) return false;
    for (uint32_t i = 0; i < count; ++i) {
      journal::LinkOption one;
      if (!reader.get(one) || !journal::is_number(one.option)) return false;
      add(static_cast<CUjit_option>(one.option), one.value);
    }
    return true;
  }
};

struct Linker::Input {
  journal::LinkInput of;
  Options options;
  std::string name;
};

// The driver writes into the logs as long as its state lives, and reads the values of its options then.
struct Linker::State {
  uint64_t number = 0;
  std::vector<uint64_t> added;  // their images
  CUlinkState real = nullptr;
  Options options;
  std::array<char, kLogBytes> info{}, error{};
};

Linker::Linker(const DriverTable& driver) : driver_(driver) {}
Linker::~Linker() {
  if (state_) end(state_->number);
}

CUresult Linker::link(uint64_t number, bool complete, Bytes payload, const std::function<Bytes(uint64_t)>& image) {
  Reader reader(payload);
  journal::LinkRequest request;
  Options options;
  if (!reader.get(request) || request.input_count > journal::kMaxLinkInputs ||
      !options.read(reader, request.option_count)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::vector<Input> inputs(request.input_count);
  for (Input& input : inputs) {
    Bytes name;
    if (!reader.get(input.of) || input.of.type >= CU_JIT_NUM_INPUT_TYPES ||
        !input.options.read(reader, input.of.option_count) || !reader.get(name, input.of.name_bytes)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    input.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
  }
  if (!reader.empty()) return CUDA_ERROR_INVALID_VALUE;

  const bool goes_on = state_ && state_->number == number && state_->added.size() <= inputs.size() &&
                       std::equal(state_->added.begin(), state_->added.end(), inputs.begin(),
                                  [](uint64_t added, const Input& input) { return added == input.of.image; });
  if (!goes_on) {
    if (state_) end(state_->number);
    state_ = std::make_unique<State>();
    state_->number = number;
    state_->options = std::move(options);
    const auto log = [this](CUjit_option buffer, CUjit_option size, std::array<char, kLogBytes>& text) {
      state_->options.add(buffer, reinterpret_cast<uint64_t>(text.data()));
      state_->options.add(size, text.size());
    };
    log(CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, state_->info);
    log(CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, state_->error);
    Options& all = state_->options;
    const CUresult made = driver_.cuLinkCreate_v2(static_cast<unsigned>(all.options.size()), all.options.data(),
                                                  all.values.data(), &state_->real);
    if (made != CUDA_SUCCESS) {
      answer_with(made, {});
      state_.reset();
      return CUDA_SUCCESS;
    }
  }
  CUresult result = CUDA_SUCCESS;
  for (size_t i = state_->added.size(); i < inputs.size() && result == CUDA_SUCCESS; ++i) {
    const Bytes bytes = image(inputs[i].of.image);
    result = bytes.empty() ? CUDA_ERROR_INVALID_IMAGE : add(inputs[i], bytes);
    if (result == CUDA_SUCCESS) state_->added.push_back(inputs[i].of.image);
  }
  void* linked = nullptr;
  size_t size = 0;
  if (complete && result == CUDA_SUCCESS) result = driver_.cuLinkComplete(state_->real, &linked, &size);
  answer_with(result, linked ? Bytes(static_cast<const std::byte*>(linked), size) : Bytes());
  if (complete || result != CUDA_SUCCESS) end(number);  // what has failed may be half done
  return CUDA_SUCCESS;
}

CUresult Linker::add(const Input& input, Bytes bytes) {
  Options options = input.options;
  // The driver's interface does not say const; it does not write.
  return driver_.cuLinkAddData_v2(state_->real, static_cast<CUjitInputType>(input.of.type),
                                  const_cast<std::byte*>(bytes.data()), bytes.size(), input.name.c_str(),
                                  static_cast<unsigned>(options.options.size()), options.options.data(),
                                  options.values.data());
}

void Linker::answer_with(CUresult result, Bytes image) {
  const Bytes info = text_of(state_->info), error = text_of(state_->error);
  reply_ = {result, static_cast<uint32_t>(info.size()), static_cast<uint32_t>(error.size()), 0, image.size()};
  answered_ = state_->number;
  answer_.clear();
  for (const Bytes part : {image, info, error}) answer_.insert(answer_.end(), part.begin(), part.end());
}

void Linker::end(uint64_t number) {
  if (!state_ || state_->number != number) return;
  driver_.cuLinkDestroy(state_->real);
  state_.reset();
}

}  // namespace xmig::server
