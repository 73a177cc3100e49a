#include "client/bootstrap/job_log.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <span>

#include "client/bootstrap/handshake.h"
#include "client/bootstrap/process.h"
#include "ipc/handshake.h"
#include "ipc/seqpacket.h"
#include "journal/lock.h"

namespace xmig::client {
namespace {

static_assert(kLongestLine <= sizeof(journal::Notice::text));
static_assert(kLongestLine < sizeof(ipc::ClientNotice::text));

// Into the memory that the daemon has, too. False: there is none.
bool post(std::string_view text) {
  if (process.phase.load(std::memory_order_acquire) != Phase::kRunning) return false;
  journal::JournalHeader& header = *process.header;
  static constinit journal::Lock lock;
  const std::lock_guard guard(lock);
  const uint64_t posted = header.notices_posted.load(std::memory_order_relaxed);
  if (posted - header.notices_taken.load(std::memory_order_acquire) >= journal::kNotices) {
    header.notices_dropped.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  journal::Notice& notice = header.notices[posted % journal::kNotices];
  notice.unix_ns = static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
  notice.bytes = static_cast<uint32_t>(text.size());
  std::memcpy(notice.text, text.data(), text.size());
  header.notices_posted.store(posted + 1, std::memory_order_release);
  return true;
}

// By a message of its own, where there is a daemon: of a process that has no journal, or has its parent's.
void mail(std::string_view text) {
  ipc::ClientNotice notice{};
  notice.magic = ipc::kNoticeMagic;
  notice.version = ipc::kHandshakeVersion;
  const char* const given = std::getenv("XMIG_JOB");
  const std::string_view job = given ? given : "";
  std::copy_n(job.begin(), std::min(job.size(), sizeof(notice.job) - 1), notice.job);
  std::copy(text.begin(), text.end(), notice.text);
  const ipc::UniqueFd socket = ipc::connect_to(socket_path(), /*wait=*/false);
  if (socket) ipc::send_message(socket.get(), std::as_bytes(std::span(&notice, 1)));
}

}  // namespace

void keep_line(std::string_view text) {
  text = text.substr(0, kLongestLine);
  if (!post(text)) mail(text);
}

}  // namespace xmig::client
