// The memory half of the client, as the rest of the client sees it: memory for module globals, and the events after
// which memory that was freed in stream order may be used by other streams.
//
// What lies in this folder: addresses (ranges, backing, heap, pool), what the program has at them (map, pointer), mappings of the
// program's own (vmm), page-locked memory (pinned), which devices reach whose memory (peers), memory of graphs (graph_memory), words
// that streams wait for and write (memory_operations), and what caching allocators give back (cached_blocks, caching_allocator).
// Each has a lock of its own.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace xmig::client {

// Device memory of the current context for a global variable of a module; not the program's to free. Its content is
// whatever was there: the server zeroes or fills it when it meets xmBindGlobal.
CUresult allocate_global(uint64_t bytes, uint64_t* address);
// Gives it back; call after the module's cuModuleUnload was appended. Waits for the context, as cuMemFree does.
CUresult free_global(uint64_t address);
// The same, without waiting, for memory that nothing which was appended needs any more.
CUresult free_idle_global(uint64_t address);

// Call on the thread that waited, right after its cuStreamSynchronize (or a cuStreamQuery that found the stream done)
// returned success and before it appends anything else: the sequence number of that record is what counts.
void memory_stream_synchronized(CUstream stream);
// The same for cuCtxSynchronize; it covers every stream of the current context.
void memory_context_synchronized();

// For events: take the key when the event is recorded (legacy and per-thread streams mean something else on every
// context and thread), and report it with the sequence number of the record when the event was seen to be complete.
uint64_t memory_stream_key(CUstream stream);
void memory_event_synchronized(uint64_t stream_key, uint64_t record_sequence);

// After cuStreamDestroy was appended, before the handle is given back.
void memory_stream_destroyed(CUstream stream);

// After xmContextReset succeeded for `context` (its handle): everything allocated in it is gone. The server drops
// the allocations; physical memory stays with this process until it gives it back with xmShrink.
void memory_context_reset(uint64_t context);

}  // namespace xmig::client
