/* The functions of cudaProfiler.h, which PyPI's nvidia-cuda-runtime does not bring. */
#pragma once
#include <cuda.h>

#ifdef __cplusplus
extern "C" {
#endif
CUresult cuProfilerStart(void);
CUresult cuProfilerStop(void);
#ifdef __cplusplus
}
#endif
