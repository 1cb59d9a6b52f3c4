// Online softmax of a tile of rows: scores s -> probabilities p in place, and m, l, alpha, acc.
//
// The rules of online_softmax.py: base 2, m_safe is 0 while m is -inf, rows without a visible key
// give o = 0 and lse = -inf. A NaN travels through p: `max` may lose it, the sum does not.
#pragma once

#include <cmath>

#include "mask_program.h"
#include "tiles.h"

namespace xsake_cpu::XSAKE_ISA {

constexpr float kNegInf = -__builtin_inff();

XS_INLINE float query_factor(const Problem& p) {
  return p.softcap > 0 ? p.scale : p.scale * kLog2e;
}
XS_INLINE bool has_general_scores(const Problem& p) { return p.bias || p.softcap > 0; }

// Whether pairs of a panel count for rows r .. r + n - 1: bit 0 some do, bit 1 some do not.
XS_INLINE int panel_state(const MaskScratch& scratch, int64_t r, int n, int64_t column) {
  const uint8_t* state = scratch.state + r * kStateStride + column / kPanel;
  int bits = 0;
  for (int i = 0; i < n; i++) bits |= state[i * kStateStride];
  return bits;
}

// Columns of a piece, panels at both ends that no row of a strip sees left out.
struct Range {
  int64_t begin, end;
};
XS_INLINE Range strip_range(const Piece& piece, const MaskScratch& scratch, int64_t r, int n) {
  if (!piece.is_masked) return {0, piece.width};
  Range x{0, piece.width};
  while (x.begin < x.end && !(panel_state(scratch, r, n, piece.column + x.begin) & 1))
    x.begin += kPanel;
  while (x.begin < x.end && !(panel_state(scratch, r, n, piece.column + x.end - kPanel) & 1))
    x.end -= kPanel;
  return x;
}

// Bias of one row of pairs, from a key on; read with bounds.
XS_INLINE vf load_bias(const Problem& p, int64_t b, int64_t h, int64_t token, int64_t key) {
  const int64_t plane = b % p.bias_batch * p.bias_heads + h % p.bias_heads;
  const int64_t at = (plane * p.q_tokens + token) * p.kv_tokens + key, n = p.kv_tokens - key;
  vf x = vf{};
  if (n <= 0) return x;
  with_dtype(p.bias_dtype,
             [&](auto type) { x = load_upto(static_cast<const decltype(type)*>(p.bias) + at, n); });
  return x;
}

// Scores in base 2 from query_factor * q.k, under bias and softcap.
XS_INLINE vf to_scores(const Problem& p, vf s, int64_t b, int64_t h, int64_t token, int64_t key) {
  if (p.softcap > 0) {
    if (p.bias) s += load_bias(p, b, h, token, key);
    return tanh(s * (1.f / p.softcap)) * (p.softcap * kLog2e);
  }
  return p.bias ? s + load_bias(p, b, h, token, key) * kLog2e : s;
}

enum class Scores { raw, full, masked };

// s = q k of a strip and a panel; with `full` and `masked` also the row maxima.
template <int M, Scores mode>
XS_NOINLINE void score_strip(const float* q, int64_t q_row, const float* k, int64_t dim, float* s,
                             float* row_max, const int8_t* mask) {
  vf acc[M][kVectors];
  clear(acc);
  multiply(q, q_row, 1, k, kPanel, dim, acc);
  XS_FOR (r, M) {
    vf top = vf{};
    if constexpr (mode != Scores::raw) top = load(row_max + r * kMaxVector);
    XS_FOR (n, kVectors) {
      vf x = acc[r][n];
      if constexpr (mode == Scores::masked)
        x = select(load_mask(mask + r * kStepKeys + n * VL), x, splat(kNegInf));
      if constexpr (mode != Scores::raw) top = max(top, x);
      store(s + r * kScoreStride + n * VL, x);
    }
    if constexpr (mode != Scores::raw) store(row_max + r * kMaxVector, top);
  }
}

XS_INLINE void fill_hidden(float* s, int rows) {
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < kVectors; n++) store(s + r * kScoreStride + n * VL, splat(kNegInf));
}

// Bias, softcap, mask and row maxima of raw scores; hidden pairs become -inf.
static void finish_scores(const Problem& p, const Piece& piece, const TileRows& rows,
                          const MaskScratch& scratch, const SoftmaxRows& x, int64_t b,
                          int64_t num) {
  const int64_t key = piece.kv_block * p.block_kv + piece.first;
  for (int64_t r = 0; r < num; r++) {
    float* s = x.s + r * kScoreStride + piece.column;
    vf top = load(x.row_max + r * kMaxVector);
    for (int64_t c = 0; c < piece.width; c += VL) {
      vf y = to_scores(p, load(s + c), b, rows.head[r], rows.token[r], key + c);
      if (piece.is_masked) {
        const vi mask = load_mask(scratch.mask + r * kStepKeys + piece.column + c);
        y = select(mask, y, splat(kNegInf));
      }
      top = max(top, y);
      store(s + c, y);
    }
    store(x.row_max + r * kMaxVector, top);
  }
}

XS_INLINE void init_rows(const SoftmaxRows& x, int64_t rows, int64_t padded_v_dim) {
  std::memset(x.acc, 0, static_cast<size_t>(rows * padded_v_dim) * sizeof(float));
  for (int64_t r = 0; r < rows; r++) {
    x.m[r] = kNegInf;
    x.l[r] = 0;
  }
}

XS_INLINE void clear_max(const SoftmaxRows& x, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) store(x.row_max + r * kMaxVector, splat(kNegInf));
}

// New m and alpha of each row; `row_max` keeps m_safe in its first lane.
XS_INLINE void update_max(const SoftmaxRows& x, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    const float top = max_lanes(load(x.row_max + r * kMaxVector)), old = x.m[r];
    const float m = top > old ? top : old;
    const float m_safe = m == kNegInf ? 0.f : m;
    x.m[r] = m;
    x.row_max[r * kMaxVector] = m_safe;
    x.alpha[r] = old - m_safe;
  }
  int64_t r = 0;
  for (; r + VL <= rows; r += VL) store(x.alpha + r, exp2(load(x.alpha + r)));
  if (r < rows) store_first(x.alpha + r, exp2(load_first(x.alpha + r, rows - r)), rows - r);
}

struct FloatPanel {
  XS_INLINE void put(float* to, const vf (&p)[kVectors]) {
    XS_FOR (i, kVectors) store(to + i * VL, p[i]);
  }
};

// s -> p of a row's columns, panels in the form of `Panel`; returns their sum by lane.
template <class Panel>
XS_INLINE vf exponentiate(float* s, int64_t n, float m_safe) {
  const vf m = splat(m_safe);
  vf sum[kVectors] = {};
  for (int64_t c = 0; c < n; c += kPanel) {
    vf p[kVectors];
    XS_FOR (i, kVectors) {
      p[i] = exp2(load(s + c + i * VL) - m);
      sum[i] += p[i];
    }
    Panel::put(s + c, p);
  }
  XS_UNROLL
  for (int i = 1; i < kVectors; i++) sum[0] += sum[i];
  return sum[0];
}

// p of a strip, M rows at most, and their l, for pieces of one step.
template <int M, class Panel>
XS_INLINE void update_strip_sums(const SoftmaxRows& x, const MaskScratch& scratch,
                                 const Piece* pieces, int num_pieces, int r, int rows) {
  vf sum[M] = {};
  for (int j = 0; j < num_pieces; j++) {
    const Range range = strip_range(pieces[j], scratch, r, rows);
    for (int i = 0; i < rows; i++) {
      float* s = x.s + (r + i) * kScoreStride + pieces[j].column + range.begin;
      sum[i] += exponentiate<Panel>(s, range.end - range.begin, x.row_max[(r + i) * kMaxVector]);
    }
  }
  for (int i = 0; i < rows; i++) x.l[r + i] = x.l[r + i] * x.alpha[r + i] + sum_lanes(sum[i]);
}

XS_INLINE void update_sums(const SoftmaxRows& x, const MaskScratch& scratch, const Piece* pieces,
                           int num_pieces, int rows) {
  for_strips(rows, [&](auto strip, int r) __attribute__((always_inline)) {
    constexpr int M = decltype(strip)::value;
    update_strip_sums<M, FloatPanel>(x, scratch, pieces, num_pieces, r, M);
  });
}

// Stores o and lse of a row from (acc, m, l).
template <class T>
XS_INLINE void finalize_row(const Problem& p, int64_t at, const float* acc, float m, float l) {
  const vf divisor = splat(l != 0 ? l : 1.f);
  T* o = static_cast<T*>(p.o) + at * p.v_dim;
  for (int64_t d = 0; d < p.v_dim; d += VL)
    store_upto(o + d, load_upto(acc + d, p.v_dim - d) / divisor, p.v_dim - d);
  p.lse[at] = l != 0 ? m * kLn2 + (m * kLn2Low + logf(l)) : kNegInf;
}

}  // namespace xsake_cpu::XSAKE_ISA
