/* Kernels of xMIG's cpu device, in C or C++. How to write and build a module: docs/kernels.md.
 *
 *     XMIG_KERNEL(saxpy, (float, a), (const float *, x), (float *, y), (uint64_t, n)) {
 *       XMIG_FOR_EACH_INDEX(i, n) y[i] += a * x[i];
 *     }
 *
 * A kernel function is called once per block, the blocks one after another in order (x fastest), so the result of a
 * launch is the same every time. It loops over its threads itself. Everything a module says about itself stands in
 * the ELF section "xmig" as an array of xmig_descriptor: readable without running anything of the module.
 */
#ifndef XMIG_KERNEL_H
#define XMIG_KERNEL_H

#include <stddef.h>
#include <stdint.h>

#define XMIG_ABI 1u
#define XMIG_MAX_PARAMETERS 16
#define XMIG_MAX_NAME 128              /* with the terminating zero */
#define XMIG_MAX_PARAMETER_BYTES 4096
#define XMIG_MAX_THREADS 1024          /* per block */
#define XMIG_SHARED_ALIGNMENT 128

typedef struct xmig_dim3 {
  uint32_t x, y, z;
} xmig_dim3;

/* What a kernel function is given for one block. */
typedef struct xmig_block {
  xmig_dim3 grid;
  xmig_dim3 block;
  xmig_dim3 index;
  uint32_t shared_bytes; /* dynamic shared memory, as given at the launch */
  void *shared;          /* aligned to XMIG_SHARED_ALIGNMENT; zeroed before the first block of a launch */
  /* Ends the kernel with a sticky CUDA error. Does not return. */
  void (*fail)(const struct xmig_block *block, int error, const char *text, const char *file, int line);
  /* The value of a conditional handle of the graph that launched the kernel. */
  void (*set_conditional)(const struct xmig_block *block, uint64_t handle, uint32_t value);
} xmig_block;

enum { XMIG_DESCRIBES_KERNEL = 1, XMIG_DESCRIBES_GLOBAL = 2 };

typedef struct xmig_parameter {
  uint32_t offset;
  uint32_t size;
} xmig_parameter;

typedef struct xmig_descriptor {
  uint32_t abi;
  uint32_t kind;
  uint32_t parameter_count;
  uint32_t parameter_bytes;
  uint32_t max_threads;         /* largest block */
  uint32_t static_shared_bytes; /* counted against a block's shared memory */
  uint64_t bytes;               /* of a global */
  void (*run)(const xmig_block *block, const void *parameters);
  void **cell;         /* of a global: where its address is put */
  const void *initial; /* of a global: its first content */
  uint64_t reserved;
  xmig_parameter parameters[XMIG_MAX_PARAMETERS];
  char name[XMIG_MAX_NAME];
} xmig_descriptor;

#ifdef __cplusplus
#define XMIG_STATIC_ASSERT static_assert
#else
#define XMIG_STATIC_ASSERT _Static_assert
#endif
XMIG_STATIC_ASSERT(sizeof(xmig_descriptor) == 320, "the layout of descriptors is fixed");

#define XMIG_UNUSED __attribute__((unused))
/* The alignment is the linker's stride: descriptors of several source files form one array. */
#define XMIG_DESCRIPTOR __attribute__((section("xmig"), used, aligned(64)))

/* --- a kernel ------------------------------------------------------------------------------------------------
 * XMIG_KERNEL(name, (type, parameter), ...) { body }: up to 16 parameters.
 * XMIG_KERNEL_LIMITS(name, max_threads, static_shared_bytes, (type, parameter), ...) { body }
 *
 * In the body: the parameters, gridDim, blockDim, blockIdx (xmig_dim3), and xmig (const xmig_block *). */
#define XMIG_KERNEL(name, ...) XMIG_KERNEL_LIMITS(name, XMIG_MAX_THREADS, 0 __VA_OPT__(, ) __VA_ARGS__)

#define XMIG_KERNEL_LIMITS(kernel, threads, static_shared, ...)                                                    \
  struct xmig_parameters_##kernel {                                                                                \
    XMIG_EACH(XMIG_FIELD, kernel __VA_OPT__(, ) __VA_ARGS__) char xmig_end;                                        \
  };                                                                                                               \
  XMIG_STATIC_ASSERT(sizeof(#kernel) <= XMIG_MAX_NAME, "kernel name too long");                                    \
  XMIG_STATIC_ASSERT(offsetof(struct xmig_parameters_##kernel, xmig_end) <= XMIG_MAX_PARAMETER_BYTES,              \
                     "too many bytes of parameters");                                                              \
  static inline void xmig_body_##kernel(const xmig_block *xmig, xmig_dim3 gridDim, xmig_dim3 blockDim,             \
                                        xmig_dim3 blockIdx XMIG_EACH(XMIG_ARGUMENT, kernel __VA_OPT__(, ) __VA_ARGS__)); \
  static void xmig_run_##kernel(const xmig_block *xmig, const void *xmig_packed) {                                 \
    const struct xmig_parameters_##kernel *xmig_p XMIG_UNUSED =                                                    \
        (const struct xmig_parameters_##kernel *)xmig_packed;                                                      \
    xmig_body_##kernel(xmig, xmig->grid, xmig->block,                                                              \
                       xmig->index XMIG_EACH(XMIG_PASS, kernel __VA_OPT__(, ) __VA_ARGS__));                       \
  }                                                                                                                \
  static xmig_descriptor xmig_descriptor_##kernel XMIG_DESCRIPTOR = {                                              \
      XMIG_ABI,                                                                                                    \
      XMIG_DESCRIBES_KERNEL,                                                                                       \
      XMIG_COUNT(__VA_ARGS__),                                                                                     \
      (uint32_t)offsetof(struct xmig_parameters_##kernel, xmig_end),                                               \
      threads,                                                                                                     \
      static_shared,                                                                                               \
      0,                                                                                                           \
      xmig_run_##kernel,                                                                                           \
      NULL,                                                                                                        \
      NULL,                                                                                                        \
      0,                                                                                                           \
      {XMIG_EACH(XMIG_LAYOUT, kernel __VA_OPT__(, ) __VA_ARGS__)},                                                 \
      #kernel};                                                                                                    \
  static inline void xmig_body_##kernel(                                                                           \
      const xmig_block *xmig XMIG_UNUSED, xmig_dim3 gridDim XMIG_UNUSED, xmig_dim3 blockDim XMIG_UNUSED,           \
      xmig_dim3 blockIdx XMIG_UNUSED XMIG_EACH(XMIG_ARGUMENT, kernel __VA_OPT__(, ) __VA_ARGS__))

/* Once per thread of the block, with threadIdx. */
#define XMIG_FOR_EACH_THREAD                                                                  \
  for (xmig_dim3 threadIdx = {0, 0, 0}; threadIdx.z < blockDim.z; ++threadIdx.z)              \
    for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)                            \
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)

/* The indices below n that fall to this block of a one-dimensional launch of any size: in runs of blockDim.x, then on
 * by the whole grid. The inner loop is a plain counted one, which compilers vectorise. */
#define XMIG_FOR_EACH_INDEX(i, n)                                                                              \
  for (uint64_t xmig_from = (uint64_t)blockIdx.x * blockDim.x; xmig_from < (uint64_t)(n);                      \
       xmig_from += (uint64_t)gridDim.x * blockDim.x)                                                          \
    for (uint64_t i = xmig_from, xmig_to = xmig_from + blockDim.x < (uint64_t)(n) ? xmig_from + blockDim.x     \
                                                                                  : (uint64_t)(n);             \
         i < xmig_to; ++i)

/* Dynamic shared memory as an array of `type`. */
#define XMIG_SHARED(type) ((type *)xmig->shared)

/* As cudaGraphSetConditional: what a conditional node of the kernel's graph will do. */
#define XMIG_SET_CONDITIONAL(handle, value) xmig->set_conditional(xmig, (handle), (value))

/* --- ending a kernel with an error, as a GPU's would end ---------------------------------------------------- */
#define XMIG_ASSERT(condition) /* CUDA_ERROR_ASSERT */ \
  ((condition) ? (void)0 : xmig->fail(xmig, 710, "assertion failed: " #condition, __FILE__, __LINE__))
#define XMIG_TRAP() /* CUDA_ERROR_LAUNCH_FAILED */ xmig->fail(xmig, 719, "trap", __FILE__, __LINE__)
/* CUDA_ERROR_MISALIGNED_ADDRESS, which most CPUs do not notice by themselves. */
#define XMIG_REQUIRE_ALIGNED(pointer, alignment)          \
  (((uintptr_t)(pointer) & ((uintptr_t)(alignment)-1)) == 0 \
       ? (void)0                                          \
       : xmig->fail(xmig, 716, "misaligned: " #pointer, __FILE__, __LINE__))

/* --- a global variable in device memory -----------------------------------------------------------------------
 * XMIG_GLOBAL(uint64_t, steps, 7) declares `static uint64_t *steps`, which points to device memory once the module is
 * loaded; the memory starts with the given initialiser, or with zeros. XMIG_GLOBAL(float[16], table): (*table)[3].
 * Only these survive the loss of a server: an ordinary static variable of a module starts afresh. */
#define XMIG_GLOBAL(type, variable, ...)                                                           \
  typedef __typeof__(type) xmig_type_##variable;                                                   \
  XMIG_STATIC_ASSERT(sizeof(#variable) <= XMIG_MAX_NAME, "name too long");                         \
  static const xmig_type_##variable xmig_initial_##variable = {                                    \
      XMIG_CAT(XMIG_INITIAL_, __VA_OPT__(GIVEN))(__VA_ARGS__)};                                    \
  static xmig_type_##variable *variable;                                                           \
  static xmig_descriptor xmig_descriptor_##variable XMIG_DESCRIPTOR = {                            \
      XMIG_ABI, XMIG_DESCRIBES_GLOBAL,    0,                                                       \
      0,        0,                        0,                                                       \
      sizeof(xmig_type_##variable),       NULL,                                                    \
      (void **)&variable,                 &xmig_initial_##variable,                                \
      0,        {{0, 0}},                 #variable}
#define XMIG_INITIAL_(...) 0
#define XMIG_INITIAL_GIVEN(...) __VA_ARGS__

/* --- preprocessor ------------------------------------------------------------------------------------------- */
#define XMIG_CAT(a, b) XMIG_CAT_(a, b)
#define XMIG_CAT_(a, b) a##b
#define XMIG_FIELD(kernel, pair) XMIG_FIELD_ pair
#define XMIG_FIELD_(type, parameter) type parameter;
#define XMIG_ARGUMENT(kernel, pair) , XMIG_ARGUMENT_ pair
#define XMIG_ARGUMENT_(type, parameter) type parameter XMIG_UNUSED
#define XMIG_PASS(kernel, pair) , xmig_p->XMIG_SECOND pair
#define XMIG_LAYOUT(kernel, pair)                                                 \
  {(uint32_t)offsetof(struct xmig_parameters_##kernel, XMIG_SECOND pair),         \
   (uint32_t)sizeof(((struct xmig_parameters_##kernel *)0)->XMIG_SECOND pair)},
#define XMIG_SECOND(type, parameter) parameter

#define XMIG_COUNT(...) XMIG_COUNT_(0 __VA_OPT__(, ) __VA_ARGS__, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define XMIG_COUNT_(z, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, count, ...) count
#define XMIG_EACH(f, kernel, ...) XMIG_CAT(XMIG_EACH_, XMIG_COUNT(__VA_ARGS__))(f, kernel __VA_OPT__(, ) __VA_ARGS__)
#define XMIG_EACH_0(f, k)
#define XMIG_EACH_1(f, k, p) f(k, p)
#define XMIG_EACH_2(f, k, p, ...) f(k, p) XMIG_EACH_1(f, k, __VA_ARGS__)
#define XMIG_EACH_3(f, k, p, ...) f(k, p) XMIG_EACH_2(f, k, __VA_ARGS__)
#define XMIG_EACH_4(f, k, p, ...) f(k, p) XMIG_EACH_3(f, k, __VA_ARGS__)
#define XMIG_EACH_5(f, k, p, ...) f(k, p) XMIG_EACH_4(f, k, __VA_ARGS__)
#define XMIG_EACH_6(f, k, p, ...) f(k, p) XMIG_EACH_5(f, k, __VA_ARGS__)
#define XMIG_EACH_7(f, k, p, ...) f(k, p) XMIG_EACH_6(f, k, __VA_ARGS__)
#define XMIG_EACH_8(f, k, p, ...) f(k, p) XMIG_EACH_7(f, k, __VA_ARGS__)
#define XMIG_EACH_9(f, k, p, ...) f(k, p) XMIG_EACH_8(f, k, __VA_ARGS__)
#define XMIG_EACH_10(f, k, p, ...) f(k, p) XMIG_EACH_9(f, k, __VA_ARGS__)
#define XMIG_EACH_11(f, k, p, ...) f(k, p) XMIG_EACH_10(f, k, __VA_ARGS__)
#define XMIG_EACH_12(f, k, p, ...) f(k, p) XMIG_EACH_11(f, k, __VA_ARGS__)
#define XMIG_EACH_13(f, k, p, ...) f(k, p) XMIG_EACH_12(f, k, __VA_ARGS__)
#define XMIG_EACH_14(f, k, p, ...) f(k, p) XMIG_EACH_13(f, k, __VA_ARGS__)
#define XMIG_EACH_15(f, k, p, ...) f(k, p) XMIG_EACH_14(f, k, __VA_ARGS__)
#define XMIG_EACH_16(f, k, p, ...) f(k, p) XMIG_EACH_15(f, k, __VA_ARGS__)

#endif
