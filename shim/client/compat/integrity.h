// The answer that lets unmodified libraries run on this libcuda.so.1.
//
// Every copy of libcudart asks the driver, when it initialises, to answer a challenge, and refuses to work (error 103)
// if the answer is wrong: it notices a driver some of whose tables were replaced. The rule is public knowledge, and
// several open compatibility layers follow it. It is here for interoperability and for nothing else: it protects no
// content and circumvents no licence.
//
// What lies in this folder: what unmodified libraries expect of the genuine driver beyond its interface: export_tables, this answer
// and its digest (md2), compile_cache. Nothing of the client but the generated stubs calls it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

namespace xmig::client {

// What the answer is made from; all of it has to be what the driver says elsewhere too.
struct Challenge {
  uint32_t version;  // of libcudart, plus 0, 1 or 2
  uint64_t unix_seconds;
  uint32_t driver_version;
  uint32_t pid;
  uint32_t thread;  // low half of pthread_self()
  uint64_t runtime_table;
  uint64_t integrity_table;
  uint64_t integrity_function;
};
struct ChallengeDevice {
  CUuuid uuid;
  int32_t domain, bus, device;
};
void answer_challenge(const Challenge& challenge, std::span<const ChallengeDevice> devices, uint64_t (&answer)[2]);

}  // namespace xmig::client
