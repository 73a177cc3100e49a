#include "server/cuda/handlers/program_contexts.h"

namespace xmig::server {

ProgramContexts::ProgramContexts(const Session& session, Streams& streams, Modules& modules, Graphs& graphs, Peers& peers)
    : driver_(session.device.driver()),
      contexts_(session.services.contexts),
      job_(session.services.job),
      live_(session.memory.live),
      objects_(session.objects),
      current_(session.current),
      errors_(session.errors),
      streams_(streams),
      modules_(modules),
      graphs_(graphs),
      peers_(peers) {}

// The program was informed that it has no context there: a replay must not make one after all.
CUresult ProgramContexts::on_xmOpen(Record& record) {
  Args_xmOpen args;
  if (!record.arguments(args) || args.ordinal >= contexts_.count()) return CUDA_ERROR_INVALID_VALUE;
  if (record.replied() && record.header().result != CUDA_SUCCESS) return static_cast<CUresult>(record.header().result);
  const CUresult result = device::result_of(contexts_.try_open(args.ordinal));
  contexts_.use(contexts_.home());
  return result;
}

CUresult ProgramContexts::on_xmLimit(Record& record) {
  Args_xmLimit args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const auto limit = static_cast<CUlimit>(args.limit);
  size_t value = 0;
  if (const CUresult unread = driver_.cuCtxGetLimit(&value, limit); unread != CUDA_SUCCESS) {
    // One that does not exist: the driver may answer differently to who sets it.
    const CUresult unset = args.set ? driver_.cuCtxSetLimit(limit, args.value) : unread;
    return unset != CUDA_SUCCESS ? unset : unread;
  }
  if (args.set) {
    const journal::RecordHeader& header = record.header();
    const auto [entry, first] = objects_.limits.try_emplace({header.ordinal, args.limit}, Limit{.before = value});
    const CUresult result = driver_.cuCtxSetLimit(limit, args.value);
    if (result == CUDA_SUCCESS) {
      entry->second.owner = {header.context, header.ordinal};
      entry->second.creation = objects_.records.keep(record.sequence(), record.stored());
      driver_.cuCtxGetLimit(&value, limit);
    } else {
      if (first) objects_.limits.erase(entry);
      return result;
    }
  }
  const uint64_t reply = value;
  record.set_reply(&reply, sizeof(reply));
  return CUDA_SUCCESS;
}

CUresult ProgramContexts::on_xmContextReset(Record& record) {
  Args_xmContextReset args;
  if (!record.arguments(args)) return CUDA_ERROR_INVALID_VALUE;
  const uint32_t ordinal = record.header().ordinal;
  if (current_.mode == Mode::kRun) {
    // The one call that waits: nothing of the context may run while its modules go.
    const CUresult result = driver_.cuCtxSynchronize();
    if (result != CUDA_SUCCESS) return result;
  }
  reset(journal::handle_is(args.context, journal::Kind::kContext) ? journal::handle_index(args.context)
                                                                        : static_cast<uint32_t>(args.context));
  if (errors_.of(ordinal) == 0) return CUDA_SUCCESS;
  errors_.clear(ordinal);
  journal::JournalHeader& header = job_.header();
  // A replay may pass a reset that lies before the fault that the program has been informed of since.
  const bool earlier = header.context_error_sequence.load() < record.sequence();
  if (earlier && header.context_error_ordinal.load() == ordinal) {
    header.context_error.store(0, std::memory_order_release);
  }
  return CUDA_SUCCESS;
}

void ProgramContexts::reset(uint32_t context) {
  std::erase_if(objects_.pins, [&](const auto& entry) {
    if (entry.second.owner.context != context) return false;
    driver_.cuMemHostUnregister(reinterpret_cast<void*>(entry.first));
    return true;
  });
  objects_.streams.for_each([&](uint32_t index, const Stream& stream) {
    if (stream.owner.context != context) return;
    streams_.leave(stream.real);
    driver_.cuStreamDestroy_v2(stream.real);
    objects_.streams.erase(index);
  });
  objects_.events.for_each([&](uint32_t index, const Event& event) {
    if (event.owner.context != context) return;
    driver_.cuEventDestroy_v2(event.real);
    objects_.events.erase(index);
  });
  objects_.modules.for_each([&](uint32_t index, const Module& module) {
    if (module.owner.context == context) modules_.unload(index);
  });
  objects_.graphs.for_each([&](uint32_t index, const GraphExec& graph) {
    if (graph.owner.context != context) return;
    graphs_.destroy(graph);
    objects_.graphs.erase(index);
  });
  std::erase_if(objects_.limits, [&](const auto& entry) {
    if (entry.second.owner.context != context) return false;
    driver_.cuCtxSetLimit(static_cast<CUlimit>(entry.first.second), entry.second.before);
    return true;
  });
  peers_.reset(context);
  live_.remove_context(context);
  std::erase_if(objects_.numbers, [&](const auto& entry) { return !live_.contains(entry.first, entry.second.bytes); });
}

}  // namespace xmig::server
