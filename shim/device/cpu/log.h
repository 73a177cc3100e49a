// A line for the job's log: the server's standard error.
#pragma once

#include <cstdio>

#define XMIG_CPU_LOG(format, ...) std::fprintf(stderr, "xmig: cpu device: " format "\n" __VA_OPT__(, ) __VA_ARGS__)
