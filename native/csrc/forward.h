// Forward pass: pack listed blocks, then one task per tile of at most 128 queries of one head.
//
// A step takes up to 256 keys from any listed blocks, so that small blocks share the cost of a
// step: s = q k^T, p = 2^(s - m) in place, acc = alpha acc + p v.
#pragma once

#include "online_softmax.h"

namespace xsake_cpu::XSAKE_ISA {

// Packed K and V of a call. An element is a float, or a pair of bfloat16 where the call has tiles.
struct PackedArrays {
  float *k, *v;
  int64_t width;     // keys of a block
  int64_t k_row;     // elements of a query or key
  int64_t row_keys;  // keys of a row of V's panels
  int64_t v_size;    // elements of a block of V
  explicit PackedArrays(const Problem& p) : width(padded_block(p)) {
    ForwardArrays arrays;
    take_forward_arrays(p.workspace, sizes_of(p), &arrays);
    k = arrays.k;
    v = arrays.v;
    row_keys = has_tiles(p) ? 2 : 1;
    k_row = p.dim / row_keys;
    v_size = width / row_keys * round_up(p.v_dim, kPanel);
  }
  // Keys and values of a block from `first` on; panels of V are v_panel() apart.
  float* keys(int64_t block, int64_t first) const { return k + (block * width + first) * k_row; }
  float* values(int64_t block, int64_t first) const {
    return v + block * v_size + first / row_keys * kPanel;
  }
  int64_t v_panel() const { return width / row_keys * kPanel; }
};

template <class T>
XS_INLINE void pack_keys(const Problem& p, const PackedBlock& block, int64_t token, int64_t padded,
                         int64_t count, float* to, const int8_t* bad) {
  if (has_tiles(p)) {  // pairs move like floats
    pack_transposed(kv_rows<float>(p, p.k, p.dim / 2, block.b, block.hk, token, count), padded, to,
                    bad);
  } else {
    pack_transposed(kv_rows<T>(p, p.k, p.dim, block.b, block.hk, token, count), padded, to, bad);
  }
}

template <class T>
static void pack_forward_block(const Problem& p, const PackedBlock& block) {
  const PackedArrays to(p);
  for_parts(p, block.kv_block, [&](int64_t first, int64_t padded, int64_t count) {
    int8_t bad[kStepKeys];
    const int64_t token = block.kv_block * p.block_kv + first;
    const auto values = kv_rows<T>(p, p.v, p.v_dim, block.b, block.hk, token, count);
    float* v = to.values(block.index, first);
    if constexpr (std::is_same_v<T, bf16>) {
      has_tiles(p) ? pack_pairs(values, padded, v, to.width, bad)
                   : pack_rows(values, padded, v, to.width, bad);
    } else {
      pack_rows(values, padded, v, to.width, bad);
    }
    pack_keys<T>(p, block, token, padded, count, to.keys(block.index, first), bad);
  });
}

static void forward_pack(const Problem& p, int64_t item) {
  const PackedBlock block = packed_block(p, item);
  if (!p.is_listed[p.listed_index(block.b, block.hk, block.kv_block)]) return;
  FlushDenormals guard;
  with_dtype(p.dtype, [&](auto type) { pack_forward_block<decltype(type)>(p, block); });
}

// Queries of one task.
struct Tile {
  int64_t b, h, q_block, first, count, padded;
  int64_t token_row(const Problem& p, int64_t r) const {
    return (b * p.q_tokens + first + r) * p.q_heads + h;
  }
};

// The tile of a task; count is 0 for tiles after the end. Later tiles of a causal mask are longer
// and come first.
XS_INLINE Tile tile_of(const Problem& p, int64_t item) {
  const int64_t per_block = p.tiles_per_block(), tiles = p.tiles_per_head();
  const int64_t tile = tiles - 1 - item % tiles;
  Tile x;
  x.h = item / tiles % p.q_heads;
  x.b = item / tiles / p.q_heads;
  x.q_block = tile / per_block;
  x.first = x.q_block * p.block_q + tile % per_block * kTileRows;
  const int64_t end = min_of(p.q_tokens, (x.q_block + 1) * p.block_q);
  x.count = max_of(0, min_of(kTileRows, end - x.first));
  x.padded = round_up(x.count, 2);
  return x;
}

XS_INLINE void load_rows(const Problem& p, const Tile& tile, const TileRows& rows) {
  const int32_t* positions =
      p.q_positions ? p.q_positions + tile.b % p.q_positions_batch * p.q_tokens : nullptr;
  const int32_t* segments = p.q_segments ? p.q_segments + tile.b * p.q_tokens : nullptr;
  for (int64_t r = 0; r < tile.count; r++) {
    const int64_t token = tile.first + r;
    rows.token[r] = (int32_t)token;
    rows.position[r] = positions ? positions[token] : (int32_t)token;
    rows.segment[r] = segments ? segments[token] : -1;
    rows.head[r] = (int32_t)tile.h;
  }
}

// Queries times query_factor, or as they are for register tiles; a row that pads the last strip
// is 0.
template <class T>
static void load_queries(const Problem& p, const Tile& tile, float* q, int64_t q_row) {
  const float factor = query_factor(p);
  for (int64_t r = 0; r < tile.padded; r++) {
    const T* from = static_cast<const T*>(p.q) + tile.token_row(p, r < tile.count ? r : 0) * p.dim;
    prefetch_row(from + kAhead * p.q_heads * p.dim, p.dim);
    if (has_tiles(p)) {
      const auto size = static_cast<size_t>(q_row) * sizeof(float);
      r < tile.count ? std::memcpy(q + r * q_row, from, size) : std::memset(q + r * q_row, 0, size);
      continue;
    }
    for (int64_t d = 0; d < p.dim; d += VL) {
      vf x = load_upto(from + d, p.dim - d);
      x = r < tile.count ? x * factor : vf{};
      store_upto(q + r * q_row + d, x, p.dim - d);
    }
  }
}

// Steps of the online softmax of a tile: pieces of keys are added until a step is full.
class TileSoftmax {
 protected:
  TileSoftmax(const Problem& p, char* scratch) : p_(p), arrays_(p), registers_(has_tiles(p)) {
    take_forward(scratch, p.dim, p.v_dim, p.program ? p.program->num_steps : 0, &x_);
    padded_v_dim_ = round_up(p.v_dim, kPanel);
  }

  // Keys of a block; `item` is that of the list of every row.
  void add_block(int32_t item, int64_t kv_block, bool is_partial) {
    const int64_t keys = min_of(p_.block_kv, p_.kv_tokens - kv_block * p_.block_kv);
    for (int64_t at = 0; at < keys; at += kStepKeys)
      add_piece(item, kv_block, at, min_of(kStepKeys, keys - at), is_partial);
  }

  void add_piece(int32_t item, int64_t kv_block, int64_t first, int64_t count, bool is_partial) {
    const int64_t width = round_up(count, kPanel);
    if (num_pieces_ == kMaxPieces || columns_ + width > kStepKeys) flush();
    const int64_t hk = tile_.h / p_.group();
    const int64_t block = (tile_.b * p_.kv_heads + hk) * p_.kv_blocks + kv_block;
    Piece& x = pieces_[num_pieces_++];
    x.k = arrays_.keys(block, first);
    x.v = arrays_.values(block, first);
    x.kv_block = kv_block;
    x.first = first;
    x.column = columns_;
    x.width = width;
    x.count = count;
    x.is_masked = is_partial || count < width;
    columns_ += width;
    if (!x.is_masked) return;
    for (int64_t r = 0; r < tile_.count; r++) x_.rows.item[r] = item;
    MaskBuilder(p_, x_.rows, x_.mask, tile_.b).build<kPanel>(x, tile_.count, tile_.padded);
  }

  void flush() {
    if (!num_pieces_) return;
    find_scores();
    update_max(x_.softmax, tile_.padded);
#if defined(__AMX_BF16__)
    if (has_tiles(p_)) {
      for (int r = 0; r < tile_.padded; r += kTileStrip) add_strip(r);
      return clear_pieces();
    }
#endif
    update_sums(x_.softmax, x_.mask, pieces_, num_pieces_, (int)tile_.padded);
    for (int j = 0; j < num_pieces_; j++) add_values(pieces_[j], j == 0);
    clear_pieces();
  }

  void clear_pieces() {
    num_pieces_ = 0;
    columns_ = 0;
  }

  // Scores of all pieces in base 2, and the maximum of each row.
  void find_scores() {
    clear_max(x_.softmax, tile_.padded);
    for (int j = 0; j < num_pieces_; j++) {
#if defined(__AMX_BF16__)
      if (has_tiles(p_)) {
        has_general_scores(p_) ? tile_scores<true>(pieces_[j]) : tile_scores<false>(pieces_[j]);
      } else
#endif
        has_general_scores(p_) ? scores<true>(pieces_[j]) : scores<false>(pieces_[j]);
      if (has_general_scores(p_))
        finish_scores(p_, pieces_[j], x_.rows, x_.mask, x_.softmax, tile_.b, tile_.count);
    }
  }

  // A panel of K stays in L1 while the strips of the tile pass over it.
  template <bool raw>
  void scores(const Piece& piece) {
    for (int64_t c = 0; c < piece.width; c += kPanel) {
      const float* k = piece.k + c * p_.dim;
      for_strips((int)tile_.padded, [&](auto strip, int r) __attribute__((always_inline)) {
        constexpr int M = decltype(strip)::value;
        const int64_t column = piece.column + c;
        const float* q = x_.q + r * p_.dim;
        float* s = x_.softmax.s + r * kScoreStride + column;
        float* row_max = x_.softmax.row_max + r * kMaxVector;
        const int state = piece.is_masked ? panel_state(x_.mask, r, M, column) : 1;
        if (!(state & 1)) {
          fill_hidden(s, M);
        } else if (raw) {
          score_strip<M, Scores::raw>(q, p_.dim, k, p_.dim, s, row_max, nullptr);
        } else if (state == 1) {
          score_strip<M, Scores::full>(q, p_.dim, k, p_.dim, s, row_max, nullptr);
        } else {
          const int8_t* mask = x_.mask.mask + r * kStepKeys + column;
          score_strip<M, Scores::masked>(q, p_.dim, k, p_.dim, s, row_max, mask);
        }
      });
    }
  }

  void add_values(const Piece& piece, bool is_first) {
    for (int64_t d = 0; d < padded_v_dim_; d += kPanel)
      for_strips((int)tile_.padded, [&](auto strip, int r) __attribute__((always_inline)) {
        constexpr int M = decltype(strip)::value;
        const Range range = strip_range(piece, x_.mask, r, M);
        if (range.begin >= range.end && !is_first) return;
        scale_add<M>(x_.softmax.s + r * kScoreStride + piece.column + range.begin, kScoreStride,
                     piece.v + d / kPanel * arrays_.v_panel() + range.begin * kPanel, kPanel,
                     range.end - range.begin, x_.softmax.acc + r * padded_v_dim_ + d, padded_v_dim_,
                     is_first ? x_.softmax.alpha + r : nullptr);
      });
  }

#if defined(__AMX_BF16__)
  int strip_rows(int r) const { return (int)min_of(kTileStrip, tile_.padded - r); }

  template <bool raw>
  void tile_scores(const Piece& piece) {
    const int64_t words = arrays_.k_row;
    for (int64_t c = 0; c < piece.width; c += kPanel) {
      const int64_t column = piece.column + c;
      int states[kTileRows / kTileStrip];
      for (int r = 0; r < tile_.padded; r += kTileStrip) {
        const int rows = strip_rows(r);
        const float *q = x_.q + r * words, *k = piece.k + c * words;
        float* s = x_.softmax.s + r * kScoreStride + column;
        const int state = piece.is_masked ? panel_state(x_.mask, r, rows, column) : 1;
        states[r / kTileStrip] = state;
        if (!(state & 1)) {
          fill_hidden(s, rows);
        } else {
          rows > kTile ? multiply_queries<2>(q, k, words, s) : multiply_queries<1>(q, k, words, s);
        }
      }
      // Later, because a load that follows a tile's store waits for it.
      for (int r = 0; r < tile_.padded; r++)
        if (const int state = states[r / kTileStrip]; state & 1)
          scale_panel<raw>(r, column, state != 1);
    }
  }

  // Scores of a row and a panel from q k, and their maximum.
  template <bool raw>
  void scale_panel(int64_t r, int64_t column, bool is_masked) {
    float* s = x_.softmax.s + r * kScoreStride + column;
    const vf factor = splat(query_factor(p_));
    vf top = load(x_.softmax.row_max + r * kMaxVector);
    XS_FOR (n, kVectors) {
      vf x = load(s + n * VL) * factor;
      if (!raw && is_masked)
        x = select(load_mask(x_.mask.mask + r * kStepKeys + column + n * VL), x, splat(kNegInf));
      top = max(top, x);
      store(s + n * VL, x);
    }
    if (!raw) store(x_.softmax.row_max + r * kMaxVector, top);
  }

  // p, l and acc of a strip.
  void add_strip(int r) {
    const int rows = strip_rows(r);
    update_strip_sums<kTileStrip, SplitPanel>(x_.softmax, x_.mask, pieces_, num_pieces_, r, rows);
    alignas(kAlign) float sums[kTileStrip * kPanel];
    for (int64_t d = 0; d < padded_v_dim_; d += kPanel) {
      rows > kTile ? sum_values<2>(r, rows, d, sums) : sum_values<1>(r, rows, d, sums);
      for (int i = 0; i < rows; i++) {
        const vf alpha = splat(x_.softmax.alpha[r + i]);
        float* acc = x_.softmax.acc + (r + i) * padded_v_dim_ + d;
        XS_FOR (n, kVectors)
          store(acc + n * VL, load(acc + n * VL) * alpha + load(sums + i * kPanel + n * VL));
      }
    }
  }

  template <int M>
  void sum_values(int r, int rows, int64_t d, float* sums) {
    clear_sums();
    for (int j = 0; j < num_pieces_; j++) {
      const Piece& piece = pieces_[j];
      const Range range = strip_range(piece, x_.mask, r, rows);
      add_split_product<M>(x_.softmax.s + r * kScoreStride + piece.column + range.begin,
                           piece.v + d / kPanel * arrays_.v_panel() + range.begin / 2 * kPanel,
                           range.end - range.begin);
    }
    store_sums<M>(sums, kPanel);
  }
#endif

  static constexpr int kMaxPieces = kStepKeys / kPanel;
  const Problem& p_;
  Tile tile_{};
  ForwardScratch x_;
  const PackedArrays arrays_;
  const Registers registers_;
  int64_t padded_v_dim_, columns_ = 0;
  Piece pieces_[kMaxPieces];
  int num_pieces_ = 0;
};

class ForwardTile : TileSoftmax {
 public:
  ForwardTile(const Problem& p, const Tile& tile, char* scratch) : TileSoftmax(p, scratch) {
    tile_ = tile;
  }

  void run() {
    load_rows(p_, tile_, x_.rows);
    with_dtype(p_.dtype,
               [&](auto type) { load_queries<decltype(type)>(p_, tile_, x_.q, arrays_.k_row); });
    init_rows(x_.softmax, tile_.padded, padded_v_dim_);
    const int64_t row = p_.list_row(tile_.b, tile_.h, tile_.q_block);
    for (int32_t item = p_.row_starts[row]; item < p_.row_starts[row + 1]; item++)
      add_block(item, p_.kv_block[item], p_.is_partial[item]);
    flush();
    with_dtype(p_.dtype, [&](auto type) {
      for (int64_t r = 0; r < tile_.count; r++)
        finalize_row<decltype(type)>(p_, tile_.token_row(p_, r), x_.softmax.acc + r * padded_v_dim_,
                                     x_.softmax.m[r], x_.softmax.l[r]);
    });
  }
};

constexpr int64_t kTileTurns = 4;

static void forward_tile(const Problem& p, int64_t item, char* scratch) {
  FlushDenormals guard;
  // Long tiles of all heads come first, so that many threads end at the same time; a few of one
  // head follow each other, because they read the same keys.
  const int64_t tiles = p.tiles_per_head(), turn = (tiles + kTileTurns - 1) / kTileTurns;
  const int64_t heads = p.batch * p.q_heads, first = item / (heads * turn) * turn;
  const int64_t count = min_of(turn, tiles - first), index = item - heads * first;
  const Tile tile = tile_of(p, index / count * tiles + first + index % count);
  if (tile.count) ForwardTile(p, tile, scratch).run();
}

}  // namespace xsake_cpu::XSAKE_ISA
