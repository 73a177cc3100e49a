/* What the benchmark's programs share. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define CHECK(call)                                                                 \
  do {                                                                              \
    const CUresult error = (call);                                                  \
    if (error != CUDA_SUCCESS) {                                                    \
      fprintf(stderr, "%s:%d: %s returned %d\n", __FILE__, __LINE__, #call, error); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

static inline double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline CUmodule load(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) perror(path), exit(1);
  fseek(file, 0, SEEK_END);
  const long size = ftell(file);
  rewind(file);
  void *image = malloc((size_t)size);
  if (fread(image, 1, (size_t)size, file) != (size_t)size) perror(path), exit(1);
  fclose(file);
  CUmodule module;
  CHECK(cuModuleLoadData(&module, image));
  free(image);
  return module;
}
