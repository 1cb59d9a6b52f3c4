// Attention statistics: lse, entropy, and lse over the keys of each block alone.
//
// Moments of scores in base 2 are m = max s, l = sum 2^(s - m) and excess = sum 2^(s - m) (s - m).
// A step is one block, or a part of a large one; its moments are merged by vectors of rows.
#pragma once

#include "forward.h"

namespace xsake_cpu::XSAKE_ISA {

struct Moments {
  float *m, *l, *excess;  // [rows]
};

static void init_moments(const Moments& x, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    x.m[r] = kNegInf;
    x.l[r] = x.excess[r] = 0;
  }
}

// Merges the moments of `from` into those of `to`; rows are padded to vectors.
static void merge_moments(const Moments& from, const Moments& to, int64_t rows) {
  for (int64_t r = 0; r < rows; r += VL) {
    const vf old = load(to.m + r), own = load(from.m + r), m = max(old, own);
    const vf m_safe = select(m == splat(kNegInf), vf{}, m);
    vf l = vf{}, excess = vf{};
    for (const Moments* x : {&to, &from}) {
      const vf below = max(splat(-127.f), load(x->m + r) - m_safe), alpha = exp2(below);
      l += alpha * load(x->l + r);
      excess += alpha * (load(x->excess + r) + load(x->l + r) * below);
    }
    store(to.m + r, m);
    store(to.l + r, l);
    store(to.excess + r, excess);
  }
}

XS_INLINE float moments_lse(const Moments& x, int64_t r) {
  if (x.l[r] == 0) return kNegInf;
  return x.m[r] * kLn2 + (x.m[r] * kLn2Low + logf(x.l[r]));
}

class StatisticsTile : TileSoftmax {
 public:
  StatisticsTile(const Problem& p, const Tile& tile, char* scratch) : TileSoftmax(p, scratch) {
    tile_ = tile;
  }

  void run() {
    load_rows(p_, tile_, x_.rows);
    with_dtype(p_.dtype,
               [&](auto type) { load_queries<decltype(type)>(p_, tile_, x_.q, arrays_.k_row); });
    init_moments(total_, kTileRows);
    for (int64_t r = 0; r < tile_.count; r++)
      for (int64_t j = 0; j < p_.kv_blocks; j++) block_lse(r)[j] = kNegInf;
    const int64_t row = p_.list_row(tile_.b, tile_.h, tile_.q_block);
    for (int32_t item = p_.row_starts[row]; item < p_.row_starts[row + 1]; item++)
      add_statistics(item, p_.kv_block[item]);
    for (int64_t r = 0; r < tile_.count; r++) {
      const int64_t at = tile_.token_row(p_, r);
      const float l = total_.l[r] != 0 ? total_.l[r] : 1.f;
      p_.lse[at] = moments_lse(total_, r);
      p_.entropy[at] = logf(l) - total_.excess[r] / (l * kLog2e);
    }
  }

 private:
  float* block_lse(int64_t r) const { return p_.block_lse + tile_.token_row(p_, r) * p_.kv_blocks; }

  void add_statistics(int32_t item, int64_t kv_block) {
    const int64_t keys = min_of(p_.block_kv, p_.kv_tokens - kv_block * p_.block_kv);
    init_moments(block_, kTileRows);
    for (int64_t at = 0; at < keys; at += kStepKeys) {
      add_piece(item, kv_block, at, min_of(kStepKeys, keys - at), p_.is_partial[item]);
      find_scores();
      for (int64_t r = 0; r < tile_.count; r++) find_moments(r);
      merge_moments(piece_, block_, tile_.padded);
      clear_pieces();
    }
    for (int64_t r = 0; r < tile_.count; r++) block_lse(r)[kv_block] = moments_lse(block_, r);
    merge_moments(block_, total_, tile_.padded);
  }

  // Moments of one row of scores. A masked score is -inf: its term is 0 times the lowest number.
  void find_moments(int64_t r) {
    const float m = max_lanes(load(x_.softmax.row_max + r * kMaxVector));
    const float* s = x_.softmax.s + r * kScoreStride;
    vf l = vf{}, excess = vf{};
    for (int64_t c = 0; c < columns_; c += VL) {
      const vf below = max(splat(-127.f), load(s + c) - splat(m == kNegInf ? 0.f : m));
      const vf p = exp2(below);
      l += p;
      excess += p * below;
    }
    piece_.m[r] = m;
    piece_.l[r] = sum_lanes(l);
    piece_.excess[r] = sum_lanes(excess);
  }

  float numbers_[9][kTileRows] = {};
  const Moments piece_{numbers_[0], numbers_[1], numbers_[2]};
  const Moments block_{numbers_[3], numbers_[4], numbers_[5]};
  const Moments total_{numbers_[6], numbers_[7], numbers_[8]};
};

static void statistics_pack(const Problem& p, int64_t item) {
  const PackedBlock block = packed_block(p, item);
  if (!p.is_listed[p.listed_index(block.b, block.hk, block.kv_block)]) return;
  FlushDenormals guard;
  const PackedArrays to(p);
  const int8_t bad[kStepKeys] = {};  // there are no values to isolate
  for_parts(p, block.kv_block, [&](int64_t first, int64_t padded, int64_t count) {
    const int64_t token = block.kv_block * p.block_kv + first;
    with_dtype(p.dtype, [&](auto type) {
      pack_keys<decltype(type)>(p, block, token, padded, count, to.keys(block.index, first), bad);
    });
  });
}

static void statistics_tile(const Problem& p, int64_t item, char* scratch) {
  FlushDenormals guard;
  const Tile tile = tile_of(p, item);
  if (tile.count) StatisticsTile(p, tile, scratch).run();
}

}  // namespace xsake_cpu::XSAKE_ISA
