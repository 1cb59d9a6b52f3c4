// Copies of K and V in the order in which the microkernels read them, widened to float32.
//
// In [B, T, H, D] the rows of one head are a page apart and compete for few cache sets. Panels are
// contiguous. Values that are not finite are isolated here, as online_softmax.isolate_nonfinite
// does: they become 0 in V and their key becomes NaN, so that only queries which see the key are
// affected.
#pragma once

#include "gemm.h"

namespace xsake_cpu::XSAKE_ISA {

// Tokens of one head: row t starts at data + t * stride.
template <class T>
struct TokenRows {
  const T* data;
  int64_t stride;
  int64_t count;  // rows after it are zeros
  int64_t dim;
};

XS_INLINE int64_t padded_block(const Problem& p) { return round_up(p.block_kv, kPanel); }

// Rows of `from` -> panels [dim / kPanel][width][kPanel], from row `first` of the panels on;
// finite. Rows with other values are marked in `bad`, unless it is null.
template <class T>
static void pack_rows(const TokenRows<T>& from, int64_t padded_rows, float* to, int64_t width,
                      int8_t* bad) {
  const int64_t padded_dim = round_up(from.dim, kPanel);
  for (int64_t t = 0; t < padded_rows; t++) {
    const T* row = from.data + t * from.stride;
    prefetch_row(row + kAhead * from.stride, from.dim);
    vi flaws = vi{};
    for (int64_t d = 0; d < padded_dim; d += VL) {
      vf x = vf{};
      if (t < from.count && d < from.dim) x = load_upto(row + d, from.dim - d);
      const vi finite = is_finite(x);
      flaws |= ~finite;
      store(to + d / kPanel * kPanel * width + t * kPanel + d % kPanel, select(finite, x, vf{}));
    }
    if (bad) bad[t] = any(flaws) ? 1 : 0;
  }
}

// Rows of `from` -> panels [padded_rows / kPanel][dim][kPanel]. Rows marked in `bad` become NaN;
// without `bad`, values that are not finite become 0.
template <class T>
static void pack_transposed(const TokenRows<T>& from, int64_t padded_rows, float* to,
                            const int8_t* bad) {
  for (int64_t t = 0; t < padded_rows; t += VL) {
    float* panel = to + t / kPanel * kPanel * from.dim + t % kPanel;
    for (int64_t i = VL; i < 2 * VL; i++) prefetch_row(from.data + (t + i) * from.stride, from.dim);
    for (int64_t d = 0; d < from.dim; d += VL) {
      const int64_t n = min_of(VL, from.dim - d);
      vf x[VL];
      XS_FOR (i, VL) {
        x[i] = vf{};
        if (t + i >= from.count) continue;
        x[i] = load_upto(from.data + (t + i) * from.stride + d, n);
        if (!bad) {
          x[i] = select(is_finite(x[i]), x[i], vf{});
        } else if (bad[t + i]) {
          x[i] = splat(__builtin_nanf(""));
        }
      }
      transpose(x);
      if (n == VL) {
        XS_FOR (i, VL) store(panel + (d + i) * kPanel, x[i]);
      } else {
        for (int64_t i = 0; i < n; i++) store(panel + (d + i) * kPanel, x[i]);
      }
    }
  }
}

// Rows of a kv head from token `first` on.
template <class T>
XS_INLINE TokenRows<T> kv_rows(const Problem& p, const void* data, int64_t dim, int64_t b,
                               int64_t hk, int64_t first, int64_t count) {
  const T* base = static_cast<const T*>(data);
  return {base + ((b * p.kv_tokens + first) * p.kv_heads + hk) * dim, p.kv_heads * dim, count, dim};
}

// The kv block of a packing task. Heads of one block follow each other: their rows lie in the same
// pages.
struct PackedBlock {
  int64_t b, hk, kv_block, index;
};
XS_INLINE PackedBlock packed_block(const Problem& p, int64_t item) {
  PackedBlock x;
  x.hk = item % p.kv_heads;
  x.kv_block = item / p.kv_heads % p.kv_blocks;
  x.b = item / p.kv_heads / p.kv_blocks;
  x.index = (x.b * p.kv_heads + x.hk) * p.kv_blocks + x.kv_block;
  return x;
}

// The first item of a row's list, if it ascends, whose block is not below `kv_block`.
XS_INLINE int32_t first_item(const Problem& p, int64_t row, int64_t kv_block) {
  int32_t begin = p.row_starts[row], end = p.row_starts[row + 1];
  while (begin < end) {
    const int32_t middle = begin + (end - begin) / 2;
    if (p.kv_block[middle] < kv_block) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Calls f(first key in the block, padded keys, keys of the sequence) for parts of a block.
template <class F>
XS_INLINE void for_parts(const Problem& p, int64_t kv_block, F&& f) {
  const int64_t first = kv_block * p.block_kv;
  const int64_t end = min_of(p.kv_tokens, first + p.block_kv);
  const int64_t padded = padded_block(p);
  for (int64_t at = 0; at < padded; at += kStepKeys)
    f(at, min_of(kStepKeys, padded - at), max_of(0, min_of(end - first - at, kStepKeys)));
}

// Calls f(T{}) with the type of the arrays.
template <class F>
XS_INLINE void with_dtype(DType dtype, F&& f) {
  if (dtype == DType::f32) {
    f(float{});
  } else if (dtype == DType::bf16) {
    f(bf16{});
  } else {
    f(f16{});
  }
}

}  // namespace xsake_cpu::XSAKE_ISA
