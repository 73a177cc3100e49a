// A stand-in for the shim: it writes down what is named.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

void xmigForgetNumbers(uint64_t address, uint64_t bytes) {
  FILE* report = fopen(getenv("REPORT"), "a");
  if (!report) return;
  fprintf(report, "forget %llu %llu\n", (unsigned long long)address, (unsigned long long)bytes);
  fclose(report);
}

size_t xmigNameNumbers(const uint64_t* addresses, const uint64_t* bytes, const uint32_t* types, size_t count, int blocks) {
  FILE* report = fopen(getenv("REPORT"), "a");
  if (!report) return 0;
  for (size_t i = 0; i < count; ++i) {
    fprintf(report, "%llu %llu %u %d\n", (unsigned long long)addresses[i], (unsigned long long)bytes[i], types[i], blocks);
  }
  fclose(report);
  return count;
}
