// libxmig-loader.so, preloaded beside the shims: the driver under its other names, and NCCL's library, which some frameworks open by
// its full path.
//
// A program that asks for libcuda.so.1 gets the shim, because a library of that name is loaded already. libcuda.so, libcuda.so.550.54,
// or the full path of the driver's file are other names to the loader: it would load the genuine driver beside the shim, and the
// program would run unprotected. So dlopen() and dlmopen() are ours, for these names only.
//
// Invariants:
//   Every other name goes on to the C library's function by a jump, not a call: who calls decides where is searched (RPATH, RUNPATH,
//   namespace), and the C library tells that by the return address. That is why the entries are written in assembly.
//   What xMIG's own libraries open is not renamed: XMIG_WITHOUT_DAEMON=native needs the genuine driver.
//   No C++ library, no allocation, no constructor.
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

namespace {

constexpr size_t kLongest = 4096;

struct Shim {
  const char* name;
  bool known;            // is `path`?
  char path[kLongest];  // threads that find it at the same time write the same bytes
};
Shim shims[] = {{"libcuda.so.1", false, {}}, {"libnvidia-ml.so.1", false, {}}, {"libnccl.so.2", false, {}}};

// The shim that stands for this file's name, or nullptr. `libcuda.so`, and what follows it in numbers.
Shim* shim_for(const char* file) {
  for (Shim& shim : shims) {
    const size_t plain = strlen(shim.name) - 2;  // without its version
    if (strncmp(file, shim.name, plain) != 0) continue;
    const char* const rest = file + plain;
    if (*rest == 0 || (*rest == '.' && rest[1] && rest[strspn(rest, ".0123456789")] == 0)) return &shim;
  }
  return nullptr;
}

const char* base_name(const char* path) {
  const char* const slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// The same for a path that is a link to such a file.
Shim* shim_behind(const char* path) {
  char here[kLongest], target[kLongest];
  if (strlen(path) >= sizeof(here)) return nullptr;
  strcpy(here, path);
  for (int hops = 0; hops < 8; ++hops) {
    const ssize_t bytes = readlink(here, target, sizeof(target) - 1);
    if (bytes <= 0) return nullptr;
    target[bytes] = 0;
    if (Shim* const shim = shim_for(base_name(target))) return shim;
    char* const folder = target[0] == '/' ? here : here + (base_name(here) - here);
    if (static_cast<size_t>(folder - here) + static_cast<size_t>(bytes) >= sizeof(here)) return nullptr;
    strcpy(folder, target);
  }
  return nullptr;
}

// All of ours lie in the folder of this library. nullptr: it is one of them that asks, or the folder's path is not known.
const char* path_of(Shim& shim, const void* caller) {
  Dl_info own{}, other{};
  if (!dladdr(reinterpret_cast<const void*>(&path_of), &own) || !own.dli_fname) return nullptr;
  const size_t folder = static_cast<size_t>(base_name(own.dli_fname) - own.dli_fname);
  const bool is_ours = dladdr(caller, &other) && other.dli_fname && strncmp(other.dli_fname, own.dli_fname, folder) == 0 &&
                       !strchr(other.dli_fname + folder, '/');
  if (is_ours || folder + strlen(shim.name) >= sizeof(shim.path)) return nullptr;
  if (!__atomic_load_n(&shim.known, __ATOMIC_ACQUIRE)) {
    memcpy(shim.path, own.dli_fname, folder);
    strcpy(shim.path + folder, shim.name);
    __atomic_store_n(&shim.known, true, __ATOMIC_RELEASE);
  }
  return shim.path;
}

}  // namespace

extern "C" {

using Open = void* (*)(const char*, int);
using OpenIn = void* (*)(Lmid_t, const char*, int);
[[gnu::visibility("hidden")]] Open xmig_next_dlopen;
[[gnu::visibility("hidden")]] OpenIn xmig_next_dlmopen;

// The path to open instead of `name`; nullptr: that one. Afterwards the functions above are known.
[[gnu::visibility("hidden"), gnu::used]] const char* xmig_instead(const char* name, const void* caller) {
  if (!__atomic_load_n(&xmig_next_dlopen, __ATOMIC_ACQUIRE)) {
    xmig_next_dlmopen = reinterpret_cast<OpenIn>(dlsym(RTLD_NEXT, "dlmopen"));
    __atomic_store_n(&xmig_next_dlopen, reinterpret_cast<Open>(dlsym(RTLD_NEXT, "dlopen")), __ATOMIC_RELEASE);
  }
  if (!name) return nullptr;
  Shim* shim = shim_for(base_name(name));
  if (!shim && strchr(name, '/')) shim = shim_behind(name);
  return shim ? path_of(*shim, caller) : nullptr;
}

#if defined(__x86_64__)
// dlopen(name: rdi, flags: esi); the return address is the caller.
asm(R"(
  .text
  .globl dlopen
  .type dlopen, @function
dlopen:
  .cfi_startproc
  endbr64
  subq $24, %rsp
  .cfi_adjust_cfa_offset 24
  movq %rdi, (%rsp)
  movq %rsi, 8(%rsp)
  movq 24(%rsp), %rsi
  call xmig_instead
  testq %rax, %rax
  cmovzq (%rsp), %rax
  movq %rax, %rdi
  movq 8(%rsp), %rsi
  addq $24, %rsp
  .cfi_adjust_cfa_offset -24
  jmp *xmig_next_dlopen(%rip)
  .cfi_endproc
  .size dlopen, . - dlopen

  .globl dlmopen
  .type dlmopen, @function
# dlmopen(namespace: rdi, name: rsi, flags: edx). A process has one shim: it is not loaded again into another namespace.
dlmopen:
  .cfi_startproc
  endbr64
  subq $40, %rsp
  .cfi_adjust_cfa_offset 40
  movq %rdi, (%rsp)
  movq %rsi, 8(%rsp)
  movq %rdx, 16(%rsp)
  movq %rsi, %rdi
  movq 40(%rsp), %rsi
  call xmig_instead
  movq (%rsp), %rdi
  movq 8(%rsp), %rsi
  movq 16(%rsp), %rdx
  addq $40, %rsp
  .cfi_adjust_cfa_offset -40
  testq %rax, %rax
  jnz 1f
  jmp *xmig_next_dlmopen(%rip)
1:
  movq %rax, %rdi
  movl %edx, %esi
  jmp *xmig_next_dlopen(%rip)
  .cfi_endproc
  .size dlmopen, . - dlmopen
)");
#else
#error "dlopen() and dlmopen() have to go on by a jump: write them for this processor"
#endif

}  // extern "C"
