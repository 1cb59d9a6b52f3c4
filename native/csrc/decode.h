// Decode: few queries, many keys. Memory bandwidth is the limit, so K and V are read in place, once
// for all query heads of a kv head.
//
// A task is a (batch, kv head, chunk of 512 keys). Its rows are the pairs (query, head of the
// group), whose lists may differ: a block is computed if any row lists it, and masked for the others.
// The states of the chunks are merged in their order, so neither the batch nor the number of threads
// changes a result.
#pragma once

#include "backward.h"

namespace xsake_cpu::XSAKE_ISA {

// Rows and keys of a block of dot products: one vector of results.
constexpr int kDotRows = 4, kDotKeys = VL / kDotRows;

// s of kDotRows queries and kDotKeys keys.
XS_INLINE vf dot_products(const float* q, int64_t q_row, const float* k, int64_t k_row, int64_t dim) {
  vf acc[VL];
  XS_UNROLL for (int i = 0; i < VL; i++) acc[i] = vf{};
  for (int64_t d = 0; d < dim; d += VL) {
    vf x[kDotRows];
    XS_UNROLL for (int r = 0; r < kDotRows; r++) x[r] = load(q + r * q_row + d);
    XS_UNROLL for (int n = 0; n < kDotKeys; n++) {
      const vf y = load(k + n * k_row + d);
      XS_UNROLL for (int r = 0; r < kDotRows; r++) acc[r * kDotKeys + n] += x[r] * y;
    }
  }
  return sum_each(acc);
}

XS_INLINE void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kAlign)
    __builtin_prefetch(static_cast<const char*>(row) + i);
}

class DecodeTask {
 public:
  DecodeTask(const Problem& p, int64_t item, char* scratch) : p_(p) {
    take_decode(scratch, p.dim, p.v_dim, p.program ? p.program->num_steps : 0, &x_);
    take_decode_arrays(p.workspace, sizes_of(p), &arrays_);
    chunks_ = max_of(1, num_chunks(p.kv_blocks, p.block_kv));
    chunk_ = item % chunks_;
    b_ = item / chunks_ / p.kv_heads;
    hk_ = item / chunks_ % p.kv_heads;
    padded_dim_ = round_up(p.dim, VL);
    padded_v_dim_ = round_up(p.v_dim, kPanel);
  }

  void run() {
    const int64_t rows = p_.q_tokens * p_.group();
    for (first_ = 0; first_ < rows; first_ += kDecodeRows) {
      count_ = min_of(kDecodeRows, rows - first_);
      padded_ = round_up(count_, kDotRows);
      load_tile();
      const int64_t blocks = chunk_blocks(p_.block_kv), begin = chunk_ * blocks;
      for (int64_t j = begin; j < min_of(begin + blocks, p_.kv_blocks); j++) add_block(j);
      store_states();
    }
  }

 private:
  void load_tile() {
    for (int64_t r = 0; r < count_; r++) {
      const int64_t token = (first_ + r) / p_.group();
      x_.rows.token[r] = (int32_t)token;
      x_.rows.head[r] = (int32_t)(hk_ * p_.group() + (first_ + r) % p_.group());
      x_.rows.position[r] = (int32_t)token;
      if (p_.q_positions)
        x_.rows.position[r] = p_.q_positions[b_ % p_.q_positions_batch * p_.q_tokens + token];
      x_.rows.segment[r] = p_.q_segments ? p_.q_segments[b_ * p_.q_tokens + token] : -1;
    }
    with_dtype(p_.dtype, [&](auto type) { load_q<decltype(type)>(); });
    init_rows(x_.softmax, padded_, padded_v_dim_);
  }

  int64_t output_row(int64_t r) const {
    return (b_ * p_.q_tokens + x_.rows.token[r]) * p_.q_heads + x_.rows.head[r];
  }

  template <class T>
  void load_q() {
    const float factor = query_factor(p_);
    for (int64_t r = 0; r < padded_; r++)
      for (int64_t d = 0; d < padded_dim_; d += VL) {
        vf x = vf{};
        if (r < count_)
          x = load_upto(static_cast<const T*>(p_.q) + output_row(r) * p_.dim + d, p_.dim - d) * factor;
        store(x_.q + r * padded_dim_ + d, x);
      }
  }

  // The item of a list that is `kv_block`, or -1.
  int32_t find_item(int64_t row, int64_t kv_block) const {
    int32_t begin = p_.row_starts[row], end = p_.row_starts[row + 1];
    if (!p_.is_ascending) {
      for (; begin < end; begin++)
        if (p_.kv_block[begin] == kv_block) return begin;
      return -1;
    }
    while (begin < end) {
      const int32_t middle = begin + (end - begin) / 2;
      if (p_.kv_block[middle] < kv_block) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin < p_.row_starts[row + 1] && p_.kv_block[begin] == kv_block ? begin : -1;
  }

  void add_block(int64_t kv_block) {
    bool is_listed = false, is_masked = false;
    int64_t last_row = -1;
    for (int64_t r = 0; r < count_; r++) {
      const int64_t row = p_.list_row(b_, x_.rows.head[r], x_.rows.token[r] / p_.block_q);
      x_.rows.item[r] = row == last_row ? x_.rows.item[r - 1] : find_item(row, kv_block);
      last_row = row;
      const int32_t item = x_.rows.item[r];
      is_listed |= item >= 0;
      is_masked |= item < 0 || p_.is_partial[item];
    }
    if (!is_listed) return;
    const int64_t keys = min_of(p_.block_kv, p_.kv_tokens - kv_block * p_.block_kv);
    for (int64_t at = 0; at < keys; at += kStepKeys) {
      const int64_t count = min_of(kStepKeys, keys - at), width = round_up(count, kPanel);
      const Piece piece{nullptr, nullptr, kv_block, at, 0, width, count, is_masked || count < width};
      if (piece.is_masked)
        MaskBuilder(p_, x_.rows, x_.mask, b_).build(piece, count_, padded_, kPanel);
      with_dtype(p_.dtype, [&](auto type) { add_piece<decltype(type)>(piece); });
    }
  }

  template <class T>
  void add_piece(const Piece& piece) {
    const int64_t token = piece.kv_block * p_.block_kv + piece.first;
    const TokenRows<T> k = kv_rows<T>(p_, p_.k, p_.dim, b_, hk_, token, piece.count);
    const TokenRows<T> v = kv_rows<T>(p_, p_.v, p_.v_dim, b_, hk_, token, piece.count);
    if constexpr (std::is_same_v<T, float>) {
      // Whole vectors of finite values can stay where they are.
      if (p_.dim % VL == 0 && p_.v_dim % kPanel == 0 && is_finite_block(v))
        return add_rows(piece, k.data, k.stride, v.data, v.stride);
    }
    copy_rows(k, v);
    add_rows(piece, x_.k, padded_dim_, x_.v, padded_v_dim_);
  }

  XS_INLINE bool is_finite_block(const TokenRows<float>& v) {
    vi flaws = vi{};
    for (int64_t t = 0; t < v.count; t++) {
      const float* row = v.data + t * v.stride;
      prefetch_row(row + kAhead * v.stride, v.dim * 4);
      for (int64_t d = 0; d < v.dim; d += VL) flaws |= ~is_finite(load(row + d));
    }
    return !any(flaws);
  }

  template <class T>
  void copy_rows(const TokenRows<T>& k, const TokenRows<T>& v) {
    for (int64_t t = 0; t < v.count; t++) {
      prefetch_row(v.data + (t + kAhead) * v.stride, v.dim * (int64_t)sizeof(T));
      prefetch_row(k.data + (t + kAhead) * k.stride, k.dim * (int64_t)sizeof(T));
      vi flaws = vi{};
      for (int64_t d = 0; d < padded_v_dim_; d += VL) {
        vf x = vf{};
        if (d < v.dim) x = load_upto(v.data + t * v.stride + d, v.dim - d);
        const vi finite = is_finite(x);
        flaws |= ~finite;
        store(x_.v + t * padded_v_dim_ + d, select(finite, x, vf{}));
      }
      const bool is_bad = any(flaws);
      for (int64_t d = 0; d < padded_dim_; d += VL) {
        const vf x = load_upto(k.data + t * k.stride + d, k.dim - d);
        store(x_.k + t * padded_dim_ + d, is_bad ? splat(__builtin_nanf("")) : x);
      }
    }
  }

  void add_rows(const Piece& piece, const float* k, int64_t k_row, const float* v, int64_t v_row) {
    const SoftmaxRows& x = x_.softmax;
    clear_max(x, padded_);
    scores(piece, k, k_row);
    finish_scores(p_, piece, x_.rows, x_.mask, x, b_, count_);
    update_max(x, padded_);
    Piece whole = piece;  // hidden columns have p = 0: the product below reads all of them
    whole.is_masked = false;
    update_sums(x, x_.mask, &whole, 1, (int)padded_);
    for (int64_t r = 0; r < padded_; r += kDotRows)
      for (int64_t d = 0; d < padded_v_dim_; d += kPanel)
        scale_add<kDotRows>(x.s + r * kScoreStride, kScoreStride, v + d, v_row, piece.count,
                            x.acc + r * padded_v_dim_ + d, padded_v_dim_, x.alpha + r);
  }

  void scores(const Piece& piece, const float* k, int64_t k_row) {
    int64_t t = 0;
    for (; t + kDotKeys <= piece.count; t += kDotKeys) {
      for (int n = 0; n < kDotKeys; n++)
        prefetch_row(k + (t + n + kAhead) * k_row, p_.dim * 4);
      for (int64_t r = 0; r < padded_; r += kDotRows)
        store_dots(r, t, kDotKeys,
                   dot_products(x_.q + r * padded_dim_, padded_dim_, k + t * k_row, k_row, padded_dim_));
    }
    for (; t < piece.count; t++)
      for (int64_t r = 0; r < padded_; r += kDotRows)
        store_dots(r, t, 1,
                   dot_products(x_.q + r * padded_dim_, padded_dim_, k + t * k_row, 0, padded_dim_));
    // Columns without a key: masked, but not left undefined.
    for (int64_t r = 0; r < padded_; r++)
      for (int64_t c = piece.count; c < piece.width; c++) x_.softmax.s[r * kScoreStride + c] = kNegInf;
  }

  XS_INLINE void store_lanes(float* to, const float* from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = from[i];
  }
  void store_dots(int64_t r, int64_t t, int64_t keys, vf dots) {
    float lanes[VL];
    store(lanes, dots);
    for (int i = 0; i < kDotRows; i++)
      store_lanes(x_.softmax.s + (r + i) * kScoreStride + t, lanes + i * kDotKeys, keys);
  }

  void store_states() {
    for (int64_t r = 0; r < count_; r++) {
      const int64_t state = (output_row(r) * chunks_ + chunk_);
      arrays_.m[state] = x_.softmax.m[r];
      arrays_.l[state] = x_.softmax.l[r];
      const float* acc = x_.softmax.acc + r * padded_v_dim_;
      for (int64_t d = 0; d < p_.v_dim; d += VL)
        store_upto(arrays_.acc + state * p_.v_dim + d, load(acc + d), p_.v_dim - d);
    }
  }

  static constexpr int64_t kAhead = 8;  // rows: about 2 microseconds of memory traffic
  const Problem& p_;
  DecodeScratch x_;
  DecodeArrays arrays_;
  int64_t chunks_, chunk_, b_, hk_, padded_dim_, padded_v_dim_;
  int64_t first_ = 0, count_ = 0, padded_ = 0;
};

static void decode_chunk(const Problem& p, int64_t item, char* scratch) {
  FlushDenormals guard;
  DecodeTask(p, item, scratch).run();
}

// o and lse of one query and head from the states of its chunks.
template <class T>
static void merge_states(const Problem& p, const DecodeArrays& x, int64_t at, int64_t chunks) {
  const int64_t first = at * chunks;
  float m = kNegInf, l = 0;
  for (int64_t i = 0; i < chunks; i++) m = x.m[first + i] > m ? x.m[first + i] : m;
  const float m_safe = m == kNegInf ? 0.f : m;
  const auto alpha = [&](int64_t i) { return exp2(splat(x.m[first + i] - m_safe)); };
  for (int64_t i = 0; i < chunks; i++) l += alpha(i)[0] * x.l[first + i];
  const vf divisor = splat(l != 0 ? l : 1.f);
  T* o = static_cast<T*>(p.o) + at * p.v_dim;
  for (int64_t d = 0; d < p.v_dim; d += VL) {
    vf sum = vf{};
    for (int64_t i = 0; i < chunks; i++)
      sum += alpha(i) * load_upto(x.acc + (first + i) * p.v_dim + d, p.v_dim - d);
    store_upto(o + d, sum / divisor, p.v_dim - d);
  }
  p.lse[at] = l != 0 ? m * kLn2 + logf(l) : kNegInf;
}

static void decode_merge(const Problem& p, int64_t item) {
  FlushDenormals guard;
  DecodeArrays x;
  take_decode_arrays(p.workspace, sizes_of(p), &x);
  const int64_t chunks = max_of(1, num_chunks(p.kv_blocks, p.block_kv));
  const int64_t b = item / p.kv_heads, first = item % p.kv_heads * p.group();
  for (int64_t t = 0; t < p.q_tokens; t++)
    for (int64_t h = first; h < first + p.group(); h++)
      with_dtype(p.dtype, [&](auto type) {
        merge_states<decltype(type)>(p, x, (b * p.q_tokens + t) * p.q_heads + h, chunks);
      });
}

}  // namespace xsake_cpu::XSAKE_ISA
