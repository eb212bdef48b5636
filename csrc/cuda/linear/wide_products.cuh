// Hopper's matrix instructions for 112 and 224 columns, and the tensor copies of wide products
// (sm_90a). See wgmma.cuh.
#pragma once

#include "cuda/device/wgmma.cuh"
#include "cuda/linear/matrix_copy.cuh"

namespace pagedkv::cuda {

// As in wgmma.cuh: sums c[n][4] are a list of registers numbered from %0.
#define PAGEDKV_WIDE_SUMS_14                                         \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"          \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55}, "
#define PAGEDKV_WIDE_SUMS_28                                         \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"          \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63," \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111}, "
#define PAGEDKV_SUM(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define PAGEDKV_4(c, i) \
  PAGEDKV_SUM(c[i]), PAGEDKV_SUM(c[i + 1]), PAGEDKV_SUM(c[i + 2]), PAGEDKV_SUM(c[i + 3])
#define PAGEDKV_16(c, i) \
  PAGEDKV_4(c, i), PAGEDKV_4(c, i + 4), PAGEDKV_4(c, i + 8), PAGEDKV_4(c, i + 12)
#define PAGEDKV_WIDE_OPERANDS_14(c) \
  PAGEDKV_4(c, 0), PAGEDKV_4(c, 4), PAGEDKV_4(c, 8), PAGEDKV_SUM(c[12]), PAGEDKV_SUM(c[13])
#define PAGEDKV_WIDE_OPERANDS_28(c) \
  PAGEDKV_16(c, 0), PAGEDKV_4(c, 16), PAGEDKV_4(c, 20), PAGEDKV_4(c, 24)

// c += A B^T, A 64 x 16 and B n x 16 in shared memory, rows of the product's k.
#define PAGEDKV_WIDE_PRODUCTS(tiles, n, element, type, i0, i1, i2)                          \
  template <class T>                                                                        \
    requires(std::is_same_v<T, element>)                                                    \
  __device__ __forceinline__ void add_product(float (&c)[tiles][4], uint64_t a, uint64_t b, \
                                              int add) {                                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " i2                                        \
                 ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type             \
                 " " PAGEDKV_WIDE_SUMS_##tiles i0 ", " i1 ", p, 1, 1, 0, 0;}\n"             \
                 : PAGEDKV_WIDE_OPERANDS_##tiles(c)                                         \
                 : "l"(a), "l"(b), "r"(add));                                               \
  }
PAGEDKV_WIDE_PRODUCTS(14, "112", __nv_bfloat16, "bf16", "%56", "%57", "%58")
PAGEDKV_WIDE_PRODUCTS(14, "112", __half, "f16", "%56", "%57", "%58")
PAGEDKV_WIDE_PRODUCTS(28, "224", __nv_bfloat16, "bf16", "%112", "%113", "%114")
PAGEDKV_WIDE_PRODUCTS(28, "224", __half, "f16", "%112", "%113", "%114")
#undef PAGEDKV_WIDE_PRODUCTS
#undef PAGEDKV_WIDE_OPERANDS_28
#undef PAGEDKV_WIDE_OPERANDS_14
#undef PAGEDKV_16
#undef PAGEDKV_4
#undef PAGEDKV_SUM
#undef PAGEDKV_WIDE_SUMS_28
#undef PAGEDKV_WIDE_SUMS_14

}  // namespace pagedkv::cuda
