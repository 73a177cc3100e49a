// The driver's linker, on behalf of a program. What the program has added is in the requests, all of it each time, so that any
// server can go on: a state of the driver's is only kept to save doing the same again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "driver_table.h"
#include "journal/link_request.h"

namespace xmig::server {

class Linker {
 public:
  using Bytes = std::span<const std::byte>;

  explicit Linker(const DriverTable& driver);
  ~Linker();
  Linker(const Linker&) = delete;

  // Do what a payload of xmLink asks for: add its inputs to the link of this number, and put them together if `complete`. The
  // context is current. `image`: the bytes of an input; empty if they are not here. The reply's result is the driver's;
  // the call's own is an error only if the payload makes no sense.
  CUresult link(uint64_t number, bool complete, Bytes payload, const std::function<Bytes(uint64_t)>& image);
  const journal::LinkReply& reply() const { return reply_; }
  const std::vector<std::byte>& answer() const { return answer_; }
  // Whose answer that is; 0 before the first.
  uint64_t answered() const { return answered_; }

  // It is not needed any more.
  void end(uint64_t number);

 private:
  struct Options;
  struct Input;
  struct State;

  CUresult add(const Input& input, Bytes bytes);
  void answer_with(CUresult result, Bytes image);

  const DriverTable& driver_;
  std::unique_ptr<State> state_;
  journal::LinkReply reply_{};
  std::vector<std::byte> answer_;
  uint64_t answered_ = 0;
};

}  // namespace xmig::server
