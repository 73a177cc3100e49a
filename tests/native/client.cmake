# Tests of the client. Included by the tests' CMakeLists.txt.
#
# They link the client's own parts; client_jobs uses the shim as programs do.
add_executable(client_units ${CMAKE_CURRENT_LIST_DIR}/client_units.cc)
target_link_libraries(client_units PRIVATE xmig_client)
foreach(test md2 integrity entry_points export_tables context_storage asked numbers table images descriptions errors
             uninitialised)
  add_test(NAME client.${test} COMMAND client_units ${test})
endforeach()

add_executable(client_jobs ${CMAKE_CURRENT_LIST_DIR}/client_jobs.cc)
target_link_libraries(client_jobs PRIVATE xmig_client)
foreach(test
    handshake refusals launch_record launch_parameters first_launches launch_errors many_threads thread_slots full_ring full_ring_and_unanswered
    sticky_error host_functions posted_twice forks events contexts modules unpublished integrity_slot storage tensor_maps lost everybody_gone launch_cost)
  add_test(NAME client.${test} COMMAND client_jobs ${test})
endforeach()
