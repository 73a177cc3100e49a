// What a program can ask and set about a kernel.
#include "client/journal/append.h"
#include "client/journal/ring_writer.h"
#include "client/modules/launch_checks.h"
#include "client/modules/modules.h"
#include "client/modules/occupancy.h"
#include "local.h"
#include "records.h"

namespace xmig::client {
namespace {

// May this attribute be set, and to this value?
CUresult check_setting(const Function& function, CUfunction_attribute attribute, int value) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: {
      const int most = client::attribute(function.module->context->ordinal,
                                         CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) -
                       function.attributes[CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES].load();
      return value >= 0 && value <= most ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return value >= -1 && value <= 100 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      return value >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
      return value == 0 || value == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

FunctionHere requested(CUfunction handle) {
  Thread& thread = this_thread();
  if (const CUresult error = enter(thread); error != CUDA_SUCCESS) return {nullptr, error};
  const Current now = current(thread);
  if (!now.context) return {nullptr, now.error};
  return find_function(handle, *now.context);
}

}  // namespace

CUresult set_attribute(Function& function, CUfunction_attribute attribute, int value) {
  if (const CUresult error = check_setting(function, attribute, value); error != CUDA_SUCCESS) return error;
  // Libraries set the same before each launch.
  if (function.attributes[attribute].load() == value) return CUDA_SUCCESS;
  const CUresult result = record::cuFuncSetAttribute(reinterpret_cast<CUfunction>(function.handle), attribute, value);
  if (result != CUDA_SUCCESS) return result;
  function.attributes[attribute].store(value);
  forget_occupancy(function);
  forget_launches(function);
  return CUDA_SUCCESS;
}

CUresult get_attribute(const Function& function, CUfunction_attribute attribute, int* value) {
  if (!value || attribute < 0 || attribute >= static_cast<int>(journal::kFunctionAttributes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *value = function.attributes[attribute].load(std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

CUresult parameter_info(const Function& function, size_t index, size_t* offset, size_t* size) {
  if (!offset || index >= function.parameters.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = function.parameters[index].offset;
  if (size) *size = function.parameters[index].size;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetName(const char** name, CUfunction hfunc) {
  if (!name) return CUDA_ERROR_INVALID_VALUE;
  const FunctionHere here = requested(hfunc);
  if (here.function) *name = here.function->name.c_str();
  return here.error;
}

CUresult cuFuncGetModule(CUmodule* hmod, CUfunction hfunc) {
  if (!hmod) return CUDA_ERROR_INVALID_VALUE;
  const FunctionHere here = requested(hfunc);
  if (here.function) *hmod = reinterpret_cast<CUmodule>(here.function->module->handle);
  return here.error;
}

CUresult cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc) {
  const FunctionHere here = requested(hfunc);
  return here.function ? get_attribute(*here.function, attrib, pi) : here.error;
}

CUresult cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
  const FunctionHere here = requested(hfunc);
  return here.function ? set_attribute(*here.function, attrib, value) : here.error;
}

// Preferences about caches and banks: they have no effect on any result.
CUresult cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config) { return requested(hfunc).error; }
CUresult cuFuncSetSharedMemConfig(CUfunction hfunc, CUsharedconfig config) { return requested(hfunc).error; }

CUresult cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t* paramOffset, size_t* paramSize) {
  const FunctionHere here = requested(func);
  return here.function ? parameter_info(*here.function, paramIndex, paramOffset, paramSize) : here.error;
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction function) {
  if (!state) return CUDA_ERROR_INVALID_VALUE;
  const FunctionHere here = requested(function);
  if (here.function) *state = CU_FUNCTION_LOADING_STATE_LOADED;
  return here.error;
}

CUresult cuFuncLoad(CUfunction function) { return requested(function).error; }

}  // namespace xmig::client
