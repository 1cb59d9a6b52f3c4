// Division of workspaces: packed arrays of a call, and the scratch of each worker.
//
// Every structure is laid out by one function, which also measures it when the base is null, so the
// size that the caller reserves cannot differ from the size in use.
#pragma once

#include "problem.h"

namespace xsake_cpu {

// Row stride of s, p and ds: a power of two would map the rows of a strip to one cache set.
constexpr int64_t kScoreStride = kStepKeys + 16;
constexpr int64_t kGradStride = kGradKeys + 16;

// Rows of a tile as the element mask and the bias read them.
struct TileRows {
  int32_t* token;     // index of the query in its sequence
  int32_t* position;  // as the mask sees it
  int32_t* segment;
  int32_t* head;  // query head
  int32_t* item;  // item of the list that the row takes in this step; -1: none
};

struct MaskScratch {
  int8_t* mask;  // [rows, kStepKeys]: -1 where a pair counts, else 0
  uint8_t*
      state;  // [rows, kStepKeys / 8]: bit 0 if a pair of a panel counts, bit 1 if one does not
  int32_t* steps;      // [program steps, kStepKeys]
  int32_t* key_valid;  // [kStepKeys]: -1 or 0
  int32_t* key_position;
  int32_t* key_segment;
};
constexpr int64_t kStateStride = kStepKeys / 4;  // the narrowest panel has 4 columns at least

static inline TileRows take_rows(Arena& arena, int64_t rows) {
  TileRows x;
  x.token = arena.take<int32_t>(rows);
  x.position = arena.take<int32_t>(rows);
  x.segment = arena.take<int32_t>(rows);
  x.head = arena.take<int32_t>(rows);
  x.item = arena.take<int32_t>(rows);
  return x;
}

static inline MaskScratch take_mask(Arena& arena, int64_t rows, int64_t program_steps) {
  MaskScratch x;
  x.mask = arena.take<int8_t>(rows * kStepKeys);
  x.state = arena.take<uint8_t>(rows * kStateStride);
  x.steps = arena.take<int32_t>(program_steps * kStepKeys);
  x.key_valid = arena.take<int32_t>(kStepKeys);
  x.key_position = arena.take<int32_t>(kStepKeys);
  x.key_segment = arena.take<int32_t>(kStepKeys);
  return x;
}

// State of the online softmax of a tile.
struct SoftmaxRows {
  float* acc;            // [rows, padded v_dim]
  float* s;              // [rows, kScoreStride]
  float* row_max;        // [rows, kMaxVector]: maximum of s in this step, by lane
  float *m, *l, *alpha;  // [rows]
};

static inline SoftmaxRows take_softmax(Arena& arena, int64_t rows, int64_t v_dim) {
  SoftmaxRows x;
  x.acc = arena.take<float>(rows * round_up(v_dim, kMaxPanel));
  x.s = arena.take<float>(rows * kScoreStride);
  x.row_max = arena.take<float>(rows * kMaxVector);
  x.m = arena.take<float>(rows);
  x.l = arena.take<float>(rows);
  x.alpha = arena.take<float>(rows);
  return x;
}

struct ForwardScratch {
  float* q;  // [rows, dim]
  SoftmaxRows softmax;
  TileRows rows;
  MaskScratch mask;
};

static inline int64_t take_forward(char* base, int64_t dim, int64_t v_dim, int64_t program_steps,
                                   ForwardScratch* out) {
  Arena arena{base};
  ForwardScratch x;
  x.q = arena.take<float>(kTileRows * dim);
  x.softmax = take_softmax(arena, kTileRows, v_dim);
  x.rows = take_rows(arena, kTileRows);
  x.mask = take_mask(arena, kTileRows, program_steps);
  if (out) *out = x;
  return arena.used;
}

// Keys of all blocks, padded.
static inline int64_t num_padded_keys(const WorkspaceSizes& z) {
  const int64_t blocks = (z.kv_tokens + z.block_kv - 1) / z.block_kv;
  return z.batch * z.kv_heads * blocks * round_up(z.block_kv, kMaxPanel);
}

// K^T panels and V panels of listed blocks.
struct ForwardArrays {
  float *k, *v;
};

static inline int64_t take_forward_arrays(char* base, const WorkspaceSizes& z, ForwardArrays* out) {
  Arena arena{base};
  const int64_t keys = num_padded_keys(z);
  ForwardArrays x;
  x.k = arena.take<float>(keys * z.dim);
  x.v = arena.take<float>(keys * round_up(z.v_dim, kMaxPanel));
  if (out) *out = x;
  return arena.used;
}

struct RowOrigin {
  float high, low;  // lse in base 2, and the digits that float32 drops
  float one;        // probabilities from here on are 1
};

// Rows of queries with what their gradients are made from.
struct QueryResiduals {
  float *q, *do_;     // [rows, padded dim or v_dim]
  RowOrigin* origin;  // [rows]
  float* delta;       // [rows]

  XS_LOCAL QueryResiduals from_row(int64_t row, int64_t padded_dim, int64_t padded_v_dim) const {
    return {q + row * padded_dim, do_ + row * padded_v_dim, origin + row, delta + row};
  }
};
static inline QueryResiduals take_residuals(Arena& arena, int64_t rows, int64_t dim,
                                            int64_t v_dim) {
  QueryResiduals x;
  x.q = arena.take<float>(rows * round_up(dim, kMaxPanel));
  x.do_ = arena.take<float>(rows * round_up(v_dim, kMaxPanel));
  x.origin = arena.take<RowOrigin>(rows);
  x.delta = arena.take<float>(rows);
  return x;
}

// p and ds of a tile.
struct GradScratch {
  float *p, *ds;    // [rows, kGradStride]
  float* q_finite;  // [rows, padded dim]: of a tile with values that are not finite
  TileRows rows;
  MaskScratch mask;
};
static inline GradScratch take_grads(Arena& arena, int64_t dim, int64_t program_steps) {
  GradScratch x;
  x.p = arena.take<float>(kTileRows * kGradStride);
  x.ds = arena.take<float>(kTileRows * kGradStride);
  x.q_finite = arena.take<float>(kTileRows * round_up(dim, kMaxPanel));
  x.rows = take_rows(arena, kTileRows);
  x.mask = take_mask(arena, kTileRows, program_steps);
  return x;
}

// Packed K and V of a backward pass: its first arrays.
struct GradArrays {
  float *k_t, *v_t;  // panels [width / panel][dim][panel]
  float* k;          // panels [dim / panel][width][panel], finite
};
static inline GradArrays take_grad_arrays(Arena& arena, const WorkspaceSizes& z) {
  const int64_t keys = num_padded_keys(z);
  GradArrays x;
  x.k_t = arena.take<float>(keys * z.dim);
  x.v_t = arena.take<float>(keys * z.v_dim);
  x.k = arena.take<float>(keys * round_up(z.dim, kMaxPanel));
  return x;
}

struct BackwardScratch {
  GradScratch grads;
  float *dk, *dv;  // [keys of a task, padded dim or v_dim]
};

static inline int64_t take_backward(char* base, const WorkspaceSizes& z, BackwardScratch* out) {
  Arena arena{base};
  const int64_t keys = grad_blocks(z.block_kv) * round_up(z.block_kv, kMaxPanel);
  BackwardScratch x;
  x.grads = take_grads(arena, z.dim, z.program_steps);
  x.dk = arena.take<float>(keys * round_up(z.dim, kMaxPanel));
  x.dv = arena.take<float>(keys * round_up(z.v_dim, kMaxPanel));
  if (out) *out = x;
  return arena.used;
}

// What tasks know of a tile of queries: threads write to different cache lines.
struct alignas(kAlign) TileState {
  int32_t num_added;  // items of its list whose part of dq is added, in the order of their blocks
  bool is_finite;     // its queries
};

// Packed K and V, and by tile of queries: residuals and dq.
struct BackwardArrays {
  GradArrays keys;
  QueryResiduals queries;
  float* dq;         // [tiles, rows, padded dim]
  TileState* tiles;  // [tiles]
};

static inline int64_t take_backward_arrays(char* base, const WorkspaceSizes& z,
                                           BackwardArrays* out) {
  Arena arena{base};
  const int64_t blocks = (z.q_tokens + z.block_q - 1) / z.block_q;
  const int64_t per_block = (z.block_q + kTileRows - 1) / kTileRows;
  const int64_t tiles = z.batch * z.q_heads * blocks * per_block;
  const int64_t rows = tiles * padded_tile_rows(z.block_q);
  BackwardArrays x;
  x.keys = take_grad_arrays(arena, z);
  x.queries = take_residuals(arena, rows, z.dim, z.v_dim);
  x.dq = arena.take<float>(rows * round_up(z.dim, kMaxPanel));
  x.tiles = arena.take<TileState>(tiles);
  if (out) *out = x;
  return arena.used;
}

struct DecodeScratch {
  float* q;      // [rows, dim padded to vectors]
  float *k, *v;  // [kStepKeys, padded dim]: finite or widened copies
  SoftmaxRows softmax;
  float *acc, *m, *l;  // before the last step
  TileRows rows;
  MaskScratch mask;
};

static inline int64_t take_decode(char* base, int64_t dim, int64_t v_dim, int64_t program_steps,
                                  DecodeScratch* out) {
  Arena arena{base};
  DecodeScratch x;
  x.q = arena.take<float>(kDecodeRows * round_up(dim, kMaxPanel));
  x.k = arena.take<float>(kStepKeys * round_up(dim, kMaxPanel));
  x.v = arena.take<float>(kStepKeys * round_up(v_dim, kMaxPanel));
  x.softmax = take_softmax(arena, kDecodeRows, v_dim);
  x.acc = arena.take<float>(kDecodeRows * round_up(v_dim, kMaxPanel));
  x.m = arena.take<float>(kDecodeRows);
  x.l = arena.take<float>(kDecodeRows);
  x.rows = take_rows(arena, kDecodeRows);
  x.mask = take_mask(arena, kDecodeRows, program_steps);
  if (out) *out = x;
  return arena.used;
}

// One softmax state per (batch, query, head, chunk): acc, m, l.
struct DecodeArrays {
  float *acc, *m, *l;
};

static inline int64_t take_decode_arrays(char* base, const WorkspaceSizes& z, DecodeArrays* out) {
  Arena arena{base};
  const int64_t blocks = (z.kv_tokens + z.block_kv - 1) / z.block_kv;
  const int64_t chunks = num_chunks(blocks, z.block_kv);
  const int64_t states = z.batch * z.q_tokens * z.q_heads * chunks;
  DecodeArrays x;
  x.acc = arena.take<float>(states * z.v_dim);
  x.m = arena.take<float>(states);
  x.l = arena.take<float>(states);
  if (out) *out = x;
  return arena.used;
}

// Queries of a chunk by the block that they selected: those of block j are query[begin[j]] up to
// query[begin[j + 1]], in their order.
struct Routes {
  int32_t* begin;  // [kv_blocks + 1]
  int32_t* end;    // [kv_blocks]: while the lists are filled
  int32_t* last;   // [kv_blocks]: the query that selected the block last
  int32_t* query;  // [queries of a chunk * slots], tokens of the chunk
};

static inline Routes take_routes(Arena& arena, const WorkspaceSizes& z) {
  const int64_t blocks = (z.kv_tokens + z.block_kv - 1) / z.block_kv;
  Routes x;
  x.begin = arena.take<int32_t>(blocks + 1);
  x.end = arena.take<int32_t>(blocks);
  x.last = arena.take<int32_t>(blocks);
  x.query = arena.take<int32_t>(selected_chunk(z.q_heads / z.kv_heads) * z.num_slots);
  return x;
}

// Rows of a chunk: head g of the group and token t are row g * (queries of a chunk) + t.
static inline int64_t chunk_rows(const WorkspaceSizes& z) {
  const int64_t group = z.q_heads / z.kv_heads;
  return selected_chunk(group) * group;
}

struct SelectedScratch {
  char* tile;  // a ForwardScratch: at the base
  Routes routes;
  float *q, *acc;  // [rows, dim], [rows, padded v_dim]
  float *m, *l;    // [rows]
};

static inline int64_t take_selected(char* base, const WorkspaceSizes& z, SelectedScratch* out) {
  Arena arena{base};
  SelectedScratch x;
  x.tile = arena.take<char>(take_forward(nullptr, z.dim, z.v_dim, z.program_steps, nullptr));
  x.routes = take_routes(arena, z);
  const int64_t rows = chunk_rows(z);
  x.q = arena.take<float>(rows * z.dim);
  x.acc = arena.take<float>(rows * round_up(z.v_dim, kMaxPanel));
  x.m = arena.take<float>(rows);
  x.l = arena.take<float>(rows);
  if (out) *out = x;
  return arena.used;
}

struct SelectedGradScratch {
  GradScratch grads;
  Routes routes;
  QueryResiduals tile, chunk;  // gathered rows, all rows
  float *tile_dq, *dq;         // [rows, padded dim]
};

static inline int64_t take_selected_backward(char* base, const WorkspaceSizes& z,
                                             SelectedGradScratch* out) {
  Arena arena{base};
  const int64_t rows = chunk_rows(z), padded = round_up(z.dim, kMaxPanel);
  SelectedGradScratch x;
  x.grads = take_grads(arena, z.dim, z.program_steps);
  x.routes = take_routes(arena, z);
  x.tile = take_residuals(arena, kTileRows, z.dim, z.v_dim);
  x.chunk = take_residuals(arena, rows, z.dim, z.v_dim);
  x.tile_dq = arena.take<float>(kTileRows * padded);
  x.dq = arena.take<float>(rows * padded);
  if (out) *out = x;
  return arena.used;
}

// Packed K and V, sums of dk and dv, parts of dq.
struct SelectedGradArrays {
  GradArrays keys;
  float *dk, *dv;  // [keys, padded dim or v_dim]
  float* dq;       // [ranges, batch, q_tokens, q_heads, dim], without it for one range
};

static inline int64_t take_selected_grad_arrays(char* base, const WorkspaceSizes& z,
                                                SelectedGradArrays* out) {
  Arena arena{base};
  const int64_t keys = num_padded_keys(z);
  const int64_t ranges = num_ranges(z.batch, z.kv_heads, z.kv_tokens, z.block_kv);
  SelectedGradArrays x;
  x.keys = take_grad_arrays(arena, z);
  x.dk = arena.take<float>(keys * round_up(z.dim, kMaxPanel));
  x.dv = arena.take<float>(keys * round_up(z.v_dim, kMaxPanel));
  x.dq = arena.take<float>(ranges > 1 ? ranges * z.batch * z.q_tokens * z.q_heads * z.dim : 0);
  if (out) *out = x;
  return arena.used;
}

// Scores of a tile of queries, and the best ones of one query.
struct TopBlocksScratch {
  float* q;       // [index heads of the group, queries, dim]
  float* scores;  // [queries, blocks]
  float* best;    // [blocks]
};

static inline int64_t take_top_blocks(char* base, int64_t dim, int64_t per_group, int64_t number,
                                      TopBlocksScratch* out) {
  Arena arena{base};
  const int64_t queries = top_blocks_queries(per_group);
  TopBlocksScratch x;
  x.q = arena.take<float>(per_group * queries * dim);
  x.scores = arena.take<float>(queries * number);
  x.best = arena.take<float>(number);
  if (out) *out = x;
  return arena.used;
}

static inline WorkspaceSizes sizes_of(const Problem& p) {
  return {p.batch,    p.q_tokens, p.kv_tokens, p.q_heads,  p.kv_heads,
          p.dim,      p.v_dim,    p.block_q,   p.block_kv, p.program ? p.program->num_steps : 0,
          p.num_slots};
}

}  // namespace xsake_cpu
