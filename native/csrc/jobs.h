// The jobs of the operations: their phases, and the sizes of their workspaces.
#pragma once

#include <memory>

#include "parallel.h"
#include "scratch.h"

namespace xsake_cpu {

// Bytes of the arrays of a call, and of the scratch of each worker.
struct JobSizes {
  int64_t arrays, slot;
};

JobSizes forward_sizes(const WorkspaceSizes& z);
JobSizes decode_sizes(const WorkspaceSizes& z);
JobSizes backward_sizes(const WorkspaceSizes& z);
JobSizes selected_sizes(const WorkspaceSizes& z);
JobSizes selected_backward_sizes(const WorkspaceSizes& z);
// block_q: index heads of a group.
JobSizes top_blocks_sizes(const WorkspaceSizes& z);

// Each takes a validated call with its workspace.
std::shared_ptr<Job> forward_job(std::unique_ptr<Call> call);
std::shared_ptr<Job> decode_job(std::unique_ptr<Call> call);
std::shared_ptr<Job> paged_job(std::unique_ptr<Call> call);
std::shared_ptr<Job> backward_job(std::unique_ptr<Call> call);
std::shared_ptr<Job> statistics_job(std::unique_ptr<Call> call);
std::shared_ptr<Job> labels_job(std::unique_ptr<Call> call);
std::shared_ptr<Job> top_blocks_job(std::unique_ptr<Call> call);
std::shared_ptr<Job> selected_job(std::unique_ptr<Call> call);
std::shared_ptr<Job> selected_backward_job(std::unique_ptr<Call> call);

}  // namespace xsake_cpu
