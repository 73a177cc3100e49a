// The parts of the client that need no server.
#include <cuda.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <thread>

#include "check.h"
#include "client/bootstrap/entry_points.h"
#include "client/compat/compile_cache.h"
#include "client/compat/integrity.h"
#include "client/compat/md2.h"
#include "client/journal/context_storage.h"
#include "client/journal/handles.h"
#include "client/modules/image.h"
#include "client/modules/modules.h"
#include "journal/module_info.h"

namespace {

using namespace xmig;
using namespace xmig::client;

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", byte);
    text += two;
  }
  return text;
}

std::string content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// RFC 1319, appendix A.5.
void md2() {
  const std::pair<const char*, const char*> vectors[] = {
      {"", "8350e5a3e24c153df2275c9f80692773"},
      {"a", "32ec01ec4a6dac72c0ab96fb34c0b5d1"},
      {"abc", "da853b0d3f88d99b30283a69e6ded6bb"},
      {"message digest", "ab4f496bfb2a530b219ff33031fe06b0"},
      {"abcdefghijklmnopqrstuvwxyz", "4e8ddff3650292ab5a4108c3aa47940b"},
      {"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", "da33def2a42df13975352846c30338cd"},
      {"12345678901234567890123456789012345678901234567890123456789012345678901234567890",
       "d5976f79d83d3a0dc9806c3c66f3efd8"},
  };
  for (const auto& [text, digest] : vectors) {
    Md2 whole;
    whole.update(bytes_of(text));
    CHECK(hex(whole.finish()) == digest);
    Md2 pieces;
    for (const char c : std::string_view(text)) pieces.update(bytes_of({&c, 1}));
    CHECK(hex(pieces.finish()) == digest);
  }
  // A key longer than a block stands for its digest.
  const std::string long_key(40, 'k');
  Md2 shortened;
  shortened.update(bytes_of(long_key));
  const Digest short_key = shortened.finish();
  CHECK(hmac_md2(bytes_of(long_key), bytes_of("m")) == hmac_md2(short_key, bytes_of("m")));
  // Made with another implementation, as there are no published vectors.
  CHECK(hex(hmac_md2(bytes_of("key"), bytes_of("The quick brown fox jumps over the lazy dog"))) ==
        "13758b9534bfb38d850457814613b0c1");
}

void integrity() {
  Challenge challenge{.version = 13000, .unix_seconds = 1'700'000'000, .driver_version = 13000};
  uint64_t first[2], second[2];
  answer_challenge(challenge, {}, first);
  CHECK(first[0] == 0x3341181C03CB675C && first[1] == 0x8ED383AA1F4CD1E8);
  challenge.version = 12081;
  answer_challenge(challenge, {}, first);
  CHECK(first[0] == 0x1841181C03CB675C && first[1] == 0x8ED383AA1F4CD1E8);
  // Made with another implementation of the rule, without devices and with two.
  Challenge real{.version = 13002, .unix_seconds = 1'700'000'000, .driver_version = 13000, .pid = 4711,
                 .thread = 0x89abcdef, .runtime_table = 0x7f0000001000, .integrity_table = 0x7f0000002000,
                 .integrity_function = 0x7f0000003000};
  answer_challenge(real, {}, first);
  CHECK(first[0] == 0x7ca9650f4a2a1c99 && first[1] == 0x21917ad2c9cddbfa);
  ChallengeDevice devices[2] = {{.domain = 0, .bus = 1, .device = 0}, {.domain = 2, .bus = 0x81, .device = 3}};
  for (int i = 0; i < 32; ++i) devices[i / 16].uuid.bytes[i % 16] = static_cast<char>(i);
  answer_challenge(real, devices, first);
  CHECK(first[0] == 0x1009fa78adba75d2 && first[1] == 0x2c66be1cc58ffe3e);
  // Everything counts.
  const auto differs = [&](auto&& change) {
    Challenge other = real;
    std::array<ChallengeDevice, 2> others{devices[0], devices[1]};
    change(other, others);
    answer_challenge(other, others, second);
    CHECK(first[0] != second[0] && first[1] != second[1]);
  };
  differs([](Challenge& c, auto&) { c.version = 13003; });
  differs([](Challenge& c, auto&) { ++c.unix_seconds; });
  differs([](Challenge& c, auto&) { ++c.driver_version; });
  differs([](Challenge& c, auto&) { ++c.pid; });
  differs([](Challenge& c, auto&) { ++c.thread; });
  differs([](Challenge& c, auto&) { ++c.runtime_table; });
  differs([](Challenge& c, auto&) { ++c.integrity_table; });
  differs([](Challenge& c, auto&) { ++c.integrity_function; });
  differs([](Challenge&, auto& d) { ++d[1].uuid.bytes[15]; });
  differs([](Challenge&, auto& d) { ++d[0].domain; });
  differs([](Challenge&, auto& d) { ++d[0].bus; });
  differs([](Challenge&, auto& d) { ++d[1].device; });
  differs([](Challenge&, auto& d) { std::swap(d[0], d[1]); });
}

void* entry(const char* name, int version, cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
  void* function = nullptr;
  CHECK(::cuGetProcAddress_v2(name, &function, version, flags, status) == CUDA_SUCCESS);
  return function;
}

void entry_points() {
  for (int i = 1; i < kEntryPointCount; ++i) {
    CHECK(std::string_view(kEntryPoints[i - 1].name) <= kEntryPoints[i].name);
    CHECK(kEntryPoints[i].function);
  }
  CUdriverProcAddressQueryResult status;
  CHECK(entry("cuInit", 13000, 0, &status) == reinterpret_cast<void*>(&::cuInit));
  CHECK(status == CU_GET_PROC_ADDRESS_SUCCESS);
  // The form that the requested version knows.
  CHECK(entry("cuCtxCreate", 12040, 0, &status) == reinterpret_cast<void*>(&::cuCtxCreate_v3));
  CHECK(entry("cuCtxCreate", 13000, 0, &status) == reinterpret_cast<void*>(&::cuCtxCreate_v4));
  CHECK(entry("cuEventElapsedTime", 12000, 0, &status) == reinterpret_cast<void*>(&::cuEventElapsedTime));
  CHECK(entry("cuEventElapsedTime", 12080, 0, &status) == reinterpret_cast<void*>(&::cuEventElapsedTime_v2));
  CHECK(entry("cuStreamGetCaptureInfo", 12030, 0, &status) == reinterpret_cast<void*>(&::cuStreamGetCaptureInfo_v3));
  CHECK(entry("cuMemAlloc", 12000, 0, &status) == reinterpret_cast<void*>(&::cuMemAlloc_v2));
  // The form whose default stream is the thread's; where there is none, the same for both.
  constexpr auto kPerThread = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  CHECK(entry("cuLaunchKernel", 12000, kPerThread, &status) == reinterpret_cast<void*>(&::cuLaunchKernel_ptsz));
  CHECK(entry("cuLaunchKernel", 12000, 0, &status) == reinterpret_cast<void*>(&::cuLaunchKernel));
  CHECK(entry("cuMemcpy", 12000, kPerThread, &status) == reinterpret_cast<void*>(&::cuMemcpy_ptds));
  CHECK(entry("cuCtxGetDevice", 12000, kPerThread, &status) == reinterpret_cast<void*>(&::cuCtxGetDevice));
  // Missing: an answer if there is a status to put it in, an error if not.
  CHECK(!entry("cuNoSuchFunction", 13000, 0, &status) && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  CHECK(!entry("cuLaunchKernelEx", 11000, 0, &status) && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  void* function = nullptr;
  CHECK(::cuGetProcAddress("cuNoSuchFunction", &function, 13000, 0) == CUDA_ERROR_NOT_FOUND);
  CHECK(::cuGetProcAddress_v2("", &function, 13000, 0, &status) == CUDA_ERROR_INVALID_VALUE);
  CHECK(::cuGetProcAddress_v2("cuInit", &function, 13000, 8, &status) == CUDA_ERROR_INVALID_VALUE);
}

void export_tables() {
  const void* table = nullptr;
  const CUuuid runtime = {{'\x6b', '\xd5', '\xfb', '\x6c', '\x5b', '\xf4', '\xe7', '\x4a', '\x89', '\x87', '\xd9',
                           '\x39', '\x12', '\xfd', '\x9d', '\xf9'}};
  CHECK(::cuGetExportTable(&table, &runtime) == CUDA_SUCCESS);
  CHECK(static_cast<const uint64_t*>(table)[0] == 13 * sizeof(void*));
  const void* again = nullptr;
  CHECK(::cuGetExportTable(&again, &runtime) == CUDA_SUCCESS && again == table);
  for (int slot = 1; slot < 13; ++slot) CHECK(static_cast<void* const*>(table)[slot]);
  // A slot that nobody is known to call says so, and answers.
  using Slot = CUresult (*)();
  CHECK(reinterpret_cast<Slot>(static_cast<void* const*>(table)[3])() == CUDA_ERROR_NOT_SUPPORTED);
  const CUuuid unknown = {{'\xf8', '\xcf', '\xf9', '\x51', '\x21', '\x46', '\x8b', '\x4e', '\xb9', '\xe2', '\xfb',
                           '\x46', '\x9e', '\x7c', '\x0d', '\xd9'}};
  CHECK(::cuGetExportTable(&table, &unknown) == CUDA_ERROR_NOT_FOUND);
  CHECK(!table);
}

// The driver's table by which NVRTC and nvJitLink keep what they have compiled, used as they use it.
void* const* compile_table() {
  const CUuuid id = {{'\xda', '\x91', '\x51', '\xd3', '\x3a', '\xe6', '\xcc', '\x41', '\xa5', '\xc0', '\x4f', '\x26', '\xd5',
                      '\x33', '\xe3', '\x28'}};
  const void* table = nullptr;
  CHECK(::cuGetExportTable(&table, &id) == CUDA_SUCCESS);
  CHECK(*static_cast<const uint64_t*>(table) > 0x30);  // it has the slot that frees a result
  return static_cast<void* const*>(table);
}

template <typename Function>
Function* compile_slot(size_t number) {
  return reinterpret_cast<Function*>(compile_table()[number]);
}

struct ToCompile {
  const char* source = "source";
  int kind = 1;
  const char* options = "-arch=sm_90";
  const char* made = "today";
  int architecture = 90;
  int flag = 0;
};

class CompileKey {
 public:
  explicit CompileKey(const ToCompile& what = {}) {
    using Make = int(void**, int, const void*, uint32_t, const char*, const char*, const char*, int, int);
    const auto bytes = static_cast<uint32_t>(std::strlen(what.source));
    const int error = compile_slot<Make>(1)(&key_, what.kind, what.source, bytes, what.options, "HOST64", what.made,
                                            what.architecture, what.flag);
    CHECK((error == 0) == (key_ != nullptr));
  }
  CompileKey(const CompileKey&) = delete;
  ~CompileKey() {
    if (key_) compile_slot<void(void*)>(2)(key_);
  }
  explicit operator bool() const { return key_ != nullptr; }
  std::string find() const {
    void* data = nullptr;
    uint32_t bytes = 0;
    if (compile_slot<int(void*, void*, void**, uint32_t*)>(3)(key_, nullptr, &data, &bytes) != 0) return "";
    std::string found(static_cast<const char*>(data), bytes);
    compile_slot<void(void*)>(6)(data);
    return found;
  }
  bool add(std::string_view data) const {
    return compile_slot<int(void*, void*, const void*, size_t)>(4)(key_, nullptr, data.data(), data.size()) == 0;
  }

 private:
  void* key_ = nullptr;
};

// A folder for what is compiled, and what is in it.
class CompileFolder {
 public:
  CompileFolder() {
    CHECK(::mkdtemp(path_));
    ::setenv("CUDA_CACHE_PATH", made().parent_path().c_str(), 1);
  }
  ~CompileFolder() { std::filesystem::remove_all(path_); }

  std::filesystem::path made() const { return std::filesystem::path(path_) / "not" / "there" / "xmig"; }
  std::set<std::filesystem::path> files() const {
    std::set<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(made())) found.insert(entry.path());
    return found;
  }
  // The file that this makes, used so many hours ago.
  std::filesystem::path add(const char* source, std::string_view data, int hours) const {
    std::set<std::filesystem::path> before;
    if (std::filesystem::exists(made())) before = files();
    CHECK(CompileKey({source}).add(data));
    for (const std::filesystem::path& path : files()) {
      if (before.contains(path)) continue;
      std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - std::chrono::hours(hours));
      return path;
    }
    CHECK(!"a new file");
    return {};
  }

 private:
  char path_[64] = "/tmp/xmig-client-test-cache-XXXXXX";
};

void compile_cache() {
  const CompileFolder folder;
  CHECK(CompileKey().find().empty());
  CHECK(CompileKey().add("binary") && CompileKey().find() == "binary");
  CHECK(CompileKey().add("newer") && CompileKey().find() == "newer");
  CHECK(folder.files().size() == 1);
  // Whatever the result depends on is part of the key.
  for (const ToCompile& other : {ToCompile{.source = "sourcf"}, ToCompile{.source = "sourc"}, ToCompile{.kind = 2},
                                 ToCompile{.options = "-arch=sm_80"}, ToCompile{.made = "yesterday"},
                                 ToCompile{.architecture = 80}, ToCompile{.flag = 1}}) {
    CHECK(CompileKey(other).find().empty());
  }
  // Turned off, or without a place: there is no key, and the caller compiles.
  ::setenv("CUDA_CACHE_DISABLE", "1", 1);
  CHECK(!CompileKey());
  ::setenv("CUDA_CACHE_DISABLE", "0", 1);
  CHECK(CompileKey().find() == "newer");
  ::setenv("CUDA_CACHE_PATH", "/proc/no/such/place", 1);
  CHECK(CompileKey().find().empty() && !CompileKey().add("binary"));
  const auto place = [] { return CompileCache::of_environment().value_or(CompileCache("", 0)).folder(); };
  ::unsetenv("CUDA_CACHE_PATH");
  ::setenv("HOME", "/home/user", 1);
  ::setenv("XDG_CACHE_HOME", "/caches", 1);
  CHECK(place() == "/caches/xmig/compiled");
  ::unsetenv("XDG_CACHE_HOME");
  CHECK(place() == "/home/user/.cache/xmig/compiled");
  ::unsetenv("HOME");
  CHECK(!CompileKey());
}

// What is not whole, or not the program's own, is not there, and is made again.
void compile_cache_damaged() {
  namespace fs = std::filesystem;
  const CompileFolder folder;
  const fs::path file = folder.add("source", "binary", 0);
  CHECK((fs::status(file).permissions() & fs::perms::mask) == (fs::perms::owner_read | fs::perms::owner_write));
  const std::pair<const char*, void (*)(std::string&)> damages[] = {
      {"a bit of the result", [](std::string& text) { text.back() ^= 1; }},
      {"a bit of the key", [](std::string& text) { text[text.size() - 7] ^= 1; }},
      {"its end", [](std::string& text) { text.pop_back(); }},
      {"something behind", [](std::string& text) { text += "x"; }},
      {"nothing left", [](std::string& text) { text.clear(); }},
      {"another format", [](std::string& text) { text[7] ^= 1; }},
      {"a size", [](std::string& text) { text[23] = '\x7f'; }},
  };
  for (const auto& [what, damage] : damages) {
    std::string text = content(file);
    damage(text);
    std::ofstream(file, std::ios::trunc | std::ios::binary) << text;
    if (!CompileKey().find().empty()) std::fprintf(stderr, "found in spite of it: %s\n", what);
    CHECK(CompileKey().find().empty());
    CHECK(CompileKey().add("binary") && CompileKey().find() == "binary");
  }
  // Another key of the same name; a link to what may be anybody's.
  const fs::path other = folder.add("other", "another binary", 0);
  fs::copy_file(other, file, fs::copy_options::overwrite_existing);
  CHECK(CompileKey().find().empty() && CompileKey({"other"}).find() == "another binary");
  CHECK(CompileKey().add("binary"));
  fs::rename(file, folder.made().parent_path() / "elsewhere");
  fs::create_symlink(folder.made().parent_path() / "elsewhere", file);
  CHECK(CompileKey().find().empty());
  CHECK(CompileKey().add("binary") && CompileKey().find() == "binary" && !fs::is_symlink(file));
}

// What was used longest ago goes first; what is larger than the whole cache is not kept.
void compile_cache_full() {
  const CompileFolder folder;
  ::setenv("CUDA_CACHE_MAXSIZE", "1300", 1);
  const std::string large(300, 'x');  // with its key and header less than 400
  const std::filesystem::path first = folder.add("first", large, 3), second = folder.add("second", large, 2),
                              third = folder.add("third", large, 1);
  CHECK(CompileKey({"first"}).find() == large);  // used, if long ago made
  const std::filesystem::path fourth = folder.add("fourth", large, 0);
  CHECK(folder.files() == std::set({first, third, fourth}));
  CHECK(!CompileKey({"fifth"}).add(std::string(1300, 'x')));
  CHECK(folder.files() == std::set({first, third, fourth}));
}

int destroyed = 0;

// What a program asks for in vain is written down, and each function that it calls.
void requested() {
  char path[] = "/tmp/xmig-client-test-requested-XXXXXX";
  ::close(::mkstemp(path));
  ::setenv("XMIG_REQUESTED", path, 1);
  int version = 0;
  for (int i = 0; i < 3; ++i) CHECK(::cuDriverGetVersion(&version) == CUDA_SUCCESS);
  CUdeviceptr pointer = 0;
  for (int i = 0; i < 3; ++i) CHECK(::cuMemAllocManaged(&pointer, 8, 1) == CUDA_ERROR_NOT_SUPPORTED);
  CUdriverProcAddressQueryResult status;
  CHECK(!entry("cuNoSuchFunction", 13000, 0, &status));
  CHECK(!entry("cuLaunchKernelEx", 11000, 0, &status));  // as every driver answers
  CHECK(entry("cuArrayCreate", 13000, 0, &status));      // looked up is not called
  const CUuuid unknown = {{'\x01', '\x23', '\xff'}};
  const void* table = nullptr;
  CHECK(::cuGetExportTable(&table, &unknown) == CUDA_ERROR_NOT_FOUND);
  CHECK(content(path) ==
        "called cuDriverGetVersion\ncalled cuMemAllocManaged\nrefused cuMemAllocManaged\ncalled cuGetProcAddress_v2\n"
        "missing cuNoSuchFunction\ncalled cuGetExportTable\ntable 0123ff00-0000-0000-0000-000000000000\n");
  ::unlink(path);
}

void context_storage() {
  static constinit ContextStorage storage;
  int keys[300];
  void* value = nullptr;
  CHECK(storage.get(&keys[0], &value) == CUDA_ERROR_INVALID_HANDLE);
  const auto destructor = [](CUcontext, void*, void* v) { destroyed += *static_cast<int*>(v); };
  for (int i = 0; i < 256; ++i) {
    keys[i] = i;
    CHECK(storage.put(&keys[i], &keys[i], destructor) == CUDA_SUCCESS);
  }
  CHECK(storage.put(&keys[256], nullptr, nullptr) == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(storage.get(&keys[77], &value) == CUDA_SUCCESS && value == &keys[77]);
  CHECK(storage.remove(&keys[77]) == CUDA_SUCCESS);
  CHECK(storage.get(&keys[77], &value) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(storage.remove(&keys[77]) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(storage.put(&keys[77], nullptr, nullptr) == CUDA_SUCCESS);  // null is a value
  CHECK(storage.get(&keys[77], &value) == CUDA_SUCCESS && !value);
  std::thread reader([&] {
    void* seen = nullptr;
    for (int i = 0; i < 100'000; ++i) {
      if (storage.get(&keys[5], &seen) == CUDA_SUCCESS) CHECK(seen == &keys[5]);
    }
  });
  for (int i = 0; i < 1000; ++i) {
    storage.remove(&keys[5]);
    storage.put(&keys[5], &keys[5], destructor);
  }
  reader.join();
  storage.clear(nullptr);
  CHECK(destroyed == 255 * 256 / 2 - 77);
  CHECK(storage.get(&keys[5], &value) == CUDA_ERROR_INVALID_HANDLE);
  storage.clear(nullptr);  // once each
  CHECK(destroyed == 255 * 256 / 2 - 77);
  CHECK(storage.put(nullptr, &keys[5], destructor) == CUDA_ERROR_INVALID_VALUE);
  CHECK(storage.get(nullptr, &value) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(storage.remove(nullptr) == CUDA_ERROR_INVALID_HANDLE);
  // The last value and its destructor count; one that was taken out has none.
  CHECK(storage.put(&keys[1], &keys[1], destructor) == CUDA_SUCCESS);
  CHECK(storage.put(&keys[1], &keys[2], destructor) == CUDA_SUCCESS);
  CHECK(storage.put(&keys[3], &keys[3], destructor) == CUDA_SUCCESS);
  CHECK(storage.remove(&keys[3]) == CUDA_SUCCESS);
  destroyed = 0;
  storage.clear(nullptr);
  CHECK(destroyed == 2);
}

void numbers() {
  Numbers few(4);
  CHECK(few.take() == 1u && few.take() == 2u && few.take() == 3u && !few.take());
  few.give(2);
  CHECK(few.take() == 2u && !few.take());
  // Where there is room, a freed number rests for a while.
  Numbers many(10'000);
  const uint32_t first = *many.take();
  many.give(first);
  for (int i = 0; i < 200; ++i) {
    const uint32_t next = *many.take();
    CHECK(next != first);
    many.give(next);
  }
}

struct Thing {
  std::atomic<bool> alive{false};
  int value = 0;
};

void table() {
  static constinit Table<Thing, 1024> things;
  const auto handle = [](uint32_t number) { return journal::make_handle(journal::Kind::kStream, number); };
  CHECK(!things.find(handle(5), journal::Kind::kStream));
  things.place(5).value = 55;
  CHECK(!things.find(handle(5), journal::Kind::kStream));
  things.place(5).alive = true;
  CHECK(things.find(handle(5), journal::Kind::kStream)->value == 55);
  CHECK(!things.find(handle(5), journal::Kind::kEvent));
  CHECK(!things.find(handle(1024), journal::Kind::kStream));
  CHECK(!things.find(handle(~0u), journal::Kind::kStream));
  CHECK(!things.find(5, journal::Kind::kStream));
  CHECK(!things.find(0x7fff12345678, journal::Kind::kStream));
  int count = 0;
  things.for_each([&](uint32_t number, Thing&) { count += number == 5; });
  CHECK(count == 1);
}

void images() {
  std::span<const std::byte> image;
  const char ptx[] = "// made by hand\n.version 8.0\n.target sm_90\n";
  CHECK(measure_image(ptx, &image) == CUDA_SUCCESS && image.size() == sizeof(ptx) && image.data() == (const void*)ptx);
  const char noise[64] = "\1\2\3\4 this is nothing";
  CHECK(measure_image(noise, &image) == CUDA_ERROR_INVALID_IMAGE);
  CHECK(measure_image(nullptr, &image) == CUDA_ERROR_INVALID_VALUE);

  struct {
    uint32_t magic = 0xBA55ED50;
    uint16_t version = 1, header = 16;
    uint64_t bytes = 40;
    char data[40] = {};
  } fat;
  CHECK(measure_image(&fat, &image) == CUDA_SUCCESS && image.size() == 56);
  CHECK(measure_image(&fat, &image, 55) == CUDA_ERROR_INVALID_IMAGE);
  struct {
    uint32_t magic = 0x466243B1, version = 1;
    const void* data;
    void* more = nullptr;
  } wrapper{.data = &fat};
  CHECK(measure_image(&wrapper, &image) == CUDA_SUCCESS && image.data() == (const void*)&fat && image.size() == 56);
  wrapper.data = nullptr;
  CHECK(measure_image(&wrapper, &image) == CUDA_ERROR_INVALID_IMAGE);

  // This program is an ELF file; the length that its headers speak of is the file's.
  const std::vector<std::byte> self = read_image_file("/proc/self/exe");
  CHECK(self.size() > 64);
  CHECK(measure_image(self.data(), &image, self.size()) == CUDA_SUCCESS && image.size() == self.size() - 64);
  // Snapshot short anywhere, it is refused and nothing is read beyond its end.
  for (const size_t length : {size_t{64}, size_t{128}, self.size() / 2, self.size() - 100}) {
    const std::vector<std::byte> part(self.begin(), self.begin() + static_cast<ptrdiff_t>(length));
    CHECK(measure_image(part.data(), &image, part.size()) == CUDA_ERROR_INVALID_IMAGE);
  }
  CHECK(read_image_file("/no/such/file").empty());
}

void descriptions() {
  std::vector<std::byte> text;
  const auto put = [&](const void* data, size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    text.insert(text.end(), from, from + bytes);
  };
  journal::ModuleInfo info{.kernel_count = 1, .global_count = 1};
  put(&info, sizeof(info));
  const journal::KernelName kernel{3};
  put(&kernel, sizeof(kernel));
  put("mix", 3);
  text.resize(journal::align8(text.size()));
  const journal::GlobalInfo global{.address = 0, .bytes = 16, .name_bytes = 5};
  put(&global, sizeof(global));
  put("table", 5);
  text.resize(journal::align8(text.size()));
  {
    Module module;
    CHECK(parse_description(text, module));
    CHECK(module.functions.size() == 1 && module.functions[0].name == "mix" && module.by_name.at("mix") == 0);
    CHECK(!module.functions[0].described.load());
    CHECK(module.globals.size() == 1 && module.globals[0].name == "table" && module.globals[0].bytes == 16);
  }
  // Whatever the server writes: nothing but yes or no. (The sanitizers watch.)
  for (size_t length = 0; length + 8 < text.size(); ++length) {
    const std::vector<std::byte> part(text.begin(), text.begin() + static_cast<ptrdiff_t>(length));
    Module module;
    CHECK(!parse_description(part, module));
  }
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int value : {0x00, 0x7f, 0xff}) {
      auto changed = text;
      changed[i] = static_cast<std::byte>(value);
      Module module;
      parse_description(changed, module);
    }
  }
  text.clear();
  journal::KernelInfo described{.parameter_count = 2, .parameter_bytes = 12, .attributes = {1024}};
  put(&described, sizeof(described));
  const journal::ParameterInfo parameters[] = {{0, 8}, {8, 4}};
  put(parameters, sizeof(parameters));
  Function function;
  CHECK(parse_description(text, function));
  CHECK(function.parameters[1].offset == 8 && function.parameter_bytes == 12 && function.attributes[0] == 1024);
  for (size_t length = 0; length < text.size(); ++length) {
    Function part;
    CHECK(!parse_description(std::span(text).first(length), part));
  }
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int value : {0x00, 0x7f, 0xff}) {
      auto changed = text;
      changed[i] = static_cast<std::byte>(value);
      Function other;
      if (!parse_description(changed, other)) continue;
      for (const journal::ParameterInfo& p : other.parameters) CHECK(p.offset + p.size <= other.parameter_bytes);
    }
  }
}

void errors() {
  const char* text = nullptr;
  CHECK(::cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text) == CUDA_SUCCESS);
  CHECK(std::string_view(text) == "CUDA_ERROR_OUT_OF_MEMORY");
  CHECK(::cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text) == CUDA_SUCCESS);
  CHECK(std::string_view(text) == "out of memory");
  CHECK(::cuGetErrorString(CUDA_ERROR_ILLEGAL_ADDRESS, &text) == CUDA_SUCCESS);
  CHECK(std::string_view(text) == "an illegal memory access was encountered");
  CHECK(::cuGetErrorName(static_cast<CUresult>(1000), &text) == CUDA_ERROR_INVALID_VALUE && !text);
}

void uninitialised() {
  int count = 0;
  CHECK(::cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(::cuDriverGetVersion(&count) == CUDA_SUCCESS && count == CUDA_VERSION);
  CUdeviceptr pointer = 0;
  CHECK(::cuMemAlloc_v2(&pointer, 8) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(::cuStreamSynchronize(nullptr) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(::cuMemsetD8Async(0, 0, 1, nullptr) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(::cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr) == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(::cuInit(1) == CUDA_ERROR_INVALID_VALUE);
  ::setenv("XMIG_SOCKET", "/no/such/socket", 1);
  CHECK(::cuInit(0) == CUDA_ERROR_SYSTEM_NOT_READY);
  // The genuine driver, where there is none either.
  ::setenv("XMIG_WITHOUT_DAEMON", "native", 1);
  ::setenv("XMIG_NATIVE_LIBCUDA", "/no/such/driver", 1);
  CHECK(::cuInit(0) == CUDA_ERROR_SYSTEM_NOT_READY);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string_view, void (*)()> tests = {
      {"md2", md2},
      {"integrity", integrity},
      {"entry_points", entry_points},
      {"export_tables", export_tables},
      {"compile_cache", compile_cache},
      {"compile_cache_damaged", compile_cache_damaged},
      {"compile_cache_full", compile_cache_full},
      {"context_storage", context_storage},
      {"requested", requested},
      {"numbers", numbers},
      {"table", table},
      {"images", images},
      {"descriptions", descriptions},
      {"errors", errors},
      {"uninitialised", uninitialised},
  };
  for (int i = 1; i < argc; ++i) {
    const auto test = tests.find(argv[i]);
    CHECK(test != tests.end());
    test->second();
  }
  if (argc == 1) {
    for (const auto& [name, test] : tests) test();
  }
}
