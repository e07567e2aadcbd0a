// Numbers and the operators that reduce them, with the same bits on every device.
//
// The arithmetic contract: narrow floats are folded in float32 and rounded once, to nearest even; denormals are kept;
// every NaN that leaves a fold is the canonical one; integers wrap as in two's complement; min and max propagate NaN and
// order -0 below +0; no multiplication is contracted with an addition.
// Operators and conversions are written once for a scalar and for a vector of the compiler: `N` names which (`Scalar`).
#pragma once
#include "platform.h"
#if defined(__clang__)
#pragma clang fp contract(off)
#endif

namespace commrt {

struct Float16 { u16 bits; };
struct BFloat16 { u16 bits; };

template <class To, class From> CR_DEV To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  union { From from; To to; } pun = {from};
  return pun.to;
}

template <u32 Bytes> struct UnsignedOf;
template <> struct UnsignedOf<1> { typedef u8 type; };
template <> struct UnsignedOf<2> { typedef u16 type; };
template <> struct UnsignedOf<4> { typedef u32 type; };
template <> struct UnsignedOf<8> { typedef u64 type; };
template <class T> using Unsigned = typename UnsignedOf<sizeof(T)>::type;

template <class T> struct AccumulatorOf { typedef T type; };
template <> struct AccumulatorOf<Float16> { typedef float type; };
template <> struct AccumulatorOf<BFloat16> { typedef float type; };
// What elements of T are folded in.
template <class T> using Accumulator = typename AccumulatorOf<T>::type;

template <class T> struct IsFloat { static constexpr bool value = false; };
template <> struct IsFloat<float> { static constexpr bool value = true; };
template <> struct IsFloat<double> { static constexpr bool value = true; };

// Wrap: the type in which sums and products are formed; unsigned, and no narrower than int, lest promotion overflow.
template <class T, bool Float = IsFloat<T>::value> struct WrapOf { typedef typename UnsignedOf<(sizeof(T) < 4 ? 4 : sizeof(T))>::type type; };
template <class T> struct WrapOf<T, true> { typedef T type; };

template <class T> struct Scalar {
  typedef T Value;
  typedef Unsigned<T> Bits;
  typedef typename WrapOf<T>::type Wrap;
  static constexpr bool floating = IsFloat<T>::value;
};

struct Sum {
  template <class N> static CR_DEV typename N::Value of(const typename N::Value& a, const typename N::Value& b) {
    return (typename N::Value)((typename N::Wrap)a + (typename N::Wrap)b);
  }
};
struct Prod {
  template <class N> static CR_DEV typename N::Value of(const typename N::Value& a, const typename N::Value& b) {
    return (typename N::Value)((typename N::Wrap)a * (typename N::Wrap)b);
  }
};
struct Min {
  template <class N> static CR_DEV typename N::Value of(const typename N::Value& a, const typename N::Value& b) {
    typedef typename N::Value Value;
    typedef typename N::Bits Bits;
    const Value x = a < b ? a : b;
    if constexpr (!N::floating) return x;
    // x and y differ only where a and b are zeros, or one is a NaN, which stays one whatever bits are set in it.
    const Value y = b < a ? b : a;
    return bits_as<Value>((Bits)(bits_as<Bits>(x) | bits_as<Bits>(y)));
  }
};
struct Max {
  template <class N> static CR_DEV typename N::Value of(const typename N::Value& a, const typename N::Value& b) {
    if constexpr (N::floating) return negated<N>(Min::of<N>(negated<N>(a), negated<N>(b)));
    else return a > b ? a : b;
  }
  template <class N> static CR_DEV typename N::Value negated(const typename N::Value& x) {   // by its sign bit, NaN or not
    typedef typename N::Bits Bits;
    const Bits bits = bits_as<Bits>(x), ones = bits | ~bits, sign = ones ^ (ones >> 1);
    return bits_as<typename N::Value>((Bits)(bits ^ sign));
  }
};

template <class Op, class T> CR_DEV T fold(T a, T b) { return Op::template of<Scalar<T>>(a, b); }

template <class T> CR_DEV T canonical(T x) { return x; }
CR_DEV float canonical(float x) { return x == x ? x : bits_as<float>(0x7fc00000u); }
CR_DEV double canonical(double x) { return x == x ? x : bits_as<double>(0x7ff8000000000000ull); }

// x / n toward zero, n >= 1. Narrow integers go by a float wide enough for the quotient to truncate exactly: no machine
// here divides vectors of integers.
template <class T> CR_DEV T divided(T x, u32 n) {
  if constexpr (IsFloat<T>::value) return x / (T)n;
  else if constexpr (sizeof(T) <= 2) return (T)((float)x / (float)n);
  else if constexpr (sizeof(T) == 4) {
#if CR_GPU
    u32 q = (x < 0 ? 0 - (u32)x : (u32)x) / n;
    return (T)(x < 0 ? 0 - q : q);
#else
    return (T)((double)x / (double)n);
#endif
  } else return x / (T)n;
}

// Conversions in integer arithmetic. U32 and F32 are u32 and float, or vectors of them; words hold 16 bits each.
template <class U32, class F32> CR_DEV F32 float16_words_to_float(const U32& half) {
  const U32 zero = half & 0u, shifted = (half & 0x7fffu) << 13, exponent = shifted & 0x0f800000u;
  const U32 rebased = shifted + (112u << 23);
  const U32 denormal = bits_as<U32>(bits_as<F32>(rebased + (1u << 23)) - bits_as<F32>(zero + (113u << 23)));
  const U32 finite = exponent == zero ? denormal : rebased;
  const U32 magnitude = exponent == zero + 0x0f800000u ? rebased + (112u << 23) : finite;
  return bits_as<F32>(magnitude | (half & 0x8000u) << 16);
}
template <class U32, class F32> CR_DEV U32 float_to_float16_words(const F32& x) {
  const U32 bits = bits_as<U32>(x), magnitude = bits & 0x7fffffffu, zero = bits & 0u;
  const U32 odd = (magnitude >> 13) & 1u;
  const U32 normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  const U32 aligner = zero + (126u << 23);             // adding 0.5 leaves the half's denormal in the low bits, rounded
  const U32 denormal = bits_as<U32>(bits_as<F32>(magnitude) + bits_as<F32>(aligner)) - aligner;
  const U32 finite = magnitude < zero + (113u << 23) ? denormal : normal;
  const U32 number = (magnitude < zero + (143u << 23) ? finite : zero + 0x7c00u) | (bits & 0x80000000u) >> 16;
  return magnitude > zero + 0x7f800000u ? zero + 0x7e00u : number;
}
template <class U32, class F32> CR_DEV U32 float_to_bfloat16_words(const F32& x) {   // in the upper half of each word
  const U32 bits = bits_as<U32>(x), zero = bits & 0u;
  const U32 rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return ((bits & 0x7fffffffu) > zero + 0x7f800000u ? zero + 0x7fc00000u : rounded) & 0xffff0000u;
}

#if CR_HIP || (defined(__FLT16_MAX__) && (defined(__F16C__) || defined(__aarch64__)))
#define CR_NATIVE_FLOAT16 1
#else
#define CR_NATIVE_FLOAT16 0
#endif

template <class T> CR_DEV T widen(T x) { return x; }
CR_DEV float widen(BFloat16 x) { return bits_as<float>((u32)x.bits << 16); }
CR_DEV float widen(Float16 x) {
#if CR_CUDA
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
  return f;
#elif CR_NATIVE_FLOAT16
  return (float)bits_as<_Float16>(x.bits);
#else
  return float16_words_to_float<u32, float>(x.bits);
#endif
}

template <class T> CR_DEV T narrow(Accumulator<T> x) { return canonical(x); }
template <> CR_DEV BFloat16 narrow<BFloat16>(float x) { return {(u16)(float_to_bfloat16_words<u32, float>(x) >> 16)}; }
template <> CR_DEV Float16 narrow<Float16>(float x) {
#if CR_CUDA
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {(u16)(x == x ? bits : 0x7e00)};
#elif CR_NATIVE_FLOAT16
  return {(u16)(x == x ? bits_as<u16>((_Float16)x) : 0x7e00)};
#else
  return {(u16)float_to_float16_words<u32, float>(x)};
#endif
}

}  // namespace commrt
