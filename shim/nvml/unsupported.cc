// Functions that have to be there, because programs look them up or ask on the off chance, and whose answers nobody here
// knows. Not the names of nvml.h but the symbols: arguments are not looked at, so their types do not matter (a caller
// passes them in registers or clears its own stack).
#include "nvml/state.h"

namespace {
constexpr int kUninitialized = 1, kNotSupported = 3;  // nvmlReturn_t
}

#define XMIG_UNSUPPORTED(name)                                           \
  extern "C" __attribute__((visibility("default"))) int name();          \
  int name() { return xmig::nvml::in_use() ? kNotSupported : kUninitialized; }

// The machine
XMIG_UNSUPPORTED(nvmlSystemGetNVMLVersion)
XMIG_UNSUPPORTED(nvmlSystemGetProcessName)

// The board
XMIG_UNSUPPORTED(nvmlDeviceGetArchitecture)
XMIG_UNSUPPORTED(nvmlDeviceGetAttributes)
XMIG_UNSUPPORTED(nvmlDeviceGetAttributes_v2)
XMIG_UNSUPPORTED(nvmlDeviceGetBoardId)
XMIG_UNSUPPORTED(nvmlDeviceGetBrand)
XMIG_UNSUPPORTED(nvmlDeviceGetMinorNumber)  // of a device file that the program must not open
XMIG_UNSUPPORTED(nvmlDeviceGetMultiGpuBoard)
XMIG_UNSUPPORTED(nvmlDeviceGetNumGpuCores)
XMIG_UNSUPPORTED(nvmlDeviceGetSerial)
XMIG_UNSUPPORTED(nvmlDeviceGetVbiosVersion)

// What it does just now
XMIG_UNSUPPORTED(nvmlDeviceGetAccountingMode)
XMIG_UNSUPPORTED(nvmlDeviceGetApplicationsClock)
XMIG_UNSUPPORTED(nvmlDeviceGetBAR1MemoryInfo)
XMIG_UNSUPPORTED(nvmlDeviceGetClock)
XMIG_UNSUPPORTED(nvmlDeviceGetClockInfo)
XMIG_UNSUPPORTED(nvmlDeviceGetCurrentClocksEventReasons)
XMIG_UNSUPPORTED(nvmlDeviceGetCurrentClocksThrottleReasons)
XMIG_UNSUPPORTED(nvmlDeviceGetDecoderUtilization)
XMIG_UNSUPPORTED(nvmlDeviceGetDisplayActive)
XMIG_UNSUPPORTED(nvmlDeviceGetDisplayMode)
XMIG_UNSUPPORTED(nvmlDeviceGetEccMode)
XMIG_UNSUPPORTED(nvmlDeviceGetEncoderUtilization)
XMIG_UNSUPPORTED(nvmlDeviceGetEnforcedPowerLimit)
XMIG_UNSUPPORTED(nvmlDeviceGetFanSpeed)
XMIG_UNSUPPORTED(nvmlDeviceGetFanSpeed_v2)
XMIG_UNSUPPORTED(nvmlDeviceGetMaxClockInfo)
XMIG_UNSUPPORTED(nvmlDeviceGetMemoryErrorCounter)
XMIG_UNSUPPORTED(nvmlDeviceGetNumFans)
XMIG_UNSUPPORTED(nvmlDeviceGetPerformanceState)
XMIG_UNSUPPORTED(nvmlDeviceGetPersistenceMode)
XMIG_UNSUPPORTED(nvmlDeviceGetPowerManagementDefaultLimit)
XMIG_UNSUPPORTED(nvmlDeviceGetPowerManagementLimit)
XMIG_UNSUPPORTED(nvmlDeviceGetPowerManagementLimitConstraints)
XMIG_UNSUPPORTED(nvmlDeviceGetPowerState)
XMIG_UNSUPPORTED(nvmlDeviceGetPowerUsage)
XMIG_UNSUPPORTED(nvmlDeviceGetProcessUtilization)
XMIG_UNSUPPORTED(nvmlDeviceGetRetiredPages)
XMIG_UNSUPPORTED(nvmlDeviceGetSamples)
XMIG_UNSUPPORTED(nvmlDeviceGetSupportedClocksEventReasons)
XMIG_UNSUPPORTED(nvmlDeviceGetTemperature)
XMIG_UNSUPPORTED(nvmlDeviceGetTemperatureThreshold)
XMIG_UNSUPPORTED(nvmlDeviceGetTemperatureV)
XMIG_UNSUPPORTED(nvmlDeviceGetTotalEccErrors)
XMIG_UNSUPPORTED(nvmlDeviceGetTotalEnergyConsumption)
XMIG_UNSUPPORTED(nvmlDeviceGetUtilizationRates)

// Where it is and what it is connected to: a job may be moved
XMIG_UNSUPPORTED(nvmlDeviceGetCpuAffinity)
XMIG_UNSUPPORTED(nvmlDeviceGetCpuAffinityWithinScope)
XMIG_UNSUPPORTED(nvmlDeviceGetGpuFabricInfo)
XMIG_UNSUPPORTED(nvmlDeviceGetGpuFabricInfoV)
XMIG_UNSUPPORTED(nvmlDeviceGetMemoryAffinity)
XMIG_UNSUPPORTED(nvmlDeviceGetNumaNodeId)
XMIG_UNSUPPORTED(nvmlDeviceGetNvLinkCapability)
XMIG_UNSUPPORTED(nvmlDeviceGetNvLinkErrorCounter)
XMIG_UNSUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
XMIG_UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo)
XMIG_UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
XMIG_UNSUPPORTED(nvmlDeviceGetNvLinkState)
XMIG_UNSUPPORTED(nvmlDeviceGetNvLinkVersion)
XMIG_UNSUPPORTED(nvmlDeviceGetPcieReplayCounter)
XMIG_UNSUPPORTED(nvmlDeviceGetPcieThroughput)
XMIG_UNSUPPORTED(nvmlDeviceGetTopologyCommonAncestor)
XMIG_UNSUPPORTED(nvmlDeviceGetTopologyNearestGpus)
XMIG_UNSUPPORTED(nvmlDeviceOnSameBoard)
XMIG_UNSUPPORTED(nvmlDeviceSetCpuAffinity)

// MIG
XMIG_UNSUPPORTED(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)
XMIG_UNSUPPORTED(nvmlDeviceGetMaxMigDeviceCount)
XMIG_UNSUPPORTED(nvmlDeviceGetMigDeviceHandleByIndex)
XMIG_UNSUPPORTED(nvmlDeviceGetMigMode)
