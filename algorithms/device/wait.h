// Waiting, written once. An attempt handles element i or says "not yet", changing nothing. Who waits how is `patience`.
#pragma once
#include "launch.h"

namespace commrt {

// May the caller try again here and now? A thread spins until an abort; a CPU cursor gives way when its budget is spent.
CR_DEV bool patience(Block& b, const Launch& L) {
  relax();
#if CR_SPIN
  return (++b.budget & 1023) || !load_relaxed(L.lane->abort);
#else
  (void)L;
  return b.budget && b.budget--;
#endif
}

template <class Attempt> CR_DEV bool each(Block& b, const Launch& L, u64 n, Attempt attempt) {
  for (u64 i = b.at + tid(); i < n; i += nthreads())
    while (!attempt(i)) {
#if !CR_SPIN
      b.at = i;
#endif
      if (b.failure || !patience(b, L)) return false;
    }
  return true;
}

CR_DEV bool fail(Block& b, Failure why, u32 culprit) {
  b.failure = why;
  b.culprit = culprit;
  return false;
}

}  // namespace commrt
