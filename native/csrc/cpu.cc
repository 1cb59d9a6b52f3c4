// Choice of the ISA, once per process.
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "problem.h"

namespace xsake_cpu {

#if defined(__x86_64__)
extern const KernelTable base_kernels, avx2_kernels, avx512_kernels;
#else
extern const KernelTable neon_kernels;
#endif

namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports of older compilers does not know it.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

// XSAKE_CPU_ISA can choose a lower ISA, for tests; one that the machine lacks is not taken.
const KernelTable* choose() {
#if defined(__x86_64__)
  const char* name = std::getenv("XSAKE_CPU_ISA");
  const bool use_base = name && !std::strcmp(name, "base");
  const bool use_avx2 = name && !std::strcmp(name, "avx2");
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && !use_avx2 && !use_base) return &avx512_kernels;
  return has_avx2 && !use_base ? &avx2_kernels : &base_kernels;
#else
  return &neon_kernels;
#endif
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable* const table = choose();
  return *table;
}

}  // namespace xsake_cpu
