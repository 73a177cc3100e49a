// The driver's linker (cuLink…), as client and server speak of it. The payload of xmLink:
//
//   LinkRequest
//   LinkOption                         } option_count times: how it is linked
//   LinkInput, its LinkOptions, name   } input_count times; the name is not terminated, and padded to 8
//
// Its reply: LinkReply, then the answer from xmLink's `offset` on, as far as it fits. The answer is the image, once everything
// is linked, what the linker printed, and its errors. Words come last, and the reply is not compared at a
// replay, because a linker may tell how long it took.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace xmig::journal {

struct LinkRequest {
  uint32_t option_count;
  uint32_t input_count;
};
struct LinkOption {  // one whose value is a number
  uint32_t option;   // CUjit_option
  uint32_t reserved;
  uint64_t value;
};
struct LinkInput {
  uint64_t image;  // number of its bytes
  uint32_t type;   // CUjitInputType
  uint32_t option_count;
  uint32_t name_bytes;
  uint32_t reserved;
};

struct LinkReply {
  int32_t result;  // CUresult, of the link
  uint32_t info_bytes;
  uint32_t error_bytes;
  uint32_t reserved;
  uint64_t image_bytes;
};

// An option in whose value the linker answers.
constexpr bool is_answer(uint32_t option) {
  return option == CU_JIT_WALL_TIME || (option >= CU_JIT_INFO_LOG_BUFFER && option <= CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
}

// One whose value is a number, and no address of the program's.
constexpr bool is_number(uint32_t option) {
  const bool of_names = (option >= CU_JIT_GLOBAL_SYMBOL_NAMES && option <= CU_JIT_GLOBAL_SYMBOL_COUNT) ||
                        (option >= CU_JIT_REFERENCED_KERNEL_NAMES && option <= CU_JIT_REFERENCED_VARIABLE_COUNT);
  return option < CU_JIT_NUM_OPTIONS && !of_names && !is_answer(option);
}

inline constexpr uint32_t kMaxLinkOptions = 64;
inline constexpr uint32_t kMaxLinkInputs = 4096;

}  // namespace xmig::journal
