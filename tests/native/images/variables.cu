// Variables of every kind that kernels can write, as compilers put them into images: read by device_images.cc.
__device__ int counter = 7;
static __device__ float table[100];
static __device__ unsigned char odd[3] = {1, 2, 3};
__constant__ float factors[4];
template <typename T>
__device__ T value = 3;
namespace {
__device__ double hidden;
}

// With addresses in them.
__device__ int plus(int x) { return x + 1; }
__device__ int minus(int x) { return x - 1; }
using Function = int (*)(int);
__device__ Function functions[3] = {plus, minus, nullptr};
__device__ int* where = &counter;
struct Node {
  int count;
  int* to;
};
__device__ Node nodes[2] = {{1, nullptr}, {2, &counter}};

__device__ int bump() {
  static int calls = 5;
  return ++calls;
}

extern "C" __global__ void use(int* out, int i) {
  ++counter;
  table[i] += factors[i & 3];
  odd[i % 3] += 1;
  hidden += table[i];
  functions[2] = functions[i & 1];
  value<int> += 1;
  value<float> += 1;
  out[0] = functions[2](counter) + *where + *nodes[1].to + nodes[0].count++ + bump() + value<int>;
  if (i == 99) asm volatile("trap;");
}
