// Choice of the ISA, once per process.
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "problem.h"

namespace xsake_cpu {

#if defined(__x86_64__)
extern const KernelTable base_kernels, avx2_kernels, avx512_kernels, amx_kernels;
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

// Register tiles of bfloat16, and the kernel's permission to use their 8 KB of state.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bf16 = 1u << 5;
  constexpr long kRequestState = 0x1023, kTileData = 18;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if (~edx & (kAmxBf16 | kAmxTile)) return false;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & kAvx512Bf16)) return false;
  return syscall(SYS_arch_prctl, kRequestState, kTileData) == 0;
#else
  return false;
#endif
}
#endif

// XSAKE_CPU_ISA can choose a lower ISA, for tests; one that the machine lacks is not taken.
const KernelTable* choose() {
#if defined(__x86_64__)
  const char* name = std::getenv("XSAKE_CPU_ISA");
  const auto is_named = [&](const char* isa) { return name && !std::strcmp(name, isa); };
  const bool use_base = is_named("base"), use_avx2 = is_named("avx2");
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && !use_avx2 && !use_base)
    return !is_named("avx512") && has_amx() ? &amx_kernels : &avx512_kernels;
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
