// Backward pass: five products per listed block in one pass over the forward's own lists.
//
// A task is a (batch, kv head, at least 128 keys): it owns dk and dv of its keys, so no sum has two
// writers. It adds to dq of a tile of queries after all tasks of earlier keys have: their number is
// known from the list of the tile. Tasks start in the order of their keys, so a task waits only for
// tasks that threads are computing at that moment. The order of every sum follows from the lists.
//
// Values that are not finite follow backward_rows and score_grad of the repository: products use
// finite copies of q, k, v and do, and NaN travels through s, p and ds.
#pragma once

#include <sched.h>

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

static GradArrays grad_arrays(const Problem& p) {
  Arena arena{p.workspace};
  return take_grad_arrays(arena, sizes_of(p));
}

template <class T>
static void pack_backward_block(const Problem& p, const PackedBlock& block) {
  const int64_t width = padded_block(p), padded_dim = round_up(p.dim, kPanel);
  const int64_t keys = block.index * width;
  const GradArrays x = grad_arrays(p);
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

template <class T>
static bool load_query(const Problem& p, const T* from, int64_t r, const QueryResiduals& to) {
  const int64_t padded_dim = round_up(p.dim, kPanel);
  const float factor = query_factor(p);
  vi flaws = vi{};
  for (int64_t d = 0; d < padded_dim; d += VL) {
    vf x = vf{};
    if (d < p.dim) x = load_upto(from + d, p.dim - d);
    flaws |= ~is_finite(x);
    x *= factor;
    store(to.q + r * padded_dim + d, x);
  }
  return !any(flaws);
}

template <class T>
static void load_cotangent(const Problem& p, const T* from, const T* o, int64_t at, int64_t r,
                           const QueryResiduals& to) {
  const int64_t padded_v_dim = round_up(p.v_dim, kPanel);
  vi flaws = vi{};
  float sum = 0.f;  // in the order of the product do v: a query that sees one key has ds = 0
  for (int64_t d = 0; d < padded_v_dim; d += VL) {
    vf x = vf{}, y = vf{};
    if (d < p.v_dim) x = load_upto(from + d, p.v_dim - d), y = load_upto(o + d, p.v_dim - d);
    const vi finite = is_finite(x);
    flaws |= ~finite;
    x = select(finite, x, vf{});
    store(to.do_ + r * padded_v_dim + d, x);
    for (int i = 0; i < VL; i++) sum += x[i] * y[i];
  }
  to.origin[r] = any(flaws) ? RowOrigin{__builtin_nanf(""), 0.f, 1.f} : origin_of(p.lse[at]);
  to.delta[r] = sum - p.dlse[at];
}

// Residuals of a tile, and of the row that pads its last strip; whether its queries are finite.
template <class T>
static bool load_residuals(const Problem& p, const Tile& tile, const QueryResiduals& to) {
  bool is_finite_tile = true;
  for (int64_t r = 0; r < tile.count; r++) {
    const int64_t at = tile.token_row(p, r), later = at + kAhead * p.q_heads;
    prefetch_row(static_cast<const T*>(p.q) + later * p.dim, p.dim);
    prefetch_row(static_cast<const T*>(p.do_) + later * p.v_dim, p.v_dim);
    prefetch_row(static_cast<const T*>(p.o) + later * p.v_dim, p.v_dim);
    is_finite_tile &= load_query(p, static_cast<const T*>(p.q) + at * p.dim, r, to);
    load_cotangent(p, static_cast<const T*>(p.do_) + at * p.v_dim,
                   static_cast<const T*>(p.o) + at * p.v_dim, at, r, to);
  }
  const int64_t padded_dim = round_up(p.dim, kPanel), padded_v_dim = round_up(p.v_dim, kPanel);
  for (int64_t r = tile.count; r < tile.padded; r++) {
    const auto size = static_cast<size_t>(padded_dim) * sizeof(float);
    std::memset(to.q + r * padded_dim, 0, size);
    std::memset(to.do_ + r * padded_v_dim, 0, static_cast<size_t>(padded_v_dim) * sizeof(float));
    to.origin[r] = {__builtin_inff(), 0.f, 1.f};
    to.delta[r] = 0;
  }
  return is_finite_tile;
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

// Gradients of a tile of queries: p and ds of the pieces of its blocks, and sums of their products.
class TileGrads {
 protected:
  TileGrads(const Problem& p, const GradScratch& scratch)
      : p_(p), x_(scratch), keys_(grad_arrays(p)) {
    padded_dim_ = round_up(p.dim, kPanel);
    padded_v_dim_ = round_up(p.v_dim, kPanel);
    width_ = padded_block(p);
  }

  void set_tile(const Tile& tile, const QueryResiduals& residuals, bool has_finite_queries) {
    tile_ = tile;
    in_ = residuals;
    q_finite_ = in_.q;
    if (has_finite_queries) return;
    for (int64_t i = 0; i < tile.padded * padded_dim_; i += VL) {
      const vf x = load(in_.q + i);
      store(x_.q_finite + i, select(is_finite(x), x, vf{}));
    }
    q_finite_ = x_.q_finite;
  }

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

  XS_INLINE void clear_strip(float* x, int rows) {
    for (int r = 0; r < rows; r++)
      for (int n = 0; n < kVectors; n++) store(x + r * kGradStride + n * VL, vf{});
  }

  // p and ds without bias and softcap: both are made in the epilogues of their products.
  void plain_grads(const Piece& piece) {
    const int64_t key = packed_key(piece);
    for (int64_t c = 0; c < piece.width; c += kPanel) {
      const float* k = keys_.k_t + (key + c) * p_.dim;
      for_strips((int)tile_.padded, [&](auto strip, int r) __attribute__((always_inline)) {
        constexpr int M = decltype(strip)::value;
        const float* q = in_.q + r * padded_dim_;
        float* p = x_.p + r * kGradStride + c;
        const int8_t* mask = x_.mask.mask + r * kStepKeys + c;
        const int state = piece.is_masked ? panel_state(x_.mask, r, M, c) : 1;
        if (!(state & 1)) {
          clear_strip(p, M);
        } else if (state == 1) {
          probability_strip<M, Scores::full>(q, padded_dim_, k, p_.dim, p, in_.origin + r, nullptr);
        } else {
          probability_strip<M, Scores::masked>(q, padded_dim_, k, p_.dim, p, in_.origin + r, mask);
        }
      });
      score_grads<false>(piece, c, key);
    }
  }

  template <bool capped>
  void score_grads(const Piece& piece, int64_t c, int64_t key) {
    const float* v = keys_.v_t + (key + c) * p_.v_dim;
    for_strips((int)tile_.padded, [&](auto strip, int r) __attribute__((always_inline)) {
      constexpr int M = decltype(strip)::value;
      const float* p = x_.p + r * kGradStride + c;
      float* ds = x_.ds + r * kGradStride + c;
      const float* do_ = in_.do_ + r * padded_v_dim_;
      const int8_t* mask = x_.mask.mask + r * kStepKeys + c;
      const int state = piece.is_masked ? panel_state(x_.mask, r, M, c) : 1;
      if (!(state & 1)) {
        clear_strip(ds, M);
      } else if (state == 1) {
        score_grad_strip<M, false, capped>(do_, padded_v_dim_, v, p_.v_dim, p, ds, in_.delta + r,
                                           nullptr);
      } else {
        score_grad_strip<M, true, capped>(do_, padded_v_dim_, v, p_.v_dim, p, ds, in_.delta + r,
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
        probability_strip<M, Scores::raw>(in_.q + r * padded_dim_, padded_dim_,
                                          keys_.k_t + (key + c) * p_.dim, p_.dim,
                                          x_.p + r * kGradStride + c, in_.origin + r, nullptr);
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
      vf x = probabilities(s, in_.origin[r]);
      if (piece.is_masked) x = select(load_mask(x_.mask.mask + r * kStepKeys + c), x, vf{});
      store(p, x);
      // Without a softcap s may be -inf, by a bias, and a factor 0 would make it NaN.
      const vf capped = p_.softcap > 0 ? s * slope_factor : vf{};
      store(x_.ds + r * kGradStride + c, 1.f - capped * capped);
    }
  }

  // dk and dv of the keys of a piece, which start at `dk` and `dv`.
  void add_to_keys(const Piece& piece, float* dk, float* dv) {
    find_rows(piece);
    for (int64_t d = 0; d < padded_v_dim_; d += kPanel)
      add_products(piece, x_.p, in_.do_ + d, padded_v_dim_, dv + d);
    for (int64_t d = 0; d < padded_dim_; d += kPanel)
      add_products(piece, x_.ds, q_finite_ + d, padded_dim_, dk + d);
  }

  // to[keys] += x^T y, without the rows at both ends that see no key of a panel.
  void add_products(const Piece& piece, const float* x, const float* y, int64_t row, float* to) {
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

  // dq of the rows of the tile.
  void add_to_queries(const Piece& piece, float* dq) {
    const int64_t key = packed_key(piece), block_key = key - piece.first;
    for (int64_t d = 0; d < padded_dim_; d += kPanel) {
      const float* k = keys_.k + block_key * padded_dim_ + d * width_ + piece.first * kPanel;
      for_strips((int)tile_.padded, [&](auto strip, int r) __attribute__((always_inline)) {
        constexpr int M = decltype(strip)::value;
        const Range range = strip_range(piece, x_.mask, r, M);
        if (range.begin >= range.end) return;
        scale_add<M>(x_.ds + r * kGradStride + range.begin, kGradStride, k + range.begin * kPanel,
                     kPanel, range.end - range.begin, dq + r * padded_dim_ + d, padded_dim_,
                     nullptr);
      });
    }
  }

  // Results of kv blocks [kv_begin, kv_end) from the sums of their keys.
  template <class T>
  void store_keys(int64_t b, int64_t hk, int64_t kv_begin, int64_t kv_end, const float* dk,
                  const float* dv) {
    // The queries came with query_factor; dk needs scale.
    const float factor = p_.softcap > 0 ? 1.f : kLn2;
    for (int64_t kv_block = kv_begin; kv_block < kv_end; kv_block++) {
      const int64_t first = kv_block * p_.block_kv,
                    keys = min_of(p_.block_kv, p_.kv_tokens - first);
      for (int64_t t = 0; t < keys; t++) {
        const int64_t to = (b * p_.kv_tokens + first + t) * p_.kv_heads + hk;
        const int64_t from = (kv_block - kv_begin) * width_ + t;
        store_row(dk + from * padded_dim_, factor, static_cast<T*>(p_.dk) + to * p_.dim, p_.dim);
        store_row(dv + from * padded_v_dim_, 1.f, static_cast<T*>(p_.dv) + to * p_.v_dim, p_.v_dim);
      }
    }
  }
  template <class T>
  static void store_row(const float* from, float factor, T* to, int64_t n) {
    for (int64_t d = 0; d < n; d += VL) store_upto(to + d, load(from + d) * factor, n - d);
  }

  const Problem& p_;
  const GradScratch x_;
  const GradArrays keys_;
  Tile tile_{};
  QueryResiduals in_{};
  const float* q_finite_ = nullptr;
  int64_t padded_dim_, padded_v_dim_, width_;
  Range rows_[kGradKeys / kPanel];  // of a panel: rows that see a key of it
};

// Items of a list with blocks in [kv_begin, kv_end).
struct ListPart {
  int32_t begin, end;      // where they are, in a list that ascends without others between them
  int32_t earlier, count;  // items of blocks below kv_begin, and of these
};
static ListPart list_part(const Problem& p, int64_t row, int64_t kv_begin, int64_t kv_end) {
  ListPart x{p.row_starts[row], p.row_starts[row + 1], 0, 0};
  if (p.is_ascending) {
    const int32_t begin = first_item(p, row, kv_begin), end = first_item(p, row, kv_end);
    return {begin, end, begin - x.begin, end - begin};
  }
  for (int32_t item = x.begin; item < x.end; item++) {
    x.earlier += p.kv_block[item] < kv_begin;
    x.count += p.kv_block[item] >= kv_begin && p.kv_block[item] < kv_end;
  }
  return x;
}

// A tile of queries in the arrays of the call.
struct QueryTile {
  Tile tile;
  QueryResiduals residuals;
  float* dq;
  TileState* state;
  int64_t list_row, list_size;

  QueryTile(const Problem& p, int64_t item) : tile(tile_of(p, item)) {
    BackwardArrays x;
    take_backward_arrays(p.workspace, sizes_of(p), &x);
    const int64_t padded_dim = round_up(p.dim, kPanel), padded_v_dim = round_up(p.v_dim, kPanel);
    const int64_t row = item * padded_tile_rows(p.block_q);
    residuals = x.queries.from_row(row, padded_dim, padded_v_dim);
    dq = x.dq + row * padded_dim;
    state = x.tiles + item;
    list_row = p.list_row(tile.b, tile.h, tile.q_block);
    list_size = p.row_starts[list_row + 1] - p.row_starts[list_row];
  }

  // dq to the result.
  template <class T>
  void store_dq(const Problem& p) const {
    const int64_t padded_dim = round_up(p.dim, kPanel);
    for (int64_t r = 0; r < tile.count; r++)
      for (int64_t d = 0; d < p.dim; d += VL)
        store_upto(static_cast<T*>(p.dq) + tile.token_row(p, r) * p.dim + d,
                   load(dq + r * padded_dim + d) * p.scale, p.dim - d);
  }
};

static void backward_pack_queries(const Problem& p, int64_t item) {
  FlushDenormals guard;
  const QueryTile x(p, item);
  if (!x.tile.count) return;
  x.state->num_added = 0;
  std::memset(x.dq, 0,
              static_cast<size_t>(x.tile.padded * round_up(p.dim, kPanel)) * sizeof(float));
  with_dtype(p.dtype, [&](auto type) {
    x.state->is_finite = load_residuals<decltype(type)>(p, x.tile, x.residuals);
    if (x.list_size == 0) x.store_dq<decltype(type)>(p);
  });
}

class KeyGrads : TileGrads {
 public:
  KeyGrads(const Problem& p, int64_t item, const BackwardScratch& scratch)
      : TileGrads(p, scratch.grads), dk_(scratch.dk), dv_(scratch.dv) {
    // Heads of the same keys follow each other. Later keys of a causal mask have fewer queries.
    const int64_t heads = p.batch * p.kv_heads;
    b_ = item % heads / p.kv_heads;
    hk_ = item % p.kv_heads;
    kv_begin_ = item / heads * grad_blocks(p.block_kv);
    kv_end_ = min_of(p.kv_blocks, kv_begin_ + grad_blocks(p.block_kv));
  }

  void run() {
    const auto keys = static_cast<size_t>((kv_end_ - kv_begin_) * width_) * sizeof(float);
    std::memset(dk_, 0, keys * static_cast<size_t>(padded_dim_));
    std::memset(dv_, 0, keys * static_cast<size_t>(padded_v_dim_));
    const int64_t tiles = p_.tiles_per_head(), first = hk_ * p_.group();
    for (int64_t h = first; h < first + p_.group(); h++)
      for (int64_t i = tiles - 1; i >= 0; i--)
        add_tile(QueryTile(p_, (b_ * p_.q_heads + h) * tiles + i));
    with_dtype(p_.dtype, [&](auto type) {
      store_keys<decltype(type)>(b_, hk_, kv_begin_, kv_end_, dk_, dv_);
    });
  }

 private:
  void add_tile(const QueryTile& x) {
    const ListPart part = list_part(p_, x.list_row, kv_begin_, kv_end_);
    if (!x.tile.count || !part.count) return;
    set_tile(x.tile, x.residuals, x.state->is_finite);
    load_rows(p_, x.tile, x_.rows);
    bool is_next = false;
    for (int32_t item = part.begin; item < part.end; item++) {
      const int64_t kv_block = p_.kv_block[item];
      if (kv_block < kv_begin_ || kv_block >= kv_end_) continue;
      for_steps(item, kv_block, p_.is_partial[item], [&](const Piece& piece) {
        const int64_t key = (kv_block - kv_begin_) * width_ + piece.first;
        add_to_keys(piece, dk_ + key * padded_dim_, dv_ + key * padded_v_dim_);
        if (!is_next) wait(x.state->num_added, part.earlier);
        is_next = true;
        add_to_queries(piece, x.dq);
      });
    }
    const int32_t added = part.earlier + part.count;
    if (added == x.list_size)
      with_dtype(p_.dtype, [&](auto type) { x.store_dq<decltype(type)>(p_); });
    __atomic_store_n(&x.state->num_added, added, __ATOMIC_RELEASE);
  }

  static void wait(const int32_t& x, int32_t expected) {
    for (int i = 0; __atomic_load_n(&x, __ATOMIC_ACQUIRE) != expected; i++)
      i < 1000 ? relax() : (void)sched_yield();
  }

  float *dk_, *dv_;
  int64_t b_, hk_, kv_begin_, kv_end_;
};

static BackwardScratch backward_scratch(const Problem& p, char* base) {
  BackwardScratch x;
  take_backward(base, sizes_of(p), &x);
  return x;
}

static void backward_keys(const Problem& p, int64_t item, char* scratch) {
  FlushDenormals guard;
  KeyGrads(p, item, backward_scratch(p, scratch)).run();
}

// dbias of a tile of queries: ds of every batch element and head that shares the bias, in their
// order. p and ds are computed again, because the tasks above own keys, and several of them would
// add to one bias.
class BiasTile : TileGrads {
 public:
  BiasTile(const Problem& p, int64_t item, const GradScratch& scratch) : TileGrads(p, scratch) {
    tiles_ = p.tiles_per_head();
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
        const QueryTile x(p_, (b * p_.q_heads + h) * tiles_ + tile_index_);
        set_tile(x.tile, x.residuals, x.state->is_finite);
        load_rows(p_, x.tile, x_.rows);
        for (int32_t item = p_.row_starts[x.list_row]; item < p_.row_starts[x.list_row + 1]; item++)
          for_steps(item, p_.kv_block[item], p_.is_partial[item],
                    [&](const Piece& piece) { add_piece(piece, to); });
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
  BiasTile(p, item, backward_scratch(p, scratch).grads).run();
}

}  // namespace xsake_cpu::XSAKE_ISA
