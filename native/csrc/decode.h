// Decode: few queries, many keys. Memory bandwidth is the limit, so K and V are read in place, once
// for all query heads of a kv head.
//
// A task is a (batch, kv head, chunk of 512 keys). Its rows are the pairs (query, head of the
// group), whose lists may differ: a block is computed if any row lists it, and masked for the
// others. The states of the chunks are merged in their order, so neither the batch nor the number
// of threads changes a result.
#pragma once

#include "backward.h"

namespace xsake_cpu::XSAKE_ISA {

// Rows and keys of a block of dot products: one vector of results.
constexpr int kDotRows = 4, kDotKeys = VL / kDotRows;

// s of kDotRows queries and kDotKeys keys.
template <class T>
XS_INLINE vf dot_products(const float* q, int64_t q_row, const T* k, int64_t k_row, int64_t dim) {
  vf acc[VL];
  XS_FOR (i, VL) acc[i] = vf{};
  for (int64_t d = 0; d < dim; d += VL) {
    vf x[kDotRows];
    XS_FOR (r, kDotRows) x[r] = load(q + r * q_row + d);
    XS_FOR (n, kDotKeys) {
      const vf y = load(k + n * k_row + d);
      XS_FOR (r, kDotRows) acc[r * kDotKeys + n] += x[r] * y;
    }
  }
  return sum_each(acc);
}

// acc = alpha acc + p v for kDotRows rows and N vectors of columns; returns NaN lanes if a value of
// v is not finite, without a pass of its own over v.
template <int N, class T>
XS_NOINLINE vf add_values(const float* p, const T* v, int64_t v_row, int64_t keys, float* acc,
                          int64_t acc_row, const float* alpha) {
  vf sum[kDotRows][N], zero[N];
  clear(sum);
  XS_FOR (n, N) zero[n] = vf{};
  for (int64_t t = 0; t < keys; t++) {
    const T* row = v + t * v_row;
    prefetch_row(row + kAhead * v_row, N * VL);
    vf y[N];
    XS_FOR (n, N) y[n] = load(row + n * VL);
    XS_FOR (n, N) zero[n] += y[n] * 0.f;
    XS_FOR (r, kDotRows) {
      const vf x = splat(p[r * kScoreStride + t]);
      XS_FOR (n, N) sum[r][n] += x * y[n];
    }
  }
  XS_FOR (r, kDotRows)
    XS_FOR (n, N) {
      float* to = acc + r * acc_row + n * VL;
      store(to, load(to) * alpha[r] + sum[r][n]);
    }
  XS_UNROLL
  for (int n = 1; n < N; n++) zero[0] += zero[n];
  return zero[0];
}

class DecodeTask {
 public:
  DecodeTask(const Problem& p, int64_t item, char* scratch) : p_(p) {
    take_decode(scratch, p.dim, p.v_dim, p.program ? p.program->num_steps : 0, &x_);
    take_decode_arrays(p.workspace, sizes_of(p), &arrays_);
    chunks_ = max_of(1, num_chunks(p.kv_blocks, p.block_kv));
    // Heads of one chunk follow each other: their rows lie in the same pages.
    hk_ = item % p.kv_heads;
    chunk_ = item / p.kv_heads % chunks_;
    b_ = item / p.kv_heads / chunks_;
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
          x = load_upto(static_cast<const T*>(p_.q) + output_row(r) * p_.dim + d, p_.dim - d) *
              factor;
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
      const Piece piece{nullptr, nullptr, kv_block, at,
                        0,       width,   count,    is_masked || count < width};
      if (piece.is_masked)
        MaskBuilder(p_, x_.rows, x_.mask, b_).build<kPanel>(piece, count_, padded_);
      with_dtype(p_.dtype, [&](auto type) { add_piece<decltype(type)>(piece); });
    }
  }

  template <class T>
  void add_piece(const Piece& piece) {
    const int64_t token = piece.kv_block * p_.block_kv + piece.first;
    const TokenRows<T> k = kv_rows<T>(p_, p_.k, p_.dim, b_, hk_, token, piece.count);
    const TokenRows<T> v = kv_rows<T>(p_, p_.v, p_.v_dim, b_, hk_, token, piece.count);
    // Whole vectors of finite values can stay where they are. Others are so rare that the step is
    // computed again, from a copy. Narrow values are widened for every kDotRows rows.
    const bool is_cheap = std::is_same_v<T, float> || (VL > 4 && padded_ <= 2 * kDotRows);
    if (is_cheap && p_.dim % VL == 0 && p_.v_dim % kPanel == 0) {
      save_state();
      if (add_rows(piece, k.data, k.stride, v.data, v.stride)) return;
      restore_state();
    }
    copy_rows(k, v);
    add_rows<float>(piece, x_.k, padded_dim_, x_.v, padded_v_dim_);
  }

  void save_state() { copy_state(x_.softmax.acc, x_.softmax.m, x_.softmax.l, x_.acc, x_.m, x_.l); }
  void restore_state() {
    copy_state(x_.acc, x_.m, x_.l, x_.softmax.acc, x_.softmax.m, x_.softmax.l);
  }
  void copy_state(const float* acc, const float* m, const float* l, float* to_acc, float* to_m,
                  float* to_l) const {
    std::memcpy(to_acc, acc, static_cast<size_t>(padded_ * padded_v_dim_) * sizeof(float));
    std::memcpy(to_m, m, static_cast<size_t>(padded_) * sizeof(float));
    std::memcpy(to_l, l, static_cast<size_t>(padded_) * sizeof(float));
  }

  template <class T>
  void copy_rows(const TokenRows<T>& k, const TokenRows<T>& v) {
    for (int64_t t = 0; t < v.count; t++) {
      prefetch_row(v.data + (t + kAhead) * v.stride, v.dim);
      prefetch_row(k.data + (t + kAhead) * k.stride, k.dim);
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

  // False if a value of v is not finite.
  template <class T>
  bool add_rows(const Piece& piece, const T* k, int64_t k_row, const T* v, int64_t v_row) {
    const SoftmaxRows& x = x_.softmax;
    clear_max(x, padded_);
    scores(piece, k, k_row);
    finish_scores(p_, piece, x_.rows, x_.mask, x, b_, count_);
    update_max(x, padded_);
    Piece whole = piece;  // hidden columns have p = 0: the product below reads all of them
    whole.is_masked = false;
    update_sums(x, x_.mask, &whole, 1, (int)padded_);
    vf zero = vf{};
    int64_t d = 0;
    for (; d + kWide * VL <= padded_v_dim_; d += kWide * VL)
      for (int64_t r = 0; r < padded_; r += kDotRows)
        zero += add_values<kWide>(x.s + r * kScoreStride, v + d, v_row, piece.count,
                                  x.acc + r * padded_v_dim_ + d, padded_v_dim_, x.alpha + r);
    for (; d < padded_v_dim_; d += kPanel)
      for (int64_t r = 0; r < padded_; r += kDotRows)
        zero += add_values<kVectors>(x.s + r * kScoreStride, v + d, v_row, piece.count,
                                     x.acc + r * padded_v_dim_ + d, padded_v_dim_, x.alpha + r);
    return !any(zero != zero);
  }

  template <class T>
  void scores(const Piece& piece, const T* k, int64_t k_row) {
    int64_t t = 0;
    for (; t + kDotKeys <= piece.count; t += kDotKeys) {
      for (int n = 0; n < kDotKeys; n++) prefetch_row(k + (t + n + kAhead) * k_row, p_.dim);
      for (int64_t r = 0; r < padded_; r += kDotRows)
        store_dots(
            r, t, kDotKeys,
            dot_products(x_.q + r * padded_dim_, padded_dim_, k + t * k_row, k_row, padded_dim_));
    }
    for (; t < piece.count; t++)
      for (int64_t r = 0; r < padded_; r += kDotRows)
        store_dots(
            r, t, 1,
            dot_products(x_.q + r * padded_dim_, padded_dim_, k + t * k_row, 0, padded_dim_));
    // Columns without a key: masked, but not left undefined.
    for (int64_t r = 0; r < padded_; r++)
      for (int64_t c = piece.count; c < piece.width; c++)
        x_.softmax.s[r * kScoreStride + c] = kNegInf;
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

  static constexpr int kWide = VL == 16 ? 2 * kVectors : kVectors;
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
  p.lse[at] = l != 0 ? m * kLn2 + (m * kLn2Low + logf(l)) : kNegInf;
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
