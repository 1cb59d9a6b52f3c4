// Microkernels: small products of float32 whose accumulators stay in registers.
#pragma once

#include "exp2.h"

namespace xsake_cpu::XSAKE_ISA {

// Accumulators of a strip: kStrip rows times kVectors vectors. AVX-512 has 32 registers, of which
// 16 accumulators hide the latency of two multiply-add units; AVX2 and SSE have 16 registers in
// all.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kStrip = 8;
#else
constexpr int kStrip = 6;
#endif
constexpr int kVectors = 2;
constexpr int kPanel = kVectors * VL;
static_assert(kMaxPanel % kPanel == 0 && kPanel <= kMaxPanel && VL <= kMaxVector);

template <int N>
struct Rows {
  static constexpr int value = N;
};

// Strips of kStrip rows, then of two; `rows` is even.
template <class F>
XS_INLINE void for_strips(int rows, F&& f) {
  int r = 0;
  for (; r + kStrip <= rows; r += kStrip) f(Rows<kStrip>{}, r);
  for (; r < rows; r += 2) f(Rows<2>{}, r);
}

template <int M, int N>
XS_INLINE void clear(vf (&acc)[M][N]) {
  XS_FOR (r, M)
    XS_FOR (n, N) acc[r][n] = vf{};
}

// acc += a b: a(r, i) = a[r * a_row + i * a_column], row i of b starts at b + i * b_row.
template <int M, int N>
XS_INLINE void multiply(const float* __restrict a, int64_t a_row, int64_t a_column,
                        const float* __restrict b, int64_t b_row, int64_t depth, vf (&acc)[M][N]) {
#if !defined(__clang__)
#pragma GCC unroll 2
#endif
  for (int64_t i = 0; i < depth; i++) {
    vf y[N];
    XS_FOR (n, N) y[n] = load(b + i * b_row + n * VL);
    XS_FOR (r, M) {
      const vf x = splat(a[r * a_row + i * a_column]);
      XS_FOR (n, N) acc[r][n] += x * y[n];
    }
  }
}

// c = alpha c + a b, alpha by row; null: 1.
template <int M, int N = kVectors>
XS_NOINLINE void scale_add(const float* a, int64_t a_row, const float* b, int64_t b_row,
                           int64_t depth, float* c, int64_t c_row, const float* alpha) {
  vf acc[M][N];
  clear(acc);
  multiply(a, a_row, 1, b, b_row, depth, acc);
  XS_FOR (r, M) {
    const vf x = splat(alpha ? alpha[r] : 1.f);
    XS_FOR (n, N) {
      float* to = c + r * c_row + n * VL;
      store(to, load(to) * x + acc[r][n]);
    }
  }
}

// c += a^T b. The product is summed before it is added: a total that takes its terms one by one has
// several times the rounding error.
template <int M>
XS_NOINLINE void add_transposed(const float* a, int64_t a_column, const float* b, int64_t b_row,
                                int64_t depth, float* c, int64_t c_row) {
  vf acc[M][kVectors];
  clear(acc);
  multiply(a, 1, a_column, b, b_row, depth, acc);
  XS_FOR (r, M)
    XS_FOR (n, kVectors) {
      float* to = c + r * c_row + n * VL;
      store(to, load(to) + acc[r][n]);
    }
}

}  // namespace xsake_cpu::XSAKE_ISA
