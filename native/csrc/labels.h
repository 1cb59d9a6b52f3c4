// Scores of the pages of a cache by labels: components of keys in 4 bits.
//
// A task is up to 64 pages of a (batch, kv head). A vector holds tokens; codes are unpacked once
// for the heads of a tile.
#pragma once

#include <cmath>

#include "exp2.h"

namespace xsake_cpu::XSAKE_ISA {

XS_INLINE vi load_codes(const uint8_t* from, int64_t n) {
  if (n >= VL) return load_mask(reinterpret_cast<const int8_t*>(from));
  int8_t part[VL] = {};
  std::memcpy(part, from, static_cast<size_t>(n));
  return load_mask(part);
}

// log(sum(exp(s))); `s` has room for whole vectors.
XS_INLINE float log_sum_exp(float* s, int64_t count) {
  for (int64_t i = count; i < round_up(count, VL); i++) s[i] = -INFINITY;
  vf largest = load(s);
  for (int64_t i = VL; i < count; i += VL) largest = max(largest, load(s + i));
  const float m = max_lanes(largest);
  vf sum = splat(0.f);
  for (int64_t i = 0; i < count; i += VL) sum += exp2((load(s + i) - m) * kLog2e);
  return m + std::log(sum_lanes(sum));
}

// `scores` of the first keys of a page, for N heads of a group; one row of q and scores per head.
template <int N>
XS_INLINE void score_page(const Labels& x, const float* q, int64_t head, int64_t keys,
                          float* scores) {
  const uint8_t* codes = x.codes + head * x.components / 2 * x.page_size;
  const uint16_t* factor = x.factor + head * x.components;
  float scaled[N][kMaxLabelComponents], s[N][kMaxLabelTokens];
  for (int64_t i = 0; i < x.components; i += VL) {
    const int64_t n = min_of(VL, x.components - i);
    const vf f = load_upto(reinterpret_cast<const bf16*>(factor) + i, n);
    XS_FOR (g, N) store_upto(scaled[g] + i, load_upto(q + g * x.components + i, n) * f, n);
  }
  for (int64_t t = 0; t < keys; t += VL) {
    vf sum[N];
    XS_FOR (g, N) sum[g] = splat(0.f);
    for (int64_t i = 0; i < x.components / 2; i++) {
      const vi byte = load_codes(codes + i * x.page_size + t, x.page_size - t);
      const vf low = __builtin_convertvector((byte & 15) - 8, vf);
      const vf high = __builtin_convertvector((byte >> 4 & 15) - 8, vf);
      XS_FOR (g, N) sum[g] += scaled[g][2 * i] * low + scaled[g][2 * i + 1] * high;
    }
    XS_FOR (g, N) store(s[g] + t, sum[g]);
  }
  XS_FOR (g, N) scores[g * x.slots] = log_sum_exp(s[g], keys);
}

static void score_labels(const Labels& x, int64_t item) {
  FlushDenormals guard;
  const int64_t chunks = label_chunks(x), row = item / chunks;
  const int64_t b = row / x.kv_heads, first = item % chunks * kLabelSlots;
  for (int64_t slot = first; slot < min_of(first + kLabelSlots, x.slots); slot++) {
    const int64_t page = x.page_table[b * x.slots + slot];
    const int64_t keys = min_of(x.page_size, x.lengths[b] - slot * x.page_size);
    float* scores = x.scores + row * x.group * x.slots + slot;
    if (page < 0 || keys <= 0) {
      for (int64_t g = 0; g < x.group; g++) scores[g * x.slots] = -INFINITY;
      continue;
    }
    const int64_t head = page * x.kv_heads + row % x.kv_heads;
    const auto score = [&](auto heads, int64_t g) __attribute__((always_inline)) {
      score_page<decltype(heads)::value>(x, x.q + (row * x.group + g) * x.components, head, keys,
                                         scores + g * x.slots);
    };
    int64_t g = 0;
    for (; g + 4 <= x.group; g += 4) score(std::integral_constant<int, 4>{}, g);
    if (x.group - g == 3) score(std::integral_constant<int, 3>{}, g);
    if (x.group - g == 2) score(std::integral_constant<int, 2>{}, g);
    if (x.group - g == 1) score(std::integral_constant<int, 1>{}, g);
  }
}

}  // namespace xsake_cpu::XSAKE_ISA
