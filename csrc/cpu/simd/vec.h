// Vectors of fp32 for one instruction set. Kernel bodies are written once against this interface
// and compiled once per instruction set, each time in a namespace of its own:
//
//   foo_avx2.cpp:    #define PAGEDKV_SIMD_AVX2      (or PAGEDKV_SIMD_AVX512, PAGEDKV_SIMD_SCALAR)
//                    #include "cpu/.../foo_body.h"  (all other headers first, then cpu/simd/vec.h,
//                                                    then namespace pagedkv::cpu::PAGEDKV_ISA
//                                                    {...})
//
// Everything below the include of this header is compiled for the instruction set, so no standard
// header may come after it: an inline function of the library, compiled for AVX-512 here, could be
// the copy that the linker keeps for everyone.
//
// Interface (kWidth lanes; T is float, BFloat16, Float16, Float8E4M3 or Float8E5M2):
//   Vec zero(), broadcast(float), load(const T*), load_first(const T*, n)   n < kWidth, rest 0
//   void store(T*, Vec), store_first(T*, Vec, n)                            float8 saturates
//   a + b, a - b, a * b, a / b, fma(a, b, c) = a * b + c, max, min, abs, sqrt, round
//   float reduce_add(Vec), reduce_max(Vec)
//   Vec swap_neighbours(Vec)                          lanes 1, 0, 3, 2, ...
//   Vec select_less(a, b, x, y) = a < b ? x : y       by lane; false for NaN
//   Vec scale_exp2(x, n) = x * 2^n                    n integral, -126 <= n <= 127
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/simd/element.h"
#include "cpu/simd/target.h"

#if PAGEDKV_HAS_X86_KERNELS
#include <immintrin.h>
#endif

#if defined(PAGEDKV_SIMD_AVX512_BF16)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#define PAGEDKV_ISA avx512_bf16
#include "cpu/simd/vec_avx512.h"
#elif defined(PAGEDKV_SIMD_AVX512)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define PAGEDKV_ISA avx512
#include "cpu/simd/vec_avx512.h"
#elif defined(PAGEDKV_SIMD_AVX2)
#pragma GCC target("avx2,fma,f16c")
#define PAGEDKV_ISA avx2
#include "cpu/simd/vec_avx2.h"
#elif defined(PAGEDKV_SIMD_SCALAR)
#define PAGEDKV_ISA scalar
#include "cpu/simd/vec_scalar.h"
#else
#error "define PAGEDKV_SIMD_SCALAR, _AVX2, _AVX512 or _AVX512_BF16 first"
#endif

#include "cpu/simd/vec_math.h"
