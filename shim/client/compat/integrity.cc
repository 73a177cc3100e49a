#include "client/compat/integrity.h"

#include <cstring>
#include <vector>

#include "client/compat/md2.h"

namespace xmig::client {
namespace {

constexpr uint8_t kKey[16] = {0x14, 0x6A, 0xDD, 0xAE, 0x53, 0xA9, 0xA7, 0x52,
                              0xAA, 0x08, 0x41, 0x36, 0x0B, 0xF5, 0x5A, 0x9F};

template <typename T>
void put(std::vector<uint8_t>& message, const T& value) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(&value);
  message.insert(message.end(), bytes, bytes + sizeof(value));
}

}  // namespace

void answer_challenge(const Challenge& challenge, std::span<const ChallengeDevice> devices, uint64_t (&answer)[2]) {
  switch (challenge.version % 10) {
    case 0:
      answer[0] = 0x3341181C03CB675C;
      answer[1] = 0x8ED383AA1F4CD1E8;
      return;
    case 1:
      answer[0] = 0x1841181C03CB675C;
      answer[1] = 0x8ED383AA1F4CD1E8;
      return;
    default:
      break;
  }
  std::vector<uint8_t> message;
  put(message, challenge.driver_version);
  put(message, challenge.version);
  put(message, challenge.pid);
  put(message, challenge.thread);
  put(message, challenge.runtime_table);
  put(message, challenge.integrity_table);
  put(message, challenge.integrity_function);
  put(message, challenge.unix_seconds);
  for (const ChallengeDevice& device : devices) {
    put(message, device.uuid);
    put(message, device.domain);
    put(message, device.bus);
    put(message, device.device);
  }
  const Digest digest = hmac_md2(kKey, message);
  std::memcpy(answer, digest.data(), digest.size());
}

}  // namespace xmig::client
