# Fuzz targets of what no other fragment has: each is a file of this folder.
xmig_fuzz_target(welcome ${CMAKE_CURRENT_LIST_DIR}/welcome.cc xmig_client)
