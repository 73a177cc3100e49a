#include "device/cpu/context.h"

#include <algorithm>

#include "device/cpu/log.h"
#include "device/cpu/progress.h"

namespace xmig::device::cpu {

void Context::raise(int error, uint64_t sequence, std::string text) {
  void (*callback)(void*) = nullptr;
  void* user = nullptr;
  {
    const std::lock_guard lock(shared_->mutex);
    if (dropping()) return;  // a consequence, or nobody's business any more
    XMIG_CPU_LOG("sticky fault %d at record %llu: %s", error, static_cast<unsigned long long>(sequence), text.c_str());
    if (shared_->fault.error == 0) {
      shared_->fault = {error, sequence, std::move(text)};
      callback = shared_->on_fault;
      user = shared_->on_fault_user;
    }
    error_.store(error);
  }
  Progress::instance().changed();
  if (callback) callback(user);
}

void Context::abandon() {
  abandoned_.store(true);
  Progress::instance().changed();
  for (const auto& stream : streams_) stream->close();
  streams_.clear();
  legacy_.reset();
  per_thread_.reset();
}

std::shared_ptr<Stream> Context::create_stream(StreamKind kind) {
  forget_finished();
  streams_.push_back(std::make_shared<Stream>(shared_from_this(), kind));
  return streams_.back();
}

const std::shared_ptr<Stream>& Context::legacy() {
  if (!legacy_) legacy_ = create_stream(StreamKind::kLegacy);
  return legacy_;
}

const std::shared_ptr<Stream>& Context::per_thread() {
  if (!per_thread_) per_thread_ = create_stream(StreamKind::kBlocking);
  return per_thread_;
}

void Context::forget_finished() {
  std::erase_if(streams_, [](const auto& stream) { return stream->closed() && stream->idle(); });
}

void Context::order(Stream& stream, uint64_t sequence) {
  if (stream.kind() == StreamKind::kLegacy) {
    for (const auto& other : streams_)
      if (other->kind() == StreamKind::kBlocking && !other->idle())
        stream.push(WaitWork{{other, other->enqueued()}}, sequence);
  } else if (stream.kind() == StreamKind::kBlocking && legacy_ && legacy_->enqueued() > stream.legacy_seen) {
    stream.legacy_seen = legacy_->enqueued();
    if (!legacy_->idle()) stream.push(WaitWork{{legacy_, stream.legacy_seen}}, sequence);
  }
}

uint64_t Context::submit(Stream& stream, Work work, uint64_t sequence) {
  order(stream, sequence);
  return stream.push(std::move(work), sequence);
}

bool Context::idle(Stream& stream) {
  if (!stream.idle()) return false;
  if (stream.kind() == StreamKind::kLegacy)
    return std::all_of(streams_.begin(), streams_.end(),
                       [](const auto& s) { return s->kind() != StreamKind::kBlocking || s->idle(); });
  return stream.kind() == StreamKind::kNonBlocking || !legacy_ || legacy_->idle();
}

std::vector<Reach> Context::reach(Stream& stream) {
  std::vector<Reach> out{{stream.shared_from_this(), stream.enqueued()}};
  if (stream.kind() == StreamKind::kLegacy)
    for (const auto& other : streams_)
      if (other->kind() == StreamKind::kBlocking && !other->idle()) out.push_back({other, other->enqueued()});
  return out;
}

std::vector<Reach> Context::reach_all() {
  std::vector<Reach> out;
  for (const auto& stream : streams_)
    if (!stream->idle()) out.push_back({stream, stream->enqueued()});
  return out;
}

}  // namespace xmig::device::cpu
