// 2^x and tanh of vectors.
#pragma once

#include "vec.h"

namespace xsake_cpu::XSAKE_ISA {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLog2eLow = 1.9259629e-8f;  // log2 e minus kLog2e
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLn2Low = -1.9046542e-9f;  // ln 2 minus kLn2

// 2^x for x <= 127, exactly 0 from -127 down; NaN stays. Relative error 8e-8: the polynomial of
// online_softmax.py. The power of two is a factor, not an addition to the exponent bits, because an
// addition could turn a NaN with a payload into a number.
XS_INLINE vf exp2(vf x) {
  x = max(splat(-127.f), x);
  const vf round = splat(12582912.f + 127.f);
  const vf shifted = x + round;  // low bits: the nearest integer + 127
  const vf f = x - (shifted - round);
  vf y = splat(0.0001537070482f);
  y = y * f + 0.001339984829f;
  y = y * f + 0.009618373251f;
  y = y * f + 0.05550329035f;
  y = y * f + 0.2402264846f;
  y = y * f + 0.6931472056f;
  y = y * f + 1.f;
  return y * (vf)((vi)shifted << 23);
}

// 1 / x of finite x from 1 to 2. A division of 16 floats takes as long as the rest of tanh.
XS_INLINE vf reciprocal(vf x) {
#if XSAKE_VECTOR == 16
  const vf y = (vf)_mm512_rcp14_ps((__m512)x);
  return y * (2.f - x * y);
#else
  return 1.f / x;
#endif
}

// Relative error 3e-7. Near 0 a polynomial, because 1 - e^(-2x) cancels there.
XS_INLINE vf tanh(vf x) {
  const vi sign = (vi)x & (int32_t)0x80000000;
  const vf size = (vf)((vi)x ^ sign);
  const vf e = exp2(size * (-2.f * kLog2e));
  const vf large = (1.f - e) * reciprocal(1.f + e);
  const vf z = x * x;
  vf y = splat(-0.00570499037f);
  y = y * z + 0.0206390906f;
  y = y * z + -0.0537397163f;
  y = y * z + 0.133314422f;
  y = y * z + -0.333332819f;
  const vf small = x + x * z * y;
  return size < 0.625f ? small : (vf)((vi)large | sign);
}

}  // namespace xsake_cpu::XSAKE_ISA
