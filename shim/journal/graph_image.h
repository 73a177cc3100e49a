// How a graph travels to the server: as an image, like a module's.
//
//   GraphImage, then `nodes` times: GraphNode, its dependencies (GraphDependency), its operations (GraphOperation,
//   arguments, payload). Everything starts at a multiple of 8. A node depends only on nodes before it.
#pragma once

#include <cstdint>

namespace xmig::journal {

inline constexpr uint64_t kGraphMagic = 0x3148505247474d58;  // "XMGGRPH1"

struct GraphImage {
  uint64_t magic;
  uint64_t bytes;  // of the whole
  uint32_t nodes;
  uint32_t reserved;
};

struct GraphNode {
  uint32_t dependencies;
  uint32_t operations;
};

struct GraphDependency {
  uint32_t node;
  uint8_t from_port, to_port, type, reserved;
};

// As in a record: the arguments are the POD Args_<op>; the stream in them means nothing.
struct GraphOperation {
  uint32_t op;
  uint32_t payload;  // bytes
};

}  // namespace xmig::journal
