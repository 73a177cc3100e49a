// What a test holds to be so; a test that is wrong ends at once, with the place.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                      \
    }                                                                                     \
  } while (false)
