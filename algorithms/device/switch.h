// What an NVLink switch does for all ranks at once, from sm_90 on, through multicast addresses: each stands for the same
// place in every rank's memory. They are another way to the same memory than ordinary addresses, and a fence joins both.
// Chunks lie in scratch slots: 16-byte aligned, and padded, so that the last access may reach past the chunk.
#pragma once
#include "packets.h"
#include "reduce.h"

namespace commrt {

#if CR_CUDA && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CR_SWITCH 1
#elif defined(CR_SWITCH_MEMBER)  // where the k-th memory behind an address is: of a driver that emulates such addresses
#define CR_SWITCH 1
#else
#define CR_SWITCH 0
#endif

// Whether the switch can fold T with Op, and how: 16 bytes, rounded to T once, in an order of its own.
template <class T, class Op> struct SwitchLoad {
#ifdef CR_SWITCH_MEMBER
  static constexpr bool known = true;
  static Pair64 of(const char* all) {
    WordFold<T, Op> lo, hi;
    for (u32 k = 0; const char* at = (const char*)CR_SWITCH_MEMBER(all, k); k++) {
      const Pair64 x = plain_load<Pair64>(at);
      if (k) lo.next(x.lo), hi.next(x.hi);
      else lo.first(x.lo), hi.first(x.hi);
    }
    return {lo.result(0), hi.result(0)};
  }
#else
  static constexpr bool known = false;
#endif
};

#ifdef CR_SWITCH_MEMBER
inline void switch_store(char* all, const Pair64& x) {
  for (u32 k = 0; char* at = (char*)CR_SWITCH_MEMBER(all, k); k++) plain_store(at, x);
}
inline void switch_fence() {}
#elif CR_SWITCH
#define CR_SWITCH_VECTOR(T, KIND)                                                                                      \
  template <> struct SwitchLoad<T, Sum> {                                                                              \
    static constexpr bool known = true;                                                                                \
    static CR_DEV Pair64 of(const char* all) {                                                                         \
      u32 a, b, c, d;                                                                                                  \
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add." KIND " {%0,%1,%2,%3}, [%4];"                           \
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(all) : "memory");                                        \
      return {a | (u64)b << 32, c | (u64)d << 32};                                                                     \
    }                                                                                                                  \
  };
CR_SWITCH_VECTOR(float, "v4.f32")
CR_SWITCH_VECTOR(Float16, "acc::f32.v4.f16x2")
CR_SWITCH_VECTOR(BFloat16, "acc::f32.v4.bf16x2")
#undef CR_SWITCH_VECTOR

#define CR_SWITCH_WORDS(T, Op, KIND)                                                                                   \
  template <> struct SwitchLoad<T, Op> {                                                                               \
    static constexpr bool known = true;                                                                                \
    static CR_DEV u64 word(const char* all) {                                                                          \
      u32 x;                                                                                                           \
      asm volatile("multimem.ld_reduce.relaxed.sys.global." KIND " %0, [%1];" : "=r"(x) : "l"(all) : "memory");        \
      return x;                                                                                                        \
    }                                                                                                                  \
    static CR_DEV Pair64 of(const char* all) {                                                                         \
      return {word(all) | word(all + 4) << 32, word(all + 8) | word(all + 12) << 32};                                  \
    }                                                                                                                  \
  };
CR_SWITCH_WORDS(u32, Sum, "add.u32")
CR_SWITCH_WORDS(i32, Sum, "add.s32")
CR_SWITCH_WORDS(u32, Min, "min.u32")
CR_SWITCH_WORDS(i32, Min, "min.s32")
CR_SWITCH_WORDS(u32, Max, "max.u32")
CR_SWITCH_WORDS(i32, Max, "max.s32")
#undef CR_SWITCH_WORDS

CR_DEV void switch_store(char* all, const Pair64& x) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};"
               ::"l"(all), "r"((u32)x.lo), "r"((u32)(x.lo >> 32)), "r"((u32)x.hi), "r"((u32)(x.hi >> 32)) : "memory");
}
CR_DEV void switch_fence() {
  if (!seeded(Seeded::NO_SWITCH_FENCE)) asm volatile("fence.proxy.alias;" ::: "memory");
}
#else
CR_DEV void switch_store(char*, const Pair64&) {}
CR_DEV void switch_fence() {}
#endif

// A quotient is rounded once more: exact for wide types alone.
template <class T, class Op> CR_DEV bool switch_folds(u32 divisor) {
  return SwitchLoad<T, Op>::known && (!divisor || sizeof(T) >= 4);
}

// By all threads of a block: to = fold of every rank's `all`, divided.
template <class T, class Op> CR_DEV void switch_reduce(char* to, const char* all, u64 nbytes, u32 divisor) {
  if constexpr (SwitchLoad<T, Op>::known) {
    switch_fence();
    for (u64 i = tid() * 16ull; i < nbytes; i += nthreads() * 16ull) {
      Pair64 x = SwitchLoad<T, Op>::of(all + i);
      WordFold<T, Op> lo, hi;
      lo.first(x.lo), hi.first(x.hi);
      store_word(to + i, lo.result(divisor), nbytes - i);
      if (nbytes - i > 8) store_word(to + i + 8, hi.result(divisor), nbytes - i - 8);
    }
    switch_fence();
  }
}

// By all threads of a block: every rank's `all` = from, a scratch slot too.
CR_DEV void switch_broadcast(char* all, const char* from, u64 nbytes) {
  switch_fence();
  for (u64 i = tid() * 16ull; i < nbytes; i += nthreads() * 16ull) switch_store(all + i, plain_load<Pair64>(from + i));
  switch_fence();
}

}  // namespace commrt
