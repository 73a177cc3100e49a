// What a test holds to be so; a test that is wrong ends at once, with the place.
#pragma once

#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kUnderThreadSanitizer = true;  // everything takes ten times as long
#else
inline constexpr bool kUnderThreadSanitizer = false;
#endif

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                      \
    }                                                                                     \
  } while (false)
