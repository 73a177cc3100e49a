#include "client/graph/user_object.h"

#include <mutex>
#include <unordered_set>

#include "client/graph/graph.h"
#include "client/journal/append.h"
#include "local.h"

namespace xmig::client {
namespace {

std::unordered_set<UserObject*>& objects() {
  static auto& all = *new std::unordered_set<UserObject*>;
  return all;
}

UserObject* find(CUuserObject handle) {
  auto* const object = reinterpret_cast<UserObject*>(handle);
  return objects().contains(object) ? object : nullptr;
}

}  // namespace

void retain(UserObject& object, unsigned int count) { object.references += count; }

void release(UserObject& object, unsigned int count) {
  object.references -= count <= object.references ? count : object.references;
  if (object.references != 0) return;
  objects().erase(&object);
  object.destroy(object.pointer);
  delete &object;
}

CUresult cuUserObjectCreate(CUuserObject* object_out, void* ptr, CUhostFn destroy, unsigned int initialRefcount,
                            unsigned int flags) {
  if (const CUresult error = enter(); error != CUDA_SUCCESS) return error;
  if (!object_out || !destroy || !initialRefcount || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const std::lock_guard lock(graphs_mutex());
  auto* const object = new UserObject{ptr, destroy, initialRefcount};
  objects().insert(object);
  *object_out = reinterpret_cast<CUuserObject>(object);
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned int count) {
  const std::lock_guard lock(graphs_mutex());
  UserObject* const found = find(object);
  if (!found || !count) return CUDA_ERROR_INVALID_VALUE;
  retain(*found, count);
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count) {
  const std::lock_guard lock(graphs_mutex());
  UserObject* const found = find(object);
  if (!found || !count || count > found->references) return CUDA_ERROR_INVALID_VALUE;
  release(*found, count);
  return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags) {
  const std::lock_guard lock(graphs_mutex());
  Graph* const owner = find_graph(graph);
  UserObject* const found = find(object);
  if (!owner || !found || !count) return CUDA_ERROR_INVALID_VALUE;
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) retain(*found, count);
  owner->user_objects[found] += count;
  return CUDA_SUCCESS;
}

CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count) {
  const std::lock_guard lock(graphs_mutex());
  Graph* const owner = find_graph(graph);
  UserObject* const found = find(object);
  if (!owner || !found) return CUDA_ERROR_INVALID_VALUE;
  const auto held = owner->user_objects.find(found);
  if (held == owner->user_objects.end() || !count || held->second < count) return CUDA_ERROR_INVALID_VALUE;
  if ((held->second -= count) == 0) owner->user_objects.erase(held);
  release(*found, count);
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
