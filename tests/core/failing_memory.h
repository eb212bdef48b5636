// The global operator new of the checks' program, which can be told to fail. In a file of its own,
// so that the compiler does not inline it into code that it then finds freeing what malloc gave.

#pragma once

namespace pagedkv::testing {

// This thread's allocations until one throws std::bad_alloc (once); negative: none does.
extern thread_local long num_until_failure;

}  // namespace pagedkv::testing
