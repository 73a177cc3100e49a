#include "client/journal/streams.h"

#include "client/journal/append.h"
#include "client/journal/handles.h"

namespace xmig::client {
namespace {

using journal::Kind;

constinit Table<Stream, number_limit(Kind::kStream)> streams;

}  // namespace

Stream* find_stream(CUstream stream) { return streams.find(reinterpret_cast<uint64_t>(stream), Kind::kStream); }

Stream& stream_place(uint64_t handle) { return streams.place(journal::handle_index(handle)); }

bool valid_stream(CUstream stream) { return special(stream) || find_stream(stream); }

CUstream resolve(CUstream stream) { return stream ? stream : default_stream(); }

void streams_context_reset(const Context& context) {
  streams.for_each([&](uint32_t number, Stream& stream) {
    if (stream.context == &context && stream.alive.exchange(false)) {
      free_handle(journal::make_handle(Kind::kStream, number));
    }
  });
}

}  // namespace xmig::client
