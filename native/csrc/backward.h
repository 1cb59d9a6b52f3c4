#pragma once
#include "forward.h"
namespace xsake_cpu::XSAKE_ISA {
static void backward_pack(const Problem&, int64_t) {}
static void backward_range(const Problem&, int64_t, char*) {}
static void backward_bias(const Problem&, int64_t, char*) {}
static void backward_merge(const Problem&, int64_t) {}
}
