// Modules, launches, and hostile images.
#include <elf.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "device/image.h"
#include "device_harness.h"

namespace {

size_t descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

}  // namespace

TEST(modules) {
  Rig rig;
  rig.load();
  const auto& d = rig.d();
  const CUfunction f = rig.functions.at("parameters");
  const size_t expected[][2] = {{0, 1}, {2, 2}, {4, 4}, {8, 8}, {16, 4}, {24, 8}, {32, 8}};
  size_t offset = 0, bytes = 0, i = 0;
  for (; d.cuFuncGetParamInfo(f, i, &offset, &bytes) == CUDA_SUCCESS; ++i)
    CHECK(offset == expected[i][0] && bytes == expected[i][1]);
  CHECK(i == 7);
  const CUdeviceptr out = rig.memory(4096);
  rig.launch("parameters", {}, uint8_t{1}, uint16_t{2}, uint32_t{3}, uint64_t{4}, 0.5f, 0.25, out);
  OK(d.cuCtxSynchronize());
  CHECK(rig.peek<double>(out) == 10.75);

  // The same, packed.
  struct {
    uint8_t a = 2;
    uint16_t b = 2;
    uint32_t c = 3;
    uint64_t d = 4;
    float e = 0.5f;
    double f = 0.25;
    CUdeviceptr out;
  } packed;
  packed.out = out;
  size_t size = sizeof(packed);
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
  CUlaunchConfig config{1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, 0};
  OK(d.cuLaunchKernelEx(&config, f, nullptr, extra));
  OK(d.cuCtxSynchronize());
  CHECK(rig.peek<double>(out) == 11.75);
  size = 8;
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuLaunchKernelEx(&config, f, nullptr, extra));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuLaunchKernelEx(&config, f, nullptr, nullptr));

  // Shapes in three dimensions.
  config = {3, 2, 2, 4, 3, 2, 0, nullptr, nullptr, 0};
  CUdeviceptr places = rig.memory(1 << 20);
  void* parameters[] = {&places};
  OK(d.cuLaunchKernelEx(&config, rig.functions.at("places"), parameters, nullptr));
  OK(d.cuCtxSynchronize());
  for (uint32_t n = 0; n < 12 * 24; ++n) CHECK(rig.peek<uint32_t>(places + 4 * n) == n / 24 * 1000 + n % 24);

  // Two copies of the same image are two modules; code stays as long as work needs it.
  CUmodule first = rig.module;
  const CUfunction old = rig.functions.at("append");
  const CUstream stream = rig.stream();
  const CUdeviceptr log = rig.memory(4096);
  Gate gate(rig, stream);
  rig.launch("append", {.stream = stream}, log, uint64_t{1});
  rig.load();
  CHECK(rig.module != first);
  OK(d.cuModuleUnload(first));
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, d.cuModuleUnload(first));
  const char* name = nullptr;
  CHECK_RESULT(CUDA_ERROR_INVALID_HANDLE, d.cuFuncGetName(&name, old));
  rig.launch("append", {.stream = stream}, log, uint64_t{2});
  gate.open();
  OK(d.cuStreamSynchronize(stream));
  CHECK(rig.peek<uint64_t>(log + 16) == 2);
  const size_t before = descriptors();
  for (int n = 0; n < 20; ++n) {
    const CUmodule previous = rig.module;
    OK(rig.device->load_image(&rig.module, read_file(kernels_path())));
    OK(d.cuModuleUnload(previous));
  }
  CHECK(descriptors() == before);
}

TEST(module_without_length) {
  Rig rig;
  std::vector<std::byte> image = read_file(kernels_path());
  CUmodule module = nullptr;
  OK(rig.d().cuModuleLoadData(&module, image.data()));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, rig.d().cuModuleLoadData(&module, nullptr));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, rig.d().cuModuleLoadData(&module, reinterpret_cast<void*>(rig.hole())));
  CHECK_RESULT(CUDA_ERROR_INVALID_IMAGE, rig.d().cuModuleLoadData(&module, "junk"));
  // It says that it goes on, but the memory ends.
  const CUdeviceptr end = rig.memory(2 << 20) + (2 << 20);
  std::memcpy(reinterpret_cast<void*>(end - 64), image.data(), 64);
  CHECK_RESULT(CUDA_ERROR_INVALID_IMAGE, rig.d().cuModuleLoadData(&module, reinterpret_cast<void*>(end - 64)));
  CHECK(rig.device->fault().error == 0);
}

TEST(globals) {
  Rig rig;
  rig.load();
  const auto globals = rig.device->globals(rig.module);
  CHECK(globals.size() == 2);
  CHECK(globals[0].address == rig.places.at(globals[0].name));
  CUdeviceptr address = 0;
  size_t bytes = 0;
  OK(rig.d().cuModuleGetGlobal_v2(&address, &bytes, rig.module, "table"));
  CHECK(address == rig.places.at("table") && bytes == 64);
  CHECK_RESULT(CUDA_ERROR_NOT_FOUND, rig.d().cuModuleGetGlobal_v2(&address, &bytes, rig.module, "nothing"));
  const CUdeviceptr out = rig.memory(4096);
  for (int i = 0; i < 3; ++i) rig.launch("use_globals", {}, out);
  OK(rig.d().cuCtxSynchronize());
  CHECK(rig.peek<uint64_t>(out) == 10 && rig.peek<uint64_t>(rig.places.at("steps")) == 10);
  CHECK(rig.peek<float>(rig.places.at("table") + 12) == 4.5f);
  CHECK(!rig.device->bind_global(rig.module, 2, out));
  CHECK(!rig.device->bind_global(rig.module, 0, 0x1000));
  CHECK(!rig.device->bind_global(rig.module, 0, rig.hole()));
}

TEST(limits) {
  Rig rig;
  rig.load();
  const auto& d = rig.d();
  const CUdeviceptr out = rig.memory(4096);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, rig.try_launch("nothing", {.grid = 0}));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, rig.try_launch("nothing", {.block = 1025}));
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, rig.try_launch("nothing", {.shared = 49153}));
  CHECK_RESULT(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, rig.try_launch("shared", {.block = 65}, out));
  const CUfunction f = rig.functions.at("shared");
  int value = 0;
  OK(d.cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, f));
  CHECK(value == 64);
  OK(d.cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f));
  CHECK(value == 1024);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE,
               d.cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 232448));
  OK(d.cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 232448 - 1024));
  OK(d.cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, f));
  CHECK(value == 232448 - 1024);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, d.cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_NUM_REGS, 1));
  // Shared memory is zero at the start of each launch, and the same for its blocks.
  for (int i = 0; i < 2; ++i) {
    OK(d.cuMemsetD8Async(out, 0, 16, nullptr));
    rig.launch("shared", {.grid = 3, .block = 64, .shared = 200'000}, out);
    OK(d.cuCtxSynchronize());
    CHECK(rig.peek<uint64_t>(out) == 200'000 * 3 && rig.peek<uint64_t>(out + 8) == 0);
  }
  OK(d.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&value, rig.functions.at("nothing"), 256, 0, 0));
  CHECK(value == 8);
  OK(d.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&value, rig.functions.at("nothing"), 32, 0, 0));
  CHECK(value == 32);
  OK(d.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&value, rig.functions.at("nothing"), 32, 100'000, 0));
  CHECK(value == 2);
  OK(d.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&value, f, 128, 0, 0));
  CHECK(value == 0);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE,
               d.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&value, f, 0, 0, 0));
}

TEST(launch_attributes) {
  Rig rig;
  rig.load();
  CUlaunchAttribute attribute{};
  CUlaunchConfig config{2, 1, 1, 1, 1, 1, 0, nullptr, &attribute, 1};
  auto launch = [&] { return rig.d().cuLaunchKernelEx(&config, rig.functions.at("nothing"), nullptr, nullptr); };
  OK(launch());  // IGNORE
  attribute.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  OK(launch());
  attribute.value.cooperative = 1;
  CHECK_RESULT(CUDA_ERROR_NOT_SUPPORTED, launch());
  attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attribute.value.clusterDim = {1, 1, 1};
  OK(launch());
  attribute.value.clusterDim = {2, 1, 1};
  CHECK_RESULT(CUDA_ERROR_INVALID_CLUSTER_SIZE, launch());
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  OK(launch());
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT;
  attribute.value.programmaticEvent = {rig.event(), 0, 0};
  const CUevent event = attribute.value.programmaticEvent.event;
  Gate gate(rig, nullptr);
  OK(launch());
  CHECK_RESULT(CUDA_ERROR_NOT_READY, rig.d().cuEventQuery(event));
  gate.open();
  OK(rig.d().cuEventSynchronize(event));
  attribute.id = static_cast<CUlaunchAttributeID>(999);
  CHECK_RESULT(CUDA_ERROR_INVALID_VALUE, launch());
}

TEST(foreign_images) {
  Rig rig;
  CUmodule module = nullptr;
  auto load = [&](std::vector<std::byte> image) { return rig.device->load_image(&module, image); };
  auto text = [](std::string_view s) {
    const auto* bytes = reinterpret_cast<const std::byte*>(s.data());
    return std::vector<std::byte>(bytes, bytes + s.size());
  };
  CHECK_RESULT(CUDA_ERROR_INVALID_IMAGE, load(text("hello")));
  CHECK_RESULT(CUDA_ERROR_NO_BINARY_FOR_GPU, load(text(".version 8.0\n.target sm_90\n")));
  CHECK_RESULT(CUDA_ERROR_NO_BINARY_FOR_GPU, load(text(std::string_view("\x50\xed\x55\xba\1\0\20\0\0\0\0\0\0\0\0\0", 16))));
  CHECK_RESULT(CUDA_ERROR_INVALID_IMAGE, load(read_file("/proc/self/exe")));
  std::vector<std::byte> image = read_file(kernels_path());
  reinterpret_cast<Elf64_Ehdr*>(image.data())->e_machine = 190;
  CHECK_RESULT(CUDA_ERROR_NO_BINARY_FOR_GPU, load(image));
}

// Whatever is changed in an image: it is refused, or it loads; nothing else happens to the server.
TEST(hostile_images) {
  const std::vector<std::byte> good = read_file(kernels_path());
  for (size_t bytes = 0; bytes < good.size(); bytes += bytes < 1024 ? 1 : 509) {
    const std::vector<std::byte> snapshot(good.begin(), good.begin() + static_cast<long>(bytes));
    const Result<device::Image> image = device::read_shared_object(snapshot);
    CHECK(!image && device::result_of(image.error()) != CUDA_SUCCESS && !image.why().empty());
  }
  Elf64_Ehdr header;
  std::memcpy(&header, good.data(), sizeof(header));
  // The tables that say where things are: every word of them, with every kind of bad value.
  std::vector<size_t> words;
  auto add = [&](uint64_t from, uint64_t bytes) {
    for (uint64_t at = from; at + 4 <= from + bytes; at += 4) words.push_back(at);
  };
  add(0, sizeof(header));
  add(header.e_phoff, uint64_t{header.e_phnum} * sizeof(Elf64_Phdr));
  add(header.e_shoff, uint64_t{header.e_shnum} * sizeof(Elf64_Shdr));
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    std::memcpy(&section, good.data() + header.e_shoff + i * sizeof(section), sizeof(section));
    switch (section.sh_type) {
      case SHT_DYNAMIC:
      case SHT_DYNSYM:
      case SHT_RELA:
      case SHT_GNU_HASH:
      case SHT_GNU_verneed:
      case SHT_GNU_versym:
        add(section.sh_offset, section.sh_size);
    }
  }
  std::mt19937 random(7);
  std::map<int, int> ends;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr size_t kStep = 7;  // each goes through a process of its own, which costs a sanitizer a lot
#else
  constexpr size_t kStep = 1;
#endif
  for (size_t i = 0; i < words.size(); i += kStep) {
    const size_t at = words[i];
    for (const uint32_t value : {0u, 1u, 0x7fffffffu, 0xffffffffu, 0x10000u, static_cast<uint32_t>(random())}) {
      std::vector<std::byte> bad = good;
      std::memcpy(bad.data() + at, &value, sizeof(value));
      if (!device::read_shared_object(bad) || !device::check_loadable(bad)) continue;
      // What still looks right goes through the dynamic linker: in a process of its own, since code that went astray
      // in there is caught, but leaves the linker as it was.
      const pid_t child = fork();
      if (child == 0) {
        Rig rig;
        CUmodule module = nullptr;
        const CUresult result = rig.device->load_image(&module, bad);
        if (result == CUDA_SUCCESS) rig.d().cuModuleUnload(module);
        std::_Exit(rig.device->fault().error != 0 ? 2 : result == CUDA_SUCCESS ? 0 : 1);
      }
      int status = 0;
      CHECK(waitpid(child, &status, 0) == child);
      if (!WIFEXITED(status)) std::fprintf(stderr, "0x%zx: 0x%x\n", at, value);
      CHECK(WIFEXITED(status));
      ++ends[WEXITSTATUS(status)];
    }
  }
  std::fprintf(stderr, "of %zu changed images %d loaded, %d were refused by the linker, %d crashed in their own code\n",
               words.size() * 6, ends[0], ends[1], ends[2]);
  CHECK(ends[0] != 0);
}

TEST(crashing_initialiser) {
  // An image that is well formed, with code that crashes as soon as it is loaded.
  Rig rig;
  std::vector<std::byte> image = read_file(kernels_path() + ".crash");
  CUmodule module = nullptr;
  rig.device->set_sequence(12);
  CHECK_RESULT(CUDA_ERROR_ILLEGAL_INSTRUCTION, rig.device->load_image(&module, image));
  CHECK(rig.device->fault().sequence == 12);
  CHECK_RESULT(CUDA_ERROR_ILLEGAL_INSTRUCTION, rig.d().cuCtxSynchronize());
}
