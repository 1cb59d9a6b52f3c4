// Selected attention: every query over the keys of its own blocks, up to its own position.
//
// Queries that selected the same block are gathered into tiles, so that products are as large as
// those of the block-sparse passes, whatever the group size. A forward task is a chunk of queries
// of a kv head: its rows keep their softmax state in scratch, and a tile takes that of its rows and
// gives it back. Rows take their blocks in ascending order. A backward task owns the keys of a
// range, as in backward.h.
#pragma once

#include "backward.h"

namespace xsake_cpu::XSAKE_ISA {

// The chunk of queries of a task.
struct SelectedQueries {
  int64_t b, hk, first, count, stride;

  SelectedQueries(const Problem& p, int64_t b, int64_t hk, int64_t chunk) : b(b), hk(hk) {
    stride = p.block_q;
    first = chunk * stride;
    count = min_of(stride, p.q_tokens - first);
  }
  int64_t head(const Problem& p, int64_t g) const { return hk * p.group() + g; }
  int32_t position(const Problem& p, int64_t t) const {
    if (!p.q_positions) return (int32_t)(first + t);
    return p.q_positions[b % p.q_positions_batch * p.q_tokens + first + t];
  }

  // Calls f(tile, its first row in the chunk) for parts of every head.
  template <class F>
  void for_tiles(const Problem& p, F&& f) const {
    for (int64_t g = 0; g < p.group(); g++)
      for (int64_t at = 0; at < count; at += kTileRows) {
        const int64_t n = min_of(kTileRows, count - at);
        f(Tile{b, head(p, g), first / stride, first + at, n, round_up(n, 2)}, g * stride + at);
      }
  }

  // Calls f(query, block) for blocks with a key that the query sees; a block that a query names
  // twice counts once.
  template <class F>
  void for_blocks(const Problem& p, int32_t* last, F&& f) const {
    for (int64_t j = 0; j < p.kv_blocks; j++) last[j] = -1;
    for (int64_t t = 0; t < count; t++) {
      const int32_t* slots =
          p.selected + (((b * p.q_tokens + first + t) * p.kv_heads) + hk) * p.num_slots;
      const int64_t position = this->position(p, t);
      for (int64_t i = 0; i < p.num_slots; i++) {
        const int32_t block = slots[i];
        if (block < 0 || block * p.block_kv > position || last[block] == t) continue;
        last[block] = (int32_t)t;
        f((int32_t)t, block);
      }
    }
  }

  void route(const Problem& p, const Routes& x) const {
    std::memset(x.begin, 0, static_cast<size_t>(p.kv_blocks + 1) * sizeof(int32_t));
    for_blocks(p, x.last, [&](int32_t, int32_t block) { x.begin[block + 1]++; });
    for (int64_t j = 0; j < p.kv_blocks; j++) {
      x.begin[j + 1] += x.begin[j];
      x.end[j] = x.begin[j];
    }
    for_blocks(p, x.last, [&](int32_t t, int32_t block) { x.query[x.end[block]++] = t; });
  }
};

// Rows of a tile: queries of one block, head after head.
class SelectedRows {
 public:
  // Calls f() for tiles of the queries of a block, after their rows are known.
  template <class F>
  void for_tiles(const Problem& p, const SelectedQueries& queries, const Routes& routes,
                 int64_t block, const TileRows& rows, Tile* tile, F&& f) {
    const int32_t* query = routes.query + routes.begin[block];
    const int64_t num = routes.begin[block + 1] - routes.begin[block];
    const int64_t last_key = min_of((block + 1) * p.block_kv, p.kv_tokens) - 1;
    int64_t g = 0, i = 0;
    while (num && g < p.group()) {
      int64_t r = 0;
      is_partial = false;
      for (; r < kTileRows && g < p.group(); r++) {
        row[r] = g * queries.stride + query[i];
        rows.token[r] = (int32_t)(queries.first + query[i]);
        rows.position[r] = queries.position(p, query[i]);
        rows.segment[r] = -1;
        rows.head[r] = (int32_t)queries.head(p, g);
        is_partial |= rows.position[r] < last_key;
        if (++i == num) g++, i = 0;
      }
      *tile = {queries.b, queries.head(p, 0), 0, 0, r, round_up(r, 2)};
      f();
    }
  }

  // Rows of the chunk into the tile; one that pads the last strip is `padding`.
  template <class T>
  void gather(const Tile& tile, const T* from, int64_t size, T* to, T padding) const {
    for (int64_t r = 0; r < tile.count; r++)
      std::memcpy(to + r * size, from + row[r] * size, static_cast<size_t>(size) * sizeof(T));
    for (int64_t i = tile.count * size; i < tile.padded * size; i++) to[i] = padding;
  }
  void scatter(const Tile& tile, const float* from, int64_t size, float* to) const {
    for (int64_t r = 0; r < tile.count; r++)
      std::memcpy(to + row[r] * size, from + r * size, static_cast<size_t>(size) * sizeof(float));
  }

  bool is_partial = false;
  int64_t row[kTileRows];  // of the chunk
};

class SelectedForward : TileSoftmax {
 public:
  SelectedForward(const Problem& p, const SelectedQueries& queries, char* scratch)
      : TileSoftmax(p, scratch), queries_(queries) {
    take_selected(scratch, sizes_of(p), &chunk_);
  }

  void run() {
    queries_.route(p_, chunk_.routes);
    queries_.for_tiles(p_, [&](const Tile& tile, int64_t row) {
      with_dtype(p_.dtype, [&](auto type) {
        load_queries<decltype(type)>(p_, tile, chunk_.q + row * arrays_.k_row, arrays_.k_row);
      });
    });
    SoftmaxRows states{};
    states.acc = chunk_.acc, states.m = chunk_.m, states.l = chunk_.l;
    init_rows(states, queries_.stride * p_.group(), padded_v_dim_);
    for (int64_t block = 0; block < p_.kv_blocks; block++)
      rows_.for_tiles(p_, queries_, chunk_.routes, block, x_.rows, &tile_,
                      [&] { compute_tile(block); });
    queries_.for_tiles(p_, [&](const Tile& tile, int64_t row) { store_tile(tile, row); });
  }

 private:
  void compute_tile(int64_t block) {
    const SoftmaxRows& x = x_.softmax;
    rows_.gather(tile_, chunk_.q, arrays_.k_row, x_.q, 0.f);
    rows_.gather(tile_, chunk_.acc, padded_v_dim_, x.acc, 0.f);
    rows_.gather(tile_, chunk_.m, 1, x.m, kNegInf);
    rows_.gather(tile_, chunk_.l, 1, x.l, 0.f);
    add_block(0, block, rows_.is_partial);
    flush();
    rows_.scatter(tile_, x.acc, padded_v_dim_, chunk_.acc);
    rows_.scatter(tile_, x.m, 1, chunk_.m);
    rows_.scatter(tile_, x.l, 1, chunk_.l);
  }

  void store_tile(const Tile& tile, int64_t row) {
    with_dtype(p_.dtype, [&](auto type) {
      for (int64_t r = 0; r < tile.count; r++)
        finalize_row<decltype(type)>(p_, tile.token_row(p_, r),
                                     chunk_.acc + (row + r) * padded_v_dim_, chunk_.m[row + r],
                                     chunk_.l[row + r]);
    });
  }

  const SelectedQueries queries_;
  SelectedScratch chunk_;
  SelectedRows rows_;
};

static void selected_chunk(const Problem& p, int64_t item, char* scratch) {
  FlushDenormals guard;
  // Heads of one chunk follow each other: their rows lie in the same pages.
  const int64_t head = item / p.q_blocks;
  const SelectedQueries queries(p, head / p.kv_heads, head % p.kv_heads, item % p.q_blocks);
  SelectedForward(p, queries, scratch).run();
}

// kv blocks of a range.
XS_INLINE Range blocks_of_range(const Problem& p, int64_t range, int64_t ranges) {
  return {range * p.kv_blocks / ranges, (range + 1) * p.kv_blocks / ranges};
}

class SelectedRange : TileGrads {
 public:
  SelectedRange(const Problem& p, int64_t item, const SelectedGradScratch& scratch)
      : TileGrads(p, scratch.grads), scratch_(scratch) {
    take_selected_grad_arrays(p.workspace, sizes_of(p), &arrays_);
    const int64_t heads = p.batch * p.kv_heads;
    ranges_ = num_ranges(p.batch, p.kv_heads, p.kv_tokens, p.block_kv);
    range_ = item / heads;
    blocks_ = blocks_of_range(p, range_, ranges_);
    b_ = item % heads / p.kv_heads;
    hk_ = item % p.kv_heads;
    const int64_t head = b_ * p.kv_heads + hk_;
    const int64_t key = (head * p.kv_blocks + blocks_.begin) * width_;
    dk_ = arrays_.dk + key * padded_dim_;
    dv_ = arrays_.dv + key * padded_v_dim_;
  }

  void run() {
    const auto keys = static_cast<size_t>((blocks_.end - blocks_.begin) * width_) * sizeof(float);
    std::memset(dk_, 0, keys * static_cast<size_t>(padded_dim_));
    std::memset(dv_, 0, keys * static_cast<size_t>(padded_v_dim_));
    for (int64_t chunk = 0; chunk < p_.q_blocks; chunk++)
      run_chunk(SelectedQueries(p_, b_, hk_, chunk));
    with_dtype(p_.dtype, [&](auto type) {
      store_keys<decltype(type)>(b_, hk_, blocks_.begin, blocks_.end, dk_, dv_);
    });
  }

 private:
  void run_chunk(const SelectedQueries& queries) {
    const auto rows = static_cast<size_t>(queries.stride * p_.group());
    std::memset(scratch_.dq, 0, rows * static_cast<size_t>(padded_dim_) * sizeof(float));
    const Routes& routes = scratch_.routes;
    queries.route(p_, routes);
    if (routes.begin[blocks_.begin] < routes.begin[blocks_.end]) {
      bool is_finite_chunk = true;
      queries.for_tiles(p_, [&](const Tile& tile, int64_t row) {
        with_dtype(p_.dtype, [&](auto type) {
          is_finite_chunk &= load_residuals<decltype(type)>(
              p_, tile, scratch_.chunk.from_row(row, padded_dim_, padded_v_dim_));
        });
      });
      for (int64_t block = blocks_.begin; block < blocks_.end; block++)
        rows_of_tile_.for_tiles(p_, queries, routes, block, x_.rows, &tile_,
                                [&] { compute_tile(block, is_finite_chunk); });
    }
    queries.for_tiles(p_, [&](const Tile& tile, int64_t row) {
      with_dtype(p_.dtype, [&](auto type) {
        store_queries<decltype(type)>(tile, scratch_.dq + row * padded_dim_);
      });
    });
  }

  void compute_tile(int64_t block, bool is_finite) {
    const QueryResiduals &from = scratch_.chunk, &to = scratch_.tile;
    const auto gather = [&](const auto* rows, int64_t size, auto* tile, auto padding) {
      rows_of_tile_.gather(tile_, rows, size, tile, padding);
    };
    gather(from.q, padded_dim_, to.q, 0.f);
    gather(from.do_, padded_v_dim_, to.do_, 0.f);
    gather(from.origin, 1, to.origin, RowOrigin{__builtin_inff(), 0.f, 1.f});
    gather(from.delta, 1, to.delta, 0.f);
    set_tile(tile_, to, is_finite);
    float* dq = scratch_.tile_dq;
    std::memset(dq, 0, static_cast<size_t>(tile_.padded * padded_dim_) * sizeof(float));
    for_steps(0, block, rows_of_tile_.is_partial, [&](const Piece& piece) {
      const int64_t key = (block - blocks_.begin) * width_ + piece.first;
      add_to_keys(piece, dk_ + key * padded_dim_, dv_ + key * padded_v_dim_);
      add_to_queries(piece, dq);
    });
    for (int64_t r = 0; r < tile_.count; r++)
      for (int64_t d = 0; d < padded_dim_; d += VL) {
        float* to_row = scratch_.dq + rows_of_tile_.row[r] * padded_dim_ + d;
        store(to_row, load(to_row) + load(dq + r * padded_dim_ + d));
      }
  }

  // dq, or the part of this range.
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

  const SelectedGradScratch scratch_;
  SelectedGradArrays arrays_;
  SelectedRows rows_of_tile_;
  int64_t ranges_, range_, b_, hk_;
  Range blocks_;
  float *dk_, *dv_;
};

static void selected_range(const Problem& p, int64_t item, char* scratch) {
  FlushDenormals guard;
  SelectedGradScratch x;
  take_selected_backward(scratch, sizes_of(p), &x);
  SelectedRange(p, item, x).run();
}

// dq of the query heads of one kv head: parts of the ranges in their order.
template <class T>
static void merge_queries(const Problem& p, int64_t item) {
  SelectedGradArrays x;
  take_selected_grad_arrays(p.workspace, sizes_of(p), &x);
  const int64_t ranges = num_ranges(p.batch, p.kv_heads, p.kv_tokens, p.block_kv);
  const int64_t part = p.batch * p.q_tokens * p.q_heads * p.dim, size = p.group() * p.dim;
  for (int64_t t = 0; t < p.q_tokens; t++) {
    const int64_t at =
        ((item / p.kv_heads * p.q_tokens + t) * p.kv_heads + item % p.kv_heads) * size;
    for (int64_t d = 0; d < size; d += VL) {
      vf sum = vf{};
      for (int64_t j = 0; j < ranges; j++) sum += load_upto(x.dq + j * part + at + d, size - d);
      store_upto(static_cast<T*>(p.dq) + at + d, sum, size - d);
    }
  }
}

static void selected_merge(const Problem& p, int64_t item) {
  FlushDenormals guard;
  with_dtype(p.dtype, [&](auto type) { merge_queries<decltype(type)>(p, item); });
}

}  // namespace xsake_cpu::XSAKE_ISA
