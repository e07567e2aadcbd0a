// Reduction in a kernel: out = fold(sources, in the order given), divided if it is an average, rounded once.
// On a CPU commrt itself calls the vector kernels of the native core; user kernels there may call these.
#pragma once
#include "numeric.h"

namespace commrt {

// The elements of one 8-byte word, folded across sources: first(), then next() for each further one, then result().
// What is held between sources are accumulators, so that narrow floats round once. Lanes past the data may hold anything.
template <class T, class Op> struct WordFold {
  static constexpr u32 lanes = 8 / sizeof(T);
  Accumulator<T> acc[lanes];

  static CR_DEV Accumulator<T> lane(u64 word, u32 j) { return widen(bits_as<T>((Unsigned<T>)(word >> (8 * sizeof(T) * j)))); }
  CR_DEV void first(u64 word) {
    for (u32 j = 0; j < lanes; j++) acc[j] = lane(word, j);
  }
  CR_DEV void next(u64 word) {
    for (u32 j = 0; j < lanes; j++) acc[j] = fold<Op>(acc[j], lane(word, j));
  }
  CR_DEV u64 result(u32 divisor) const {
    u64 word = 0;
    for (u32 j = 0; j < lanes; j++) {
      T out = narrow<T>(divisor ? divided(acc[j], divisor) : acc[j]);
      word |= (u64)bits_as<Unsigned<T>>(out) << (8 * sizeof(T) * j);
    }
    return word;
  }
};

// One element at p; `natural`: p is aligned to it. Byte by byte otherwise: a GPU faults on a misaligned access.
template <class T> CR_DEV u64 element_load(const char* p, bool natural) {
  if (natural) return plain_load<Unsigned<T>>(p);
  u64 word = 0;
  for (u32 j = 0; j < sizeof(T); j++) word |= (u64)plain_load<u8>(p + j) << 8 * j;
  return word;
}
template <class T> CR_DEV void element_store(char* p, u64 word, bool natural) {
  if (natural) return plain_store(p, (Unsigned<T>)word);
  for (u32 j = 0; j < sizeof(T); j++) plain_store(p + j, (u8)(word >> 8 * j));
}

// What a thread folds at a time: 16 bytes, but 8 of one-byte elements, since a block of 1024 threads has not the registers
// for 16 accumulators of each.
template <class T> constexpr u32 STEP = sizeof(T) == 1 ? 8 : 16;
template <class T> CR_DEV Pair64 step_load(const char* p) {
  if constexpr (STEP<T> == 16) return plain_load<Pair64>(p);
  else return {plain_load<u64>(p), 0};
}
template <class T> CR_DEV void step_store(char* p, const Pair64& words) {
  if constexpr (STEP<T> == 16) plain_store(p, words);
  else plain_store(p, words.lo);
}

// dsts[0..ndst) = fold(srcs[0..nsrc)), `count` elements, shared among the threads of the block; no synchronisation.
// Dsts and Srcs are indexed for addresses: arrays, or anything that computes them. divisor: 0, or n of an average (Sum).
// A destination may be exactly a source; other overlap is not allowed. Any alignment; 16-byte accesses where all allow.
template <class T, class Op, class Dsts, class Srcs>
CR_DEV void reduce(const Dsts& dsts, u32 ndst, const Srcs& srcs, u32 nsrc, u64 count, u32 divisor) {
  u64 address_bits = 0;
  for (u32 k = 0; k < ndst; k++) address_bits |= (u64)dsts[k];
  for (u32 k = 0; k < nsrc; k++) address_bits |= (u64)srcs[k];
  const u64 nbytes = count * sizeof(T), body = address_bits % 16 ? 0 : nbytes / 16 * 16;
  const bool natural = address_bits % sizeof(T) == 0;
  char* const dst0 = dsts[0];
  const char* const src0 = srcs[0];

  for (u64 i = (u64)tid() * STEP<T>; i < body; i += (u64)nthreads() * STEP<T>) {
    WordFold<T, Op> lo, hi;
    Pair64 x = step_load<T>(src0 + i);
    lo.first(x.lo), hi.first(x.hi);
    for (u32 k = 1; k < nsrc; k++) {
      x = step_load<T>(srcs[k] + i);
      lo.next(x.lo), hi.next(x.hi);
    }
    const Pair64 out = {lo.result(divisor), hi.result(divisor)};
    step_store<T>(dst0 + i, out);
    for (u32 k = 1; k < ndst; k++) step_store<T>(dsts[k] + i, out);
  }
  for (u64 i = body + tid() * sizeof(T); i < nbytes; i += nthreads() * sizeof(T)) {
    WordFold<T, Op> word;
    Accumulator<T>& acc = word.acc[0];
    acc = word.lane(element_load<T>(src0 + i, natural), 0);
    for (u32 k = 1; k < nsrc; k++) acc = fold<Op>(acc, word.lane(element_load<T>(srcs[k] + i, natural), 0));
    const u64 out = bits_as<Unsigned<T>>(narrow<T>(divisor ? divided(acc, divisor) : acc));
    for (u32 k = 0; k < ndst; k++) element_store<T>(dsts[k] + i, out, natural);
  }
}

}  // namespace commrt
