// Products of bfloat16 by AMX: a register tile is 16 rows of 64 bytes, a product adds 16 x 16 sums
// of 32 terms in float32.
//
// The second operand of a product holds pairs of neighbouring terms in words: word (i, n) is terms
// 2i and 2i + 1 of column n. With words in place of floats, panels of keys and values have the
// layout of pack.h and half the rows.
#pragma once

#include "pack.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace xsake_cpu::XSAKE_ISA {

// Whether a call is computed by register tiles. A row of words has no rest then.
XS_INLINE bool has_tiles(const Problem& p) {
#if defined(__AMX_BF16__)
  return p.dtype == DType::bf16 && p.dim % 32 == 0;
#else
  (void)p;
  return false;
#endif
}

// Rows of `from` -> panels [dim / kPanel][width / 2][kPanel] of words, each a pair of rows; finite.
// Rows with other values are marked in `bad`.
static void pack_pairs(const TokenRows<bf16>& from, int64_t padded_rows, float* to, int64_t width,
                       int8_t* bad) {
  const int64_t padded_dim = round_up(from.dim, kPanel);
  for (int64_t t = 0; t < padded_rows; t += 2) {
    const bf16* row = from.data + t * from.stride;
    prefetch_row(row + kAhead * from.stride, from.dim);
    prefetch_row(row + (kAhead + 1) * from.stride, from.dim);
    vi flaws[2] = {};
    for (int64_t d = 0; d < padded_dim; d += VL) {
      vu words = vu{};
      for (int i = 0; i < 2; i++) {
        if (t + i >= from.count || d >= from.dim) continue;
        const vf x = load_upto(row + i * from.stride + d, from.dim - d);
        const vi finite = is_finite(x);
        flaws[i] |= ~finite;
        const vu bits = (vu)select(finite, x, vf{});
        words |= i ? bits : bits >> 16;
      }
      store(to + d / kPanel * kPanel * (width / 2) + t / 2 * kPanel + d % kPanel, (vf)words);
    }
    for (int i = 0; i < 2; i++) bad[t + i] = any(flaws[i]) ? 1 : 0;
  }
}

#if defined(__AMX_BF16__)

// Register tiles of this thread, while it lives.
class Registers {
 public:
  explicit Registers(bool is_used) : is_used_(is_used) {
    if (!is_used_) return;
    alignas(64) static constexpr struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~Registers() {
    if (is_used_) _tile_release();
  }
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;

 private:
  const bool is_used_;
};

constexpr int kTile = 16;              // rows and columns of sums
constexpr int kTileStrip = 2 * kTile;  // rows of a strip
constexpr int kTileDepth = 2 * kTile;  // terms of a product
static_assert(kPanel == 2 * kTile);

// The compiler does not see that the intrinsics read memory.
XS_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

XS_INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Sums += a b: M rows of tiles, 32 terms; strides in bytes.
template <int M>
XS_INLINE void add_product(const void* a, int64_t a_row) {
  _tile_loadd(4, a, a_row);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (M > 1) {
    _tile_loadd(5, static_cast<const char*>(a) + kTile * a_row, a_row);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
XS_INLINE void load_columns(const float* words) {
  _tile_loadd(6, words, kPanel * 4);
  _tile_loadd(7, words + kTile, kPanel * 4);
}
template <int M>
XS_INLINE void store_sums(float* c, int64_t c_row) {
  _tile_stored(0, c, c_row * 4);
  _tile_stored(1, c + kTile, c_row * 4);
  if constexpr (M > 1) {
    _tile_stored(2, c + kTile * c_row, c_row * 4);
    _tile_stored(3, c + kTile * c_row + kTile, c_row * 4);
  }
}

// s = q k of M row tiles and a panel; rows of q are `words` words long.
template <int M>
XS_NOINLINE void multiply_queries(const float* q, const float* k, int64_t words, float* s) {
  finish_stores();
  clear_sums();
  for (int64_t i = 0; i < words; i += kTile) {
    load_columns(k + i * kPanel);
    add_product<M>(q + i, words * 4);
  }
  store_sums<M>(s, kScoreStride);
}

// Sums += p v of M row tiles and a panel of values. Panels of p are split: see SplitPanel.
template <int M>
XS_NOINLINE void add_split_product(const float* p, const float* v, int64_t keys) {
  finish_stores();
  for (int64_t c = 0; c < keys; c += kTileDepth) {
    load_columns(v + c / 2 * kPanel);
    add_product<M>(p + c, kScoreStride * 4);
    add_product<M>(p + c + kTile, kScoreStride * 4);
  }
}

// A panel of p becomes the upper halves of 32 floats and the 32 rests, so that 16 bits of p count.
struct SplitPanel {
  XS_INLINE void put(float* to, const vf (&p)[kVectors]) {
    typedef uint16_t Halves __attribute__((vector_size(64)));
    const Halves high = __builtin_shufflevector((Halves)p[0], (Halves)p[1], 1, 3, 5, 7, 9, 11, 13,
                                                15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39,
                                                41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
    vf rest[kVectors];
    XS_FOR (i, kVectors) rest[i] = p[i] - (vf)((vu)p[i] & 0xffff0000u);
    const __m512bh low = _mm512_cvtne2ps_pbh((__m512)rest[1], (__m512)rest[0]);
    std::memcpy(to, &high, sizeof(high));
    std::memcpy(to + kTile, &low, sizeof(low));
  }
};

#else

class Registers {
 public:
  explicit Registers(bool) {}
};

#endif

}  // namespace xsake_cpu::XSAKE_ISA
