# Tests of the devices, without a server. Included by the tests' CMakeLists.txt.
set(device_sources device_main.cc device_cuda_hash.cc device_faults.cc device_images.cc device_memory.cc device_mesh.cc device_modules.cc device_nccl.cc device_null.cc device_streams.cc)
list(TRANSFORM device_sources PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
add_executable(device_units ${device_sources})
target_link_libraries(device_units PRIVATE xmig_server_core xmig_tests)
xmig_precompiled(device_units)
set_target_properties(device_units PROPERTIES UNITY_BUILD ${XMIG_UNITY} UNITY_BUILD_BATCH_SIZE 0)
# The images that a compiler has made of variables.cu. A definition of its own, so that what is precompiled does not fit it.
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/device_images.cc PROPERTIES
    COMPILE_DEFINITIONS XMIG_IMAGES="${CMAKE_CURRENT_LIST_DIR}/images" SKIP_PRECOMPILE_HEADERS ON
    SKIP_UNITY_BUILD_INCLUSION ON)

# It includes a GPU's kernel, which asks for what only its compiler knows.
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/device_cuda_hash.cc PROPERTIES
    COMPILE_OPTIONS -Wno-unknown-pragmas SKIP_PRECOMPILE_HEADERS ON
    SKIP_UNITY_BUILD_INCLUSION ON)

foreach(module device_kernels device_crash device_nccl_library)
  add_library(${module} MODULE ${CMAKE_CURRENT_LIST_DIR}/${module}.c)
  set_target_properties(${module} PROPERTIES PREFIX "")
  target_compile_options(${module} PRIVATE -O1)
  target_include_directories(${module} PRIVATE ${CMAKE_SOURCE_DIR}/include)
endforeach()
set_target_properties(device_crash PROPERTIES OUTPUT_NAME device_kernels SUFFIX .so.crash)
add_dependencies(device_units device_kernels device_crash device_nccl_library)

set(device_tests
    memory_maps memory_runs_out copies fills hash_and_copy two_devices
    stream_order stream_destroyed_with_work legacy_stream legacy_stream_orders_by_waits events memory_operations memory_of_another_device host_functions many_threads
    idle_uses_no_cpu contexts
    modules module_without_length globals limits launch_attributes foreign_images hostile_images crashing_initialiser
    fault_address fault_kinds fault_stack fault_copy fault_drops_work crash_elsewhere
    inject_fault_in_kernel inject_fault_in_copy inject_kill inject_hang
    cuda_hash_by_the_processor mesh_of_one_node mesh_of_several_nodes mesh_addresses_that_are_none mesh_strangers mesh_of_one_that_ends
    nccl_first_operation nccl_first_operation_that_is_not_done nccl_first_transfers_that_fail
    descriptions refusals context_limits every_function null_device null_launches_that_do_not_fit null_memory_runs_out null_tensor_maps null_exports ptx fat_binaries
    cubin_parameters cubin_kernels_and_variables ptx_parameters image_variables ptx_variables damaged_images_with_variables)
# ThreadSanitizer does not survive these: a stack that overflows, its own look at memory that is not there, and a thread
# that comes back from two faults.
if(XMIG_SANITIZE STREQUAL thread)
  list(REMOVE_ITEM device_tests fault_stack module_without_length hash_and_copy)
endif()
foreach(test ${device_tests})
  add_test(NAME device.${test} COMMAND device_units $<TARGET_FILE:device_kernels> ${test})
endforeach()

xmig_fuzz_target(image ${XMIG_TESTS}/fuzz/image.cc xmig_server_core)
