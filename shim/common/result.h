// A value, or why there is none.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace xmig {

// What went wrong: a sentence for people, and for who has to tell cases apart a word of the protocol, or the driver's number.
struct Error {
  std::string text;
  std::string code = "failed";
  int number = 0;  // a CUresult, of what programs are informed of
};

template <typename T = void>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Error error) : error_(std::move(error)) {}

  explicit operator bool() const { return value_.has_value(); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  // Only if there is no value.
  const Error& error() const { return error_; }
  const std::string& why() const { return error_.text; }

 private:
  std::optional<T> value_;
  Error error_;
};

// It went well, or why it did not.
template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  explicit operator bool() const { return !error_.has_value(); }
  const Error& error() const { return *error_; }
  const std::string& why() const { return error_->text; }

 private:
  std::optional<Error> error_;
};

}  // namespace xmig
