// Vectors of one ISA by the vector extensions of GCC and Clang, loads and stores of every dtype.
//
// XSAKE_ISA names the namespace, XSAKE_VECTOR the number of floats: kernels.cc is compiled with
// other values for each ISA.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "problem.h"

#define XS_INLINE static inline __attribute__((always_inline))
#define XS_NOINLINE static __attribute__((noinline))
#if defined(__clang__)
#define XS_UNROLL _Pragma("unroll")
#else
#define XS_UNROLL _Pragma("GCC unroll 16")
#endif

// A loop over registers: it has to disappear.
#define XS_FOR(i, n) \
  XS_UNROLL          \
  for (int i = 0; i < (n); i++)

namespace xsake_cpu::XSAKE_ISA {

constexpr int VL = XSAKE_VECTOR;
typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef int8_t vb __attribute__((vector_size(VL)));

using Lanes = std::make_integer_sequence<int, VL>;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Through memcpy: the compiler makes it one unaligned move.
template <class V>
XS_INLINE V load_as(const void* from) {
  V x;
  std::memcpy(&x, from, sizeof(V));
  return x;
}
XS_INLINE vf load(const float* from) { return load_as<vf>(from); }
XS_INLINE vi load(const int32_t* from) { return load_as<vi>(from); }
XS_INLINE void store(float* to, vf x) { std::memcpy(to, &x, sizeof(x)); }
XS_INLINE void store(int32_t* to, vi x) { std::memcpy(to, &x, sizeof(x)); }
XS_INLINE vf splat(float x) { return x - vf{}; }  // x + 0 would turn -0 into 0
XS_INLINE vi splat(int32_t x) { return x - vi{}; }
XS_INLINE vi load_mask(const int8_t* from) {
  return __builtin_convertvector(load_as<vb>(from), vi);
}
XS_INLINE vf select(vi which, vf yes, vf no) { return which ? yes : no; }

// The second operand if one of them is NaN: `max(limit, x)` keeps a NaN of x.
XS_INLINE vf max(vf x, vf y) {
#if XSAKE_VECTOR == 16
  return (vf)_mm512_max_ps((__m512)x, (__m512)y);
#elif XSAKE_VECTOR == 8
  return (vf)_mm256_max_ps((__m256)x, (__m256)y);
#elif defined(__x86_64__)
  return (vf)_mm_max_ps((__m128)x, (__m128)y);
#else
  return x > y ? x : y;
#endif
}

template <int S, int... I>
XS_INLINE vf swap_lanes(vf x, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(x, x, (I ^ S)...);
}
template <int S, class F>
XS_INLINE vf reduce_lanes(vf x, F f) {
  if constexpr (S > 0) {
    return reduce_lanes<S / 2>(f(x, swap_lanes<S>(x, Lanes{})), f);
  } else {
    return x;
  }
}
XS_INLINE float max_lanes(vf x) {
  return reduce_lanes<VL / 2>(
      x, [](vf a, vf b) __attribute__((always_inline)) { return max(a, b); })[0];
}
XS_INLINE float sum_lanes(vf x) {
  return reduce_lanes<VL / 2>(x,
                              [](vf a, vf b) __attribute__((always_inline)) { return a + b; })[0];
}
XS_INLINE vi is_finite(vf x) { return ((vi)x & 0x7f800000) != 0x7f800000; }
// Whether a lane of a mask is set.
XS_INLINE bool any(vi x) {
#if XSAKE_VECTOR == 16
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif XSAKE_VECTOR == 8
  return _mm256_movemask_ps((__m256)x) != 0;
#elif defined(__x86_64__)
  return _mm_movemask_ps((__m128)x) != 0;
#else
  uint64_t words[VL / 2], all = 0;
  std::memcpy(words, &x, sizeof(x));
  for (int i = 0; i < VL / 2; i++) all |= words[i];
  return all != 0;
#endif
}

// ---- dtypes: arithmetic is in float32

XS_INLINE vf load(const bf16* from) {
  return (vf)(__builtin_convertvector(load_as<vh>(from), vu) << 16);
}

XS_INLINE vf load(const int8_t* from) {
  return __builtin_convertvector(load_as<vb>(from), vf);
}

XS_INLINE float widen_f16(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  uint32_t bits;
  if (rest >= 0x7c00u) {
    bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
  } else if (rest >= 0x400u) {
    bits = sign | ((rest << 13) + (112u << 23));
  } else {  // subnormal: exact by way of an integer
    float x = static_cast<float>(rest) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &x, 4);
    bits |= sign;
  }
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

XS_INLINE vf load(const f16* from) {
#if XSAKE_VECTOR == 16
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif XSAKE_VECTOR == 8
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  vf x;
  for (int i = 0; i < VL; i++) x[i] = widen_f16(from[i].bits);
  return x;
#endif
}

XS_INLINE uint16_t narrow_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (bits < 0x38800000u) {  // subnormal: the addition rounds to nearest even
    float y;
    std::memcpy(&y, &bits, 4);
    y += 0.5f;
    std::memcpy(&bits, &y, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((bits - (112u << 23)) >> 13));
}

XS_INLINE void store(bf16* to, vf x) {
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  // Rounding up the payload of a NaN could make it infinite.
  rounded = (vu)(x != x) ? (bits >> 16 | 0x40u) : rounded;
  vh half = __builtin_convertvector(rounded, vh);
  std::memcpy(to, &half, sizeof(half));
}
XS_INLINE void store(f16* to, vf x) {
#if XSAKE_VECTOR == 16
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif XSAKE_VECTOR == 8
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < VL; i++) to[i].bits = narrow_f16(x[i]);
#endif
}

// The first `n` lanes; zeros after them, and nothing outside is read or written.
template <class T>
XS_INLINE vf load_first(const T* from, int64_t n) {
  T part[VL] = {};
  std::memcpy(part, from, static_cast<size_t>(n) * sizeof(T));
  return load(part);
}
template <class T>
XS_INLINE void store_first(T* to, vf x, int64_t n) {
  T part[VL];
  store(part, x);
  std::memcpy(to, part, static_cast<size_t>(n) * sizeof(T));
}
template <class T>
XS_INLINE vf load_upto(const T* from, int64_t n) {
  return n >= VL ? load(from) : load_first(from, n);
}
template <class T>
XS_INLINE void store_upto(T* to, vf x, int64_t n) {
  if (n >= VL) {
    store(to, x);
  } else {
    store_first(to, x, n);
  }
}

template <int S, int... I>
XS_INLINE vf mix_low(vf a, vf b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & S) ? VL + (I ^ S) : I)...);
}
template <int S, int... I>
XS_INLINE vf mix_high(vf a, vf b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & S) ? VL + I : (I ^ S))...);
}
template <int S = VL / 2>
XS_INLINE void transpose(vf (&x)[VL]) {
  if constexpr (S > 0) {
    XS_FOR (i, VL) {
      if (i & S) continue;
      const vf a = x[i], b = x[i | S];
      x[i] = mix_low<S>(a, b, Lanes{});
      x[i | S] = mix_high<S>(a, b, Lanes{});
    }
    transpose<S / 2>(x);
  }
}

template <int S, int... I>
XS_INLINE vf join_halves(vf a, vf b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & S) ? VL + I : I)...) +
         __builtin_shufflevector(a, b, ((I & S) ? VL + (I ^ S) : (I ^ S))...);
}
// Lane i of the result is the sum of the lanes of x[i].
template <int S = VL / 2>
XS_INLINE vf sum_each(vf (&x)[VL]) {
  if constexpr (S > 0) {
    XS_FOR (i, S) x[i] = join_halves<S>(x[i], x[i + S], Lanes{});
    return sum_each<S / 2>(x);
  } else {
    return x[0];
  }
}

// Rows of one head are a page apart in [B, T, H, D], which hides them from hardware prefetchers.
constexpr int64_t kAhead = 8;
template <class T>
XS_INLINE void prefetch_row(const T* row, int64_t dim) {
  for (int64_t i = 0; i < dim * (int64_t)sizeof(T); i += kAlign)
    __builtin_prefetch(reinterpret_cast<const char*>(row) + i);
}

// Denormal results cost a hundred cycles each and change nothing that float32 sums can show.
class FlushDenormals {
#if defined(__x86_64__)
 public:
  FlushDenormals() : old_(_mm_getcsr()) { _mm_setcsr(old_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(old_); }

 private:
  const unsigned old_;
#elif defined(__aarch64__)
 public:
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(old_));
    asm volatile("msr fpcr, %0" : : "r"(old_ | uint64_t{1} << 24));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(old_)); }

 private:
  uint64_t old_;
#endif
};

}  // namespace xsake_cpu::XSAKE_ISA
