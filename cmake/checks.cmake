# The programs that only this repository needs: unit checks (one ctest entry each), fuzzer, benchmark.

file(GLOB PAGEDKV_CHECK_SOURCES CONFIGURE_DEPENDS tests/core/*.cpp)
add_executable(core_checks ${PAGEDKV_CHECK_SOURCES})
target_include_directories(core_checks PRIVATE tests/core)
target_compile_options(core_checks PRIVATE -Wall -Wextra)
target_link_libraries(core_checks PRIVATE pagedkv::core Threads::Threads)
if(PAGEDKV_SANITIZE)
  # Instrumented code takes three times as long to optimise as to compile as it is, and hides less unoptimised. The
  # other build reads every header where it is included, and so finds a missing #include.
  target_compile_options(core_checks PRIVATE -O0)
  target_precompile_headers(core_checks PRIVATE tests/core/check.h <algorithm> <memory> <random> <set> <unordered_map>)
endif()

add_executable(core_fuzz tests/core/fuzz/fuzz_block_manager.cpp)
target_compile_options(core_fuzz PRIVATE -Wall -Wextra)
target_link_libraries(core_fuzz PRIVATE pagedkv::core)
# Clang has libFuzzer, which brings its own main and mutates by coverage; elsewhere the fuzzer draws its own inputs.
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(core_fuzz PRIVATE -fsanitize=fuzzer)
  target_link_options(core_fuzz PRIVATE -fsanitize=fuzzer)
else()
  target_sources(core_fuzz PRIVATE tests/core/fuzz/draw_inputs.cpp)
endif()

add_executable(core_bench benchmarks/core/bench_core.cpp)
target_compile_options(core_bench PRIVATE -Wall -Wextra)
target_link_libraries(core_bench PRIVATE pagedkv::core)

# The checks name themselves (core_checks --list); ctest's list is written when the program has been built.
enable_testing()
set(checks_file ${CMAKE_CURRENT_BINARY_DIR}/core_checks.cmake)
add_custom_command(
  TARGET core_checks POST_BUILD
  COMMAND ${CMAKE_COMMAND} -DPROGRAM=$<TARGET_FILE:core_checks> -DOUTPUT=${checks_file} -P
          ${CMAKE_CURRENT_SOURCE_DIR}/cmake/list_checks.cmake
  VERBATIM)
set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${checks_file})
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  add_test(NAME core_fuzz COMMAND core_fuzz --runs 2000)
endif()
