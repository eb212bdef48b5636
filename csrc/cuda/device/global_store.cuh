// A vector into global memory by one instruction. As an assignment of 16 bytes the compiler may
// split it into words, where it can interleave them with other work, and each store then costs the
// L2 a whole sector for a quarter of it: (see reshape_and_cache in benchmarks/results).
#pragma once

#include "cuda/device/numeric.cuh"

namespace pagedkv::cuda {

template <int N, class T>
__device__ void store_global(T* to, const Vec<T, N>& x) {
  using Word = typename WordOf<sizeof(T) * N>::Type;
  if constexpr (sizeof(Word) >= 8) {
    __stwb(reinterpret_cast<Word*>(to), *reinterpret_cast<const Word*>(&x));
  } else {
    store_vec<N>(to, x);
  }
}

}  // namespace pagedkv::cuda
