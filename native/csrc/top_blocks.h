// The best blocks of every query by the scores of an indexer.
//
// A task is a tile of queries of one (batch, group). A panel of keys is multiplied with a strip of
// queries for each index head of the group, and only the largest sum of each block is kept. Then
// every query selects its blocks from its scores.
#pragma once

#include "pack.h"

namespace xsake_cpu::XSAKE_ISA {

constexpr float kForcedScore = 1e30f;  // scores lie below; see kernels/block_selection.py
constexpr float kLargestScore = 1e29f;

static void top_blocks_pack(const TopBlocks& x, int64_t item) {
  const int64_t head = item % x.kv_heads, j = item / x.kv_heads % x.number;
  const int64_t b = item / x.kv_heads / x.number, padded = round_up(x.block, kPanel);
  const int64_t index = (b * x.kv_heads + head) * x.number + j;
  const int8_t bad[kStepKeys] = {};  // values that are not finite stay
  for (int64_t at = 0; at < padded; at += kStepKeys) {
    const int64_t first = j * x.block + at, end = min_of((j + 1) * x.block, x.kv_tokens);
    const TokenRows<float> rows{x.k + ((b * x.kv_tokens + first) * x.kv_heads + head) * x.dim,
                                x.kv_heads * x.dim, max_of(0, end - first), x.dim};
    pack_transposed(rows, min_of(kStepKeys, padded - at),
                    x.packed_keys() + (index * padded + at) * x.dim, bad);
  }
}

// NaN counts as 0, other numbers up to the largest score; -inf stays.
XS_INLINE vf finite_score(vf s) {
  const vf clipped = max(splat(-kLargestScore), s > kLargestScore ? splat(kLargestScore) : s);
  return select(s == splat(-INFINITY), s, select(s == s, clipped, vf{}));
}

class TopBlocksTile {
 public:
  TopBlocksTile(const TopBlocks& x, int64_t item, char* scratch) : x_(x) {
    take_top_blocks(scratch, x.dim, x.per_group(), x.number, &s_);
    const int64_t tiles = x.num_tiles();
    first_ = item % tiles * x.tile_queries();
    group_ = item / tiles % x.groups;
    b_ = item / tiles / x.groups;
    count_ = min_of(x.tile_queries(), x.q_tokens - first_);
  }

  void run() {
    load_queries();
    int32_t begin = INT32_MAX, end = -1;
    for (int64_t t = 0; t < count_; t++) {
      if (position(t) < 0) continue;
      begin = position(t) < start(t) ? begin : (int32_t)min_of(begin, start(t));
      end = (int32_t)max_of(end, position(t));
    }
    for (int64_t i = 0; i < count_ * x_.number; i++) s_.scores[i] = -INFINITY;
    const int64_t last = min_of(x_.number, end < 0 ? 0 : end / x_.block + 1);
    for (int64_t j = begin / x_.block; j < last; j++) score_block(j);
    for (int64_t t = 0; t < count_; t++) select_blocks(t);
  }

 private:
  int32_t position(int64_t t) const { return x_.position[b_ * x_.q_tokens + first_ + t]; }
  int32_t start(int64_t t) const { return x_.start[b_ * x_.q_tokens + first_ + t]; }

  // Index heads of the group, one after the other; rows of a strip that are no queries are zeros.
  void load_queries() {
    const int64_t n = x_.per_group(), rows = x_.tile_queries();
    for (int64_t h = 0; h < n; h++)
      for (int64_t t = 0; t < rows; t++) {
        float* to = s_.q + (h * rows + t) * x_.dim;
        const int64_t token = b_ * x_.q_tokens + first_ + t;
        if (t < count_) {
          std::memcpy(to, x_.q + (token * x_.q_heads + group_ * n + h) * x_.dim,
                      static_cast<size_t>(x_.dim) * sizeof(float));
        } else {
          std::memset(to, 0, static_cast<size_t>(x_.dim) * sizeof(float));
        }
      }
  }

  void score_block(int64_t j) {
    const int64_t head = x_.kv_heads > 1 ? group_ : 0, padded = round_up(x_.block, kPanel);
    const float* keys =
        x_.packed_keys() + ((b_ * x_.kv_heads + head) * x_.number + j) * padded * x_.dim;
    const int64_t rows = round_up(count_, 2);
    for_strips((int)rows, [&](auto strip, int r) {
      constexpr int M = decltype(strip)::value;
      bool is_full = padded == x_.block, is_seen = false;
      for (int64_t t = r; t < min_of(r + M, count_); t++) {
        is_full = is_full && (j + 1) * x_.block - 1 <= position(t) && j * x_.block >= start(t);
        is_seen = is_seen || j * x_.block <= position(t);
      }
      if (is_seen) score_strip<M>(j, r, keys, padded, is_full);
    });
  }

  template <int M>
  void score_strip(int64_t j, int64_t r, const float* keys, int64_t padded, bool is_full) {
    const int64_t n = x_.per_group(), rows = x_.tile_queries();
    vf best[M];
    XS_FOR (i, M) best[i] = splat(-INFINITY);
    for (int64_t at = 0; at < padded; at += kPanel) {
      vf sum[M][kVectors];
      clear(sum);
      for (int64_t h = 0; h < n; h++) {
        vf acc[M][kVectors];
        clear(acc);
        multiply(s_.q + (h * rows + r) * x_.dim, x_.dim, 1, keys + at * x_.dim, kPanel, x_.dim,
                 acc);
        XS_FOR (i, M) {
          const vf weight = splat(weight_of(r + i, h));
          XS_FOR (c, kVectors) {
            const vf s = x_.has_relu ? select(acc[i][c] < 0.f, vf{}, acc[i][c]) : acc[i][c];
            sum[i][c] = x_.weights ? sum[i][c] + s * weight : n > 1 ? sum[i][c] + s : s;
          }
        }
      }
      XS_FOR (i, M)
        XS_FOR (c, kVectors) {
          vf s = finite_score(sum[i][c]);
          if (!is_full) s = hide(s, r + i, j, at + c * VL);
          best[i] = max(best[i], s);
        }
    }
    XS_FOR (i, M)
      if (r + i < count_) s_.scores[(r + i) * x_.number + j] = max_lanes(best[i]);
  }

  float weight_of(int64_t t, int64_t h) const {
    if (!x_.weights || t >= count_) return 1.f;
    const int64_t token = b_ * x_.q_tokens + first_ + t;
    return x_.weights[token * x_.q_heads + group_ * x_.per_group() + h];
  }

  // -inf for the keys from `at` of a block that a query does not see.
  XS_LOCAL vf hide(vf s, int64_t t, int64_t j, int64_t at) const {
    if (t >= count_) return s;
    vi lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    const vi offset = lane + (int32_t)at, key = offset + (int32_t)(j * x_.block);
    const vi seen = (offset < (int32_t)x_.block) & (key <= position(t)) & (key >= start(t));
    return select(seen, s, splat(-INFINITY));
  }

  // Best first; of equal scores the earlier block.
  void select_blocks(int64_t t) {
    const int64_t token = b_ * x_.q_tokens + first_ + t;
    int32_t* blocks = x_.blocks + (token * x_.groups + group_) * x_.slots;
    int64_t found = 0;
    const int64_t zero = start(t) / x_.block;
    const int64_t own = position(t) < 0 ? -1 : position(t) / x_.block;
    for (int64_t j = zero; j <= min_of(own, x_.number - 1); j++) {
      float score = s_.scores[t * x_.number + j];
      if (j - zero < x_.first) score = kForcedScore * (float)(x_.first - (j - zero));
      if (own - j < x_.local) score = kForcedScore * (float)(x_.first + x_.local - (own - j));
      if (score == -INFINITY) continue;
      int64_t at = found;
      while (at > 0 && s_.best[at - 1] < score) at--;
      if (at >= x_.slots) continue;
      found = min_of(found + 1, x_.slots);
      for (int64_t i = found - 1; i > at; i--) {
        s_.best[i] = s_.best[i - 1];
        blocks[i] = blocks[i - 1];
      }
      s_.best[at] = score;
      blocks[at] = (int32_t)j;
    }
    for (int64_t i = found; i < x_.slots; i++) blocks[i] = -1;
  }

  const TopBlocks& x_;
  TopBlocksScratch s_;
  int64_t first_, group_, b_, count_;
};

static void top_blocks_tile(const TopBlocks& x, int64_t item, char* scratch) {
  FlushDenormals guard;
  TopBlocksTile(x, item, scratch).run();
}

}  // namespace xsake_cpu::XSAKE_ISA
