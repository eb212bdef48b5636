# pagedkv_sanitize(target visibility): what PAGEDKV_SANITIZE asks for; nothing if it is empty. A finding ends the program
# with a non-zero status, so that a test run cannot pass over it.

set(_pagedkv_sanitizers ${PAGEDKV_SANITIZE})
string(REPLACE "," ";" _pagedkv_sanitizers "${_pagedkv_sanitizers}")
foreach(name IN LISTS _pagedkv_sanitizers)
  if(NOT name MATCHES "^(address|undefined|thread)$")
    message(FATAL_ERROR "PAGEDKV_SANITIZE has '${name}'; supported are address, undefined, thread")
  endif()
endforeach()
if("thread" IN_LIST _pagedkv_sanitizers AND "address" IN_LIST _pagedkv_sanitizers)
  message(FATAL_ERROR "PAGEDKV_SANITIZE: address and thread exclude each other")
endif()

function(pagedkv_sanitize target visibility)
  if(PAGEDKV_SANITIZE)
    set(flags -fsanitize=${PAGEDKV_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    target_compile_options(${target} ${visibility} ${flags})
    target_link_options(${target} ${visibility} -fsanitize=${PAGEDKV_SANITIZE})
  endif()
endfunction()
