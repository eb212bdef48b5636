// HugePageAllocator: memory for the arrays that have a record per block. Blocks are visited in
// shuffled order, so with a large pool each visit would miss the TLB too; on Linux such arrays ask
// for huge pages (advice: without them all is only slower). Arrays below one huge page come from
// the ordinary heap.

#pragma once

#include <cstddef>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace pagedkv {

template <class T>
struct HugePageAllocator {
  using value_type = T;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;

  HugePageAllocator() = default;
  template <class U>
  HugePageAllocator(const HugePageAllocator<U>&) {}

  T* allocate(std::size_t n) {
    if (n > static_cast<std::size_t>(-1) / 2 / sizeof(T)) throw std::bad_array_new_length();
    const std::size_t num_bytes = n * sizeof(T);
    if (num_bytes < kHugePage) return static_cast<T*>(::operator new(num_bytes));
    const std::size_t num_rounded = (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* memory = ::operator new(num_rounded, std::align_val_t(kHugePage));
#ifdef __linux__
    madvise(memory, num_rounded, MADV_HUGEPAGE);
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t n) {
    if (n * sizeof(T) < kHugePage) {
      ::operator delete(memory);
    } else {
      ::operator delete(memory, std::align_val_t(kHugePage));
    }
  }
  // Leaves elements without a value of their own uninitialised: a row of tokens is written before
  // it is read, and memory that nobody touched is not resident.
  template <class U>
  void construct(U* at) {
    ::new (static_cast<void*>(at)) U;
  }
  template <class U, class... Arguments>
  void construct(U* at, Arguments&&... arguments) {
    ::new (static_cast<void*>(at)) U(std::forward<Arguments>(arguments)...);
  }
  friend bool operator==(const HugePageAllocator&, const HugePageAllocator&) { return true; }
};

template <class T>
using HugeVector = std::vector<T, HugePageAllocator<T>>;

}  // namespace pagedkv
