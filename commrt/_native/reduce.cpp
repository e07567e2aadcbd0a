#include "reduce.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

typedef const cr_reduce_fn cr_reduce_table[12][5];
extern "C" {
extern cr_reduce_table cr_reduce_table_base;
#if defined(__x86_64__)
extern cr_reduce_table cr_reduce_table_v3, cr_reduce_table_v4, cr_reduce_table_v4bf16;
#endif
}

namespace {

#if defined(__x86_64__)
constexpr cr_reduce_table* tables[] = {&cr_reduce_table_base, &cr_reduce_table_v3, &cr_reduce_table_v4, &cr_reduce_table_v4bf16};

// Not every compiler knows these names in __builtin_cpu_supports. Whether the system saves the registers, avx2 and avx512f say.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool has_avx512bf16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
}
int best_level() {
  __builtin_cpu_init();
  bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
            __builtin_cpu_supports("bmi2") && has_f16c();
  bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!v3) return 0;
  if (!v4) return 1;
  return has_avx512bf16() ? 3 : 2;
}
#else
constexpr cr_reduce_table* tables[] = {&cr_reduce_table_base};
int best_level() { return 0; }
#endif

int level_here() {
  static const int level = best_level();
  return level;
}

}  // namespace

extern "C" {

int cr_reduce_levels(void) { return sizeof tables / sizeof *tables; }

cr_reduce_fn cr_reduce_lookup_at(int level, int dtype, int op) {
  if (level < 0 || level > level_here() || dtype < 1 || dtype > 12 || op < 0 || op > 4) return nullptr;
  return (*tables[level])[dtype - 1][op];
}

cr_reduce_fn cr_reduce_lookup(int dtype, int op) { return cr_reduce_lookup_at(level_here(), dtype, op); }
}
