// The kernels of one ISA: this file is compiled once for each, with its own flags and namespace.
#include "backward.h"
#include "decode.h"
#include "forward.h"
#include "labels.h"
#include "paged.h"
#include "selected.h"
#include "statistics.h"
#include "top_blocks.h"

#define XS_JOIN2(x, y) x##y
#define XS_JOIN(x, y) XS_JOIN2(x, y)
#define XS_STRING2(x) #x
#define XS_STRING(x) XS_STRING2(x)

namespace xsake_cpu {
namespace XSAKE_ISA {

// For tests of the building blocks.
static void test_exp2(const float* x, float* y, int64_t n) {
  FlushDenormals guard;
  for (int64_t i = 0; i < n; i += VL) store_upto(y + i, exp2(load_upto(x + i, n - i)), n - i);
}
static void test_tanh(const float* x, float* y, int64_t n) {
  FlushDenormals guard;
  for (int64_t i = 0; i < n; i += VL) store_upto(y + i, tanh(load_upto(x + i, n - i)), n - i);
}
// c [m, n] = a [m, k] b [k, n], m even, n a multiple of 32.
static void test_product(const float* a, const float* b, float* c, int64_t m, int64_t n,
                         int64_t k) {
  for (int64_t column = 0; column < n; column += kPanel)
    for_strips((int)m, [&](auto strip, int r) {
      const float zeros[kStrip] = {};
      scale_add<decltype(strip)::value>(a + r * k, k, b + column, n, k, c + r * n + column, n,
                                        zeros);
    });
}

}  // namespace XSAKE_ISA

extern const KernelTable XS_JOIN(XSAKE_ISA, _kernels);
const KernelTable XS_JOIN(XSAKE_ISA, _kernels) = {
    XS_STRING(XSAKE_ISA),      XSAKE_ISA::forward_pack,   XSAKE_ISA::forward_tile,
    XSAKE_ISA::backward_pack,  XSAKE_ISA::backward_pack_queries,
    XSAKE_ISA::backward_keys,  XSAKE_ISA::backward_bias,
    XSAKE_ISA::decode_chunk,   XSAKE_ISA::decode_merge,   XSAKE_ISA::paged_chunk,
    XSAKE_ISA::selected_chunk, XSAKE_ISA::selected_range, XSAKE_ISA::selected_merge,
    XSAKE_ISA::statistics_pack, XSAKE_ISA::statistics_tile, XSAKE_ISA::score_labels,
    XSAKE_ISA::top_blocks_pack, XSAKE_ISA::top_blocks_tile,
    XSAKE_ISA::test_exp2,      XSAKE_ISA::test_tanh,      XSAKE_ISA::test_product,
};

}  // namespace xsake_cpu
