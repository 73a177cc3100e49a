// A job that has a context and a little memory, and then waits until its standard input ends.
#include <cuda.h>
#include <stdio.h>

int main(void) {
  CUcontext context;
  CUdeviceptr memory;
  if (cuInit(0) != CUDA_SUCCESS || cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS) return 1;
  if (cuCtxSetCurrent(context) != CUDA_SUCCESS || cuMemAlloc(&memory, 8 << 20) != CUDA_SUCCESS) return 1;
  if (cuMemsetD8(memory, 1, 8 << 20) != CUDA_SUCCESS || cuCtxSynchronize() != CUDA_SUCCESS) return 1;
  puts("[]");
  fflush(stdout);
  while (getchar() != EOF) {
  }
  return 0;
}
