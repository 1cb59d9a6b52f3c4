// Decode: few queries, many keys. Memory bandwidth is the limit, so K and V are read in place, once
// for all query heads of a kv head.
//
// A task is a (batch, chunk of 512 keys, as many kv heads as have 64 rows together). The rows of a
// head are the pairs (query, head of the group), whose lists may differ: a block is computed if any
// row lists it, and masked for the others. The states of the chunks are merged in their order, so
// neither the batch nor the number of threads changes a result.
#pragma once

#include "backward.h"

namespace xsake_cpu::XSAKE_ISA {

// Keys of a block of dot products with kDotRows rows: one vector of results.
constexpr int kDotKeys = VL / kDotRows;

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

// acc = alpha acc + p v for kDotRows rows and N vectors of columns, alpha by row; null: 1. Returns
// NaN lanes if a value of v is not finite, without a pass of its own over v.
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
  XS_FOR (r, kDotRows) {
    const vf x = splat(alpha ? alpha[r] : 1.f);
    XS_FOR (n, N) {
      float* to = acc + r * acc_row + n * VL;
      store(to, load(to) * x + sum[r][n]);
    }
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
    task_ = decode_task(p, item);
    padded_dim_ = round_up(p.dim, VL);
    padded_v_dim_ = round_up(p.v_dim, kPanel);
  }

  void run() {
    const int64_t rows = p_.q_tokens * p_.group();
    const int64_t blocks = chunk_blocks(p_.block_kv), begin = task_.chunk * blocks;
    for (first_ = 0; first_ < rows; first_ += kDecodeRows) {
      count_ = min_of(kDecodeRows, rows - first_);
      padded_ = round_up(count_, kDotRows);
      load_tile();
      for (int64_t j = begin; j < min_of(begin + blocks, p_.kv_blocks); j++) add_block(j);
      store_states();
    }
  }

 protected:
  // Rows of one kv head of the task, and what its lists say of a block.
  struct Head {
    int64_t hk;
    float* q;
    SoftmaxRows softmax;
    TileRows rows;
    float *acc, *m, *l;  // before the last step
    bool is_listed, is_masked, is_in_place;
  };

  void load_tile() {
    for (int64_t i = 0; i < task_.num_heads; i++) {
      Head& x = heads_[i];
      const int64_t at = i * padded_;
      x.hk = task_.first_head + i;
      x.q = x_.q + at * padded_dim_;
      x.softmax = {x_.softmax.acc + at * padded_v_dim_,
                   x_.softmax.s + at * kScoreStride,
                   x_.softmax.row_max + at * kMaxVector,
                   x_.softmax.m + at,
                   x_.softmax.l + at,
                   x_.softmax.alpha + at};
      x.rows = {x_.rows.token + at, x_.rows.position + at, x_.rows.segment + at, x_.rows.head + at,
                x_.rows.item + at};
      x.acc = x_.acc + at * padded_v_dim_;
      x.m = x_.m + at;
      x.l = x_.l + at;
      load_head(x);
    }
  }

  void load_head(Head& x) {
    for (int64_t r = 0; r < count_; r++) {
      const int64_t token = (first_ + r) / p_.group();
      x.rows.token[r] = (int32_t)token;
      x.rows.head[r] = (int32_t)(x.hk * p_.group() + (first_ + r) % p_.group());
      x.rows.position[r] = (int32_t)token;
      if (p_.q_positions)
        x.rows.position[r] = p_.q_positions[task_.b % p_.q_positions_batch * p_.q_tokens + token];
      x.rows.segment[r] = p_.q_segments ? p_.q_segments[task_.b * p_.q_tokens + token] : -1;
    }
    with_dtype(p_.dtype, [&](auto type) { load_q<decltype(type)>(x); });
    init_rows(x.softmax, padded_, padded_v_dim_);
  }

  int64_t output_row(const Head& x, int64_t r) const {
    return (task_.b * p_.q_tokens + x.rows.token[r]) * p_.q_heads + x.rows.head[r];
  }

  template <class T>
  void load_q(const Head& x) {
    const float factor = query_factor(p_);
    for (int64_t r = 0; r < padded_; r++)
      for (int64_t d = 0; d < padded_dim_; d += VL) {
        vf q = vf{};
        if (r < count_)
          q = load_upto(static_cast<const T*>(p_.q) + output_row(x, r) * p_.dim + d, p_.dim - d) *
              factor;
        store(x.q + r * padded_dim_ + d, q);
      }
  }

  // The item of a list that is `kv_block`, or -1.
  int32_t find_item(int64_t row, int64_t kv_block) const {
    const int32_t end = p_.row_starts[row + 1];
    int32_t item = p_.is_ascending ? first_item(p_, row, kv_block) : p_.row_starts[row];
    while (!p_.is_ascending && item < end && p_.kv_block[item] != kv_block) item++;
    return item < end && p_.kv_block[item] == kv_block ? item : -1;
  }

  void find_items(Head& x, int64_t kv_block) const {
    x.is_listed = x.is_masked = false;
    int64_t last_row = -1;
    for (int64_t r = 0; r < count_; r++) {
      const int64_t row = p_.list_row(task_.b, x.rows.head[r], x.rows.token[r] / p_.block_q);
      x.rows.item[r] = row == last_row ? x.rows.item[r - 1] : find_item(row, kv_block);
      last_row = row;
      const int32_t item = x.rows.item[r];
      x.is_listed |= item >= 0;
      x.is_masked |= item < 0 || p_.is_partial[item];
    }
  }

  void add_block(int64_t kv_block) {
    for (int64_t i = 0; i < task_.num_heads; i++) find_items(heads_[i], kv_block);
    const int64_t keys = min_of(p_.block_kv, p_.kv_tokens - kv_block * p_.block_kv);
    for (int64_t at = 0; at < keys; at += kStepKeys) {
      const int64_t count = min_of(kStepKeys, keys - at);
      const Piece piece{nullptr, nullptr, kv_block, at, 0, round_up(count, kPanel), count, false};
      with_dtype(p_.dtype, [&](auto type) { add_piece<decltype(type)>(piece); });
    }
  }

  // Whole vectors of finite values can stay where they are. Others are so rare that the step is
  // computed again, from a copy. Narrow values are widened for every kDotRows rows.
  template <class T>
  void add_piece(const Piece& piece) {
    const bool is_cheap = std::is_same_v<T, float> || (VL > 4 && padded_ <= 2 * kDotRows);
    if (is_cheap && p_.dim % VL == 0 && p_.v_dim % kPanel == 0) {
      add_in_place<T>(piece);
    } else {
      for_listed([&](Head& x) { add_copy<T>(x, piece); });
    }
  }

  // Heads take turns every few keys: their rows lie in the same pages, which are read once, in
  // their order.
  template <class T>
  void add_in_place(const Piece& piece) {
    for (int64_t t = 0; t < piece.count; t += kTurnKeys) {
      const int64_t end = min_of(t + kTurnKeys, piece.count);
      for_listed([&](Head& x) {
        const TokenRows<T> k = keys<T>(x, piece);
        find_scores(x, x.softmax.s, k.data, k.stride, t, end);
      });
    }
    for_listed([&](Head& x) {
      copy_state(x.softmax.acc, x.softmax.m, x.softmax.l, x.acc, x.m, x.l);
      update(x, piece);
      x.is_in_place = true;
    });
    for (int64_t t = 0; t < piece.count; t += kTurnKeys) {
      const int64_t end = min_of(t + kTurnKeys, piece.count);
      for_listed([&](Head& x) {
        const TokenRows<T> v = values<T>(x, piece);
        x.is_in_place &= add_rows(x, x.softmax.s, v.data, v.stride, t, end,
                                  t ? nullptr : x.softmax.alpha);
      });
    }
    for_listed([&](Head& x) {
      if (x.is_in_place) return;
      copy_state(x.acc, x.m, x.l, x.softmax.acc, x.softmax.m, x.softmax.l);
      add_copy<T>(x, piece);
    });
  }

  template <class T>
  void add_copy(Head& x, const Piece& piece) {
    copy_rows(keys<T>(x, piece), values<T>(x, piece), 0);
    find_scores(x, x.softmax.s, x_.k, padded_dim_, 0, piece.count);
    update(x, piece);
    add_rows(x, x.softmax.s, x_.v, padded_v_dim_, 0, piece.count, x.softmax.alpha);
  }

  template <class F>
  void for_listed(F&& f) {
    for (int64_t i = 0; i < task_.num_heads; i++)
      if (heads_[i].is_listed) f(heads_[i]);
  }
  template <class T>
  TokenRows<T> keys(const Head& x, const Piece& piece) const {
    return kv_rows<T>(p_, p_.k, p_.dim, task_.b, x.hk, first_token(piece), piece.count);
  }
  template <class T>
  TokenRows<T> values(const Head& x, const Piece& piece) const {
    return kv_rows<T>(p_, p_.v, p_.v_dim, task_.b, x.hk, first_token(piece), piece.count);
  }
  int64_t first_token(const Piece& piece) const {
    return piece.kv_block * p_.block_kv + piece.first;
  }

  void copy_state(const float* acc, const float* m, const float* l, float* to_acc, float* to_m,
                  float* to_l) const {
    std::memcpy(to_acc, acc, static_cast<size_t>(padded_ * padded_v_dim_) * sizeof(float));
    std::memcpy(to_m, m, static_cast<size_t>(padded_) * sizeof(float));
    std::memcpy(to_l, l, static_cast<size_t>(padded_) * sizeof(float));
  }

  template <class T>
  void copy_rows(const TokenRows<T>& k, const TokenRows<T>& v, int64_t first) {
    float *to_k = x_.k + first * padded_dim_, *to_v = x_.v + first * padded_v_dim_;
    for (int64_t t = 0; t < v.count; t++) {
      prefetch_row(v.data + (t + kAhead) * v.stride, v.dim);
      prefetch_row(k.data + (t + kAhead) * k.stride, k.dim);
      vi flaws = vi{};
      for (int64_t d = 0; d < padded_v_dim_; d += VL) {
        vf x = vf{};
        if (d < v.dim) x = load_upto(v.data + t * v.stride + d, v.dim - d);
        const vi finite = is_finite(x);
        flaws |= ~finite;
        store(to_v + t * padded_v_dim_ + d, select(finite, x, vf{}));
      }
      const bool is_bad = any(flaws);
      for (int64_t d = 0; d < padded_dim_; d += VL) {
        const vf x = load_upto(k.data + t * k.stride + d, k.dim - d);
        store(to_k + t * padded_dim_ + d, is_bad ? splat(__builtin_nanf("")) : x);
      }
    }
  }

  // s of keys [t, end) of a piece, whose columns start at `s`.
  template <class T>
  void find_scores(const Head& x, float* s, const T* k, int64_t k_row, int64_t t, int64_t end) {
    for (; t + kDotKeys <= end; t += kDotKeys) {
      for (int n = 0; n < kDotKeys; n++) prefetch_row(k + (t + n + kAhead) * k_row, p_.dim);
      for (int64_t r = 0; r < padded_; r += kDotRows)
        store_dots(
            s + r * kScoreStride + t, kDotKeys,
            dot_products(x.q + r * padded_dim_, padded_dim_, k + t * k_row, k_row, padded_dim_));
    }
    for (; t < end; t++)
      for (int64_t r = 0; r < padded_; r += kDotRows)
        store_dots(s + r * kScoreStride + t, 1,
                   dot_products(x.q + r * padded_dim_, padded_dim_, k + t * k_row, 0, padded_dim_));
  }

  void store_dots(float* s, int64_t keys, vf dots) {
    float lanes[VL];
    store(lanes, dots);
    for (int i = 0; i < kDotRows; i++)
      for (int64_t n = 0; n < keys; n++) s[i * kScoreStride + n] = lanes[i * kDotKeys + n];
  }

  // s -> p, and m, l, alpha.
  void update(Head& x, Piece piece) {
    // Columns without a key: masked, but not left undefined.
    for (int64_t r = 0; r < padded_; r++)
      for (int64_t c = piece.count; c < piece.width; c++)
        x.softmax.s[r * kScoreStride + c] = kNegInf;
    piece.is_masked = x.is_masked || piece.count < piece.width;
    if (piece.is_masked)
      MaskBuilder(p_, x.rows, x_.mask, task_.b).build<kPanel>(piece, count_, padded_);
    clear_max(x.softmax, padded_);
    finish_scores(p_, piece, x.rows, x_.mask, x.softmax, task_.b, count_);
    update_max(x.softmax, padded_);
    piece.is_masked = false;  // hidden columns have p = 0: the product below reads all of them
    update_sums(x.softmax, x_.mask, &piece, 1, (int)padded_);
  }

  // acc = alpha acc + p v of keys [t, end) of a piece, whose columns start at `p`; alpha null: 1.
  // False if a value of v is not finite.
  template <class T>
  bool add_rows(const Head& x, const float* p, const T* v, int64_t v_row, int64_t t, int64_t end,
                const float* alpha) {
    vf zero = vf{};
    const auto add = [&](auto width, int64_t d) {
      for (int64_t r = 0; r < padded_; r += kDotRows)
        zero += add_values<decltype(width)::value>(
            p + r * kScoreStride + t, v + t * v_row + d, v_row, end - t,
            x.softmax.acc + r * padded_v_dim_ + d, padded_v_dim_, alpha ? alpha + r : nullptr);
    };
    int64_t d = 0;
    for (; d + kWide * VL <= padded_v_dim_; d += kWide * VL) add(Rows<kWide>{}, d);
    for (; d < padded_v_dim_; d += kPanel) add(Rows<kVectors>{}, d);
    return !any(zero != zero);
  }

  void store_states() {
    const int64_t chunks = num_chunks(p_.kv_blocks, p_.block_kv);
    for (int64_t i = 0; i < task_.num_heads; i++)
      for (int64_t r = 0; r < count_; r++) {
        const Head& x = heads_[i];
        const int64_t state = output_row(x, r) * chunks + task_.chunk;
        arrays_.m[state] = x.softmax.m[r];
        arrays_.l[state] = x.softmax.l[r];
        const float* acc = x.softmax.acc + r * padded_v_dim_;
        for (int64_t d = 0; d < p_.v_dim; d += VL)
          store_upto(arrays_.acc + state * p_.v_dim + d, load(acc + d), p_.v_dim - d);
      }
  }

  static constexpr int kWide = VL == 16 ? 2 * kVectors : kVectors;
  static constexpr int64_t kTurnKeys = 16;
  const Problem& p_;
  DecodeItem task_;
  DecodeScratch x_;
  DecodeArrays arrays_;
  Head heads_[kDecodeRows / kDotRows];
  int64_t padded_dim_, padded_v_dim_;
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
  const int64_t chunks = num_chunks(p.kv_blocks, p.block_kv);
  const int64_t b = item / p.kv_heads, first = item % p.kv_heads * p.group();
  for (int64_t t = 0; t < p.q_tokens; t++)
    for (int64_t h = first; h < first + p.group(); h++)
      with_dtype(p.dtype, [&](auto type) {
        merge_states<decltype(type)>(p, x, (b * p.q_tokens + t) * p.q_heads + h, chunks);
      });
}

}  // namespace xsake_cpu::XSAKE_ISA
