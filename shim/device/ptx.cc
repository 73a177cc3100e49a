// PTX: which kernels and variables a text declares. Only declarations are read; what a kernel does is not.
#include <algorithm>
#include <charconv>
#include <optional>

#include "device/image_formats.h"

namespace xmig::device {
namespace {

bool in_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$' ||
         c == '%' || c == '.' || c == '@';
}

// Words and single signs, without comments and strings.
class Tokens {
 public:
  explicit Tokens(std::string_view text) : text_(text.substr(0, text.find('\0'))) {}

  // Empty at the end.
  std::string_view next() {
    skip_space();
    if (at_ >= text_.size()) return {};
    const size_t begin = at_++;
    if (text_[begin] == '"') {
      at_ = std::min(text_.find('"', at_), text_.size() - 1) + 1;
    } else if (in_word(text_[begin])) {
      while (at_ < text_.size() && in_word(text_[at_])) ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }
  std::string_view peek() {
    const size_t before = at_;
    const std::string_view token = next();
    at_ = before;
    return token;
  }
  // Goes on behind the sign that closes the one just read.
  void skip_block(std::string_view open, std::string_view close) {
    for (int depth = 1; depth > 0;) {
      const std::string_view token = next();
      if (token.empty()) return;
      depth += token == open ? 1 : token == close ? -1 : 0;
    }
  }

 private:
  void skip_space() {
    while (at_ < text_.size()) {
      const std::string_view rest = text_.substr(at_);
      if (rest.starts_with("//")) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (rest.starts_with("/*")) {
        const size_t end = text_.find("*/", at_ + 2);
        at_ = end == text_.npos ? text_.size() : end + 2;
      } else if (rest[0] == ' ' || (rest[0] >= '\t' && rest[0] <= '\r')) {
        ++at_;
      } else {
        return;
      }
    }
  }

  std::string_view text_;
  size_t at_ = 0;
};

std::optional<uint64_t> number(std::string_view token) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(token.begin(), token.end(), value);
  if (error != std::errc() || end != token.end()) return std::nullopt;
  return value;
}

// Bytes of a type; 0 if the word is none.
uint64_t type_bytes(std::string_view word) {
  constexpr std::pair<std::string_view, uint64_t> kTypes[] = {
      {".u8", 1},   {".s8", 1},  {".b8", 1},   {".u16", 2},   {".s16", 2},        {".b16", 2},    {".f16", 2},
      {".bf16", 2}, {".u32", 4}, {".s32", 4},  {".b32", 4},   {".f32", 4},        {".f16x2", 4},  {".u64", 8},
      {".s64", 8},  {".b64", 8}, {".f64", 8},  {".b128", 16}, {".texref", 8},     {".surfref", 8}, {".samplerref", 8},
  };
  for (const auto& [name, bytes] : kTypes)
    if (name == word) return bytes;
  return 0;
}

// [.align N] .type ... name [dimension]...: what follows .param, .global or .const.
struct Variable {
  std::string_view name;
  uint64_t bytes = 0, alignment = 1;
};

// Stops before the first sign that is not part of the declaration.
std::optional<Variable> read_variable(Tokens& tokens) {
  Variable variable;
  for (std::string_view word = tokens.peek(); !word.empty() && in_word(word[0]); word = tokens.peek()) {
    tokens.next();
    if (word == ".align") {
      const auto alignment = number(tokens.next());
      if (!alignment || *alignment == 0 || *alignment > 4096 || (*alignment & (*alignment - 1))) return std::nullopt;
      // A pointer may say how what it points to is aligned: that comes after the type.
      if (variable.bytes == 0) variable.alignment = *alignment;
    } else if (const uint64_t bytes = type_bytes(word)) {
      variable.bytes = bytes;
    } else if (word[0] != '.') {
      variable.name = word;
    }
  }
  variable.alignment = std::max(variable.alignment, variable.bytes);
  while (tokens.peek() == "[") {
    tokens.next();
    const auto count = number(tokens.next());
    if (!count || tokens.next() != "]" || __builtin_mul_overflow(variable.bytes, *count, &variable.bytes)) {
      return std::nullopt;
    }
  }
  if (variable.name.empty() || variable.bytes == 0 || variable.bytes > kMaxGlobalBytes) return std::nullopt;
  return variable;
}

// Behind .entry. False: it does not make sense.
bool read_entry(Tokens& tokens, Image& out) {
  constexpr uint64_t kMaxParameterBytes = 32764;
  ImageKernel kernel{.name = std::string(tokens.next())};
  std::string_view token = tokens.next();
  if (token == "(") {
    uint64_t end = 0;
    for (token = tokens.next(); token != ")"; token = tokens.next()) {
      if (token == ",") continue;
      const auto variable = token == ".param" ? read_variable(tokens) : std::nullopt;
      if (!variable) return false;
      const uint64_t offset = (end + variable->alignment - 1) & ~(variable->alignment - 1);
      end = offset + variable->bytes;
      if (end > kMaxParameterBytes) return false;
      kernel.parameters.push_back({static_cast<uint16_t>(offset), static_cast<uint16_t>(variable->bytes)});
    }
    kernel.parameter_bytes = static_cast<uint32_t>(end);
    token = tokens.next();
  }
  for (; token != "{"; token = tokens.next()) {
    if (token.empty()) return false;
    if (token == ";") return true;  // declared, not defined
    if (token != ".maxntid" && token != ".reqntid") continue;
    uint64_t threads = number(tokens.next()).value_or(0);
    while (tokens.peek() == ",") {
      tokens.next();
      threads = std::min<uint64_t>(threads, 1024) * std::min<uint64_t>(number(tokens.next()).value_or(0), 1024);
    }
    if (threads == 0) return false;
    kernel.max_threads = static_cast<uint32_t>(std::min<uint64_t>(threads, 1024));
  }
  tokens.skip_block("{", "}");
  if (out.kernels.size() < kMaxKernels) out.kernels.push_back(std::move(kernel));
  return true;
}

}  // namespace

bool is_ptx(Bytes image) {
  const std::string_view text(reinterpret_cast<const char*>(image.data()), image.size());
  return Tokens(text).next() == ".version";
}

Result<Image> read_ptx(std::string_view text) {
  Image out;
  Tokens tokens(text);
  bool visible = false;
  for (std::string_view token = tokens.next(); !token.empty(); token = tokens.next()) {
    if (token == "{") {
      tokens.skip_block("{", "}");
    } else if (token == ".entry") {
      if (!read_entry(tokens, out)) {
        return refused("it is PTX with a kernel whose declaration cannot be read", CUDA_ERROR_INVALID_PTX);
      }
    } else if ((token == ".global" || token == ".const") && visible) {
      // One without a size of its own is of no use to a program that asks for it.
      const auto variable = read_variable(tokens);
      if (variable && out.globals.size() < kMaxKernels)
        out.globals.push_back({std::string(variable->name), variable->bytes, 0});
    }
    visible = token == ".visible" || token == ".weak" || token == ".common";
  }
  return out;
}

// [.attribute(...)] [.align N] .type name [dimensions] [= first content], ...: what follows .global.
Result<> read_ptx_variables(std::string_view text, std::vector<ImageVariable>& out) {
  Tokens tokens(text);
  bool elsewhere = false;
  for (std::string_view token = tokens.next(); !token.empty(); token = tokens.next()) {
    const bool declares = token == ".global" && !elsewhere;
    elsewhere = token == ".extern";
    if (token == "{") tokens.skip_block("{", "}");
    if (token == ".entry" || token == ".func") {  // a parameter may say that it points to .global
      for (token = tokens.next(); token != "{" && token != ";" && !token.empty();) token = tokens.next();
      if (token == "{") tokens.skip_block("{", "}");
    }
    if (!declares) continue;
    bool named = false, content = false, handle = false;
    int depth = 0;  // in lists, and what is computed
    for (token = tokens.next(); token != ";"; token = tokens.next()) {
      if (token.empty()) return refused("it is PTX that ends in a variable");
      const bool word = in_word(token[0]) && token[0] != '.' && !(token[0] >= '0' && token[0] <= '9');
      if (token == "(" && !content) {
        tokens.skip_block("(", ")");
      } else if (token == "{" || token == "(") {
        ++depth;
      } else if (token == "}" || token == ")") {
        --depth;
      } else if (token == "," && depth == 0) {
        named = content = false;
      } else if (token == "=") {
        content = true;
      } else if (word && content && named) {
        out.back().has_addresses = true;  // the name of a variable or a function
      } else if (token == ".texref" || token == ".surfref" || token == ".samplerref") {
        handle = true;  // no kernel writes it
      } else if (word && !named && !handle) {
        if (out.size() >= kMaxVariables || token.size() >= kMaxVariableName) {
          return refused("it is PTX with too many variables, or with too long a name");
        }
        named = true;
        out.push_back({std::string(token), false});
      }
    }
  }
  return {};
}

}  // namespace xmig::device
