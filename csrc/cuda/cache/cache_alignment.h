// Whether a cache can be read and written several elements at a time.
#pragma once

#include "cuda/device/launch.h"
#include "pagedkv/kernels/cache_params.h"

namespace pagedkv::cuda {

// Whether every row of both caches starts at a multiple of num_elements elements.
template <class Pointer>
bool cache_aligned_to(int64_t num_elements, int64_t element_bytes,
                      const KvCacheView<Pointer>& cache) {
  return aligned_to(
      num_elements * element_bytes, {cache.key, cache.value},
      {cache.key_stride_block * element_bytes, cache.key_stride_head * element_bytes,
       cache.key_stride_token * element_bytes, cache.value_stride_block * element_bytes,
       cache.value_stride_head * element_bytes, cache.value_stride_token * element_bytes});
}

}  // namespace pagedkv::cuda
