// For test_reduce.py: what kernels call, instantiated for the CPU; and a call from a thread in another float mode.
#include "../../algorithms/device/reduce.h"
#include "../../commrt/_native/reduce.h"
using namespace commrt;
typedef u64 (*fold_fn)(const u64*, u32, u32);
template <class T, class Op> void loop(char* const* d, u32 nd, const char* const* s, u32 ns, u64 count, u32 divisor) {
  reduce<T, Op>(d, nd, s, ns, count, divisor);
}
template <class T, class Op> u64 word(const u64* words, u32 n, u32 divisor) {
  WordFold<T, Op> fold;
  fold.first(words[0]);
  for (u32 k = 1; k < n; k++) fold.next(words[k]);
  return fold.result(divisor);
}
#define OPS(F, T) {F<T, Sum>, F<T, Prod>, F<T, Min>, F<T, Max>, F<T, Sum>}
#define TYPES(F) {OPS(F, i8), OPS(F, u8), OPS(F, i16), OPS(F, u16), OPS(F, i32), OPS(F, u32), OPS(F, i64), \
  OPS(F, u64), OPS(F, Float16), OPS(F, BFloat16), OPS(F, float), OPS(F, double)}
const cr_reduce_fn loops[12][5] = TYPES(loop);
const fold_fn folds[12][5] = TYPES(word);
extern "C" cr_reduce_fn device_reduce(int dtype, int op) { return loops[dtype - 1][op]; }
extern "C" u64 word_fold(int dtype, int op, const u64* words, u32 n, u32 divisor) {
  return folds[dtype - 1][op](words, n, divisor);
}
extern "C" u32 in_float_mode(u32 mode, cr_reduce_fn f, char* const* d, const char* const* s, u32 ns, u64 count,
                             u32 divisor) {
#if defined(__x86_64__)
  u32 was = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(was | mode);
  f(d, 1, s, ns, count, divisor);
  u32 after = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(was);
  return after & mode;
#else
  return f(d, 1, s, ns, count, divisor), mode;
#endif
}
