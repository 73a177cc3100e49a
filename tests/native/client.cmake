# Tests of the client. Included by the tests' CMakeLists.txt.
#
# The client's own parts, in a library that shows them; client_jobs uses the shim as programs do.
get_target_property(client_core_sources cuda_shim SOURCES)
list(TRANSFORM client_core_sources PREPEND ${CMAKE_SOURCE_DIR}/ REGEX "^[^/]")
add_library(client_core STATIC EXCLUDE_FROM_ALL ${client_core_sources})
set_source_files_properties(${gen}/stubs.cc ${gen}/entry_points.cc PROPERTIES GENERATED TRUE)
add_dependencies(client_core xmig_generated)
target_link_libraries(client_core PUBLIC xmig_common)

add_executable(client_units ${CMAKE_CURRENT_LIST_DIR}/client_units.cc)
target_link_libraries(client_units PRIVATE client_core)
foreach(test md2 integrity entry_points export_tables context_storage numbers table images descriptions errors
             uninitialised)
  add_test(NAME client.${test} COMMAND client_units ${test})
endforeach()

add_executable(client_jobs ${CMAKE_CURRENT_LIST_DIR}/client_jobs.cc)
target_link_libraries(client_jobs PRIVATE client_core)
foreach(test
    handshake refusals launch_record launch_errors many_threads thread_slots full_ring full_ring_and_unanswered
    sticky_error host_functions posted_twice forks events contexts modules lost everybody_gone launch_cost)
  add_test(NAME client.${test} COMMAND client_jobs ${test})
endforeach()
