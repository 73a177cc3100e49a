# Tests of xmig-server. Included by the tests' CMakeLists.txt.
foreach(units server_units server_snapshot_units server_policy_units server_meeting_units server_quota_units)
  add_executable(${units} ${CMAKE_CURRENT_LIST_DIR}/${units}.cc)
  target_link_libraries(${units} PRIVATE xmig_server_core xmig_tests)
  target_precompile_headers(${units} REUSE_FROM device_units)
  string(REGEX REPLACE "^server_" "server." test ${units})
  add_test(NAME ${test} COMMAND ${units})
endforeach()

add_library(server_kernels MODULE ${CMAKE_CURRENT_LIST_DIR}/../conformance/kernels.c)
set_target_properties(server_kernels PROPERTIES PREFIX "")
target_compile_options(server_kernels PRIVATE -O2)
target_include_directories(server_kernels PRIVATE ${CMAKE_SOURCE_DIR}/include)

# A server whose device reports faults as late, and as vaguely, as a GPU.
add_executable(blind_server $<TARGET_OBJECTS:xmig_server_main> ${CMAKE_CURRENT_LIST_DIR}/blind_device.cc)
target_link_libraries(blind_server PRIVATE xmig_server_core)
xmig_precompiled(blind_server)
set_target_properties(blind_server PROPERTIES OUTPUT_NAME xmig-server RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/blind)

# A server whose device has the memory that was given back only later.
add_executable(late_server $<TARGET_OBJECTS:xmig_server_main> ${CMAKE_CURRENT_LIST_DIR}/late_device.cc)
target_link_libraries(late_server PRIVATE xmig_server_core)
target_precompile_headers(late_server REUSE_FROM blind_server)
set_target_properties(late_server PROPERTIES OUTPUT_NAME xmig-server RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/late)

# A server whose device has no memory for a context at first.
add_executable(full_server $<TARGET_OBJECTS:xmig_server_main> ${CMAKE_CURRENT_LIST_DIR}/full_device.cc)
target_link_libraries(full_server PRIVATE xmig_server_core)
target_precompile_headers(full_server REUSE_FROM blind_server)
set_target_properties(full_server PROPERTIES OUTPUT_NAME xmig-server RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/full)

# A server whose communicators take memory of the device.
add_executable(crowded_server $<TARGET_OBJECTS:xmig_server_main> ${CMAKE_CURRENT_LIST_DIR}/crowded_device.cc)
target_link_libraries(crowded_server PRIVATE xmig_server_core)
target_precompile_headers(crowded_server REUSE_FROM blind_server)
set_target_properties(crowded_server PROPERTIES OUTPUT_NAME xmig-server RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/crowded)

# A server whose device places modules' variables itself.
add_executable(placing_server $<TARGET_OBJECTS:xmig_server_main> ${CMAKE_CURRENT_LIST_DIR}/placing_device.cc)
target_link_libraries(placing_server PRIVATE xmig_server_core)
target_precompile_headers(placing_server REUSE_FROM blind_server)
set_target_properties(placing_server PROPERTIES OUTPUT_NAME xmig-server RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/placing)
add_library(placed_kernels MODULE ${CMAKE_CURRENT_LIST_DIR}/placed_kernels.c)
set_target_properties(placed_kernels PROPERTIES PREFIX "")
target_compile_options(placed_kernels PRIVATE -O2)
target_include_directories(placed_kernels PRIVATE ${CMAKE_SOURCE_DIR}/include)

add_executable(server_preload_test ${CMAKE_CURRENT_LIST_DIR}/server_preload_test.cc)
target_link_libraries(server_preload_test PRIVATE xmig_server_core xmig_tests)
target_precompile_headers(server_preload_test REUSE_FROM device_units)
add_test(NAME server.preload_limit COMMAND server_preload_test $<TARGET_FILE:server_kernels>)

# Tests of whole jobs, in one program: most of what each of these files takes to compile is what they share.
set(server_jobs server_main.cc server_jobs.cc server_memory_jobs.cc server_move_test.cc server_object_jobs.cc
    server_placement_jobs.cc server_suspend_test.cc server_variable_jobs.cc)
list(TRANSFORM server_jobs PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
add_executable(server_jobs ${server_jobs})
target_link_libraries(server_jobs PRIVATE xmig_server_core)
set_target_properties(server_jobs PROPERTIES UNITY_BUILD ${XMIG_UNITY} UNITY_BUILD_BATCH_SIZE 0)
if(NOT XMIG_SANITIZE STREQUAL thread)  # which makes their own code slow
  # They are compiled for half as long so, and what they do at run time is to wait for servers.
  target_compile_options(server_jobs PRIVATE -O0)
endif()

# Arguments: what the tests' names begin with, the server, the kernels, what precedes the names in the program, their names.
# `mode`, where it is set, is the program's last argument.
function(xmig_jobs prefix server kernels within)
  foreach(test ${ARGN})
    add_test(NAME server.${prefix}${test}
             COMMAND server_jobs $<TARGET_FILE:${server}> $<TARGET_FILE:${kernels}> ${within}${test} ${mode})
  endforeach()
endfunction()
function(xmig_server_jobs prefix)
  xmig_jobs("${prefix}" xmig-server server_kernels "${prefix}" ${ARGN})
endfunction()
xmig_server_jobs("" undisturbed kills injections lost_again_in_replay program_error error_among_others queued_error
                 host_functions host_function_needs_the_program never_synchronises waits_are_apart garbage daemon_comes_back
                 pauses snapshots_are_copied copies_are_increments copies_may_be_lossy unique_copies_are_of_one_snapshot idle_uses_no_cpu snapshots_of_two_devices)
xmig_server_jobs("" pinned pinned_ahead sets_pinned pinned_much kernel_reads_pinned order_by_waiting
                 copies_more_than_the_journal memory_is_full mapped_ahead prepares_ahead prepares_in_vain zeros changes
                 discarded discarded_wrongly)
xmig_server_jobs("" first_launches failed_frees tensor_maps globals twins twin_when_a_snapshot_begins preloaded limits
                 event_on_two_streams)
xmig_server_jobs(placement_ settles where_waking_is_cheap looks_again runs_beside usher rests_after_the_last_record moves_with_the_program nonsense
                 reported_that_it_is_late bound_by_others whole_server_bound real_time_program)
xmig_server_jobs(move_ settles moves aborts source_dies both_die unprepared young smaller grows_while_settling)
xmig_server_jobs(suspend_ host while_settling brings_all given_room files aborts dies no_room damaged ahead full shadow_on_host)

# Of the server that places variables itself.
xmig_jobs(variables_ placing_server placed_kernels variables_ kept kept_at_random kept_preloaded kept_when_a_snapshot_begins
          first_used_before_a_snapshot_that_fails kept_after_faults addresses_are_each_servers some_have_twins
          modules_come_and_go snapshots_copy_what_was_written on_two_devices overwritten bad_places suspended)
xmig_jobs(blind_ blind_server server_kernels "" injections lost_again_in_replay program_error error_among_others
          snapshots_go_with_kernels)
xmig_jobs(late_ late_server server_kernels "" memory_is_full)
xmig_jobs(move_ blind_server server_kernels move_ promised)

# Where they kill the server, the job moves to another device instead.
set(mode moved)
xmig_jobs(variables_moved_ placing_server placed_kernels variables_ kept some_have_twins modules_come_and_go
          snapshots_copy_what_was_written)
xmig_jobs(moved_ xmig-server server_kernels "" pinned_ahead sets_pinned kernel_reads_pinned order_by_waiting zeros changes
          discarded globals twins limits first_launches)
unset(mode)

foreach(decoder snapshot request ring variables)
  xmig_fuzz_target(server_${decoder} ${CMAKE_CURRENT_LIST_DIR}/server_fuzz_${decoder}.cc xmig_server_core)
endforeach()
