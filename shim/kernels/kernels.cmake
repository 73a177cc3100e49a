# The kernel library of the cpu device: an image that programs load like any other, xmig_kernels.so.
add_library(xmig_kernels MODULE ${CMAKE_CURRENT_LIST_DIR}/kernels.c)
set_target_properties(xmig_kernels PROPERTIES PREFIX "" C_STANDARD 11 C_EXTENSIONS ON)
target_include_directories(xmig_kernels PRIVATE ${CMAKE_CURRENT_LIST_DIR}/../include)
# No fused multiply-add and no reordering: the same bits on every x86-64.
target_compile_options(xmig_kernels PRIVATE -O3 -ffp-contract=off -Wall -Wextra -Werror)
target_link_libraries(xmig_kernels PRIVATE m)
install(TARGETS xmig_kernels LIBRARY DESTINATION xmigd/native COMPONENT native)
