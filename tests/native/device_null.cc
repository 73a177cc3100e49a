// The null device, and what devices say of themselves.
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

#include "device/image.h"
#include "device_harness.h"

TEST(descriptions) {
  {
    Rig rig;
    const journal::DeviceDescription d = rig.device->describe(0);
    CHECK(d.total_bytes == 256 << 20 && d.attributes[CU_DEVICE_ATTRIBUTE_WARP_SIZE] == 32);
    CHECK(d.attributes[CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] == 1);
    CHECK(d.attributes[CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS] == 0);
    for (int a = 1; a < CU_DEVICE_ATTRIBUTE_MAX; ++a) {
      int value = 0;
      OK(rig.d().cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(a), 0));
      CHECK(value == d.attributes[a]);
    }
  }
  Rig rig("null", 0);
  const journal::DeviceDescription d = rig.device->describe(0);
  CHECK(std::strcmp(d.name, "NVIDIA H200") == 0 && d.attributes[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT] == 132);
  CHECK(d.attributes[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN] == 232448);
  CHECK(d.total_bytes == 150109880320);
}

TEST(refusals) {
  auto refused = [](auto&& open) {
    try {
      open();
    } catch (const std::runtime_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const int one[] = {0};
  CHECK(refused([&] { device::open("gpu", one, 0); }).find("\"gpu\"") != std::string::npos);
  CHECK(!refused([&] { device::open("cpu", {}, 0); }).empty());
  const auto first = device::open("cpu", one, 0);
  CHECK(refused([&] { device::open("cpu", one, 0); }).find("already") != std::string::npos);
  int count = 0;
  CHECK_RESULT(CUDA_ERROR_NOT_INITIALIZED, first->driver().cuDeviceGetCount(&count));
}

TEST(context_limits) {
  for (const char* kind : {"cpu", "null"}) {
    Rig rig(kind);
    const DriverTable& d = rig.d();
    size_t value = 0;
    const auto limit = [&](CUlimit which) {
      OK(d.cuCtxGetLimit(&value, which));
      return value;
    };
    CHECK(limit(CU_LIMIT_STACK_SIZE) == 1024 && limit(CU_LIMIT_MALLOC_HEAP_SIZE) == 8 << 20);
    OK(d.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 5000));
    CHECK(limit(CU_LIMIT_STACK_SIZE) == 5008);
    OK(d.cuCtxSetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 20));
    CHECK(limit(CU_LIMIT_PRINTF_FIFO_SIZE) == 1 << 20);
    CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1 << 20));
    CHECK_RESULT(CUDA_ERROR_OUT_OF_MEMORY, d.cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 1ull << 50));
    CHECK_RESULT(CUDA_ERROR_UNSUPPORTED_LIMIT, d.cuCtxSetLimit(CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 2));
    CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuCtxGetLimit(&value, CU_LIMIT_MAX));
    CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuCtxGetLimit(nullptr, CU_LIMIT_STACK_SIZE));
    CHECK(limit(CU_LIMIT_STACK_SIZE) == 5008 && limit(CU_LIMIT_MALLOC_HEAP_SIZE) == 8 << 20);
  }
}

TEST(null_launches_that_do_not_fit) {
  Rig rig("null");
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  attribute.value.cooperative = 1;
  CUlaunchConfig config{132 * 2, 1, 1, 1024, 1, 1, 0, nullptr, &attribute, 1};
  const auto launch = [&] { return rig.d().cuLaunchKernelEx(&config, nullptr, nullptr, nullptr); };
  OK(launch());
  config.gridDimX += 1;
  CHECK_RESULT(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, launch());
  attribute.value.cooperative = 0;
  OK(launch());
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim = {2, 1, 1};
  CHECK_RESULT(CUDA_ERROR_INVALID_CLUSTER_SIZE, launch());
  config.gridDimX = 66;
  OK(launch());
  attribute.value.clusterDim = {33, 1, 1};
  CHECK_RESULT(CUDA_ERROR_INVALID_CLUSTER_SIZE, launch());
}

TEST(every_function) {
  for (const char* kind : {"cpu", "null"}) {
    Rig rig(kind);
    const DriverTable& table = rig.d();
    for_each_driver_function([&](const char* name, auto member) {
      if (!(table.*member)) std::fprintf(stderr, "%s: %s\n", kind, name);
      CHECK(table.*member);
    });
  }
}

TEST(null_device) {
  Rig rig("null", 0);
  const auto& d = rig.d();
  const CUdeviceptr a = rig.memory(64ull << 30);  // addresses only
  rig.load();
  CHECK(rig.functions.contains("parameters") && rig.device->globals(rig.module).size() == 2);
  rig.launch("store", {}, uint64_t{0});
  const CUstream stream = rig.stream();
  const CUevent event = rig.event(), other = rig.event();
  CHECK(event != other);
  OK(d.cuEventRecordWithFlags(event, stream, 0));
  OK(d.cuEventQuery(event));
  float ms = -1;
  OK(d.cuEventElapsedTime_v2(&ms, event, event));
  CHECK(ms > 0);  // programs divide by it
  OK(d.cuEventDestroy_v2(event));
  OK(d.cuEventDestroy_v2(other));
  std::vector<uint8_t> got(100, 9);
  OK(d.cuMemcpyDtoHAsync_v2(got.data(), a, 100, stream));
  CHECK(got == std::vector<uint8_t>(100, 0));
  const device::Chunk chunks[] = {{a, 2 << 20}, {a + (2 << 20), 2 << 20}};
  uint64_t hashes[2] = {1, 2};
  CHECK(rig.device->hash(chunks, hashes, {}) && hashes[0] == hashes[1]);
  CHECK(rig.copy(a, a + 4096, 4096));

  // Host functions are run, elsewhere, and waited for.
  static std::thread::id thread;
  OK(d.cuLaunchHostFunc(stream, [](void*) { thread = std::this_thread::get_id(); }, nullptr));
  OK(d.cuStreamSynchronize(stream));
  CHECK(thread != std::thread::id() && thread != std::this_thread::get_id());

  CUmodule module = nullptr;
  OK(d.cuModuleLoadData(&module, ".version 8.0\n.target sm_90\n.visible .entry f() { ret; }"));
  OK(d.cuModuleUnload(module));
}

namespace {

device::Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

constexpr std::string_view kPtx = R"(// a comment { .entry no() }
.version 9.0
.target sm_90a
.address_size 64
.visible .global .align 16 .b8 table[3][8] = {1, 2, 3};
.global .u32 hidden;
.visible .const .f64 scale;
.extern .shared .align 16 .b8 dynamic[];
.func (.param .b32 r) helper(.param .b64 a) { st.param.b32 [r], 0; { ret; } }
.visible .entry _Z5firstPfi(
  .param .u64 .ptr .global .align 32 _Z5firstPfi_param_0, /* ) */
  .param .u8 _Z5firstPfi_param_1,
  .param .align 8 .b8 _Z5firstPfi_param_2[24],
  .param .f16 last
)
.maxntid 128, 2, 1
{ .reg .b32 %r<3>; @%p1 bra $L_1; "}"; ret; }
.weak .entry second() { ret; }
)";

// A fat binary's entry: a header of 64 bytes, then what is stored.
std::string fat_entry(uint16_t kind, uint32_t architecture, uint64_t flags, std::string_view stored, uint64_t content) {
  std::string entry(64, '\0');
  const auto put = [&](size_t at, auto value) { std::memcpy(entry.data() + at, &value, sizeof(value)); };
  put(0, kind);
  put(4, uint32_t{64});
  put(8, uint64_t{stored.size()});
  put(16, static_cast<uint32_t>(stored.size()));
  put(28, architecture);
  put(40, flags);
  put(56, content);
  return entry.append(stored);
}

std::string fat_binary(std::initializer_list<std::string> entries) {
  std::string all;
  for (const std::string& entry : entries) all += entry;
  std::string binary(16, '\0');
  const uint32_t magic = 0xba55ed50;
  const uint16_t header[] = {1, 16};
  const uint64_t bytes = all.size();
  std::memcpy(binary.data(), &magic, 4);
  std::memcpy(binary.data() + 4, header, 4);
  std::memcpy(binary.data() + 8, &bytes, 8);
  return binary + all;
}

std::string ptx_with(std::string_view kernel) {
  return ".version 9.0\n.target sm_75\n.visible .entry " + std::string(kernel) + "() { ret; }\n";
}

// One run of literals, as LZ4 stores what it cannot shorten.
std::string lz4_literals(std::string_view text) {
  std::string block(1, '\xf0');
  size_t rest = text.size() - 15;
  for (; rest >= 255; rest -= 255) block += '\xff';
  return block + static_cast<char>(rest) + std::string(text);
}

}  // namespace

TEST(ptx) {
  const Result<device::Image> read = device::read_any(bytes_of(kPtx));
  CHECK(read);
  const device::Image& image = *read;
  CHECK(image.kernels.size() == 2 && image.kernels[0].name == "_Z5firstPfi" && image.kernels[1].name == "second");
  const device::ImageKernel& first = image.kernels[0];
  const uint16_t expected[][2] = {{0, 8}, {8, 1}, {16, 24}, {40, 2}};
  CHECK(first.parameters.size() == 4 && first.parameter_bytes == 42 && first.max_threads == 256);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(first.parameters[i].offset == expected[i][0] && first.parameters[i].size == expected[i][1]);
  }
  CHECK(image.kernels[1].parameters.empty() && image.kernels[1].max_threads == 1024);
  CHECK(image.globals.size() == 2 && image.globals[0].name == "table" && image.globals[0].bytes == 24);
  CHECK(image.globals[1].name == "scale" && image.globals[1].bytes == 8);
  // Snapshot short anywhere, it is read to its end or refused.
  for (size_t n = 0; n < kPtx.size(); ++n) {
    const Result<device::Image> part = device::read_any(bytes_of(kPtx.substr(0, n)));
    CHECK(part || !part.why().empty());
  }
  const auto refusal = [](const std::string& text) {
    const Result<device::Image> bad = device::read_any(bytes_of(text));
    return bad ? CUDA_SUCCESS : device::result_of(bad.error());
  };
  CHECK_RESULT(CUDA_ERROR_INVALID_PTX, refusal(".version 9.0\n.entry f(.param .align 3 .b8 x[4]) { ret; }"));
  CHECK_RESULT(CUDA_ERROR_INVALID_IMAGE, refusal("what is this"));
}

TEST(fat_binaries) {
  const auto kernels = [](std::initializer_list<std::string> entries) {
    const std::string binary = fat_binary(entries);
    CHECK(device::image_extent(bytes_of(binary).first(16)) == binary.size());
    const Result<device::Image> image = device::read_any(bytes_of(binary));
    if (!image && device::result_of(image.error()) == CUDA_ERROR_NO_BINARY_FOR_GPU) return std::string("none");
    if (!image) return "refused: " + image.why();
    CHECK(image->kernels.size() == 1);
    return image->kernels[0].name;
  };
  const auto ptx = [](uint32_t architecture, std::string_view name) {
    const std::string text = ptx_with(name);
    return fat_entry(1, architecture, 0x11, text, 0);
  };
  // The newest PTX that is not too new; code of another generation, and of a later one, is not for this device.
  CHECK(kernels({ptx(75, "old"), ptx(80, "newer"), ptx(100, "too_new"), fat_entry(2, 80, 0x11, "elf", 0)}) == "newer");
  CHECK(kernels({ptx(100, "too_new"), fat_entry(2, 80, 0x11, "elf", 0)}) == "none");
  CHECK(kernels({ptx(75, "old"), fat_entry(2, 90, 0x11, "no ELF file", 0)}).starts_with("refused"));

  // Compressed by older tools: literals, and a match that overlaps what it makes.
  const std::string text = ptx_with("packed");
  CHECK(kernels({fat_entry(1, 75, 0x2011, lz4_literals(text), text.size())}) == "packed");
  std::string name = ptx_with(std::string(40, 'x'));
  const size_t run = name.find('x');
  std::string block = lz4_literals(name.substr(0, run + 1));
  block[0] = '\xff';                                        // literals, then a match: 39 more of the same
  block += std::string("\x01\x00", 2) + '\x14';            // distance 1, length 4 + 15 + 20
  block += lz4_literals(name.substr(run + 40) + std::string(20, '\n'));
  name += std::string(20, '\n');
  CHECK(kernels({fat_entry(1, 75, 0x2011, block, name.size())}) == std::string(40, 'x'));
  // Damaged: too long, too short, a match from before the beginning, an impossible claim.
  for (const size_t claim : {text.size() - 1, text.size() + 1, size_t{1} << 40}) {
    CHECK(kernels({fat_entry(1, 75, 0x2011, lz4_literals(text), claim)}).starts_with("refused"));
  }
  CHECK(kernels({fat_entry(1, 75, 0x2011, std::string("\x10x\x09\x00", 4), 5)}).starts_with("refused"));
}

TEST(null_memory_runs_out) {
  Rig rig("null", 8ull << 30);
  const auto& d = rig.d();
  const CUmemAllocationProp prop = Rig::property();
  const auto free_bytes = [&] {
    size_t free = 0, total = 0;
    OK(d.cuMemGetInfo_v2(&free, &total));
    CHECK(total == 8ull << 30);
    return free;
  };
  CUmemGenericAllocationHandle first = 0, second = 0;
  OK(d.cuMemCreate(&first, 6ull << 30, &prop, 0));
  CHECK(free_bytes() == 2ull << 30);
  CHECK_RESULT(CUDA_ERROR_OUT_OF_MEMORY, d.cuMemCreate(&second, 3ull << 30, &prop, 0));
  // Mapped memory outlives its handle.
  OK(d.cuMemMap(Rig::kBase, 6ull << 30, 0, first, 0));
  OK(d.cuMemRelease(first));
  CHECK(free_bytes() == 2ull << 30);
  OK(d.cuMemUnmap(Rig::kBase, 6ull << 30));
  CHECK(free_bytes() == 8ull << 30);
  OK(d.cuMemCreate(&second, 8ull << 30, &prop, 0));
  OK(d.cuMemRelease(second));
}

TEST(null_tensor_maps) {
  Rig rig("null", 0);
  const auto& d = rig.d();
  const cuuint64_t sizes[] = {256, 256}, strides[] = {512}, odd_strides[] = {520};
  const cuuint32_t box[] = {64, 128}, large_box[] = {64, 257}, steps[] = {1, 1};
  const auto tiled = [&](CUtensorMap& map, uint64_t address, const cuuint64_t* with, const cuuint32_t* of,
                         cuuint32_t rank = 2) {
    return d.cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, reinterpret_cast<void*>(address), sizes,
                                    with, of, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUtensorMap first{}, second{}, third{};
  OK(tiled(first, Rig::kBase, strides, box));
  OK(tiled(second, Rig::kBase + 4096, strides, box));
  CHECK(std::memcmp(&first, &second, sizeof(first)) != 0);
  OK(d.cuTensorMapReplaceAddress(&first, reinterpret_cast<void*>(Rig::kBase + 4096)));
  CHECK(std::memcmp(&first, &second, sizeof(first)) == 0);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, tiled(third, Rig::kBase + 8, strides, box));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, tiled(third, Rig::kBase, odd_strides, box));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, tiled(third, Rig::kBase, strides, large_box));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, tiled(third, Rig::kBase, strides, box, 6));
}

TEST(null_exports) {
  Rig rig("null", 0);
  CUmemGenericAllocationHandle handle = 0;
  const CUmemAllocationProp prop = Rig::property();
  OK(rig.d().cuMemCreate(&handle, 1 << 30, &prop, 0));
  int fd = -1;
  OK(rig.d().cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  struct stat status{};
  CHECK(fstat(fd, &status) == 0 && status.st_size == 1 << 30 && status.st_blocks == 0);
  close(fd);
  OK(rig.d().cuMemRelease(handle));
}
