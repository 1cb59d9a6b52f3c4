// A call owns what its tasks read after the handler has returned; building it validates every
// index.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "problem.h"

namespace xsake_cpu {

struct Call {
  Problem problem{};
  Labels labels{};
  TopBlocks top_blocks{};
  MaskProgram program{};
  std::vector<ProgramStep> steps;
  std::vector<uint8_t> is_listed;
  std::unique_ptr<std::atomic<int64_t>[]> unfinished;  // tasks left of each (batch, kv head)
  char* scratch = nullptr;
  int64_t scratch_size = 0;
};

// Lengths of the arrays that hold lists and tables.
struct ListSizes {
  int64_t row_starts, kv_block, is_partial, tables, mask_blocks, mask_index;
};

// Each returns what is wrong, or an empty string.
std::string check_sizes(const Problem& p);
std::string check_lists(const Problem& p, const ListSizes& sizes, Call* call);
// Selected attention: fills what follows from the sizes, the causal rule included.
std::string check_selected(int64_t num_indices, Call* call);
// Lists of pages, `num_items` long.
std::string check_pages(int64_t num_items, Call* call);
std::string parse_program(const int32_t* words, int64_t count, int64_t num_tables, Call* call);

}  // namespace xsake_cpu
