#pragma once
#include "forward.h"
namespace xsake_cpu::XSAKE_ISA {
static void decode_chunk(const Problem&, int64_t, char*) {}
static void decode_merge(const Problem&, int64_t) {}
}
