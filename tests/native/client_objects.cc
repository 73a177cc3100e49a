// The client against a daemon and a server that belong to the test: events, contexts, modules, the tables of libcudart.
#include <pthread.h>

#include <set>

#include "api/profiler.h"
#include "client/compat/integrity.h"
#include "client_jobs.h"

namespace {

using namespace harness;

void events() {
  Fixture test;
  test.start();
  CUevent event, fast;
  CU(cuEventCreate(&event, CU_EVENT_DEFAULT));
  CU(cuEventQuery(event));  // never recorded
  CU(cuEventSynchronize(event));
  CU(cuStreamWaitEvent(nullptr, event, 0));
  test.control.hold_events = true;
  CU(cuEventRecord(event, nullptr));
  CHECK(cuEventQuery(event) == CUDA_ERROR_NOT_READY);
  float milliseconds;
  CHECK(cuEventElapsedTime(&milliseconds, event, event) == CUDA_ERROR_NOT_READY);
  test.control.hold_events = false;
  CU(cuEventRecord(event, nullptr));
  eventually([&] { return cuEventQuery(event) == CUDA_SUCCESS; });
  CU(cuEventQuery(event));
  CU(cuEventSynchronize(event));
  CU(cuCtxSynchronize());
  CHECK(test.control.synchronise_notes == 1);  // seen once, written once
  CU(cuEventElapsedTime(&milliseconds, event, event));
  // A thread without a context may ask, as PyTorch's thread for page-locked memory does.
  CUstream stream;
  CU(cuStreamCreate(&stream, 0));
  CU(cuEventRecord(event, nullptr));
  std::thread([&] {
    CUdevice device;
    CHECK(cuCtxGetDevice(&device) == CUDA_ERROR_INVALID_CONTEXT);
    eventually([&] { return cuEventQuery(event) == CUDA_SUCCESS; });
    CU(cuEventSynchronize(event));
    CU(cuEventElapsedTime(&milliseconds, event, event));
    CU(cuStreamQuery(stream));
    CU(cuStreamSynchronize(stream));
    CU(cuStreamDestroy_v2(stream));
    CHECK(cuStreamSynchronize(nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  }).join();
  CU(cuEventCreate(&fast, CU_EVENT_DISABLE_TIMING));
  CU(cuEventRecord(fast, nullptr));
  CHECK(cuEventElapsedTime(&milliseconds, event, fast) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuEventCreate(&fast, 64) == CUDA_ERROR_INVALID_VALUE);
  CU(cuEventDestroy_v2(event));
  CHECK(cuEventRecord(event, nullptr) == CUDA_ERROR_INVALID_HANDLE);
  // As many as there can be, and again.
  std::vector<CUevent> all;
  CUevent next;
  CUresult result;
  while ((result = cuEventCreate(&next, 0)) == CUDA_SUCCESS) all.push_back(next);
  CHECK(result == CUDA_ERROR_OUT_OF_MEMORY && all.size() == journal::kMaxEvents - 2);
  for (const CUevent one : all) CU(cuEventDestroy_v2(one));
  CU(cuEventCreate(&next, 0));
  CHECK(test.control.bad == 0);
}

void contexts() {
  Fixture test;
  test.start();
  CUcontext made, current;
  CU(cuCtxCreate_v2(&made, 0, 1));
  CU(cuCtxGetCurrent(&current));
  CHECK(current == made);
  CUdevice device;
  CU(cuCtxGetDevice(&device));
  CHECK(device == 1);
  CUstream stream;
  CU(cuStreamCreate(&stream, 0));
  CU(cuCtxSetCurrent(test.context));  // replaces the top
  CU(cuCtxPopCurrent_v2(&current));
  CHECK(current == test.context);
  CU(cuCtxGetCurrent(&current));
  CHECK(current == test.context);  // from start()
  CU(cuCtxDestroy_v2(made));
  CHECK(test.control.context_resets == 1);
  CHECK(cuStreamSynchronize(stream) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuCtxSetCurrent(made) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(cuCtxDestroy_v2(test.context) == CUDA_ERROR_INVALID_CONTEXT);
  size_t value;
  CU(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
  CU(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
  CHECK(value == 4096);
  // What the device made of it; it is queried once.
  CU(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 5000));
  CHECK(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1 << 21) == CUDA_ERROR_INVALID_VALUE);
  const uint64_t requested = test.control.limits_requested;
  for (int i = 0; i < 10; ++i) {
    CU(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
    CHECK(value == 5008);
  }
  CHECK(test.control.limits_requested == requested);
  for (int i = 0; i < 10; ++i) CU(cuCtxGetLimit(&value, CU_LIMIT_MALLOC_HEAP_SIZE));
  CHECK(test.control.limits_requested == requested + 1);
  CHECK(cuCtxGetLimit(&value, CU_LIMIT_MAX) == CUDA_ERROR_UNSUPPORTED_LIMIT);
  CHECK(cuCtxSetLimit(CU_LIMIT_MAX, 1) == CUDA_ERROR_UNSUPPORTED_LIMIT);
  CHECK(cuCtxGetLimit(nullptr, CU_LIMIT_STACK_SIZE) == CUDA_ERROR_INVALID_VALUE);
  // Retained twice, released twice; a thread that still has it current is informed.
  CU(cuDevicePrimaryCtxRetain(&current, 0));
  unsigned int flags;
  int active;
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CU(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 1);
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CU(cuDevicePrimaryCtxGetState(0, &flags, &active));
  CHECK(active == 0);
  CHECK(cuCtxSynchronize() == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_ERROR_INVALID_CONTEXT);
  CU(cuDevicePrimaryCtxRetain(&current, 0));
  CHECK(current == test.context);
  CU(cuCtxSynchronize());
  // Made and destroyed again and again.
  for (int i = 0; i < 500; ++i) {
    CU(cuCtxCreate_v2(&made, 0, 0));
    CU(cuCtxDestroy_v2(made));
  }
  CHECK(test.control.bad == 0);
}

void modules() {
  Fixture test;
  test.start();
  // A description that is longer than one reply.
  CUmodule module;
  CU(cuModuleLoadData(&module, ".version 8.0"));
  unsigned int count;
  CU(cuModuleGetFunctionCount(&count, module));
  CHECK(count == 2001);
  CUfunction function;
  CU(cuModuleGetFunction(&function, module, ("kernel number 1999" + std::string(100, '.')).c_str()));
  CHECK(cuModuleGetFunction(&function, module, "no such") == CUDA_ERROR_NOT_FOUND);
  CU(cuModuleUnload(module));
  CHECK(cuModuleUnload(module) == CUDA_ERROR_INVALID_HANDLE);
  // A large image travels in pieces; one in a file is only named.
  CHECK(test.control.image_files == 0);
  const uint64_t before = test.control.image_bytes;
  std::string large = ".version 8.0";
  large.resize(3 << 20, ' ');
  CU(cuModuleLoadData(&module, large.c_str()));
  CHECK(test.control.image_bytes - before == large.size() + 1);
  char path[] = "/tmp/xmig-client-test-image-XXXXXX";
  const ipc::UniqueFd file(::mkstemp(path));
  CHECK(::write(file.get(), large.c_str(), large.size() + 1) == static_cast<ssize_t>(large.size() + 1));
  void* const mapped = ::mmap(nullptr, large.size() + 1, PROT_READ, MAP_PRIVATE, file.get(), 0);
  CU(cuModuleLoadData(&module, mapped));
  CHECK(test.control.image_files == 1);
  ::unlink(path);
  CU(cuModuleLoadData(&module, mapped));  // the name is gone: the bytes travel
  CHECK(test.control.image_files == 1);
  // One library on two devices: the same kernel, another function in each.
  CUlibrary library;
  CUkernel kernel;
  CU(cuLibraryLoadData(&library, ".version 8.0", nullptr, nullptr, 0, nullptr, nullptr, 0));
  CU(cuLibraryGetKernel(&kernel, library, "many"));
  Arguments arguments;
  CU(launch(reinterpret_cast<CUfunction>(kernel), arguments));
  CU(cuCtxSynchronize());
  const uint64_t first = test.control.launch.function;
  CUcontext other;
  CU(cuDevicePrimaryCtxRetain(&other, 1));
  CU(cuCtxSetCurrent(other));
  CU(launch(reinterpret_cast<CUfunction>(kernel), arguments));
  CU(cuCtxSynchronize());
  CHECK(test.control.launch.function != first);
  CU(cuKernelGetFunction(&function, kernel));
  CHECK(reinterpret_cast<uint64_t>(function) == test.control.launch.function);
  int value;
  CU(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 8192, kernel, 0));
  CU(cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel, 0));
  CHECK(value == 8192);
  CU(cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel, 1));
  CHECK(value == 4096);
  // After a reset it is loaded again when it is needed again, and keeps what was set.
  CU(cuDevicePrimaryCtxReset_v2(0));
  CU(cuCtxSetCurrent(test.context));
  CU(cuKernelGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel, 0));
  CHECK(value == 8192);
  CU(launch(reinterpret_cast<CUfunction>(kernel), arguments));
  CU(cuLibraryUnload(library));
  CHECK(launch(reinterpret_cast<CUfunction>(kernel), arguments) == CUDA_ERROR_INVALID_HANDLE);
  CU(cuCtxSynchronize());
  CHECK(test.control.bad == 0);
}

// A module whose variables the server has placed gets memory to keep them in, once, before any of its kernels is launched.
void kept_variables() {
  Fixture test;
  test.start();
  test.control.variable_bytes = 5000;
  const std::string second = "kernel number 5" + std::string(100, '.');
  uint64_t before = 0;
  for (uint64_t round = 1; round <= 3; ++round) {
    CUmodule module;
    CUfunction function, other;
    CU(cuModuleLoadData(&module, ".version 8.0"));
    CU(cuModuleGetFunction(&function, module, "many"));
    CU(cuModuleGetFunction(&other, module, second.c_str()));
    const uint64_t launches = test.control.launches;
    Arguments arguments;
    for (int i = 0; i < 3; ++i) {
      CU(launch(function, arguments));
      CU(cuLaunchKernel(other, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr));
    }
    CU(cuCtxSynchronize());
    CHECK(test.control.variables_kept == round && test.control.launched_without == launches);
    const Args_xmVariables& kept = test.control.variables;
    CHECK(kept.module == reinterpret_cast<uint64_t>(module) && kept.bytes == 5000 && kept.address != 0);
    // It is not the program's to free, nor what it finds by name.
    CHECK(cuMemFree_v2(kept.address) == CUDA_ERROR_INVALID_VALUE);
    if (round == 2) CHECK(kept.address == before);  // what the first module had was given back
    before = kept.address;
    if (round != 2) CU(cuModuleUnload(module));
  }
  CHECK(test.control.bad == 0);
}

void* const* table(std::initializer_list<unsigned char> uuid) {
  CUuuid id;
  std::copy(uuid.begin(), uuid.end(), reinterpret_cast<unsigned char*>(id.bytes));
  const void* found = nullptr;
  CU(cuGetExportTable(&found, &id));
  return static_cast<void* const*>(found);
}

void* const* runtime_table() {
  return table({0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9});
}

// The answer is made of what the driver says elsewhere.
void integrity_slot() {
  Fixture test;
  test.start();
  void* const* const slots =
      table({0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2});
  CHECK(reinterpret_cast<uint64_t>(slots[0]) == 3 * sizeof(void*));
  const auto answer = reinterpret_cast<CUresult (*)(uint32_t, uint64_t, uint64_t(*)[2])>(slots[1]);
  CHECK(answer(13000, 0, nullptr) == CUDA_ERROR_INVALID_VALUE);
  uint64_t got[2], expected[2];
  CU(answer(13000, 0, &got));
  CHECK(got[0] == 0x3341181C03CB675C && got[1] == 0x8ED383AA1F4CD1E8);
  std::vector<client::ChallengeDevice> devices(2);
  for (int i = 0; i < 2; ++i) {
    CU(cuDeviceGetUuid_v2(&devices[i].uuid, i));
    CU(cuDeviceGetAttribute(&devices[i].domain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, i));
    CU(cuDeviceGetAttribute(&devices[i].bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, i));
    CU(cuDeviceGetAttribute(&devices[i].device, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, i));
  }
  int version = 0;
  CU(cuDriverGetVersion(&version));
  const auto check = [&] {
    const client::Challenge challenge{.version = 12082,
                                      .unix_seconds = 1'800'000'000,
                                      .driver_version = static_cast<uint32_t>(version),
                                      .pid = static_cast<uint32_t>(::getpid()),
                                      .thread = static_cast<uint32_t>(::pthread_self()),
                                      .runtime_table = reinterpret_cast<uint64_t>(runtime_table()),
                                      .integrity_table = reinterpret_cast<uint64_t>(slots),
                                      .integrity_function = reinterpret_cast<uint64_t>(slots[1])};
    uint64_t here[2];
    client::answer_challenge(challenge, devices, expected);
    CU(answer(12082, 1'800'000'000, &here));
    CHECK(here[0] == expected[0] && here[1] == expected[1]);
  };
  check();
  std::thread(check).join();  // another thread, another answer
}

// Values per context, with a function that runs when the context ends.
struct Kept {
  CUcontext context = nullptr;
  CUdeviceptr memory = 0;
  int ended = 0;
};

CUresult (*storage_get)(void**, CUcontext, void*);
CUresult (*storage_put)(CUcontext, void*, void*, void (*)(CUcontext, void*, void*));

void storage() {
  Fixture test;
  test.start();
  void* const* const slots =
      table({0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93});
  CHECK(!slots[3]);
  storage_put = reinterpret_cast<decltype(storage_put)>(slots[0]);
  const auto forget = reinterpret_cast<CUresult (*)(CUcontext, void*)>(slots[1]);
  storage_get = reinterpret_cast<decltype(storage_get)>(slots[2]);
  static int key, other_key;
  // What runs may ask for other values, and use the context, which is there still.
  const auto end = [](CUcontext context, void* its_key, void* value) {
    auto& kept = *static_cast<Kept*>(value);
    void* found = nullptr;
    CHECK(its_key == &key && context == kept.context);
    CHECK(storage_get(&found, context, &key) == CUDA_ERROR_INVALID_HANDLE);
    if (kept.memory) CU(cuMemFree_v2(kept.memory));
    ++kept.ended;
  };
  CUcontext made, again;
  CU(cuCtxCreate_v2(&made, 0, 1));
  Kept first{test.context}, second{made};
  CU(cuMemAlloc_v2(&second.memory, 4096));
  CU(storage_put(nullptr, &key, &second, end));  // the current context
  CU(storage_put(test.context, &key, &first, end));
  CU(storage_put(test.context, &other_key, &first, nullptr));
  void* found = nullptr;
  CU(storage_get(&found, made, &key));
  CHECK(found == &second);
  CU(storage_get(&found, test.context, &key));
  CHECK(found == &first);
  CHECK(storage_get(&found, nullptr, &other_key) == CUDA_ERROR_INVALID_HANDLE);  // of another context
  CHECK(storage_get(nullptr, nullptr, &key) == CUDA_ERROR_INVALID_VALUE);
  CHECK(storage_put(reinterpret_cast<CUcontext>(&first), &key, &first, end) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(forget(reinterpret_cast<CUcontext>(&first), &key) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(storage_get(&found, reinterpret_cast<CUcontext>(&first), &key) == CUDA_ERROR_INVALID_CONTEXT);
  CU(cuCtxDestroy_v2(made));
  CHECK(second.ended == 1 && first.ended == 0);
  // Whoever gets its place has none of its values.
  CU(cuCtxCreate_v2(&again, 0, 1));
  CHECK(storage_get(&found, again, &key) == CUDA_ERROR_INVALID_HANDLE);
  CU(cuCtxDestroy_v2(again));
  CHECK(second.ended == 1);
  // The primary context: a reset ends it, and so does the last release.
  CU(cuCtxSetCurrent(test.context));
  CU(cuDevicePrimaryCtxReset_v2(0));
  CHECK(first.ended == 1 && storage_get(&found, test.context, &other_key) == CUDA_ERROR_INVALID_HANDLE);
  CU(storage_put(nullptr, &key, &first, end));
  CU(cuDevicePrimaryCtxRetain(&again, 0));
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CHECK(first.ended == 1);
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CHECK(first.ended == 2);
  // Taken out by its owner: nothing runs.
  CU(cuDevicePrimaryCtxRetain(&again, 0));
  CU(storage_put(nullptr, &key, &first, end));
  CU(forget(nullptr, &key));
  CHECK(forget(nullptr, &key) == CUDA_ERROR_INVALID_HANDLE);
  CU(cuDevicePrimaryCtxRelease_v2(0));
  CHECK(first.ended == 2);
  // Nobody's: a thread without a context.
  std::thread([&] { CHECK(storage_get(&found, nullptr, &key) == CUDA_ERROR_INVALID_CONTEXT); }).join();
  CHECK(test.control.bad == 0);
}

// What cuBLAS, cuBLASLt and cuFFT ask the driver's unpublished tables.
void unpublished() {
  Fixture test;
  test.start();
  void* const* const threads =
      table({0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc});
  void* const* const numbers =
      table({0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2});
  void* const* const modules =
      table({0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e});
  CHECK(reinterpret_cast<uint64_t>(modules[0]) == 792 && reinterpret_cast<uint64_t>(numbers[0]) == 744);

  // The current context, and a number for each: the first one's is 0, and none comes again.
  const auto current = reinterpret_cast<CUresult (*)(CUcontext*)>(threads[2]);
  const auto context_number = reinterpret_cast<CUresult (*)(CUcontext, uint64_t*)>(numbers[4]);
  CUcontext now = nullptr, other = nullptr;
  CU(current(&now));
  CHECK(now == test.context);
  uint64_t first = 9, second = 9;
  CU(context_number(now, &first));
  CU(cuCtxCreate_v2(&other, 0, 1));
  CU(current(&now));
  CHECK(now == other);
  CU(context_number(nullptr, &second));
  CHECK(first == 0 && second != 0);
  CU(cuCtxDestroy_v2(other));
  CU(cuCtxSetCurrent(test.context));

  // Streams, by the driver's own name of them.
  const auto own_stream = reinterpret_cast<CUresult (*)(CUcontext, CUstream, CUstream*, int)>(numbers[51]);
  const auto stream_number = reinterpret_cast<CUresult (*)(CUcontext, CUstream, uint64_t*)>(numbers[39]);
  CUstream stream, another;
  CU(cuStreamCreate(&stream, 0));
  CU(cuStreamCreate(&another, 0));
  std::set<uint64_t> seen;
  for (const CUstream requested : {static_cast<CUstream>(nullptr), CU_STREAM_PER_THREAD, stream, another}) {
    CUstream own = nullptr;
    uint64_t number = 0;
    CU(own_stream(test.context, requested, &own, requested == CU_STREAM_PER_THREAD));
    CU(stream_number(test.context, own, &number));
    CHECK(seen.insert(number).second);
  }
  CUstream own = nullptr;
  CHECK(own_stream(test.context, reinterpret_cast<CUstream>(0x1234), &own, 0) == CUDA_ERROR_INVALID_HANDLE);

  // A module's functions, whatever they are called.
  const auto visit =
      reinterpret_cast<int (*)(CUcontext, CUmodule, void (*)(void*, CUfunction), void*)>(modules[7]);
  static const char ptx[] = ".version 8.0";
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CU(cuModuleLoadData(&module, ptx));
  CU(cuModuleGetFunction(&function, module, "many"));
  std::vector<CUfunction> all;
  const int count = visit(
      test.context, module,
      [](void* user, CUfunction one) { static_cast<std::vector<CUfunction>*>(user)->push_back(one); }, &all);
  CHECK(count == 2001 && all.size() == 2001 && all[0] == function);
  CHECK(visit(test.context, nullptr, [](void*, CUfunction) {}, nullptr) == 0);
  CU(cuProfilerStart());
  CU(cuProfilerStop());
}

// A tensor map is made where the driver is; what the program gave is in the record, and the reply is the map.
void tensor_maps() {
  Fixture test;
  test.start();
  const cuuint64_t sizes[] = {256, 128, 3}, strides[] = {512, 65536};
  const cuuint32_t box[] = {64, 32, 1}, steps[] = {1, 1, 1};
  CUtensorMap map{}, answered;
  std::memset(&answered, 0x11, sizeof(answered));
  const auto encode = [&](CUtensorMap* to, cuuint32_t rank, const cuuint64_t* lengths) {
    return cuTensorMapEncodeTiled(to, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, reinterpret_cast<void*>(0x1000), lengths,
                                  strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                  CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CU(encode(&map, 3, sizes));
  CHECK(std::memcmp(&map, &answered, sizeof(map)) == 0);
  const Args_xmTensorMap& seen = test.control.tensor_map;
  CHECK(seen.rank == 3 && seen.address == 0x1000 && seen.sizes[2] == 3 && seen.strides[1] == 65536 && seen.box[1] == 32);
  CHECK(encode(&map, 0, sizes) == CUDA_ERROR_INVALID_VALUE);
  CHECK(encode(&map, 6, sizes) == CUDA_ERROR_INVALID_VALUE);
  CHECK(encode(&map, 3, nullptr) == CUDA_ERROR_INVALID_VALUE);
  CHECK(encode(nullptr, 3, sizes) == CUDA_ERROR_INVALID_VALUE);
  CHECK(encode(reinterpret_cast<CUtensorMap*>(reinterpret_cast<char*>(&map) + 8), 2, sizes) == CUDA_ERROR_INVALID_VALUE);
  alignas(128) std::byte older[256];  // CUDA 12 aligned the type to 64 bytes
  CU(encode(reinterpret_cast<CUtensorMap*>(older + 64), 3, sizes));
  CHECK(std::memcmp(older + 64, &answered, sizeof(answered)) == 0);
  CU(cuTensorMapReplaceAddress(&map, reinterpret_cast<void*>(0x2000)));
  CHECK(seen.address == 0x2000 && std::memcmp(seen.map, &answered, sizeof(answered)) == 0);
  CHECK(test.control.bad == 0);
}

const Tests kTests = {
    {"events", events}, {"contexts", contexts}, {"modules", modules}, {"kept_variables", kept_variables}, {"integrity_slot", integrity_slot},
    {"storage", storage}, {"unpublished", unpublished}, {"tensor_maps", tensor_maps},
};

}  // namespace

int main(int argc, char** argv) { return run_test(argc, argv, kTests); }
