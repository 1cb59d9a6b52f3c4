// Choice of the ISA, once per process.
#include <cstdlib>
#include <cstring>

#include "problem.h"

namespace xsake_cpu {

extern const KernelTable base_kernels;
#if defined(__x86_64__)
extern const KernelTable avx2_kernels, avx512_kernels;
#endif

namespace {

// XSAKE_CPU_ISA can choose a lower ISA, for tests; one that the machine lacks is not taken.
const KernelTable* choose() {
  const char* forced = std::getenv("XSAKE_CPU_ISA");
  const auto allows = [&](const char* name) { return !forced || !std::strcmp(forced, name); };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && allows("avx512")) return &avx512_kernels;
  if (has_avx2 && !(forced && !std::strcmp(forced, "base"))) return &avx2_kernels;
#else
  (void)allows;
#endif
  return &base_kernels;
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable* const table = choose();
  return *table;
}

}  // namespace xsake_cpu
