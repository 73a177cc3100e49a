# Tests of xmig-server. Included by the tests' CMakeLists.txt.
add_executable(server_units ${CMAKE_CURRENT_LIST_DIR}/server_units.cc)
target_link_libraries(server_units PRIVATE xmig_server_core)
add_test(NAME server.units COMMAND server_units)

add_library(server_kernels MODULE ${CMAKE_CURRENT_LIST_DIR}/../conformance/kernels.c)
set_target_properties(server_kernels PROPERTIES PREFIX "")
target_compile_options(server_kernels PRIVATE -O2)
target_include_directories(server_kernels PRIVATE ${CMAKE_SOURCE_DIR}/include)

# A server whose device reports faults as late, and as vaguely, as a GPU.
add_executable(blind_server ${CMAKE_SOURCE_DIR}/server/main.cc ${CMAKE_CURRENT_LIST_DIR}/blind_device.cc)
target_link_libraries(blind_server PRIVATE xmig_server_core)
set_target_properties(blind_server PROPERTIES OUTPUT_NAME xmig-server RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/blind)

add_executable(server_jobs ${CMAKE_CURRENT_LIST_DIR}/server_jobs.cc)
target_link_libraries(server_jobs PRIVATE xmig_server_core)
foreach(test
    undisturbed kills injections lost_again_in_redo program_error error_among_others queued_error pinned pinned_ahead sets_pinned
    pinned_much kernel_reads_pinned order_by_waiting
    host_functions host_function_needs_the_program never_synchronises copies_more_than_the_journal waits_are_apart garbage
    daemon_comes_back memory_is_full zeros pauses globals twins limits first_launches failed_frees tensor_maps event_on_two_streams idle_uses_no_cpu)
  add_test(NAME server.${test} COMMAND server_jobs $<TARGET_FILE:xmig-server> $<TARGET_FILE:server_kernels> ${test})
endforeach()

foreach(test injections lost_again_in_redo program_error error_among_others)
  add_test(NAME server.blind_${test} COMMAND server_jobs $<TARGET_FILE:blind_server> $<TARGET_FILE:server_kernels> ${test})
endforeach()

foreach(decoder cut request ring)
  xmig_fuzz_target(server_${decoder} ${CMAKE_CURRENT_LIST_DIR}/server_fuzz_${decoder}.cc xmig_server_core)
endforeach()
