#include "server/cuda/timing/operation.h"

#include <cxxabi.h>

#include <cstdlib>
#include <cstring>

#include "journal/collectives.h"
#include "server/memory/physical.h"

namespace xmig::server {
namespace {

using profiling::Kind;

constexpr const char* kCollectives[] = {"all-reduce", "broadcast", "reduce",  "all-gather", "reduce-scatter",
                                        "all-to-all", "gather",    "scatter", "send",       "receive"};
static_assert(std::size(kCollectives) == static_cast<size_t>(journal::CollectiveKind::kCount));

template <typename Args>
bool launch(const Record& record, Operation& out) {
  Args args;
  if (!record.arguments(args)) return false;
  out.kind = Kind::kKernel;
  out.stream = args.stream;
  out.what = args.function;
  out.grid[0] = args.grid_x;
  out.grid[1] = args.grid_y;
  out.grid[2] = args.grid_z;
  out.block[0] = args.block_x;
  out.block[1] = args.block_y;
  out.block[2] = args.block_z;
  out.shared_bytes = args.shared_bytes;
  return true;
}

template <typename Args>
bool rows(const Record& record, Kind kind, Operation& out) {
  Args args;
  if (!record.arguments(args)) return false;
  out.kind = kind;
  out.stream = args.stream;
  out.bytes = args.width * args.height;
  return true;
}

template <typename Args>
bool fill(const Record& record, uint64_t element, Operation& out) {
  Args args;
  if (!record.arguments(args)) return false;
  out.kind = Kind::kFill;
  out.stream = args.hStream;
  if constexpr (requires { args.N; }) {
    out.bytes = args.N * element;
  } else {
    out.bytes = args.Width * args.Height * element;
  }
  return true;
}

Kind between(uint64_t to, uint64_t from) {
  return ordinal_of_device_address(to) == ordinal_of_device_address(from) ? Kind::kOnDevice : Kind::kBetweenDevices;
}

bool collective(const Record& record, Operation& out) {
  Args_xmCommGroup args;
  const std::span<const std::byte> payload = record.payload();
  if (!record.arguments(args) || args.operations == 0 || payload.size() != args.operations * sizeof(journal::CollectiveOperation)) {
    return false;
  }
  out.kind = Kind::kCollective;
  for (uint64_t i = 0; i < args.operations; ++i) {
    journal::CollectiveOperation operation;  // the program can change what lies in the ring
    std::memcpy(&operation, payload.data() + i * sizeof(operation), sizeof(operation));
    if (operation.kind >= std::size(kCollectives) || operation.type >= static_cast<uint32_t>(journal::DataType::kCount)) return false;
    if (i == 0) {
      out.stream = operation.stream;
      out.what = operation.kind;
    }
    out.bytes += operation.count * journal::size_of(static_cast<journal::DataType>(operation.type));
  }
  return true;
}

}  // namespace

uint64_t Operation::key() const {
  uint64_t hash = what * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(kind);
  const auto mix = [&](uint64_t value) {
    hash = (hash ^ value) * 0xbf58476d1ce4e5b9ull;
    hash ^= hash >> 29;
  };
  mix(uint64_t{grid[0]} << 32 | grid[1]);
  mix(uint64_t{grid[2]} << 32 | block[0]);
  mix(uint64_t{block[1]} << 32 | block[2]);
  mix(shared_bytes);
  return hash | 1;  // never 0
}

bool operation_of(const Record& record, Operation& out) {
  switch (static_cast<Op>(record.header().op)) {
    case Op::xmLaunch: return launch<Args_xmLaunch>(record, out);
    case Op::xmFirstLaunch: return launch<Args_xmFirstLaunch>(record, out);
    case Op::xmCopyFromHost: return rows<Args_xmCopyFromHost>(record, Kind::kToDevice, out);
    case Op::xmCopyFromPinned: return rows<Args_xmCopyFromPinned>(record, Kind::kToDevice, out);
    case Op::xmCopyToHost: return rows<Args_xmCopyToHost>(record, Kind::kToHost, out);
    case Op::xmCopyToPinned: return rows<Args_xmCopyToPinned>(record, Kind::kToHost, out);
    case Op::xmCopy2D: {
      Args_xmCopy2D args;
      if (!record.arguments(args) || !rows<Args_xmCopy2D>(record, Kind::kOnDevice, out)) return false;
      out.kind = between(args.destination, args.source);
      return true;
    }
    case Op::cuMemcpyDtoDAsync_v2: {
      Args_cuMemcpyDtoDAsync_v2 args;
      if (!record.arguments(args)) return false;
      out.kind = between(args.dstDevice, args.srcDevice);
      out.stream = args.hStream;
      out.bytes = args.ByteCount;
      return true;
    }
    case Op::cuMemsetD8Async: return fill<Args_cuMemsetD8Async>(record, 1, out);
    case Op::cuMemsetD16Async: return fill<Args_cuMemsetD16Async>(record, 2, out);
    case Op::cuMemsetD32Async: return fill<Args_cuMemsetD32Async>(record, 4, out);
    case Op::cuMemsetD2D8Async: return fill<Args_cuMemsetD2D8Async>(record, 1, out);
    case Op::cuMemsetD2D16Async: return fill<Args_cuMemsetD2D16Async>(record, 2, out);
    case Op::cuMemsetD2D32Async: return fill<Args_cuMemsetD2D32Async>(record, 4, out);
    case Op::xmGraphLaunch: {
      Args_xmGraphLaunch args;
      if (!record.arguments(args) || args.upload != 0) return false;
      out.kind = Kind::kGraph;
      out.stream = args.stream;
      out.what = args.exec;
      return true;
    }
    case Op::xmCommGroup: return collective(record, out);
    default: return false;
  }
}

const char* name_of(const Operation& operation) {
  switch (operation.kind) {
    case Kind::kToDevice: return "copy host to device";
    case Kind::kToHost: return "copy device to host";
    case Kind::kOnDevice: return "copy on the device";
    case Kind::kBetweenDevices: return "copy between devices";
    case Kind::kFill: return "memset";
    case Kind::kGraph: return "graph";
    case Kind::kCollective: return kCollectives[operation.what];
    default: return "kernel";
  }
}

std::string readable(const char* mangled, size_t longest) {
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 && text ? text : mangled;
  std::free(text);
  if (name.size() > longest) name.resize(longest);
  return name;
}

}  // namespace xmig::server
