// Paged attention for the instruction set that the including file has chosen, and its table.
// No include guard: each attention_<isa>.cpp includes it once. See cpu/simd/vec.h for the rules.
//
// Instantiations: 5 of attend_with for AVX2, AVX-512 and plain, 3 for AVX-512 with the bf16 dot
// product, each for its query types.
#include "cpu/simd/vec.h"
// After vec.h, which chooses the target:
#if defined(PAGEDKV_SIMD_SCALAR)
#include "cpu/attention/lanes_scalar.h"
#elif defined(PAGEDKV_SIMD_AVX2)
#include "cpu/attention/lanes_avx2.h"
#else
#include "cpu/attention/lanes_avx512.h"
#endif
#include "cpu/attention/products.h"
#include "cpu/attention/softmax_body.h"
#include "cpu/attention/stream_body.h"
#include "cpu/attention/tile_body.h"
// After the bodies above, which it puts together:
#include "cpu/attention/attend_body.h"
#include "cpu/attention/merge_body.h"

namespace pagedkv::cpu::PAGEDKV_ISA {

inline void merge(const PagedAttentionParams& p, const MergeTask& task, const float* states) {
  dispatch_activation_type(p.type,
                           [&](auto query) { merge_rows<decltype(query)>(p, task, states); });
}

#if defined(PAGEDKV_SIMD_AVX512_BF16)

// Products of bf16, but for float8 read in place, which is widened once to fp32.
inline void attend(const PagedAttentionParams& p, const AttentionTask& task,
                   const AttentionScratch& scratch, float* states) {
  switch (p.cache.type) {
    case ElementType::kBFloat16:
      return attend_with<Bf16Product, Bf16Product, BFloat16, BFloat16>(p, task, scratch, states);
    case ElementType::kFloat8E4M3:
      return attend_with<Bf16Product, Fp32Product, Float8E4M3, BFloat16>(p, task, scratch, states);
    case ElementType::kFloat8E5M2:
      return attend_with<Bf16Product, Fp32Product, Float8E5M2, BFloat16>(p, task, scratch, states);
    default:
      throw_no_cache_kernel(p.cache.type, p.type);
  }
}

#else

inline void attend(const PagedAttentionParams& p, const AttentionTask& task,
                   const AttentionScratch& scratch, float* states) {
  dispatch_cache_types(p.type, p.cache.type, [&](auto query, auto stored) {
    attend_with<Fp32Product, Fp32Product, decltype(stored), decltype(query)>(p, task, scratch,
                                                                             states);
  });
}

#endif

constexpr AttentionKernels kAttentionKernels{.attend = attend, .merge = merge};

}  // namespace pagedkv::cpu::PAGEDKV_ISA
