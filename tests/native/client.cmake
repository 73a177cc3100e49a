# Tests of the client. Included by the tests' CMakeLists.txt.
#
# They link the client's own parts; client_jobs uses the shim as programs do.
add_executable(client_units ${CMAKE_CURRENT_LIST_DIR}/client_units.cc)
target_link_libraries(client_units PRIVATE xmig_client xmig_tests)
target_precompile_headers(client_units PRIVATE ${CMAKE_CURRENT_LIST_DIR}/client_jobs.h)
foreach(test md2 integrity entry_points export_tables compile_cache compile_cache_damaged compile_cache_full
             context_storage requested numbers table images descriptions errors uninitialised)
  add_test(NAME client.${test} COMMAND client_units ${test})
endforeach()

# Arguments: an executable, its tests.
function(xmig_client_jobs name)
  add_executable(${name} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/${name}.cc)
  target_link_libraries(${name} PRIVATE xmig_client xmig_tests)
  target_precompile_headers(${name} REUSE_FROM client_units)
  foreach(test ${ARGN})
    add_test(NAME client.${test} COMMAND ${name} ${test})
  endforeach()
endfunction()
xmig_client_jobs(client_jobs handshake refusals many_threads thread_slots full_ring full_ring_and_unanswered sticky_error
                 host_functions posted_twice forks lost everybody_gone)
xmig_client_jobs(client_launches launch_record first_launches launch_parameters launch_errors launch_cost journal_pages)
xmig_client_jobs(client_wakeups says_where_it_runs server_elsewhere server_that_does_not_come server_anywhere)
xmig_client_jobs(client_objects events contexts modules kept_variables unpublished integrity_slot storage tensor_maps)
