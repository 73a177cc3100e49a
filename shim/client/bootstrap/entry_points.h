// The generated table behind cuGetProcAddress.
#pragma once

namespace xmig::client {

struct EntryPoint {
  const char* name;  // as the program asks for it: without _v2 or _ptsz
  int version;       // CUDA version in which this form appeared
  bool per_thread;   // the form whose default stream is the thread's own
  const char* symbol;
  void* function;
};
extern const EntryPoint kEntryPoints[];
extern const int kEntryPointCount;

}  // namespace xmig::client
