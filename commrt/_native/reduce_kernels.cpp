// Reduction on a CPU, compiled once for each instruction set: CR_LEVEL names the set, CR_REDUCE_TABLE the one symbol
// that leaves. Everything else has internal linkage, lest the linker hand another set's code to an older machine.
#include "reduce.h"
#include "../../algorithms/device/numeric.h"
#if defined(__x86_64__)
#include <immintrin.h>
#define CR_VECTOR_REGISTER "v"
#elif defined(__aarch64__)
#include <arm_neon.h>
#define CR_VECTOR_REGISTER "w"
#endif

namespace commrt {
namespace {

#if defined(__AVX512F__)
constexpr u32 vector_bytes = 64;
#elif defined(__AVX2__)
constexpr u32 vector_bytes = 32;
#else
constexpr u32 vector_bytes = 16;
#endif

template <class T, bool Float = IsFloat<T>::value> struct LaneWrap { typedef Unsigned<T> type; };
template <class T> struct LaneWrap<T, true> { typedef T type; };

template <class T> struct Simd {                        // what Scalar is for one element
  typedef T Value __attribute__((vector_size(vector_bytes)));
  typedef Unsigned<T> Bits __attribute__((vector_size(vector_bytes)));
  typedef typename LaneWrap<T>::type Wrap __attribute__((vector_size(vector_bytes)));
  static constexpr bool floating = IsFloat<T>::value;
};

// Not memcpy: gcc 12 splits a 32-byte one in two.
template <class V> struct __attribute__((packed, may_alias)) Unaligned { V v; };
template <class V> CR_DEV V load(const char* p) { return ((const Unaligned<V>*)p)->v; }
template <class V> CR_DEV void store(char* p, const V& v) { ((Unaligned<V>*)p)->v = v; }

// 1 to 16 bytes, in the order of memory, zeros after them. Through registers: a vector load of bytes just stored would stall.
struct Bytes16 { u64 lo, hi; };
CR_DEV u64 load_most8(const char* p, u64 n) {
  if (n == 8) return load<u64>(p);
  if (n >= 4) return load<u32>(p) | (u64)load<u32>(p + n - 4) << 8 * (n - 4);
  return (u8)p[0] | (u64)(u8)p[n / 2] << 8 * (n / 2) | (u64)(u8)p[n - 1] << 8 * (n - 1);
}
CR_DEV void store_most8(char* p, u64 word, u64 n) {
  if (n == 8) return store(p, word);
  if (n >= 4) return store(p, (u32)word), store(p + n - 4, (u32)(word >> 8 * (n - 4)));
  p[0] = (char)word, p[n / 2] = (char)(word >> 8 * (n / 2)), p[n - 1] = (char)(word >> 8 * (n - 1));
}
CR_DEV Bytes16 load_most16(const char* p, u64 n) {
  if (n <= 8) return {load_most8(p, n), 0};
  return {load<u64>(p), load<u64>(p + n - 8) >> 8 * (16 - n)};
}
CR_DEV void store_most16(char* p, const Bytes16& bytes, u64 n) {
  if (n <= 8) return store_most8(p, bytes.lo, n);
  const u64 shared = 16 - n;                            // bytes that the two stores both write
  store(p, bytes.lo), store(p + n - 8, shared ? bytes.hi << 8 * shared | bytes.lo >> 8 * (8 - shared) : bytes.hi);
}

typedef Simd<float>::Value Floats;
typedef Simd<double>::Value Doubles;
typedef Simd<u32>::Value Words;
typedef Simd<u64>::Value Words64;
CR_DEV Words64 spread(const Bytes16& bytes) {           // the first 16 bytes of a vector
  Words64 words = {};
  words[0] = bytes.lo, words[1] = bytes.hi;
  return words;
}
template <class V> CR_DEV Bytes16 first16(const V& v) { return {((Words64)v)[0], ((Words64)v)[1]}; }

template <class T> CR_DEV typename Simd<T>::Value settled(const typename Simd<T>::Value& v) {   // NaNs made canonical
  return v == v ? v : (typename Simd<T>::Value){} + canonical((T)__builtin_nan(""));
}
template <class T> CR_DEV void divide(typename Simd<T>::Value& v, u32 n) {
  if constexpr (IsFloat<T>::value) {
    v /= (typename Simd<T>::Value){} + (T)n;
  } else {
    alignas(vector_bytes) T lanes[vector_bytes / sizeof(T)];
    store((char*)lanes, v);
    for (T& lane : lanes) lane = divided(lane, n);
    v = load<typename Simd<T>::Value>((const char*)lanes);
  }
}

// nans(a, b): where either is a NaN. some(): whether anywhere.
#if defined(__AVX512F__)
typedef u32 Spots;
CR_DEV Spots nans(const Floats& a, const Floats& b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
CR_DEV Spots nans(const Doubles& a, const Doubles& b) { return _mm512_cmp_pd_mask(a, b, _CMP_UNORD_Q); }
CR_DEV bool some(Spots spots) { return spots != 0; }
#elif defined(__AVX2__)
typedef Words Spots;
CR_DEV Spots nans(const Floats& a, const Floats& b) { return (Words)_mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
CR_DEV Spots nans(const Doubles& a, const Doubles& b) { return (Words)_mm256_cmp_pd(a, b, _CMP_UNORD_Q); }
CR_DEV bool some(const Spots& spots) { return _mm256_movemask_epi8((__m256i)spots) != 0; }
#else
typedef Words Spots;
template <class V> CR_DEV Spots nans(const V& a, const V& b) { return (Words)((a != a) | (b != b)); }
#if defined(__SSE2__)
CR_DEV bool some(const Spots& spots) { return _mm_movemask_epi8((__m128i)spots) != 0; }
#else
CR_DEV bool some(const Spots& spots) { return ((Words64)spots)[0] | ((Words64)spots)[1]; }
#endif
#endif

// One vector of memory, as accumulators; first(): its first 16 bytes alone. special(): what write<false> would get wrong
// and write<true> gets right; it is looked for in many elements at once, and seldom found.
template <class T> struct Pack {
  static constexpr u32 nbytes = vector_bytes;
  static constexpr bool floating = IsFloat<T>::value;
  typename Simd<T>::Value v;
  CR_DEV void read(const char* p) { v = load<typename Simd<T>::Value>(p); }
  CR_DEV void read(const Bytes16& bytes) { v = (typename Simd<T>::Value)spread(bytes); }
  template <bool Special> CR_DEV void write(char* p) const { store(p, stored<Special>()); }
  template <bool Special> CR_DEV Bytes16 first() const { return first16(stored<Special>()); }
  template <bool Special> CR_DEV typename Simd<T>::Value stored() const {
    if constexpr (Special) return settled<T>(v);
    else return v;
  }
  template <class Op> CR_DEV void take(const Pack& x) { v = Op::template of<Simd<T>>(v, x.v); }
  CR_DEV void divide_by(u32 n) { divide<T>(v, n); }
  CR_DEV Spots special() const { return nans(v, v); }
};

struct FloatPack {                                      // of 16-bit floats: two vectors of accumulators
  static constexpr u32 nbytes = vector_bytes;
  static constexpr bool floating = true;
  Floats a, b;
  template <class Op> CR_DEV void take(const FloatPack& x) {
    a = Op::template of<Simd<float>>(a, x.a);
    b = Op::template of<Simd<float>>(b, x.b);
  }
  CR_DEV void divide_by(u32 n) { divide<float>(a, n), divide<float>(b, n); }
  CR_DEV Spots special() const { return nans(a, b); }
};

template <> struct Pack<BFloat16> : FloatPack {         // a: the even elements, b: the odd: no lane ever moves
  CR_DEV void read(const char* p) { read_words(load<Words>(p)); }
  CR_DEV void read(const Bytes16& bytes) { read_words((Words)spread(bytes)); }
  template <bool Special> CR_DEV void write(char* p) const { store(p, stored<Special>()); }
  template <bool Special> CR_DEV Bytes16 first() const { return first16(stored<Special>()); }
  CR_DEV void read_words(const Words& w) { a = bits_as<Floats>((Words)(w << 16)), b = bits_as<Floats>((Words)(w & 0xffff0000u)); }
#if defined(__AVX512BF16__)                             // its rounding is right, but for NaNs and the denormals that it flushes
  CR_DEV Spots special() const {
    constexpr int quiet_nan = 1, denormal = 0x20, signaling_nan = 0x80, any = quiet_nan | denormal | signaling_nan;
    return _mm512_fpclass_ps_mask(a, any) | _mm512_fpclass_ps_mask(b, any);
  }
  template <bool Special> CR_DEV Words stored() const {
    if constexpr (Special) return rounded<true>(a) >> 16 | rounded<true>(b);
    const Simd<u16>::Value turns = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (Words)_mm512_permutexvar_epi16((__m512i)turns, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
#else
  template <bool Special> CR_DEV Words stored() const { return rounded<Special>(a) >> 16 | rounded<Special>(b); }
#endif
  template <bool Special> static CR_DEV Words rounded(const Floats& x) {
    if constexpr (Special) return float_to_bfloat16_words<Words, Floats>(x);
    const Words bits = bits_as<Words>(x);
    return (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  }
};

#if defined(__F16C__) || defined(__aarch64__)
template <> struct Pack<Float16> : FloatPack {          // a: the first half of the elements, b: the second
#if defined(__AVX512F__)
  typedef __m256i Half;
  // The masked forms, every lane on: gcc 12 warns of an uninitialised register inside the plain ones.
  static CR_DEV Floats widened(Half x) { return _mm512_maskz_cvtph_ps(0xffff, x); }
  static CR_DEV Half narrowed(const Floats& x) { return _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#elif defined(__F16C__)
  typedef __m128i Half;
  static CR_DEV Floats widened(Half x) { return _mm256_cvtph_ps(x); }
  static CR_DEV Half narrowed(const Floats& x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
#else
  typedef float16x4_t Half;
  static CR_DEV Floats widened(Half x) { return (Floats)vcvt_f32_f16(x); }
  static CR_DEV Half narrowed(const Floats& x) { return vcvt_f16_f32((float32x4_t)x); }
#endif
  struct Halves { Half a, b; };
  static constexpr u32 half = sizeof(Half);
  CR_DEV void read(const char* p) { read_halves(load<Half>(p), load<Half>(p + half)); }
  CR_DEV void read(const Bytes16& bytes) {
    const Halves halves = bits_as<Halves>(spread(bytes));
    read_halves(halves.a, halves.b);
  }
  CR_DEV void read_halves(Half x, Half y) {
    a = widened(x), b = widened(y);
#if defined(__clang__)                                  // else it moves comparisons before the widening, and has none for halves
    asm("" : "+" CR_VECTOR_REGISTER(a), "+" CR_VECTOR_REGISTER(b));
#endif
  }
  template <bool Special> static CR_DEV Half stored(const Floats& x) { return narrowed(Special ? settled<float>(x) : x); }
  template <bool Special> CR_DEV void write(char* p) const { store(p, stored<Special>(a)), store(p + half, stored<Special>(b)); }
  template <bool Special> CR_DEV Bytes16 first() const { return first16(bits_as<Words64>(Halves{stored<Special>(a), stored<Special>(b)})); }
};
#else
template <> struct Pack<Float16> : FloatPack {          // a: the even elements, b: the odd
  CR_DEV void read(const char* p) { read_words(load<Words>(p)); }
  CR_DEV void read(const Bytes16& bytes) { read_words((Words)spread(bytes)); }
  template <bool Special> CR_DEV void write(char* p) const { store(p, stored()); }
  template <bool Special> CR_DEV Bytes16 first() const { return first16(stored()); }
  CR_DEV void read_words(const Words& w) {
    a = float16_words_to_float<Words, Floats>(w & 0xffffu), b = float16_words_to_float<Words, Floats>(w >> 16);
  }
  CR_DEV Words stored() const { return float_to_float16_words<Words, Floats>(a) | float_to_float16_words<Words, Floats>(b) << 16; }
  CR_DEV Spots special() const { return Spots{}; }
};
#endif

// Two side by side. An array of packs would do, but for compilers that then keep it in memory.
template <class P> struct Twice {
  static constexpr u32 nbytes = 2 * P::nbytes;
  static constexpr bool floating = P::floating;
  P a, b;
  CR_DEV void read(const char* p) { a.read(p), b.read(p + P::nbytes); }
  template <bool Special> CR_DEV void write(char* p) const { a.template write<Special>(p), b.template write<Special>(p + P::nbytes); }
  template <class Op> CR_DEV void take(const Twice& x) { a.template take<Op>(x.a), b.template take<Op>(x.b); }
  CR_DEV void divide_by(u32 n) { a.divide_by(n), b.divide_by(n); }
  CR_DEV Spots special() const { return a.special() | b.special(); }
};

struct Lists { char* const* dsts; u32 ndst; const char* const* srcs; u32 nsrc; };

template <class P> CR_DEV void write_all(const P& acc, char* const* dsts, u32 ndst, u64 i) {
  if constexpr (P::floating) {
    if (__builtin_expect(some(acc.special()), 0)) {
      for (u32 k = 0; k < ndst; k++) acc.template write<true>(dsts[k] + i);
      return;
    }
  }
  for (u32 k = 0; k < ndst; k++) acc.template write<false>(dsts[k] + i);
}

// As many whole P as fit in [i, end); returns where it stopped.
template <class P, class Op, bool Divide> CR_DEV u64 sweep(const Lists& lists, u64 i, u64 end, u32 divisor) {
  const char *const src0 = lists.srcs[0], *const src1 = lists.srcs[lists.nsrc > 1];
  char* const dst0 = lists.dsts[0];
  P acc, x;
  if (lists.nsrc == 2 && lists.ndst == 1) {             // two ranks: keep the loop bare
    for (; end - i >= P::nbytes; i += P::nbytes) {
      acc.read(src0 + i), x.read(src1 + i);
      acc.template take<Op>(x);
      if (Divide) acc.divide_by(divisor);
      write_all(acc, &dst0, 1, i);
    }
    return i;
  }
  for (; end - i >= P::nbytes; i += P::nbytes) {
    acc.read(src0 + i);
    for (u32 k = 1; k < lists.nsrc; k++) x.read(lists.srcs[k] + i), acc.template take<Op>(x);
    if (Divide) acc.divide_by(divisor);
    write_all(acc, lists.dsts, lists.ndst, i);
  }
  return i;
}

// 1 to 16 bytes that fill no vector, in one with zeros: an element meets the same instructions as in the body.
template <class P, class Op, bool Divide> CR_DEV void rest(const Lists& lists, u64 i, u64 n, u32 divisor) {
  P acc, x;
  acc.read(load_most16(lists.srcs[0] + i, n));
  for (u32 k = 1; k < lists.nsrc; k++) x.read(load_most16(lists.srcs[k] + i, n)), acc.template take<Op>(x);
  if (Divide) acc.divide_by(divisor);
  bool special = false;
  if constexpr (P::floating) special = some(acc.special());
  const Bytes16 out = special ? acc.template first<true>() : acc.template first<false>();
  for (u32 k = 0; k < lists.ndst; k++) store_most16(lists.dsts[k] + i, out, n);
}

template <class T, class Op, bool Divide>
__attribute__((noinline)) void run(const Lists& lists, u64 count, u32 divisor) {
  typedef Pack<T> P;
  const u64 end = count * sizeof(T);
  u64 i = sweep<Twice<Twice<P>>, Op, Divide>(lists, 0, end, divisor);
  i = sweep<P, Op, Divide>(lists, i, end, divisor);
  for (; i < end; i += 16) rest<P, Op, Divide>(lists, i, end - i < 16 ? end - i : 16, divisor);
}

// The calling thread may flush denormals or round otherwise: other libraries set that for a whole process. Not here.
struct PlainRounding {
#if defined(__x86_64__)
  static constexpr u32 departures = 0xe040;             // flush to zero, denormals are zero, rounding direction
  const u32 was = __builtin_ia32_stmxcsr();
  PlainRounding() { if (was & departures) __builtin_ia32_ldmxcsr(was & ~departures); }
  ~PlainRounding() { if (was & departures) __builtin_ia32_ldmxcsr(was); }
#elif defined(__aarch64__)
  static constexpr u64 departures = 0x1c80000;          // FZ, RMode, FZ16
  u64 was;
  static void set(u64 v) { asm volatile("msr fpcr, %0" ::"r"(v) : "memory"); }
  PlainRounding() { asm volatile("mrs %0, fpcr" : "=r"(was)); if (was & departures) set(was & ~departures); }
  ~PlainRounding() { if (was & departures) set(was); }
#endif
};

template <class Op> struct Divides { static constexpr bool value = false; };
template <> struct Divides<Sum> { static constexpr bool value = true; };

template <class T, class Op> void reduce(char* const* dsts, u32 ndst, const char* const* srcs, u32 nsrc, u64 count, u32 divisor) {
  const Lists lists = {dsts, ndst, srcs, nsrc};
  PlainRounding scope;
  if constexpr (Divides<Op>::value) {
    if (divisor) return run<T, Op, true>(lists, count, divisor);
  }
  run<T, Op, false>(lists, count, 0);
}

}  // namespace
}  // namespace commrt

// By dtype code less one, then op code; avg is sum with a divisor. A product of integers is the same, signed or not.
#define ROW(T, P) {commrt::reduce<T, commrt::Sum>, commrt::reduce<P, commrt::Prod>, commrt::reduce<T, commrt::Min>, commrt::reduce<T, commrt::Max>, commrt::reduce<T, commrt::Sum>}
extern "C" __attribute__((visibility("hidden"))) const cr_reduce_fn CR_REDUCE_TABLE[12][5] = {
    ROW(i8, u8), ROW(u8, u8), ROW(i16, u16), ROW(u16, u16), ROW(i32, u32), ROW(u32, u32), ROW(i64, u64), ROW(u64, u64),
    ROW(commrt::Float16, commrt::Float16), ROW(commrt::BFloat16, commrt::BFloat16), ROW(float, float), ROW(double, double),
};
