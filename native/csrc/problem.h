// Sizes and pointers of one call, as the handlers hand them to the kernels of every ISA.
//
// This header is compiled once per ISA. Its functions are static or always inlined, because the
// linker keeps one copy of an inline function, and a copy compiled for AVX-512 must not be the one
// that an older machine runs.
#pragma once

#include <cstddef>
#include <cstdint>

#define XS_LOCAL inline __attribute__((always_inline))

namespace xsake_cpu {

enum class DType : int32_t { f32, bf16, f16, i8 };  // i8: of pages only

// Limits that workspace sizes are computed with; those of an ISA are not above them.
constexpr int64_t kMaxVector = 16;    // floats of a vector
constexpr int64_t kMaxPanel = 32;     // columns of a panel
constexpr int64_t kTileRows = 128;    // queries of a tile
constexpr int64_t kStepKeys = 256;    // keys of a step of the forward pass
constexpr int64_t kGradKeys = 128;    // keys of a step of the backward pass
constexpr int64_t kChunkKeys = 512;   // keys of a decode task
constexpr int64_t kDecodeRows = 64;   // rows of a decode tile
constexpr int kDotRows = 4;           // rows of a block of dot products
constexpr int64_t kChunkRows = 1024;  // rows of a chunk of selected attention, about
constexpr int64_t kIndexRows = 64;    // rows of a tile that scores blocks, about
constexpr int64_t kLabelSlots = 64;   // pages of a task that scores labels
constexpr int64_t kMaxLabelComponents = 256, kMaxLabelTokens = 256;  // of a page
constexpr int64_t kAlign = 64;

static inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}
// While another thread is about to write what this one reads.
XS_LOCAL void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

static inline int64_t min_of(int64_t x, int64_t y) { return x < y ? x : y; }
static inline int64_t max_of(int64_t x, int64_t y) { return x > y ? x : y; }

// Operations of mask programs, in the order of their codes. See mask_program.h.
enum class Op : int32_t {
  and_,
  or_,
  xor_,
  not_,
  eq,
  ne,
  lt,
  le,
  gt,
  ge,
  add,
  sub,
  mul,
  neg,
  abs,
  sign,
  min,
  max,
  div,
  rem,
  shift_left,
  shift_right_arithmetic,
  shift_right_logical,
  population_count,
  clz,
  select_n,
  to_bool,
  to_int32,
  to_uint32,
  count_
};
enum class TermKind : int32_t { none, position, constant, table, step };
enum class TermType : int32_t { boolean, int32, uint32 };
// Which axis of a tile a value varies over.
enum class Axis : int32_t { query, key, both };

struct Term {
  TermKind kind;
  int32_t number;
  TermType type;
};
struct ProgramStep {
  Op op;
  Term terms[3];
  Axis axis;
};
struct MaskProgram {
  const ProgramStep* steps;
  int32_t num_steps;
  Term answer;
  Axis answer_axis;
};

struct Problem {
  int64_t batch, q_tokens, kv_tokens, q_heads, kv_heads, dim, v_dim;
  int64_t block_q, block_kv, q_blocks, kv_blocks;
  int64_t layout_batch, layout_heads, program_heads;
  DType dtype, bias_dtype;
  float scale, softcap;
  const void *q, *k, *v;
  const int32_t *row_starts, *kv_block;
  const uint8_t* is_partial;
  bool is_ascending;  // every list
  const int32_t* tables;
  const uint8_t* mask_blocks;
  const int32_t* mask_index;
  const void* bias;
  int64_t bias_batch, bias_heads;
  const int32_t *q_positions, *kv_positions;
  int64_t q_positions_batch, kv_positions_batch;
  const int32_t *q_segments, *kv_segments;
  const MaskProgram* program;
  // Selected attention: [B, Tq, Hk, num_slots], kv blocks of each query; negative: unused.
  const int32_t* selected;
  int64_t num_slots;
  // Pages of a cache: k and v are [num_pages, kv_heads, block_kv, D], kv_blocks slots a list. Lists
  // [B, page_heads, kv_blocks] hold where a page lies, negative if the slot is unused, and its
  // number in the sequence.
  const int32_t *page, *page_number;
  int64_t page_heads, num_pages;
  DType page_dtype;
  const int32_t* lengths;                    // [B], keys of each sequence
  const float *page_k_scale, *page_v_scale;  // [num_pages, kv_heads] of i8
  // [layout_batch, listed_heads, kv_blocks]: whether a row of the kv head lists the block.
  const uint8_t* is_listed;
  int64_t listed_heads;  // kv_heads, or a divisor of it where kv heads share lists
  // Results of forward and decode, residuals of backward.
  void* o;
  float* lse;
  float *entropy, *block_lse;  // of statistics
  // Backward.
  const void* do_;
  const float* dlse;
  void *dq, *dk, *dv;
  float* dbias;
  // Workspace without the scratch of the workers.
  char* workspace;

  XS_LOCAL int64_t group() const { return q_heads / kv_heads; }
  XS_LOCAL int64_t list_row(int64_t b, int64_t h, int64_t q_block) const {
    return ((b % layout_batch) * layout_heads + h * layout_heads / q_heads) * q_blocks + q_block;
  }
  XS_LOCAL int64_t listed_index(int64_t b, int64_t hk, int64_t kv_block) const {
    const int64_t head = b % layout_batch * listed_heads + hk * listed_heads / kv_heads;
    return head * kv_blocks + kv_block;
  }
  XS_LOCAL int64_t tiles_per_block() const { return (block_q + kTileRows - 1) / kTileRows; }
  XS_LOCAL int64_t tiles_per_head() const { return q_blocks * tiles_per_block(); }
};

// Sizes that workspaces depend on; block_q only that of the backward pass.
struct WorkspaceSizes {
  int64_t batch, q_tokens, kv_tokens, q_heads, kv_heads, dim, v_dim, block_q, block_kv;
  int64_t program_steps, num_slots;
};

// Hands out parts of a buffer; with base null it measures.
struct Arena {
  char* base;
  int64_t used = 0;
  template <class T>
  XS_LOCAL T* take(int64_t count) {
    T* part = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += round_up(count * static_cast<int64_t>(sizeof(T)), kAlign);
    return part;
  }
};

// Rows of a tile of queries, with those that pad a strip.
static inline int64_t padded_tile_rows(int64_t block_q) {
  return min_of(kTileRows, round_up(block_q, 2));
}

// kv blocks of a task of the backward pass, which owns dk and dv of their keys, and the tasks of a
// kv head.
static inline int64_t grad_blocks(int64_t block_kv) { return max_of(1, kGradKeys / block_kv); }
static inline int64_t num_grad_tasks(const Problem& p) {
  return (p.kv_blocks + grad_blocks(p.block_kv) - 1) / grad_blocks(p.block_kv);
}

// Number of key ranges of the backward pass of selected attention: shapes alone decide, and one
// range needs no copies of dq. More than 8 copies would cost more memory traffic than idle cores
// cost time.
static inline int64_t num_ranges(int64_t batch, int64_t kv_heads, int64_t kv_tokens,
                                 int64_t block_kv) {
  const int64_t tasks = batch * kv_heads;
  const int64_t for_cores = (32 + tasks - 1) / tasks;
  const int64_t by_length = max_of(1, kv_tokens / 2048);
  const int64_t blocks = (kv_tokens + block_kv - 1) / block_kv;
  return max_of(1, min_of(min_of(8, for_cores), min_of(by_length, blocks)));
}

// Queries of a chunk of selected attention: whole tiles of each head of the group.
static inline int64_t selected_chunk(int64_t group) {
  return max_of(1, kChunkRows / group / kTileRows) * kTileRows;
}

// Blocks of a decode task, and chunks of a sequence: at least one.
static inline int64_t chunk_blocks(int64_t block_kv) { return max_of(1, kChunkKeys / block_kv); }
static inline int64_t num_chunks(int64_t kv_blocks, int64_t block_kv) {
  return max_of(1, (kv_blocks + chunk_blocks(block_kv) - 1) / chunk_blocks(block_kv));
}

// A decode task: kv heads [first_head, first_head + num_heads) of a chunk. Rows of a head are
// padded to blocks of dot products.
struct DecodeItem {
  int64_t b, chunk, first_head, num_heads;
};
// Pages hold the keys of a head next to each other, so that heads gain nothing from turns.
static inline int64_t decode_heads(const Problem& p) {
  if (p.page) return 1;
  return max_of(1, min_of(p.kv_heads, kDecodeRows / round_up(p.q_tokens * p.group(), kDotRows)));
}
static inline int64_t num_decode_tasks(const Problem& p) {
  const int64_t groups = (p.kv_heads + decode_heads(p) - 1) / decode_heads(p);
  return p.batch * num_chunks(p.kv_blocks, p.block_kv) * groups;
}
static inline DecodeItem decode_task(const Problem& p, int64_t item) {
  const int64_t heads = decode_heads(p), groups = (p.kv_heads + heads - 1) / heads;
  const int64_t chunks = num_chunks(p.kv_blocks, p.block_kv), first = item % groups * heads;
  return {item / groups / chunks, item / groups % chunks, first, min_of(heads, p.kv_heads - first)};
}

// Queries of a tile that selects blocks: the index heads of a group share its cache.
static inline int64_t top_blocks_queries(int64_t per_group) {
  return max_of(8, kIndexRows / per_group / 8 * 8);
}

// Scores of pages by labels: log-sum-exp of q.k over the keys of each page of a sequence.
struct Labels {
  int64_t batch, kv_heads, group, components, page_size, slots;
  const float* q;                       // [batch, kv_heads, group, components]
  const uint8_t* codes;                 // [pages, kv_heads, components / 2, page_size]
  const uint16_t* factor;               // bfloat16 [pages, kv_heads, components]
  const int32_t *page_table, *lengths;  // [batch, slots], [batch]
  float* scores;                        // [batch, kv_heads, group, slots]
};
static inline int64_t label_chunks(const Labels& x) {
  return (x.slots + kLabelSlots - 1) / kLabelSlots;
}

// Blocks of the largest index scores of every query.
struct TopBlocks {
  int64_t batch, q_tokens, kv_tokens, q_heads, kv_heads, dim, groups;
  int64_t block, number, slots, first, local;
  bool has_relu;
  const float *q, *k;               // [batch, q_tokens, q_heads, dim] and of keys
  const float* weights;             // [batch, q_tokens, q_heads]; null: ones
  const int32_t *position, *start;  // [batch, q_tokens]
  int32_t* blocks;                  // [batch, q_tokens, groups, slots]
  char* workspace;

  XS_LOCAL int64_t per_group() const { return q_heads / groups; }
  XS_LOCAL int64_t tile_queries() const { return top_blocks_queries(per_group()); }
  XS_LOCAL int64_t num_tiles() const { return (q_tokens + tile_queries() - 1) / tile_queries(); }
  XS_LOCAL float* packed_keys() const { return reinterpret_cast<float*>(workspace); }
};

// Entry points of one ISA. Every function computes one item of a phase; `scratch` belongs to the
// worker.
struct KernelTable {
  const char* name;
  void (*forward_pack)(const Problem&, int64_t item);
  void (*forward_tile)(const Problem&, int64_t item, char* scratch);
  void (*backward_pack)(const Problem&, int64_t item);
  void (*backward_pack_queries)(const Problem&, int64_t item);
  void (*backward_keys)(const Problem&, int64_t item, char* scratch);
  void (*backward_bias)(const Problem&, int64_t item, char* scratch);
  void (*decode_chunk)(const Problem&, int64_t item, char* scratch);
  void (*decode_merge)(const Problem&, int64_t item);
  void (*paged_chunk)(const Problem&, int64_t item, char* scratch);
  void (*selected_chunk)(const Problem&, int64_t item, char* scratch);
  void (*selected_range)(const Problem&, int64_t item, char* scratch);
  void (*selected_merge)(const Problem&, int64_t item);
  void (*statistics_pack)(const Problem&, int64_t item);
  void (*statistics_tile)(const Problem&, int64_t item, char* scratch);
  void (*score_labels)(const Labels&, int64_t item);
  void (*top_blocks_pack)(const TopBlocks&, int64_t item);
  void (*top_blocks_tile)(const TopBlocks&, int64_t item, char* scratch);
  void (*exp2)(const float* x, float* y, int64_t n);
  void (*tanh)(const float* x, float* y, int64_t n);
  void (*product)(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k);
};

const KernelTable& kernels();  // of the machine's best ISA

}  // namespace xsake_cpu
