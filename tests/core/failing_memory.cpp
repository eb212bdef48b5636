// Replaces the global operator new and delete of this program. The contract is in the header.

#include "failing_memory.h"

#include <cstdlib>
#include <new>

namespace pagedkv::testing {
thread_local long num_until_failure = -1;
}

namespace {
void* take(std::size_t size, std::size_t alignment) {
  long& countdown = pagedkv::testing::num_until_failure;
  if (countdown >= 0 && countdown-- == 0) throw std::bad_alloc();
  void* memory = alignment > 0
                     ? std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment)
                     : std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

void* operator new(std::size_t size) { return take(size, 0); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return take(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return take(size, 0);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
