// Whether the x86 kernels are part of this build. They are compiled function by function for their
// instruction set with `#pragma GCC target` (GCC only), so that one binary serves every processor;
// any other compiler or architecture gets the plain kernels.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PAGEDKV_HAS_X86_KERNELS 1
#else
#define PAGEDKV_HAS_X86_KERNELS 0
#endif
