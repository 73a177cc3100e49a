// Questions about pointers, answered from the map of what the program has.
#include <cstring>

#include "client/memory/memory_backing.h"
#include "client/memory/memory_call.h"
#include "client/memory/memory_map.h"
#include "journal/layout.h"
#include "local.h"

namespace xmig::client {

namespace {

constexpr int kNoDevice = -2;

template <typename T>
CUresult put(void* data, const T& value) {
  std::memcpy(data, &value, sizeof(value));
  return CUDA_SUCCESS;
}
CUresult put_bool(void* data, bool value) { return put(data, static_cast<unsigned int>(value)); }

// Memory of pools and mappings belongs to a device, not to a context.
CUcontext context_of(const Allocation& allocation) {
  const bool none = allocation.handle != 0;
  return none ? nullptr : reinterpret_cast<CUcontext>(allocation.context);
}

// Writes one attribute of memory that is known.
CUresult describe(const Allocation& a, CUpointer_attribute attribute, uint64_t address, void* data) {
  const bool mapped = a.kind == MemoryKind::kMapped;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return put(data, context_of(a));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      return put(data, a.on_device() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      if (a.kind == MemoryKind::kRegistered) return CUDA_ERROR_NOT_SUPPORTED;
      return put(data, CUdeviceptr{address});
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (a.on_device()) return CUDA_ERROR_INVALID_VALUE;
      return put(data, reinterpret_cast<void*>(address));
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
      return put_bool(data, false);
    case CU_POINTER_ATTRIBUTE_MAPPED:
      return put_bool(data, true);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return put(data, static_cast<unsigned long long>(a.id));
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      return put(data, a.ordinal);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      return put(data, CUdeviceptr{a.address});
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      return put(data, size_t{a.bytes});
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return put(data, 0ull);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return put(data, mapped ? static_cast<int>(access_of(a.flags, a.ordinal)) : int{CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE});
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      return put(data, a.kind == MemoryKind::kDevice ? a.handle : 0);
    default:  // P2P_TOKENS: there is no device file in this process to use them with
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// What cuPointerGetAttributes says where there is nothing to say.
void describe_nothing(CUpointer_attribute attribute, void* data) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      put(data, kNoDevice);
      return;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      put(data, 0u);
      return;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
      put(data, CUDA_POINTER_ATTRIBUTE_P2P_TOKENS{});
      return;
    default:
      put(data, uint64_t{0});
  }
}

bool known_attribute(CUpointer_attribute attribute) {
  return attribute >= CU_POINTER_ATTRIBUTE_CONTEXT && attribute <= CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE;
}

}  // namespace

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  if (!data || !known_attribute(attribute)) return CUDA_ERROR_INVALID_VALUE;
  const auto found = memory_map().find(ptr);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  return describe(*found, attribute, ptr, data);
}

CUresult cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute* attributes, void** data,
                                CUdeviceptr ptr) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  if (!numAttributes || !attributes || !data) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned int i = 0; i < numAttributes; ++i) {
    if (!data[i] || !known_attribute(attributes[i])) return CUDA_ERROR_INVALID_VALUE;
  }
  const auto found = memory_map().find(ptr);
  for (unsigned int i = 0; i < numAttributes; ++i) {
    if (!found || describe(*found, attributes[i], ptr, data[i]) != CUDA_SUCCESS) {
      describe_nothing(attributes[i], data[i]);
    }
  }
  return CUDA_SUCCESS;
}

// SYNC_MEMOPS is the only one that can be set, and what it asks for costs nothing to promise: it is about copies that
// the driver may return early from, and ours take effect in the order of their streams whatever it says.
CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr ptr) {
  if (const CUresult result = enter(); result != CUDA_SUCCESS) return result;
  if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) return CUDA_ERROR_INVALID_VALUE;
  const auto found = memory_map().find(ptr);
  return found && found->on_device() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
  if (const CUresult result = enter_with_context(); result != CUDA_SUCCESS) return result;
  const auto found = memory_map().find(dptr);
  if (!found || found->kind == MemoryKind::kRegistered) return CUDA_ERROR_NOT_FOUND;
  if (pbase) *pbase = found->address;
  if (psize) *psize = found->bytes;
  return CUDA_SUCCESS;
}

}  // namespace xmig::client
