// The CPU's reduction kernels, one function a (dtype, op), chosen once for the machine's instruction set.
#pragma once
#include "../../algorithms/device/platform.h"

extern "C" {

// Element i of every dst = fold over srcs, in the order given, of their elements i: accumulated in the type itself, or
// in float32 for float16 and bfloat16, and rounded once; NaNs come out canonical. ndst, nsrc >= 1. `count` is in elements.
// divisor: 0, or (op sum and avg only) the number that the fold is divided by: integers toward zero.
// Any alignment. A dst may be exactly a src; other overlap is not allowed. Same bits at every level, position, alignment,
// and whatever rounding or flush-to-zero mode the calling thread is in.
typedef void (*cr_reduce_fn)(char* const* dsts, u32 ndst, const char* const* srcs, u32 nsrc, u64 count, u32 divisor);

// Null if the pair isn't supported: dtype codes 1..12 and op codes 0..4 are. avg is sum's function: the caller divides once.
cr_reduce_fn cr_reduce_lookup(int dtype, int op);

// For tests: instruction sets by number from 0, the least, to cr_reduce_levels() - 1; null where this machine lacks one.
cr_reduce_fn cr_reduce_lookup_at(int level, int dtype, int op);
int cr_reduce_levels(void);
}
