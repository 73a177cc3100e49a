// How a graph travels to the server: as an image, like a module's.
//
//   GraphImage, then `conditions` times GraphCondition, then `nodes` times: GraphNode, its dependencies (GraphDependency),
//   its operations (GraphOperation, arguments, payload). Everything starts at a multiple of 8. A node depends only on
//   nodes before it.
//
//   A conditional node has no operations, but a GraphChoice and its bodies, each a GraphBody and its nodes, which count
//   from 0 again. The image's own nodes are graph 0, bodies are numbered as they come.
#pragma once

#include <cstdint>

namespace xmig::journal {

inline constexpr uint64_t kGraphMagic = 0x3148505247474d58;  // "XMGGRPH1"

struct GraphImage {
  uint64_t magic;
  uint64_t bytes;  // of the whole
  uint32_t nodes;
  uint32_t conditions;
};

// A value that kernels set. Wherever a kernel's parameters have this number, the driver's own is meant.
struct GraphCondition {
  uint64_t number;
  uint32_t value;     // when a launch begins,
  uint32_t assigned;  // if this is not 0
  uint32_t graph;     // to which it belongs
  uint32_t reserved;
};

inline constexpr uint32_t kConditionalNode = 0xffffffff;

struct GraphNode {
  uint32_t dependencies;
  uint32_t operations;  // or kConditionalNode
};

struct GraphChoice {
  uint64_t condition;
  uint32_t type;  // CUgraphConditionalNodeType
  uint32_t bodies;
};

struct GraphBody {
  uint32_t nodes;
  uint32_t reserved;
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
