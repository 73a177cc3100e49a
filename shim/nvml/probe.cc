// xmig-nvml-probe LIBCUDA ORDINAL: asks a driver about its devices, and about the free memory of one (-1: of none), on
// behalf of a process that must not initialise CUDA itself. It writes a ProbeReport; devices.h says why it exists.
#include <unistd.h>

#include <cstdlib>

#include "nvml/devices.h"

int main(int count, char** arguments) {
  using namespace xmig::nvml;
  if (count != 3) return 2;
  const Driver driver(arguments[1]);
  const int ordinal = std::atoi(arguments[2]);
  ProbeReport report{};
  report.error = driver.loaded ? driver.cuInit(0) : CUDA_ERROR_SHARED_OBJECT_INIT_FAILED;
  if (report.error == CUDA_SUCCESS) report.error = driver.describe(report.devices);
  if (report.error == CUDA_SUCCESS && ordinal >= 0) report.error = driver.free_bytes(ordinal, report.free_bytes);
  // Less than a pipe holds: it is written at once or not at all.
  const bool written = ::write(STDOUT_FILENO, &report, sizeof(report)) == sizeof(report);
  return written ? 0 : 1;
}
