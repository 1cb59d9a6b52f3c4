// Backward pass: five products per listed block in one pass over the forward's own lists.
//
// A task is a (batch, kv head, range of kv blocks): it owns dk and dv of its keys, so no sum has
// two writers. dq of a query is summed over the ranges afterwards, in their order. Values that are
// not finite follow backward_rows and score_grad of the repository: products use finite copies of
// q, k, v and do, and NaN travels through s, p and ds.
#pragma once

#include "forward.h"

namespace xsake_cpu::XSAKE_ISA {

template <class T>
XS_INLINE void find_bad(const TokenRows<T>& from, int8_t* bad) {
  for (int64_t t = 0; t < from.count; t++) {
    vi flaws = vi{};
    for (int64_t d = 0; d < from.dim; d += VL)
      flaws |= ~is_finite(load_upto(from.data + t * from.stride + d, from.dim - d));
    bad[t] = any(flaws) ? 1 : 0;
  }
}

template <class T>
static void pack_backward_block(const Problem& p, const PackedBlock& block) {
  const int64_t width = padded_block(p);
  const int64_t padded_dim = round_up(p.dim, kPanel), padded_v_dim = round_up(p.v_dim, kPanel);
  const int64_t keys = block.index * width;
  BackwardArrays x;
  take_backward_arrays(p.workspace, sizes_of(p), &x);
  for_parts(p, block.kv_block, [&](int64_t first, int64_t padded, int64_t count) {
    int8_t bad[kStepKeys];
    const int64_t token = block.kv_block * p.block_kv + first, at = keys + first;
    const TokenRows<T> k = kv_rows<T>(p, p.k, p.dim, block.b, block.hk, token, count);
    const TokenRows<T> v = kv_rows<T>(p, p.v, p.v_dim, block.b, block.hk, token, count);
    find_bad(v, bad);
    pack_transposed(k, padded, x.k_t + at * p.dim, bad);
    pack_transposed(v, padded, x.v_t + at * p.v_dim, static_cast<const int8_t*>(nullptr));
    pack_rows(k, padded, x.k + keys * padded_dim + first * kPanel, width, nullptr);
  });
  std::memset(x.dk + keys * padded_dim, 0, static_cast<size_t>(width * padded_dim) * sizeof(float));
  std::memset(x.dv + keys * padded_v_dim, 0,
              static_cast<size_t>(width * padded_v_dim) * sizeof(float));
}

static void backward_pack(const Problem& p, int64_t item) {
  const PackedBlock block = packed_block(p, item);
  if (!p.is_listed[p.listed_index(block.b, block.hk, block.kv_block)]) return;
  FlushDenormals guard;
  with_dtype(p.dtype, [&](auto type) { pack_backward_block<decltype(type)>(p, block); });
}

// What the probabilities of a row are made from. A row without keys has p = 0. The rounding of lse
// hides how far a probability near 1 is from 1: from `one` on it is 1, as for a single visible key.
XS_INLINE RowOrigin origin_of(float lse) {
  if (!(__builtin_fabsf(lse) < __builtin_inff()))
    return {lse == kNegInf ? __builtin_inff() : lse, 0.f, 1.f};
  const double exact = (double)lse * ((double)kLog2e + (double)kLog2eLow);
  const float high = (float)exact, unit = 1.f / (1 << 24);
  return {high, (float)(exact - (double)high), 1.f - (__builtin_fabsf(lse) + 2.f) * unit};
}
XS_INLINE vf probabilities(vf s, const RowOrigin& row) {
  const vf p = exp2(s - splat(row.high) - splat(row.low));
  return select(p >= splat(row.one), splat(1.f), p);
}

// p = 2^(q k - lse) of a strip and a panel; raw: q k.
template <int M, Scores mode>
XS_NOINLINE void probability_strip(const float* q, int64_t q_row, const float* k, int64_t dim,
                                   float* p, const RowOrigin* origins, const int8_t* mask) {
  vf acc[M][kVectors];
  clear(acc);
  multiply(q, q_row, 1, k, kPanel, dim, acc);
  XS_FOR (r, M) {
    XS_FOR (n, kVectors) {
      vf x = acc[r][n];
      if constexpr (mode != Scores::raw) x = probabilities(x, origins[r]);
      if constexpr (mode == Scores::masked)
        x = select(load_mask(mask + r * kStepKeys + n * VL), x, vf{});
      store(p + r * kGradStride + n * VL, x);
    }
  }
}

// ds = p (do v - delta); `capped`: times the slope that ds holds.
template <int M, bool masked, bool capped>
XS_NOINLINE void score_grad_strip(const float* do_, int64_t do_row, const float* v, int64_t v_dim,
                                  const float* p, float* ds, const float* delta,
                                  const int8_t* mask) {
  vf acc[M][kVectors];
  clear(acc);
  multiply(do_, do_row, 1, v, kPanel, v_dim, acc);
  XS_FOR (r, M)
    XS_FOR (n, kVectors) {
      float* to = ds + r * kGradStride + n * VL;
      vf x = load(p + r * kGradStride + n * VL) * (acc[r][n] - delta[r]);
      if constexpr (capped) x *= load(to);
      if constexpr (masked) x = select(load_mask(mask + r * kStepKeys + n * VL), x, vf{});
      store(to, x);
    }
}

// Queries of a tile with their residuals, and p and ds of its pieces.
class TileGrads {
 public:
  TileGrads(const Problem& p, char* scratch) : p_(p) {
    take_backward(scratch, p.dim, p.v_dim, p.program ? p.program->num_steps : 0, &x_);
    take_backward_arrays(p.workspace, sizes_of(p), &arrays_);
    padded_dim_ = round_up(p.dim, kPanel);
    padded_v_dim_ = round_up(p.v_dim, kPanel);
    width_ = padded_block(p);
  }

  void load_tile(const Tile& tile) {
    tile_ = tile;
    load_rows(p_, tile, x_.rows);
    with_dtype(p_.dtype, [&](auto type) { load_residuals<decltype(type)>(); });
  }

  // Calls f(piece) for the listed blocks from kv_begin up to kv_end, after their p and ds.
  template <class F>
  void for_pieces(int64_t kv_begin, int64_t kv_end, F&& f) {
    const int64_t row = p_.list_row(tile_.b, tile_.h, tile_.q_block);
    for (int32_t item = p_.row_starts[row]; item < p_.row_starts[row + 1]; item++) {
      const int64_t kv_block = p_.kv_block[item];
      if (kv_block >= kv_begin && kv_block < kv_end)
        for_steps(item, kv_block, p_.is_partial[item], f);
    }
  }

 protected:
  // Calls f(piece) for the steps of one block, after their p and ds.
  template <class F>
  void for_steps(int32_t item, int64_t kv_block, bool is_partial, F&& f) {
    const int64_t keys = min_of(p_.block_kv, p_.kv_tokens - kv_block * p_.block_kv);
    for (int64_t first = 0; first < keys; first += kGradKeys) {
      const int64_t count = min_of(kGradKeys, keys - first), width = round_up(count, kPanel);
      const Piece piece{nullptr, nullptr, kv_block, first,
                        0,       width,   count,    is_partial || count < width};
      if (piece.is_masked) {
        for (int64_t r = 0; r < tile_.count; r++) x_.rows.item[r] = item;
        MaskBuilder(p_, x_.rows, x_.mask, tile_.b).build<kPanel>(piece, tile_.count, tile_.padded);
      }
      has_general_scores(p_) ? general_grads(piece) : plain_grads(piece);
      f(piece);
    }
  }

  // First key of a piece in the packed arrays.
  int64_t packed_key(const Piece& piece) const {
    const int64_t head = tile_.b * p_.kv_heads + tile_.h / p_.group();
    return (head * p_.kv_blocks + piece.kv_block) * width_ + piece.first;
  }

  template <class T>
  void load_residuals() {
    const float factor = query_factor(p_);
    bool is_finite_tile = true;
    for (int64_t r = 0; r < tile_.count; r++) {
      const int64_t at = tile_.token_row(p_, r), later = at + kAhead * p_.q_heads;
      prefetch_row(static_cast<const T*>(p_.q) + later * p_.dim, p_.dim);
      prefetch_row(static_cast<const T*>(p_.do_) + later * p_.v_dim, p_.v_dim);
      prefetch_row(static_cast<const T*>(p_.o) + later * p_.v_dim, p_.v_dim);
      is_finite_tile &= load_query(static_cast<const T*>(p_.q) + at * p_.dim, r, factor);
      load_cotangent(static_cast<const T*>(p_.do_) + at * p_.v_dim,
                     static_cast<const T*>(p_.o) + at * p_.v_dim, at, r);
    }
    for (int64_t r = tile_.count; r < tile_.padded; r++) {
      std::memset(x_.q + r * padded_dim_, 0, static_cast<size_t>(padded_dim_) * sizeof(float));
      std::memset(x_.do_ + r * padded_v_dim_, 0,
                  static_cast<size_t>(padded_v_dim_) * sizeof(float));
      x_.origin[r] = {__builtin_inff(), 0.f, 1.f};
      x_.delta[r] = 0;
    }
    q_finite_ = is_finite_tile ? x_.q : x_.q_finite;
  }

  template <class T>
  bool load_query(const T* from, int64_t r, float factor) {
    vi flaws = vi{};
    for (int64_t d = 0; d < padded_dim_; d += VL) {
      vf x = vf{};
      if (d < p_.dim) x = load_upto(from + d, p_.dim - d);
      const vi finite = is_finite(x);
      flaws |= ~finite;
      x *= factor;
      store(x_.q + r * padded_dim_ + d, x);
      store(x_.q_finite + r * padded_dim_ + d, select(finite, x, vf{}));
    }
    return !any(flaws);
  }

  template <class T>
  void load_cotangent(const T* from, const T* o, int64_t at, int64_t r) {
    vi flaws = vi{};
    float sum = 0.f;  // in the order of the product do v: a query that sees one key has ds = 0
    for (int64_t d = 0; d < padded_v_dim_; d += VL) {
      vf x = vf{}, y = vf{};
      if (d < p_.v_dim) x = load_upto(from + d, p_.v_dim - d), y = load_upto(o + d, p_.v_dim - d);
      const vi finite = is_finite(x);
      flaws |= ~finite;
      x = select(finite, x, vf{});
      store(x_.do_ + r * padded_v_dim_ + d, x);
      for (int i = 0; i < VL; i++) sum += x[i] * y[i];
    }
    x_.origin[r] = any(flaws) ? RowOrigin{__builtin_nanf(""), 0.f, 1.f} : origin_of(p_.lse[at]);
    x_.delta[r] = sum - p_.dlse[at];
  }

  XS_INLINE void clear_strip(float* x, int rows) {
    for (int r = 0; r < rows; r++)
      for (int n = 0; n < kVectors; n++) store(x + r * kGradStride + n * VL, vf{});
  }

  // p and ds without bias and softcap: both are made in the epilogues of their products.
  void plain_grads(const Piece& piece) {
    const int64_t key = packed_key(piece);
    for (int64_t c = 0; c < piece.width; c += kPanel) {
      const float* k = arrays_.k_t + (key + c) * p_.dim;
      for_strips((int)tile_.padded, [&](auto strip, int r) __attribute__((always_inline)) {
        constexpr int M = decltype(strip)::value;
        const float* q = x_.q + r * padded_dim_;
        float* p = x_.p + r * kGradStride + c;
        const int8_t* mask = x_.mask.mask + r * kStepKeys + c;
        const int state = piece.is_masked ? panel_state(x_.mask, r, M, c) : 1;
        if (!(state & 1)) {
          clear_strip(p, M);
        } else if (state == 1) {
          probability_strip<M, Scores::full>(q, padded_dim_, k, p_.dim, p, x_.origin + r, nullptr);
        } else {
          probability_strip<M, Scores::masked>(q, padded_dim_, k, p_.dim, p, x_.origin + r, mask);
        }
      });
      score_grads<false>(piece, c, key);
    }
  }

  template <bool capped>
  void score_grads(const Piece& piece, int64_t c, int64_t key) {
    const float* v = arrays_.v_t + (key + c) * p_.v_dim;
    for_strips((int)tile_.padded, [&](auto strip, int r) __attribute__((always_inline)) {
      constexpr int M = decltype(strip)::value;
      const float* p = x_.p + r * kGradStride + c;
      float* ds = x_.ds + r * kGradStride + c;
      const float* do_ = x_.do_ + r * padded_v_dim_;
      const int8_t* mask = x_.mask.mask + r * kStepKeys + c;
      const int state = piece.is_masked ? panel_state(x_.mask, r, M, c) : 1;
      if (!(state & 1)) {
        clear_strip(ds, M);
      } else if (state == 1) {
        score_grad_strip<M, false, capped>(do_, padded_v_dim_, v, p_.v_dim, p, ds, x_.delta + r,
                                           nullptr);
      } else {
        score_grad_strip<M, true, capped>(do_, padded_v_dim_, v, p_.v_dim, p, ds, x_.delta + r,
                                          mask);
      }
    });
  }

  // With bias or softcap: raw scores, then a pass over rows that leaves the softcap's slope in ds.
  void general_grads(const Piece& piece) {
    const int64_t key = packed_key(piece);
    for (int64_t c = 0; c < piece.width; c += kPanel)
      for_strips((int)tile_.padded, [&](auto strip, int r) __attribute__((always_inline)) {
        constexpr int M = decltype(strip)::value;
        probability_strip<M, Scores::raw>(x_.q + r * padded_dim_, padded_dim_,
                                          arrays_.k_t + (key + c) * p_.dim, p_.dim,
                                          x_.p + r * kGradStride + c, x_.origin + r, nullptr);
      });
    for (int64_t r = 0; r < tile_.count; r++) finish_row(piece, r);
    for (int64_t c = 0; c < piece.width; c += kPanel) score_grads<true>(piece, c, key);
  }

  void finish_row(const Piece& piece, int64_t r) {
    const int64_t token = piece.kv_block * p_.block_kv + piece.first;
    const float slope_factor = 1.f / (p_.softcap * kLog2e);
    for (int64_t c = 0; c < piece.width; c += VL) {
      float* p = x_.p + r * kGradStride + c;
      const vf s = to_scores(p_, load(p), tile_.b, tile_.h, x_.rows.token[r], token + c);
      vf x = probabilities(s, x_.origin[r]);
      if (piece.is_masked) x = select(load_mask(x_.mask.mask + r * kStepKeys + c), x, vf{});
      store(p, x);
      // Without a softcap s may be -inf, by a bias, and a factor 0 would make it NaN.
      const vf capped = p_.softcap > 0 ? s * slope_factor : vf{};
      store(x_.ds + r * kGradStride + c, 1.f - capped * capped);
    }
  }

  const Problem& p_;
  Tile tile_;
  BackwardScratch x_;
  BackwardArrays arrays_;
  const float* q_finite_ = nullptr;
  int64_t padded_dim_, padded_v_dim_, width_;
};

// kv blocks of a range.
XS_INLINE Range blocks_of_range(const Problem& p, int64_t range, int64_t ranges) {
  return {range * p.kv_blocks / ranges, (range + 1) * p.kv_blocks / ranges};
}
// Whether the list of a tile has a block of a range.
XS_INLINE bool has_items(const Problem& p, const Tile& tile, Range blocks) {
  const int64_t row = p.list_row(tile.b, tile.h, tile.q_block);
  for (int32_t item = p.row_starts[row]; item < p.row_starts[row + 1]; item++)
    if (p.kv_block[item] >= blocks.begin && p.kv_block[item] < blocks.end) return true;
  return false;
}

class BackwardRange : protected TileGrads {
 public:
  BackwardRange(const Problem& p, int64_t item, char* scratch) : TileGrads(p, scratch) {
    const int64_t heads = p.batch * p.kv_heads;
    ranges_ = num_ranges(p.batch, p.kv_heads, p.kv_tokens, p.block_kv);
    range_ = item / heads;
    blocks_ = blocks_of_range(p, range_, ranges_);
    b_ = item % heads / p.kv_heads;
    hk_ = item % p.kv_heads;
  }

  void run() {
    const int64_t tiles = p_.q_blocks * p_.tiles_per_block(), first = hk_ * p_.group();
    for (int64_t h = first; h < first + p_.group(); h++)
      for (int64_t i = tiles - 1; i >= 0; i--) {
        const Tile tile = tile_of(p_, (b_ * p_.q_heads + h) * tiles + i);
        if (tile.count) run_tile(tile);
      }
    with_dtype(p_.dtype, [&](auto type) { store_keys<decltype(type)>(); });
  }

 protected:
  void run_tile(const Tile& tile) {
    const bool has_any = has_items(p_, tile, blocks_);
    if (!has_any && ranges_ > 1) return;  // the merge skips it too
    std::memset(x_.dq, 0, static_cast<size_t>(tile.padded * padded_dim_) * sizeof(float));
    if (has_any) {
      load_tile(tile);
      for_pieces(blocks_.begin, blocks_.end, [&](const Piece& piece) { add_piece(piece); });
    }
    with_dtype(p_.dtype, [&](auto type) { store_queries<decltype(type)>(tile, x_.dq); });
  }

  void add_piece(const Piece& piece) {
    const int64_t key = packed_key(piece);
    const int64_t block_key = key - piece.first;
    find_rows(piece);
    for (int64_t d = 0; d < padded_v_dim_; d += kPanel)
      add_to_keys(piece, x_.p, x_.do_ + d, padded_v_dim_, arrays_.dv + key * padded_v_dim_ + d);
    for (int64_t d = 0; d < padded_dim_; d += kPanel) {
      add_to_keys(piece, x_.ds, q_finite_ + d, padded_dim_, arrays_.dk + key * padded_dim_ + d);
      const float* k = arrays_.k + block_key * padded_dim_ + d * width_ + piece.first * kPanel;
      for_strips((int)tile_.padded, [&](auto strip, int r) __attribute__((always_inline)) {
        constexpr int M = decltype(strip)::value;
        const Range range = strip_range(piece, x_.mask, r, M);
        if (range.begin >= range.end) return;
        scale_add<M>(x_.ds + r * kGradStride + range.begin, kGradStride, k + range.begin * kPanel,
                     kPanel, range.end - range.begin, x_.dq + r * padded_dim_ + d, padded_dim_,
                     nullptr);
      });
    }
  }

  // to[keys] += x^T y, without the rows at both ends that see no key of a panel.
  void add_to_keys(const Piece& piece, const float* x, const float* y, int64_t row, float* to) {
    for_strips((int)piece.width, [&](auto strip, int key) __attribute__((always_inline)) {
      constexpr int M = decltype(strip)::value;
      const Range first = rows_[key / kPanel], last = rows_[(key + M - 1) / kPanel];
      const int64_t begin = min_of(first.begin, last.begin), end = max_of(first.end, last.end);
      if (begin >= end) return;
      add_transposed<M>(x + begin * kGradStride + key, kGradStride, y + begin * row, row,
                        end - begin, to + key * row, row);
    });
  }

  void find_rows(const Piece& piece) {
    for (int64_t c = 0; c < piece.width; c += kPanel) {
      Range x{0, tile_.count};
      if (piece.is_masked) {
        while (x.begin < x.end && !(panel_state(x_.mask, x.begin, 1, c) & 1)) x.begin++;
        while (x.begin < x.end && !(panel_state(x_.mask, x.end - 1, 1, c) & 1)) x.end--;
      }
      rows_[c / kPanel] = x;
    }
  }

  template <class T>
  void store_queries(const Tile& tile, const float* dq) {
    for (int64_t r = 0; r < tile.count; r++) {
      const int64_t at = tile.token_row(p_, r);
      const float* from = dq + r * padded_dim_;
      float* part = arrays_.dq + (range_ * p_.batch * p_.q_tokens * p_.q_heads + at) * p_.dim;
      for (int64_t d = 0; d < p_.dim; d += VL) {
        const vf x = load(from + d) * p_.scale;
        if (ranges_ > 1) {
          store_upto(part + d, x, p_.dim - d);
        } else {
          store_upto(static_cast<T*>(p_.dq) + at * p_.dim + d, x, p_.dim - d);
        }
      }
    }
  }

  template <class T>
  void store_keys() {
    // The queries came with query_factor; dk needs scale.
    const float factor = p_.softcap > 0 ? 1.f : kLn2;
    for (int64_t kv_block = blocks_.begin; kv_block < blocks_.end; kv_block++) {
      const int64_t block = (b_ * p_.kv_heads + hk_) * p_.kv_blocks + kv_block;
      const bool is_listed = p_.is_listed[p_.listed_index(b_, hk_, kv_block)];
      const int64_t first = kv_block * p_.block_kv,
                    keys = min_of(p_.block_kv, p_.kv_tokens - first);
      for (int64_t t = 0; t < keys; t++) {
        const int64_t to = (b_ * p_.kv_tokens + first + t) * p_.kv_heads + hk_;
        const float* dk = arrays_.dk + (block * width_ + t) * padded_dim_;
        const float* dv = arrays_.dv + (block * width_ + t) * padded_v_dim_;
        store_row(dk, factor, is_listed, static_cast<T*>(p_.dk) + to * p_.dim, p_.dim);
        store_row(dv, 1.f, is_listed, static_cast<T*>(p_.dv) + to * p_.v_dim, p_.v_dim);
      }
    }
  }
  template <class T>
  static void store_row(const float* from, float factor, bool exists, T* to, int64_t n) {
    for (int64_t d = 0; d < n; d += VL)
      store_upto(to + d, exists ? load(from + d) * factor : vf{}, n - d);
  }

  int64_t ranges_, range_, b_, hk_;
  Range blocks_;
  Range rows_[kGradKeys / kPanel];
};

static void backward_range(const Problem& p, int64_t item, char* scratch) {
  FlushDenormals guard;
  BackwardRange(p, item, scratch).run();
}

// dq of the query heads of one kv head: parts of the ranges in their order.
template <class T, class F>
static void merge_queries(const Problem& p, int64_t item, F&& has_part) {
  BackwardArrays x;
  take_backward_arrays(p.workspace, sizes_of(p), &x);
  const int64_t ranges = num_ranges(p.batch, p.kv_heads, p.kv_tokens, p.block_kv);
  const int64_t tiles = p.q_blocks * p.tiles_per_block(),
                part = p.batch * p.q_tokens * p.q_heads * p.dim;
  const int64_t b = item / p.kv_heads, first = item % p.kv_heads * p.group();
  for (int64_t h = first; h < first + p.group(); h++)
    for (int64_t i = 0; i < tiles; i++) {
      const Tile tile = tile_of(p, (b * p.q_heads + h) * tiles + i);
      bool exists[8];
      for (int64_t j = 0; j < ranges; j++)
        exists[j] = tile.count && has_part(tile, blocks_of_range(p, j, ranges));
      for (int64_t r = 0; r < tile.count; r++) {
        const int64_t at = tile.token_row(p, r) * p.dim;
        for (int64_t d = 0; d < p.dim; d += VL) {
          vf sum = vf{};
          for (int64_t j = 0; j < ranges; j++)
            if (exists[j]) sum += load_upto(x.dq + j * part + at + d, p.dim - d);
          store_upto(static_cast<T*>(p.dq) + at + d, sum, p.dim - d);
        }
      }
    }
}

static void backward_merge(const Problem& p, int64_t item) {
  FlushDenormals guard;
  with_dtype(p.dtype, [&](auto type) {
    merge_queries<decltype(type)>(
        p, item, [&](const Tile& tile, Range blocks) { return has_items(p, tile, blocks); });
  });
}

// dbias of a tile of queries: ds of every batch element and head that shares the bias, in their
// order. p and ds are computed again, because the tasks above own keys, and several of them would
// add to one bias.
class BiasTile : TileGrads {
 public:
  BiasTile(const Problem& p, int64_t item, char* scratch) : TileGrads(p, scratch) {
    tiles_ = p.q_blocks * p.tiles_per_block();
    plane_ = item / tiles_;
    tile_index_ = item % tiles_;
  }

  void run() {
    const Tile rows = tile_of(p_, tile_index_);
    if (!rows.count) return;
    float* to = p_.dbias + (plane_ * p_.q_tokens + rows.first) * p_.kv_tokens;
    std::memset(to, 0, static_cast<size_t>(rows.count * p_.kv_tokens) * sizeof(float));
    for (int64_t b = plane_ / p_.bias_heads; b < p_.batch; b += p_.bias_batch)
      for (int64_t h = plane_ % p_.bias_heads; h < p_.q_heads; h += p_.bias_heads) {
        load_tile(tile_of(p_, (b * p_.q_heads + h) * tiles_ + tile_index_));
        for_pieces(0, p_.kv_blocks, [&](const Piece& piece) { add_piece(piece, to); });
      }
  }

 private:
  void add_piece(const Piece& piece, float* to) {
    const int64_t token = piece.kv_block * p_.block_kv + piece.first;
    for (int64_t r = 0; r < tile_.count; r++)
      for (int64_t c = 0; c < piece.count; c += VL) {
        float* at = to + r * p_.kv_tokens + token + c;
        const int64_t n = piece.count - c;
        store_upto(at, load_upto(at, n) + load(x_.ds + r * kGradStride + c), n);
      }
  }

  int64_t tiles_, plane_, tile_index_;
};

static void backward_bias(const Problem& p, int64_t item, char* scratch) {
  FlushDenormals guard;
  BiasTile(p, item, scratch).run();
}

}  // namespace xsake_cpu::XSAKE_ISA
