// XLA FFI handlers and the C functions that the Python side loads.
#include "xla/ffi/api/ffi.h"

#include "jobs.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ffi = xla::ffi;

namespace xsake_cpu {
namespace {

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using AnyResult = ffi::Result<ffi::AnyBuffer>;
using FloatsResult = ffi::Result<Floats>;

struct Heads {
  ffi::AnyBuffer q, k, v;
};
// Arguments of the block-sparse handlers, in their order.
struct Inputs : Heads {
  Ints row_starts, kv_block;
  ffi::AnyBuffer is_partial;
  Ints tables;
  ffi::AnyBuffer mask_blocks;
  Ints mask_index;
  ffi::AnyBuffer bias;
  Ints q_positions, kv_positions, q_segment_ids, kv_segment_ids;
};
struct Attributes {
  float scale, softcap;
  int64_t block_q, block_kv, layout_batch, layout_heads;
  ffi::Span<const int32_t> program;
  int64_t program_heads;
};

int64_t count(const ffi::AnyBuffer& x) { return static_cast<int64_t>(x.element_count()); }
int64_t count(const Ints& x) { return static_cast<int64_t>(x.element_count()); }
template <class T>
T* pointer(const ffi::AnyBuffer& x) {
  return count(x) ? static_cast<T*>(x.untyped_data()) : nullptr;
}
const int32_t* pointer(const Ints& x) { return count(x) ? x.typed_data() : nullptr; }

bool read_dtype(ffi::DataType type, DType* to) {
  if (type == ffi::F32)
    *to = DType::f32;
  else if (type == ffi::BF16)
    *to = DType::bf16;
  else if (type == ffi::F16)
    *to = DType::f16;
  else
    return false;
  return true;
}
bool is_byte(ffi::DataType type) { return type == ffi::U8 || type == ffi::PRED || type == ffi::S8; }

bool has_shape(ffi::AnyBuffer::Dimensions dims, std::initializer_list<int64_t> shape) {
  if (dims.size() != shape.size()) return false;
  size_t i = 0;
  for (int64_t size : shape)
    if (dims[i++] != size) return false;
  return true;
}

std::string read_heads(const Heads& in, Problem* p) {
  const auto q = in.q.dimensions(), k = in.k.dimensions(), v = in.v.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4)
    return "rank of q, k, v: expected 4 each ([B, T, H, D]). Fold other axes into the batch";
  if (!read_dtype(in.q.element_type(), &p->dtype) || in.k.element_type() != in.q.element_type() ||
      in.v.element_type() != in.q.element_type())
    return "dtype of q, k, v: expected float32, bfloat16 or float16, the same for all";
  p->batch = q[0], p->q_tokens = q[1], p->q_heads = q[2], p->dim = q[3];
  p->kv_tokens = k[1], p->kv_heads = k[2], p->v_dim = v[3];
  if (!has_shape(k, {q[0], k[1], k[2], q[3]}) || !has_shape(v, {q[0], k[1], k[2], v[3]}))
    return "shapes of q, k, v: expected [B, Tq, Hq, D], [B, Tk, Hk, D], [B, Tk, Hk, Dv]";
  p->q = in.q.untyped_data(), p->k = in.k.untyped_data(), p->v = in.v.untyped_data();
  return "";
}

// Positions [1 or B, tokens] and segment ids [B, tokens]; absent with no elements.
std::string read_tokens(const Inputs& in, Problem* p) {
  const auto is_rows = [&](const Ints& x, int64_t tokens) {
    const auto dims = x.dimensions();
    return dims.size() == 2 && dims[1] == tokens && (dims[0] == 1 || dims[0] == p->batch);
  };
  p->q_positions = pointer(in.q_positions), p->kv_positions = pointer(in.kv_positions);
  p->q_segments = pointer(in.q_segment_ids), p->kv_segments = pointer(in.kv_segment_ids);
  if ((p->q_positions && !is_rows(in.q_positions, p->q_tokens)) ||
      (p->kv_positions && !is_rows(in.kv_positions, p->kv_tokens)))
    return "shape of positions: expected [1 or B, tokens]";
  if (p->q_positions) p->q_positions_batch = in.q_positions.dimensions()[0];
  if (p->kv_positions) p->kv_positions_batch = in.kv_positions.dimensions()[0];
  if (!p->q_segments != !p->kv_segments) return "segment ids: expected both or neither";
  if (p->q_segments && (!has_shape(in.q_segment_ids.dimensions(), {p->batch, p->q_tokens}) ||
                        !has_shape(in.kv_segment_ids.dimensions(), {p->batch, p->kv_tokens})))
    return "shape of segment ids: expected [B, tokens]";
  return "";
}

std::string read_pairs(const Inputs& in, Problem* p) {
  p->bias = pointer<const void>(in.bias);
  if (p->bias) {
    const auto dims = in.bias.dimensions();
    if (dims.size() != 4 || dims[2] != p->q_tokens || dims[3] != p->kv_tokens)
      return "shape of the bias: expected [1 or B, heads, Tq, Tk]";
    p->bias_batch = dims[0], p->bias_heads = dims[1];
    if (!read_dtype(in.bias.element_type(), &p->bias_dtype))
      return "dtype of the bias: expected float32, bfloat16 or float16";
  }
  p->mask_blocks = pointer<const uint8_t>(in.mask_blocks);
  if (p->mask_blocks) {
    const auto dims = in.mask_blocks.dimensions();
    if (!is_byte(in.mask_blocks.element_type()) || dims.size() != 3 || dims[1] != p->block_q ||
        dims[2] != p->block_kv)
      return "mask_blocks: expected bytes [blocks, block_q, block_kv]";
  }
  return is_byte(in.is_partial.element_type()) ? "" : "dtype of is_partial: expected bool or uint8";
}

// Fills and validates the problem of a call.
std::string read_call(const Inputs& in, const Attributes& attributes, Call* call) {
  Problem& p = call->problem;
  if (std::string error = read_heads(in, &p); !error.empty()) return error;
  p.scale = attributes.scale, p.softcap = attributes.softcap;
  p.block_q = attributes.block_q, p.block_kv = attributes.block_kv;
  p.layout_batch = attributes.layout_batch, p.layout_heads = attributes.layout_heads;
  p.program_heads = attributes.program_heads;
  if (std::string error = read_tokens(in, &p); !error.empty()) return error;
  if (std::string error = read_pairs(in, &p); !error.empty()) return error;
  if (std::string error = check_sizes(p); !error.empty()) return error;
  p.q_blocks = (p.q_tokens + p.block_q - 1) / p.block_q;
  p.kv_blocks = (p.kv_tokens + p.block_kv - 1) / p.block_kv;
  p.row_starts = in.row_starts.typed_data(), p.kv_block = in.kv_block.typed_data();
  p.is_partial = static_cast<const uint8_t*>(in.is_partial.untyped_data());
  p.tables = in.tables.typed_data(), p.mask_index = in.mask_index.typed_data();
  const int64_t blocks = p.mask_blocks ? in.mask_blocks.dimensions()[0] : 0;
  const ListSizes sizes{
      count(in.row_starts), count(in.kv_block), count(in.is_partial), count(in.tables), blocks,
      count(in.mask_index)};
  if (std::string error = check_lists(p, sizes, call); !error.empty()) return error;
  p.is_listed = call->is_listed.data();
  const auto words = attributes.program;
  return parse_program(words.begin(), static_cast<int64_t>(words.size()),
                       sizes.tables / p.program_heads, call);
}

// Divides a workspace into the arrays of the call and scratch of as many workers as it has room
// for.
std::string read_workspace(const ffi::AnyBuffer& buffer, const JobSizes& sizes, Call* call) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.untyped_data());
  const int64_t lost = static_cast<int64_t>(-address & (kAlign - 1));
  const int64_t size = static_cast<int64_t>(buffer.size_bytes()) - lost;
  if (size < sizes.arrays + sizes.slot)
    return "size of the workspace: got " + std::to_string(buffer.size_bytes()) +
           " bytes, expected at least " + std::to_string(sizes.arrays + sizes.slot + kAlign);
  call->problem.workspace = static_cast<char*>(buffer.untyped_data()) + lost;
  call->scratch = call->problem.workspace + sizes.arrays;
  call->scratch_size = size - sizes.arrays;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  // A fresh workspace would cost a page fault per 4 KB.
  constexpr uintptr_t page = uintptr_t{2} << 20;
  const uintptr_t begin = (address + page - 1) / page * page;
  const uintptr_t end = (address + buffer.size_bytes()) / page * page;
  if (end > begin)
    madvise(static_cast<char*>(buffer.untyped_data()) + (begin - address), end - begin,
            MADV_HUGEPAGE);
#endif
  return "";
}

ffi::Future fail(const std::string& error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error::InvalidArgument("xsake_cpu: " + error));
  return future;
}

ffi::Future start(ffi::ThreadPool& pool, const std::shared_ptr<Job>& job) {
  ffi::Promise promise;
  ffi::Future future(promise);
  if (job->is_empty()) {
    promise.SetAvailable();
    return future;
  }
  const std::function<void()> work = [job, promise]() mutable {
    job->work([&] { promise.SetAvailable(); });
  };
  const int64_t workers = min_of(max_of(1, pool.num_threads()), job->max_workers());
  for (int64_t i = 1; i < workers; i++) pool.Schedule(std::function<void()>(work));
  work();
  return future;
}

std::string read_outputs(const Heads& in, AnyResult o, FloatsResult lse, Problem* p) {
  if (!has_shape(o->dimensions(), {p->batch, p->q_tokens, p->q_heads, p->v_dim}) ||
      o->element_type() != in.q.element_type() ||
      !has_shape(lse->dimensions(), {p->batch, p->q_tokens, p->q_heads}))
    return "results: expected o [B, Tq, Hq, Dv] in the dtype of q and lse [B, Tq, Hq]";
  p->o = o->untyped_data(), p->lse = lse->typed_data();
  return "";
}

ffi::Future attend(ffi::ThreadPool& pool, bool is_decode, const Inputs& in, AnyResult o,
                   FloatsResult lse, AnyResult workspace, const Attributes& attributes) {
  auto call = std::make_unique<Call>();
  Problem& p = call->problem;
  if (std::string error = read_call(in, attributes, call.get()); !error.empty()) return fail(error);
  if (std::string error = read_outputs(in, o, lse, &p); !error.empty()) return fail(error);
  const WorkspaceSizes z = sizes_of(p);
  const JobSizes sizes = is_decode ? decode_sizes(z) : forward_sizes(z);
  if (std::string error = read_workspace(*workspace, sizes, call.get()); !error.empty())
    return fail(error);
  return start(pool, is_decode ? decode_job(std::move(call)) : forward_job(std::move(call)));
}

struct Residuals {
  ffi::AnyBuffer o;
  Floats lse;
  ffi::AnyBuffer do_;
  Floats dlse;
};
struct Gradients {
  AnyResult dq, dk, dv;
};

std::string read_gradients(const Heads& in, Residuals from, Gradients to, Problem* p) {
  const auto is_like = [](const ffi::AnyBuffer& x, const ffi::AnyBuffer& y) {
    return x.element_type() == y.element_type() && x.dimensions() == y.dimensions();
  };
  for (const ffi::AnyBuffer& x : {from.o, from.do_})
    if (!has_shape(x.dimensions(), {p->batch, p->q_tokens, p->q_heads, p->v_dim}) ||
        x.element_type() != in.q.element_type())
      return "o and do: expected [B, Tq, Hq, Dv] in the dtype of q";
  for (const Floats& x : {from.lse, from.dlse})
    if (!has_shape(x.dimensions(), {p->batch, p->q_tokens, p->q_heads}))
      return "lse and dlse: expected [B, Tq, Hq]";
  if (!is_like(*to.dq, in.q) || !is_like(*to.dk, in.k) || !is_like(*to.dv, in.v))
    return "dq, dk, dv: expected the shapes and dtypes of q, k, v";
  p->o = from.o.untyped_data(), p->lse = from.lse.typed_data();
  p->do_ = from.do_.untyped_data(), p->dlse = from.dlse.typed_data();
  p->dq = to.dq->untyped_data(), p->dk = to.dk->untyped_data(), p->dv = to.dv->untyped_data();
  return "";
}

ffi::Future differentiate(ffi::ThreadPool& pool, const Inputs& in, const Residuals& residuals,
                          const Gradients& gradients, FloatsResult dbias, AnyResult workspace,
                          const Attributes& attributes) {
  auto call = std::make_unique<Call>();
  Problem& p = call->problem;
  if (std::string error = read_call(in, attributes, call.get()); !error.empty()) return fail(error);
  if (std::string error = read_gradients(in, residuals, gradients, &p); !error.empty())
    return fail(error);
  if (p.bias && !(dbias->dimensions() == in.bias.dimensions()))
    return fail("dbias: expected the shape of the bias");
  p.dbias = p.bias ? dbias->typed_data() : nullptr;
  const JobSizes sizes = backward_sizes(sizes_of(p));
  if (std::string error = read_workspace(*workspace, sizes, call.get()); !error.empty())
    return fail(error);
  return start(pool, backward_job(std::move(call)));
}

struct SelectedArguments : Heads {
  Ints blocks, q_positions;
  float scale;
  int64_t block;
};

std::string read_selected(const SelectedArguments& in, Call* call) {
  Problem& p = call->problem;
  if (std::string error = read_heads(in, &p); !error.empty()) return error;
  const auto dims = in.blocks.dimensions(), positions = in.q_positions.dimensions();
  if (dims.size() != 4 || dims[0] != p.batch || dims[1] != p.q_tokens || dims[2] != p.kv_heads)
    return "shape of blocks: expected [B, Tq, Hk, slots]";
  p.selected = in.blocks.typed_data(), p.num_slots = dims[3];
  p.q_positions = pointer(in.q_positions);
  if (p.q_positions && (positions.size() != 2 || positions[1] != p.q_tokens ||
                        (positions[0] != 1 && positions[0] != p.batch)))
    return "shape of positions: expected [1 or B, tokens]";
  if (p.q_positions) p.q_positions_batch = positions[0];
  p.scale = in.scale, p.block_q = 1, p.block_kv = in.block;
  return check_selected(count(in.blocks), call);
}

ffi::Future attend_selected(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                            ffi::AnyBuffer v, Ints blocks, Ints q_positions, AnyResult o,
                            FloatsResult lse, AnyResult workspace, float scale, int64_t block) {
  auto call = std::make_unique<Call>();
  const SelectedArguments in{{q, k, v}, blocks, q_positions, scale, block};
  if (std::string error = read_selected(in, call.get()); !error.empty()) return fail(error);
  if (std::string error = read_outputs(in, o, lse, &call->problem); !error.empty())
    return fail(error);
  const JobSizes sizes = selected_sizes(sizes_of(call->problem));
  if (std::string error = read_workspace(*workspace, sizes, call.get()); !error.empty())
    return fail(error);
  return start(pool, selected_job(std::move(call)));
}

ffi::Future differentiate_selected(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                                   ffi::AnyBuffer v, Ints blocks, Ints q_positions,
                                   ffi::AnyBuffer o, Floats lse, ffi::AnyBuffer do_, Floats dlse,
                                   AnyResult dq, AnyResult dk, AnyResult dv, AnyResult workspace,
                                   float scale, int64_t block) {
  auto call = std::make_unique<Call>();
  const SelectedArguments in{{q, k, v}, blocks, q_positions, scale, block};
  if (std::string error = read_selected(in, call.get()); !error.empty()) return fail(error);
  if (std::string error = read_gradients(in, {o, lse, do_, dlse}, {dq, dk, dv}, &call->problem);
      !error.empty())
    return fail(error);
  const JobSizes sizes = selected_backward_sizes(sizes_of(call->problem));
  if (std::string error = read_workspace(*workspace, sizes, call.get()); !error.empty())
    return fail(error);
  return start(pool, selected_backward_job(std::move(call)));
}

struct PagedArguments {
  ffi::AnyBuffer q, k, v;
  Ints page, number;
  ffi::AnyBuffer is_partial;
  Ints q_positions, lengths;
  Floats k_scale, v_scale;
  Ints tables;
  float scale, softcap;
  ffi::Span<const int32_t> program;
  int64_t program_heads;
};

std::string read_pages(const PagedArguments& in, Call* call) {
  Problem& p = call->problem;
  const auto q = in.q.dimensions(), k = in.k.dimensions(), v = in.v.dimensions();
  const auto lists = in.page.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || lists.size() != 3)
    return "rank: expected q [B, Tq, Hq, D], pages [P, Hk, page, D], lists [B, heads, slots]";
  p.batch = q[0], p.q_tokens = q[1], p.q_heads = q[2], p.dim = q[3], p.v_dim = v[3];
  p.num_pages = k[0], p.kv_heads = k[1], p.block_kv = k[2];
  p.page_heads = lists[1], p.kv_blocks = lists[2];
  p.kv_tokens = p.kv_blocks * p.block_kv;
  if (k[3] != q[3] || !has_shape(v, {k[0], k[1], k[2], v[3]}) || lists[0] != q[0] ||
      !has_shape(in.number.dimensions(), {lists[0], lists[1], lists[2]}) ||
      count(in.is_partial) != count(in.page) || !is_byte(in.is_partial.element_type()) ||
      !has_shape(in.q_positions.dimensions(), {q[0], q[1]}) ||
      !has_shape(in.lengths.dimensions(), {q[0]}))
    return "shapes of a call over pages do not fit together";
  const bool is_int8 = in.k.element_type() == ffi::S8;
  if (!read_dtype(in.q.element_type(), &p.dtype) || in.v.element_type() != in.k.element_type() ||
      (!is_int8 && in.k.element_type() != in.q.element_type()))
    return "dtype of pages: expected that of q, or int8";
  p.page_dtype = is_int8 ? DType::i8 : p.dtype;
  for (const Floats& x : {in.k_scale, in.v_scale})
    if (static_cast<int64_t>(x.element_count()) != (is_int8 ? k[0] * k[1] : 0))
      return "scales: expected [P, Hk] for int8 pages and none for others";
  p.page_k_scale = is_int8 ? in.k_scale.typed_data() : nullptr;
  p.page_v_scale = is_int8 ? in.v_scale.typed_data() : nullptr;
  p.q = in.q.untyped_data(), p.k = in.k.untyped_data(), p.v = in.v.untyped_data();
  p.page = in.page.typed_data(), p.page_number = in.number.typed_data();
  p.is_partial = static_cast<const uint8_t*>(in.is_partial.untyped_data());
  p.q_positions = in.q_positions.typed_data(), p.q_positions_batch = p.batch;
  p.lengths = in.lengths.typed_data(), p.tables = in.tables.typed_data();
  p.scale = in.scale, p.softcap = in.softcap, p.program_heads = in.program_heads;
  if (std::string error = check_pages(count(in.page), call); !error.empty()) return error;
  return parse_program(in.program.begin(), static_cast<int64_t>(in.program.size()),
                       count(in.tables) / p.program_heads, call);
}

ffi::Future attend_pages(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                         Ints page, Ints number, ffi::AnyBuffer is_partial, Ints q_positions,
                         Ints lengths, Floats k_scale, Floats v_scale, Ints tables, AnyResult o,
                         FloatsResult lse, AnyResult workspace, float scale, float softcap,
                         ffi::Span<const int32_t> program, int64_t program_heads) {
  auto call = std::make_unique<Call>();
  const PagedArguments in{q, k, v, page, number, is_partial, q_positions, lengths, k_scale, v_scale,
                          tables, scale, softcap, program, program_heads};
  if (std::string error = read_pages(in, call.get()); !error.empty()) return fail(error);
  if (std::string error = read_outputs({q, k, v}, o, lse, &call->problem); !error.empty())
    return fail(error);
  const JobSizes sizes = decode_sizes(sizes_of(call->problem));
  if (std::string error = read_workspace(*workspace, sizes, call.get()); !error.empty())
    return fail(error);
  return start(pool, paged_job(std::move(call)));
}

ffi::Future score_labels(ffi::ThreadPool pool, Floats q, ffi::AnyBuffer codes,
                         ffi::AnyBuffer factor, Ints page_table, Ints lengths,
                         FloatsResult scores) {
  const auto rows = q.dimensions(), pages = codes.dimensions(), table = page_table.dimensions();
  if (rows.size() != 4 || pages.size() != 4 || table.size() != 2 || rows[3] != 2 * pages[2] ||
      !has_shape(pages, {pages[0], rows[1], pages[2], pages[3]}) ||
      !has_shape(factor.dimensions(), {pages[0], rows[1], rows[3]}) || table[0] != rows[0] ||
      !has_shape(lengths.dimensions(), {rows[0]}) ||
      !has_shape(scores->dimensions(), {rows[0], rows[1], rows[2], table[1]}))
    return fail("shapes of labels: expected q [B, Hk, G, R], codes [P, Hk, R/2, page], factor "
                "[P, Hk, R], page_table [B, N], lengths [B], scores [B, Hk, G, N]");
  if (codes.element_type() != ffi::U8 || factor.element_type() != ffi::BF16)
    return fail("dtypes of labels: expected uint8 codes and bfloat16 factors");
  if (rows[3] > kMaxLabelComponents || pages[3] > kMaxLabelTokens)
    return fail("sizes of labels: expected up to 256 components and 256 tokens of a page");
  for (int64_t i = 0; i < count(page_table); i++)
    if (page_table.typed_data()[i] >= pages[0])
      return fail("page_table: expected pages below " + std::to_string(pages[0]));
  auto call = std::make_unique<Call>();
  call->labels = {rows[0], rows[1], rows[2], rows[3], pages[3], table[1],
                  q.typed_data(), static_cast<const uint8_t*>(codes.untyped_data()),
                  static_cast<const uint16_t*>(factor.untyped_data()), page_table.typed_data(),
                  lengths.typed_data(), scores->typed_data()};
  return start(pool, labels_job(std::move(call)));
}

ffi::Future select_blocks(ffi::ThreadPool pool, Floats q, Floats k, Floats weights, Ints position,
                          Ints start_of, ffi::Result<Ints> blocks, AnyResult workspace,
                          int64_t block, int64_t first, int64_t local, bool has_relu) {
  const auto rows = q.dimensions(), keys = k.dimensions(), lists = blocks->dimensions();
  const bool is_weighted = weights.element_count() > 0;
  if (rows.size() != 4 || keys.size() != 4 || lists.size() != 4 || keys[0] != rows[0] ||
      keys[3] != rows[3] || lists[2] < 1 || rows[2] % lists[2] ||
      (keys[2] != 1 && keys[2] != lists[2]) ||
      !has_shape(lists, {rows[0], rows[1], lists[2], lists[3]}) ||
      !has_shape(position.dimensions(), {rows[0], rows[1]}) ||
      !has_shape(start_of.dimensions(), {rows[0], rows[1]}) ||
      (is_weighted && !has_shape(weights.dimensions(), {rows[0], rows[1], rows[2]})))
    return fail("shapes of an index: expected q [B, Tq, Hi, D], k [B, Tk, 1 or groups, D], weights "
                "[B, Tq, Hi] or none, position and start [B, Tq], blocks [B, Tq, groups, slots]");
  if (block < 1 || first < 0 || local < 1 || rows[3] < 1 || keys[1] > INT32_MAX - block)
    return fail("numbers of an index: expected block, local and D of 1 or more, first of 0 or more");
  const int64_t tokens = rows[0] * rows[1];
  for (int64_t i = 0; i < tokens; i++)
    if (start_of.typed_data()[i] < 0) return fail("start: expected 0 or more");
  auto call = std::make_unique<Call>();
  call->top_blocks = {rows[0], rows[1], keys[1], rows[2], keys[2], rows[3], lists[2],
                      block, (keys[1] + block - 1) / block, lists[3], first, local,
                      has_relu, q.typed_data(), k.typed_data(),
                      is_weighted ? weights.typed_data() : nullptr, position.typed_data(),
                      start_of.typed_data(), blocks->typed_data(), nullptr};
  TopBlocks& x = call->top_blocks;
  const JobSizes sizes = top_blocks_sizes({x.batch, x.q_tokens, x.kv_tokens, x.q_heads, x.kv_heads,
                                           x.dim, 0, x.per_group(), x.block, 0, 0});
  if (std::string error = read_workspace(*workspace, sizes, call.get()); !error.empty())
    return fail(error);
  return start(pool, top_blocks_job(std::move(call)));
}

// Arguments and attributes of the block-sparse handlers.
#define XS_INPUTS                                                                          \
  ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Ints row_starts, Ints kv_block,    \
      ffi::AnyBuffer is_partial, Ints tables, ffi::AnyBuffer mask_blocks, Ints mask_index, \
      ffi::AnyBuffer bias, Ints q_positions, Ints kv_positions, Ints q_segment_ids,        \
      Ints kv_segment_ids
#define XS_ATTRIBUTES                                                                  \
  float scale, float softcap, int64_t block_q, int64_t block_kv, int64_t layout_batch, \
      int64_t layout_heads, ffi::Span<const int32_t> program, int64_t program_heads
#define XS_PACK_INPUTS                                                                  \
  Inputs {                                                                              \
    {q, k, v}, row_starts, kv_block, is_partial, tables, mask_blocks, mask_index, bias, \
        q_positions, kv_positions, q_segment_ids, kv_segment_ids                        \
  }
#define XS_PACK_ATTRIBUTES                                                                \
  Attributes {                                                                            \
    scale, softcap, block_q, block_kv, layout_batch, layout_heads, program, program_heads \
  }

template <bool is_decode>
ffi::Future attend_handler(ffi::ThreadPool pool, XS_INPUTS, AnyResult o, FloatsResult lse,
                           AnyResult workspace, XS_ATTRIBUTES) {
  return attend(pool, is_decode, XS_PACK_INPUTS, o, lse, workspace, XS_PACK_ATTRIBUTES);
}

// Statistics read no values: v is k, and its workspace is that of a forward call with v_dim 0.
ffi::Future statistics_handler(ffi::ThreadPool pool, XS_INPUTS, FloatsResult lse,
                               FloatsResult entropy, FloatsResult block_lse, AnyResult workspace,
                               XS_ATTRIBUTES) {
  auto call = std::make_unique<Call>();
  Problem& p = call->problem;
  if (std::string error = read_call(XS_PACK_INPUTS, XS_PACK_ATTRIBUTES, call.get()); !error.empty())
    return fail(error);
  p.v_dim = 0;
  if (!has_shape(lse->dimensions(), {p.batch, p.q_tokens, p.q_heads}) ||
      !has_shape(entropy->dimensions(), {p.batch, p.q_tokens, p.q_heads}) ||
      !has_shape(block_lse->dimensions(), {p.batch, p.q_tokens, p.q_heads, p.kv_blocks}))
    return fail("results: expected lse and entropy [B, Tq, Hq], block_lse [B, Tq, Hq, Nk]");
  p.lse = lse->typed_data(), p.entropy = entropy->typed_data();
  p.block_lse = block_lse->typed_data();
  const JobSizes sizes = forward_sizes(sizes_of(p));
  if (std::string error = read_workspace(*workspace, sizes, call.get()); !error.empty())
    return fail(error);
  return start(pool, statistics_job(std::move(call)));
}

ffi::Future backward_handler(ffi::ThreadPool pool, XS_INPUTS, ffi::AnyBuffer o, Floats lse,
                             ffi::AnyBuffer do_, Floats dlse, AnyResult dq, AnyResult dk,
                             AnyResult dv, FloatsResult dbias, AnyResult workspace, XS_ATTRIBUTES) {
  return differentiate(pool, XS_PACK_INPUTS, {o, lse, do_, dlse}, {dq, dk, dv}, dbias, workspace,
                       XS_PACK_ATTRIBUTES);
}

template <class B>
auto bind_inputs(B&& binding) {
  return std::forward<B>(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<Ints>()
      .template Arg<Ints>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<Ints>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<Ints>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<Ints>()
      .template Arg<Ints>()
      .template Arg<Ints>()
      .template Arg<Ints>();
}
template <class B>
auto bind_attributes(B&& binding) {
  return std::forward<B>(binding)
      .template Attr<float>("scale")
      .template Attr<float>("softcap")
      .template Attr<int64_t>("block_q")
      .template Attr<int64_t>("block_kv")
      .template Attr<int64_t>("layout_batch")
      .template Attr<int64_t>("layout_heads")
      .template Attr<ffi::Span<const int32_t>>("program")
      .template Attr<int64_t>("program_heads");
}

}  // namespace
}  // namespace xsake_cpu

#define XSAKE_EXPORT extern "C" __attribute__((visibility("default")))
using namespace xsake_cpu;

XSAKE_EXPORT XLA_FFI_Error* xsake_cpu_forward(XLA_FFI_CallFrame* frame) {
  static auto* const handler = bind_attributes(bind_inputs(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                                                   .Ret<ffi::AnyBuffer>()
                                                   .Ret<Floats>()
                                                   .Ret<ffi::AnyBuffer>())
                                   .To(attend_handler<false>)
                                   .release();
  return handler->Call(frame);
}

XSAKE_EXPORT XLA_FFI_Error* xsake_cpu_decode(XLA_FFI_CallFrame* frame) {
  static auto* const handler = bind_attributes(bind_inputs(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                                                   .Ret<ffi::AnyBuffer>()
                                                   .Ret<Floats>()
                                                   .Ret<ffi::AnyBuffer>())
                                   .To(attend_handler<true>)
                                   .release();
  return handler->Call(frame);
}

XSAKE_EXPORT XLA_FFI_Error* xsake_cpu_backward(XLA_FFI_CallFrame* frame) {
  static auto* const handler = bind_attributes(bind_inputs(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                                                   .Arg<ffi::AnyBuffer>()
                                                   .Arg<Floats>()
                                                   .Arg<ffi::AnyBuffer>()
                                                   .Arg<Floats>()
                                                   .Ret<ffi::AnyBuffer>()
                                                   .Ret<ffi::AnyBuffer>()
                                                   .Ret<ffi::AnyBuffer>()
                                                   .Ret<Floats>()
                                                   .Ret<ffi::AnyBuffer>())
                                   .To(backward_handler)
                                   .release();
  return handler->Call(frame);
}

XSAKE_EXPORT XLA_FFI_Error* xsake_cpu_statistics(XLA_FFI_CallFrame* frame) {
  static auto* const handler = bind_attributes(bind_inputs(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())
                                                   .Ret<Floats>()
                                                   .Ret<Floats>()
                                                   .Ret<Floats>()
                                                   .Ret<ffi::AnyBuffer>())
                                   .To(statistics_handler)
                                   .release();
  return handler->Call(frame);
}

XSAKE_EXPORT XLA_FFI_Error* xsake_cpu_paged(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<Ints>()
                                   .Arg<Ints>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<Ints>()
                                   .Arg<Ints>()
                                   .Arg<Floats>()
                                   .Arg<Floats>()
                                   .Arg<Ints>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Ret<Floats>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Attr<float>("scale")
                                   .Attr<float>("softcap")
                                   .Attr<ffi::Span<const int32_t>>("program")
                                   .Attr<int64_t>("program_heads")
                                   .To(attend_pages)
                                   .release();
  return handler->Call(frame);
}

XSAKE_EXPORT XLA_FFI_Error* xsake_cpu_page_labels(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<Floats>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<Ints>()
                                   .Arg<Ints>()
                                   .Ret<Floats>()
                                   .To(score_labels)
                                   .release();
  return handler->Call(frame);
}

XSAKE_EXPORT XLA_FFI_Error* xsake_cpu_top_blocks(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<Floats>()
                                   .Arg<Floats>()
                                   .Arg<Floats>()
                                   .Arg<Ints>()
                                   .Arg<Ints>()
                                   .Ret<Ints>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Attr<int64_t>("block")
                                   .Attr<int64_t>("first")
                                   .Attr<int64_t>("local")
                                   .Attr<bool>("has_relu")
                                   .To(select_blocks)
                                   .release();
  return handler->Call(frame);
}

XSAKE_EXPORT XLA_FFI_Error* xsake_cpu_selected(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<Ints>()
                                   .Arg<Ints>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Ret<Floats>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Attr<float>("scale")
                                   .Attr<int64_t>("block")
                                   .To(attend_selected)
                                   .release();
  return handler->Call(frame);
}

XSAKE_EXPORT XLA_FFI_Error* xsake_cpu_selected_backward(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<Ints>()
                                   .Arg<Ints>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<Floats>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Arg<Floats>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Ret<ffi::AnyBuffer>()
                                   .Attr<float>("scale")
                                   .Attr<int64_t>("block")
                                   .To(differentiate_selected)
                                   .release();
  return handler->Call(frame);
}

XSAKE_EXPORT const char* xsake_cpu_isa() { return kernels().name; }
XSAKE_EXPORT void xsake_cpu_ffi_version(int32_t* major, int32_t* minor) {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}

// Bytes of the workspace of a call with scratch for `workers` threads. More threads than that do
// not take part; results do not depend on their number.
#define XS_WORKSPACE(name, steps)                                                            \
  XSAKE_EXPORT int64_t xsake_cpu_##name##_workspace(                                         \
      int64_t batch, int64_t q_tokens, int64_t kv_tokens, int64_t q_heads, int64_t kv_heads, \
      int64_t dim, int64_t v_dim, int64_t block_q, int64_t block_kv,                         \
      [[maybe_unused]] int64_t program_steps, int64_t num_slots, int64_t workers) {          \
    const WorkspaceSizes z{batch, q_tokens, kv_tokens, q_heads, kv_heads, dim,               \
                           v_dim, block_q,  block_kv,  steps,   num_slots};                  \
    const JobSizes sizes = name##_sizes(z);                                                  \
    return sizes.arrays + kAlign + max_of(1, workers) * sizes.slot;                          \
  }
XS_WORKSPACE(forward, program_steps)
XS_WORKSPACE(backward, program_steps)
XS_WORKSPACE(decode, program_steps)
// The causal rule is a program of one step.
XS_WORKSPACE(selected, 1)
XS_WORKSPACE(selected_backward, 1)
XS_WORKSPACE(top_blocks, 0)

// Building blocks, for tests.
XSAKE_EXPORT void xsake_cpu_test_exp2(const float* x, float* y, int64_t n) {
  kernels().exp2(x, y, n);
}
XSAKE_EXPORT void xsake_cpu_test_tanh(const float* x, float* y, int64_t n) {
  kernels().tanh(x, y, n);
}
XSAKE_EXPORT void xsake_cpu_test_product(const float* a, const float* b, float* c, int64_t m,
                                         int64_t n, int64_t k) {
  kernels().product(a, b, c, m, n, k);
}
