# The client's memory half against a server in the same process (memory_fake.h). Include after shim/CMakeLists.txt.
file(GLOB memory_sources CONFIGURE_DEPENDS
  ${XMIG_SHIM}/client/memory*.cc ${XMIG_SHIM}/client/copy*.cc ${XMIG_SHIM}/client/p[io]*.cc ${XMIG_SHIM}/client/vmm*.cc)
list(FILTER memory_sources EXCLUDE REGEX "/memory_contexts\\.cc$")
add_library(memory_under_test STATIC
  ${memory_sources} ${XMIG_SHIM}/client/message.cc ${CMAKE_CURRENT_LIST_DIR}/memory_fake.cc)
add_dependencies(memory_under_test xmig_generated)
target_include_directories(memory_under_test PUBLIC ${CMAKE_CURRENT_LIST_DIR})
target_link_libraries(memory_under_test PUBLIC xmig_common)
foreach(name memory_alloc_test memory_copy_test)
  add_executable(${name} ${CMAKE_CURRENT_LIST_DIR}/${name}.cc)
  target_link_libraries(${name} PRIVATE memory_under_test)
  add_test(NAME ${name} COMMAND ${name})
endforeach()
