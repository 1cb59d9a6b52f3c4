#include "jobs.h"

namespace xsake_cpu {
namespace {

// Counts down the tasks of each (batch, kv head); the last one merges.
void count_tasks(Call* call, int64_t tasks_per_head) {
  const auto heads = static_cast<size_t>(call->problem.batch * call->problem.kv_heads);
  call->unfinished = std::make_unique<std::atomic<int64_t>[]>(heads);
  for (size_t i = 0; i < heads; i++) call->unfinished[i].store(tasks_per_head);
}
bool is_last_task(Call& call, int64_t head) {
  return call.unfinished[static_cast<size_t>(head)].fetch_sub(1, std::memory_order_acq_rel) == 1;
}

}  // namespace

JobSizes forward_sizes(const WorkspaceSizes& z) {
  return {take_forward_arrays(nullptr, z, nullptr),
          take_forward(nullptr, z.dim, z.v_dim, z.program_steps, nullptr)};
}
JobSizes decode_sizes(const WorkspaceSizes& z) {
  return {take_decode_arrays(nullptr, z, nullptr),
          take_decode(nullptr, z.dim, z.v_dim, z.program_steps, nullptr)};
}
JobSizes backward_sizes(const WorkspaceSizes& z) {
  return {take_backward_arrays(nullptr, z, nullptr), take_backward(nullptr, z, nullptr)};
}
JobSizes selected_sizes(const WorkspaceSizes& z) {
  return {take_forward_arrays(nullptr, z, nullptr), take_selected(nullptr, z, nullptr)};
}
JobSizes selected_backward_sizes(const WorkspaceSizes& z) {
  return {take_selected_grad_arrays(nullptr, z, nullptr),
          take_selected_backward(nullptr, z, nullptr)};
}

JobSizes top_blocks_sizes(const WorkspaceSizes& z) {
  const int64_t number = (z.kv_tokens + z.block_kv - 1) / z.block_kv;
  return {num_padded_keys(z) * z.dim * static_cast<int64_t>(sizeof(float)),
          take_top_blocks(nullptr, z.dim, z.block_q, number, nullptr)};
}

std::shared_ptr<Job> forward_job(std::unique_ptr<Call> call) {
  const Problem& p = call->problem;
  const int64_t slot = forward_sizes(sizes_of(p)).slot;
  auto job = std::make_shared<Job>(std::move(call), slot);
  job->add_phase(p.batch * p.kv_heads * p.kv_blocks,
                 [&p](int64_t item, char*) { kernels().forward_pack(p, item); });
  job->add_phase(p.batch * p.q_heads * p.tiles_per_head(),
                 [&p](int64_t item, char* scratch) { kernels().forward_tile(p, item, scratch); });
  return job;
}

namespace {
// Chunks of keys, each head merged by the thread that finishes its last chunk.
std::shared_ptr<Job> chunked_job(std::unique_ptr<Call> call,
                                 void (*compute)(const Problem&, int64_t item, char* scratch)) {
  const Problem& p = call->problem;
  const int64_t slot = decode_sizes(sizes_of(p)).slot;
  count_tasks(call.get(), num_chunks(p.kv_blocks, p.block_kv));
  auto job = std::make_shared<Job>(std::move(call), slot);
  job->add_phase(
      num_decode_tasks(p), [&p, &call = job->call(), compute](int64_t item, char* scratch) {
        compute(p, item, scratch);
        const DecodeItem task = decode_task(p, item);
        for (int64_t i = 0; i < task.num_heads; i++) {
          const int64_t head = task.b * p.kv_heads + task.first_head + i;
          if (is_last_task(call, head)) kernels().decode_merge(p, head);
        }
      });
  return job;
}
}  // namespace

std::shared_ptr<Job> decode_job(std::unique_ptr<Call> call) {
  return chunked_job(std::move(call), kernels().decode_chunk);
}

std::shared_ptr<Job> paged_job(std::unique_ptr<Call> call) {
  return chunked_job(std::move(call), kernels().paged_chunk);
}

std::shared_ptr<Job> labels_job(std::unique_ptr<Call> call) {
  const Labels& x = call->labels;
  auto job = std::make_shared<Job>(std::move(call), 0);
  job->add_phase(x.batch * x.kv_heads * label_chunks(x),
                 [&x](int64_t item, char*) { kernels().score_labels(x, item); });
  return job;
}

std::shared_ptr<Job> top_blocks_job(std::unique_ptr<Call> call) {
  call->top_blocks.workspace = call->problem.workspace;
  const TopBlocks& x = call->top_blocks;
  const int64_t slot = take_top_blocks(nullptr, x.dim, x.per_group(), x.number, nullptr);
  auto job = std::make_shared<Job>(std::move(call), slot);
  job->add_phase(x.batch * x.kv_heads * x.number,
                 [&x](int64_t item, char*) { kernels().top_blocks_pack(x, item); });
  job->add_phase(x.batch * x.groups * x.num_tiles(), [&x](int64_t item, char* scratch) {
    kernels().top_blocks_tile(x, item, scratch);
  });
  return job;
}

std::shared_ptr<Job> backward_job(std::unique_ptr<Call> call) {
  const Problem& p = call->problem;
  const int64_t slot = backward_sizes(sizes_of(p)).slot;
  const int64_t heads = p.batch * p.kv_heads, tiles = p.tiles_per_head();
  const int64_t kv_blocks = heads * p.kv_blocks, tasks = heads * num_grad_tasks(p);
  auto job = std::make_shared<Job>(std::move(call), slot);
  job->add_phase(kv_blocks + p.batch * p.q_heads * tiles, [&p, kv_blocks](int64_t item, char*) {
    item < kv_blocks ? kernels().backward_pack(p, item)
                     : kernels().backward_pack_queries(p, item - kv_blocks);
  });
  job->add_phase(tasks + (p.bias ? p.bias_batch * p.bias_heads * tiles : 0),
                 [&p, tasks](int64_t item, char* scratch) {
                   item < tasks ? kernels().backward_keys(p, item, scratch)
                                : kernels().backward_bias(p, item - tasks, scratch);
                 });
  return job;
}

std::shared_ptr<Job> statistics_job(std::unique_ptr<Call> call) {
  const Problem& p = call->problem;
  const int64_t slot = forward_sizes(sizes_of(p)).slot;
  auto job = std::make_shared<Job>(std::move(call), slot);
  job->add_phase(p.batch * p.kv_heads * p.kv_blocks,
                 [&p](int64_t item, char*) { kernels().statistics_pack(p, item); });
  job->add_phase(p.batch * p.q_heads * p.tiles_per_head(), [&p](int64_t item, char* scratch) {
    kernels().statistics_tile(p, item, scratch);
  });
  return job;
}

std::shared_ptr<Job> selected_job(std::unique_ptr<Call> call) {
  const Problem& p = call->problem;
  const int64_t slot = selected_sizes(sizes_of(p)).slot;
  auto job = std::make_shared<Job>(std::move(call), slot);
  job->add_phase(p.batch * p.kv_heads * p.kv_blocks,
                 [&p](int64_t item, char*) { kernels().forward_pack(p, item); });
  job->add_phase(p.batch * p.kv_heads * p.q_blocks,
                 [&p](int64_t item, char* scratch) { kernels().selected_chunk(p, item, scratch); });
  return job;
}

std::shared_ptr<Job> selected_backward_job(std::unique_ptr<Call> call) {
  const Problem& p = call->problem;
  const int64_t slot = selected_backward_sizes(sizes_of(p)).slot;
  const int64_t heads = p.batch * p.kv_heads;
  const int64_t ranges = num_ranges(p.batch, p.kv_heads, p.kv_tokens, p.block_kv);
  count_tasks(call.get(), ranges);
  auto job = std::make_shared<Job>(std::move(call), slot);
  job->add_phase(heads * p.kv_blocks,
                 [&p](int64_t item, char*) { kernels().backward_pack(p, item); });
  job->add_phase(heads * ranges,
                 [&p, &call = job->call(), heads, ranges](int64_t item, char* scratch) {
                   kernels().selected_range(p, item, scratch);
                   if (is_last_task(call, item % heads) && ranges > 1)
                     kernels().selected_merge(p, item % heads);
                 });
  return job;
}

}  // namespace xsake_cpu
