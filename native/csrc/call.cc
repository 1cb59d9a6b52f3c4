#include "call.h"

#include <iterator>

namespace xsake_cpu {
namespace {

std::string number(const char* what, int64_t got, const char* expected) {
  return std::string(what) + ": got " + std::to_string(got) + ", expected " + expected;
}

int arity(Op op) {
  switch (op) {
    case Op::not_:
    case Op::neg:
    case Op::abs:
    case Op::sign:
    case Op::population_count:
    case Op::clz:
    case Op::to_bool:
    case Op::to_int32:
    case Op::to_uint32: return 1;
    case Op::select_n: return 3;
    default: return 2;
  }
}

Axis join(Axis x, Axis y) { return x == y ? x : Axis::both; }

// Reads a term of which `num_steps` steps are known; false if it is invalid.
bool read_term(const int32_t* words, int64_t num_steps, int64_t num_tables, Term* term) {
  if (words[0] < 1 || words[0] > 4 || words[2] < 0 || words[2] > 2) return false;
  *term = {static_cast<TermKind>(words[0]), words[1], static_cast<TermType>(words[2])};
  switch (term->kind) {
    case TermKind::position: return term->number == 0 || term->number == 1;
    case TermKind::table: return term->number >= 0 && term->number < num_tables;
    case TermKind::step: return term->number >= 0 && term->number < num_steps;
    default: return true;
  }
}

// Axis of a term; constants and integers of the head count as values of the query.
Axis axis_of(const Term& term, const std::vector<ProgramStep>& steps) {
  if (term.kind == TermKind::position) return term.number ? Axis::key : Axis::query;
  return term.kind == TermKind::step ? steps[static_cast<size_t>(term.number)].axis : Axis::query;
}
bool is_constant(const Term& term) { return term.kind == TermKind::constant; }

}  // namespace

std::string check_sizes(const Problem& p) {
  if (p.block_q < 1) return number("block_q", p.block_q, "at least 1");
  if (p.block_kv < 1) return number("block_kv", p.block_kv, "at least 1");
  if (p.q_heads < 1 || p.kv_heads < 1 || p.q_heads % p.kv_heads)
    return number("query heads", p.q_heads, "a multiple of the kv heads");
  if (p.dim < 1 || p.v_dim < 1) return number("head dim", min_of(p.dim, p.v_dim), "at least 1");
  if (p.q_tokens > INT32_MAX || p.kv_tokens > INT32_MAX)
    return number("tokens", max_of(p.q_tokens, p.kv_tokens), "at most 2^31 - 1");
  if (p.layout_batch != 1 && p.layout_batch != p.batch)
    return number("layout_batch", p.layout_batch, "1 or the batch size");
  if (p.layout_heads < 1 || p.q_heads % p.layout_heads)
    return number("layout_heads", p.layout_heads, "a divisor of the query heads");
  if (p.program_heads < 1 || p.q_heads % p.program_heads)
    return number("program_heads", p.program_heads, "a divisor of the query heads");
  if (p.bias && ((p.bias_batch != 1 && p.bias_batch != p.batch) || p.q_heads % p.bias_heads))
    return number("heads of the bias", p.bias_heads, "a divisor of the query heads, batch 1 or B");
  if (!(p.softcap >= 0)) return "softcap: expected 0 or a positive number";
  return "";
}

std::string check_lists(const Problem& p, const ListSizes& sizes, Call* call) {
  const int64_t rows = p.layout_batch * p.layout_heads * p.q_blocks;
  if (sizes.row_starts != rows + 1)
    return number("length of row_starts", sizes.row_starts,
                  "layout_batch * layout_heads * q_blocks + 1");
  if (sizes.is_partial != sizes.kv_block)
    return number("length of is_partial", sizes.is_partial, "that of kv_block");
  if (p.mask_blocks && sizes.mask_index != sizes.kv_block)
    return number("length of mask_index", sizes.mask_index, "that of kv_block");
  // Lists shared by kv heads or batch elements are marked once.
  const int64_t marked = p.kv_heads % p.layout_heads ? p.kv_heads : p.layout_heads;
  call->problem.listed_heads = marked;
  call->is_listed.assign(static_cast<size_t>(p.layout_batch * marked * p.kv_blocks), 0);
  call->problem.is_ascending = true;
  int32_t start = p.row_starts[0];
  if (start < 0) return number("row_starts", start, "0 or more");
  for (int64_t row = 0; row < rows; row++) {
    const int32_t end = p.row_starts[row + 1];
    if (end < start || end > sizes.kv_block)
      return number("row_starts", end, "ascending numbers up to the length of kv_block");
    const int64_t lb = row / p.q_blocks / p.layout_heads, lh = row / p.q_blocks % p.layout_heads;
    const int64_t first = lh * marked / p.layout_heads;
    const int64_t last = ((lh + 1) * marked - 1) / p.layout_heads;
    for (int32_t item = start; item < end; item++) {
      const int32_t block = p.kv_block[item];
      if (block < 0 || block >= p.kv_blocks)
        return number("kv_block", block, "an index of a kv block");
      if (item > start && block <= p.kv_block[item - 1]) call->problem.is_ascending = false;
      if (p.mask_blocks && p.is_partial[item] &&
          (p.mask_index[item] < 0 || p.mask_index[item] >= sizes.mask_blocks))
        return number("mask_index", p.mask_index[item], "an index of a mask block");
      for (int64_t head = first; head <= last; head++)
        call->is_listed[static_cast<size_t>((lb * marked + head) * p.kv_blocks + block)] = 1;
    }
    start = end;
  }
  return "";
}

std::string parse_program(const int32_t* words, int64_t count, int64_t num_tables, Call* call) {
  if (count == 0) return "";
  if (count < 4 || words[0] < 0 || count != 4 + 10 * static_cast<int64_t>(words[0]))
    return number("length of the mask program", count, "4 + 10 * steps");
  for (int64_t i = 0; i < words[0]; i++) {
    const int32_t* at = words + 4 + int64_t{10} * i;
    if (at[0] < 0 || at[0] >= static_cast<int32_t>(Op::count_))
      return number("operation of the mask program", at[0], "a known code");
    ProgramStep step{static_cast<Op>(at[0]), {}, Axis::query};
    bool is_known = false;
    for (int64_t t = 0; t < 3; t++) {
      step.terms[t] = {TermKind::none, 0, TermType::int32};
      if (t >= arity(step.op)) continue;
      if (!read_term(at + 1 + 3 * t, i, num_tables, &step.terms[t]))
        return number("term of the mask program in step", i, "a term that is known before it");
      if (is_constant(step.terms[t])) continue;
      const Axis axis = axis_of(step.terms[t], call->steps);
      step.axis = is_known ? join(step.axis, axis) : axis;
      is_known = true;
    }
    call->steps.push_back(step);
  }
  Term answer;
  if (!read_term(words + 1, words[0], num_tables, &answer))
    return number("answer of the mask program", words[2], "a term of it");
  const Axis axis = is_constant(answer) ? Axis::query : axis_of(answer, call->steps);
  call->program = {call->steps.data(), words[0], answer, axis};
  call->problem.program = &call->program;
  return "";
}

std::string check_selected(int64_t num_indices, Call* call) {
  // Every block may hold keys after the position of a query.
  static constexpr uint8_t is_partial = 1;
  static constexpr int32_t causal[] = {1, 4, 0, 0, static_cast<int32_t>(Op::ge), 1, 0, 1,
                                       1, 1, 1, 0, 0, 0};
  Problem& p = call->problem;
  p.layout_batch = p.batch;
  p.layout_heads = p.program_heads = 1;
  if (std::string error = check_sizes(p); !error.empty()) return error;
  const int64_t queries = p.batch * p.q_tokens;
  if (p.num_slots < 0 || num_indices != queries * p.kv_heads * p.num_slots)
    return number("length of blocks", num_indices, "B * Tq * Hk * slots");
  p.block_q = selected_chunk(p.group());
  p.q_blocks = (p.q_tokens + p.block_q - 1) / p.block_q;
  p.kv_blocks = (p.kv_tokens + p.block_kv - 1) / p.block_kv;
  p.is_partial = &is_partial;
  p.listed_heads = p.kv_heads;
  call->is_listed.assign(static_cast<size_t>(p.batch * p.kv_heads * p.kv_blocks), 0);
  p.is_listed = call->is_listed.data();
  for (int64_t i = 0; i < num_indices; i++) {
    const int32_t block = p.selected[i];
    if (block >= p.kv_blocks) return number("blocks", block, "an index of a kv block");
    const int64_t head = i / p.num_slots % p.kv_heads;
    const int64_t b = i / p.num_slots / p.kv_heads / p.q_tokens;
    if (block >= 0)
      call->is_listed[static_cast<size_t>((b * p.kv_heads + head) * p.kv_blocks + block)] = 1;
  }
  return parse_program(causal, std::size(causal), 0, call);
}

std::string check_pages(int64_t num_items, Call* call) {
  Problem& p = call->problem;
  p.layout_batch = p.layout_heads = 1;
  p.block_q = 1, p.q_blocks = p.q_tokens;
  if (std::string error = check_sizes(p); !error.empty()) return error;
  if (p.page_heads != 1 && p.page_heads != p.kv_heads)
    return number("heads of the lists", p.page_heads, "1 or the kv heads");
  for (int64_t b = 0; b < p.batch; b++)
    if (p.lengths[b] < 0) return number("lengths", p.lengths[b], "0 or more");
  for (int64_t i = 0; i < num_items; i++) {
    if (p.page[i] < 0) continue;
    if (p.page[i] >= p.num_pages) return number("page", p.page[i], "an index of a page");
    const int64_t keys = p.lengths[i / p.kv_blocks / p.page_heads];
    if (p.page_number[i] < 0 || p.page_number[i] * p.block_kv >= keys)
      return number("number of a page", p.page_number[i], "a page of the sequence");
  }
  return "";
}

}  // namespace xsake_cpu
