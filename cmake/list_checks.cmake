# Script: writes one add_test per check that PROGRAM --list names into OUTPUT.

execute_process(COMMAND ${PROGRAM} --list OUTPUT_VARIABLE names RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${PROGRAM} --list ended with ${status}")
endif()
string(REGEX REPLACE "\n$" "" names "${names}")
string(REPLACE "\n" ";" names "${names}")
set(text "")
foreach(name IN LISTS names)
  string(APPEND text "add_test([=[${name}]=] [=[${PROGRAM}]=] [=[--filter]=] [=[${name}]=])\n")
endforeach()
file(WRITE ${OUTPUT} "${text}")
