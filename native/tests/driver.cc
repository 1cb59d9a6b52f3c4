// The kernels without Python and XLA: jobs on own threads against sums in double precision.
//
//   driver [THREADS] [REPEATS]
//
// For sanitizers that Python and XLA disturb, and for machines that only an emulator runs. Repeats
// must be equal bit by bit.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "../csrc/jobs.h"

namespace xsake_cpu {
namespace {

struct Case {
  const char* name;
  int64_t batch, q_tokens, kv_tokens, q_heads, kv_heads, dim, v_dim, block_q, block_kv;
  double density;
  bool is_causal, has_bias;
  float softcap;
  int64_t num_slots = 0;  // of selected attention
};

const Case kCases[] = {
    {"causal", 1, 200, 200, 2, 2, 16, 16, 64, 64, 1.0, true, false, 0},
    {"ragged", 2, 260, 260, 4, 2, 32, 24, 32, 32, 0.4, true, false, 0},
    {"large blocks", 1, 300, 530, 2, 1, 64, 64, 256, 512, 1.0, false, false, 0},
    {"odd sizes", 1, 77, 133, 3, 1, 5, 7, 24, 40, 0.6, false, false, 0},
    {"bias and softcap", 2, 90, 90, 4, 2, 16, 16, 32, 16, 0.7, true, true, 4},
    {"key ranges", 1, 4100, 4100, 1, 1, 8, 8, 128, 128, 0.1, true, false, 0},
    {"one query", 2, 1, 1500, 8, 2, 64, 64, 16, 64, 0.8, false, false, 0},
    {"selected", 2, 700, 700, 6, 2, 32, 24, 1, 32, 0, true, false, 0, 5},
    {"selected, key ranges", 1, 4100, 4100, 2, 1, 8, 8, 1, 64, 0, true, false, 0, 4},
};

// k >= q as a mask program: see csrc/mask_program.h.
const int32_t kCausal[] = {1, 4, 0, 0, static_cast<int32_t>(Op::ge), 1, 0, 1, 1, 1, 1, 0, 0, 0};

class Data {
 public:
  explicit Data(const Case& c) : case_(c), random_(7) {
    q = draw(c.batch * c.q_tokens * c.q_heads * c.dim);
    k = draw(c.batch * c.kv_tokens * c.kv_heads * c.dim);
    v = draw(c.batch * c.kv_tokens * c.kv_heads * c.v_dim);
    do_ = draw(c.batch * c.q_tokens * c.q_heads * c.v_dim);
    dlse = draw(c.batch * c.q_tokens * c.q_heads);
    if (c.has_bias) bias = draw(c.q_tokens * c.kv_tokens);
    c.num_slots ? draw_blocks() : draw_lists();
  }

  bool is_visible(int64_t b, int64_t query, int64_t h, int64_t key) const {
    if (case_.num_slots) {
      const int64_t hk = h * case_.kv_heads / case_.q_heads;
      const int64_t row = (b * case_.q_tokens + query) * case_.kv_heads + hk;
      const int32_t* slots = &blocks[static_cast<size_t>(row * case_.num_slots)];
      const auto block = static_cast<int32_t>(key / case_.block_kv);
      return key <= query && std::find(slots, slots + case_.num_slots, block) != slots + case_.num_slots;
    }
    const int64_t kv_blocks = (case_.kv_tokens + case_.block_kv - 1) / case_.block_kv;
    return grid_[static_cast<size_t>(query / case_.block_q * kv_blocks + key / case_.block_kv)] &&
           (!case_.is_causal || key <= query);
  }

  std::vector<float> q, k, v, do_, dlse, bias;
  std::vector<int32_t> row_starts{0}, kv_block, blocks;
  std::vector<uint8_t> is_partial;

 private:
  std::vector<float> draw(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n));
    for (float& y : x) y = normal(random_);
    return x;
  }

  // Slots of a query: its own block, then any, unused ones and repeats included.
  void draw_blocks() {
    const auto last = static_cast<int32_t>((case_.kv_tokens - 1) / case_.block_kv);
    std::uniform_int_distribution<int32_t> uniform(-1, last);
    for (int64_t row = 0; row < case_.batch * case_.q_tokens * case_.kv_heads; row++)
      for (int64_t i = 0; i < case_.num_slots; i++) {
        const int64_t own = row / case_.kv_heads % case_.q_tokens / case_.block_kv;
        blocks.push_back(i ? uniform(random_) : static_cast<int32_t>(own));
      }
  }

  void draw_lists() {
    std::uniform_real_distribution<double> uniform;
    const Case& c = case_;
    for (int64_t i = 0; i < c.q_tokens; i += c.block_q) {
      for (int64_t j = 0; j < c.kv_tokens; j += c.block_kv) {
        const bool exists = !c.is_causal || j < i + c.block_q;
        const bool is_listed = exists && uniform(random_) < c.density;
        grid_.push_back(is_listed);
        if (!is_listed) continue;
        kv_block.push_back(static_cast<int32_t>(j / c.block_kv));
        is_partial.push_back(j + c.block_kv > c.kv_tokens || (c.is_causal && j + c.block_kv > i));
      }
      row_starts.push_back(static_cast<int32_t>(kv_block.size()));
    }
  }

  const Case& case_;
  std::mt19937 random_;
  std::vector<uint8_t> grid_;
};

// Results of one case, and what they are compared with.
struct Results {
  std::vector<float> o, lse, dq, dk, dv, dbias;
};
struct Expected {
  std::vector<double> o, lse, dq, dk, dv, dbias;
};

template <class R>
R make_results(const Case& c) {
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  R x;
  x.o.resize(size(c.batch * c.q_tokens * c.q_heads * c.v_dim));
  x.lse.resize(size(c.batch * c.q_tokens * c.q_heads));
  x.dq.resize(size(c.batch * c.q_tokens * c.q_heads * c.dim));
  x.dk.resize(size(c.batch * c.kv_tokens * c.kv_heads * c.dim));
  x.dv.resize(size(c.batch * c.kv_tokens * c.kv_heads * c.v_dim));
  if (c.has_bias) x.dbias.resize(size(c.q_tokens * c.kv_tokens));
  return x;
}

double dot(const float* x, const float* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += static_cast<double>(x[i]) * y[i];
  return sum;
}

// One query and head, by the formulas.
void expect_row(const Case& c, const Data& data, int64_t b, int64_t t, int64_t h, Expected* to) {
  const double scale = 1 / std::sqrt(static_cast<double>(c.dim));
  const int64_t row = (b * c.q_tokens + t) * c.q_heads + h;
  const float *q = &data.q[row * c.dim], *do_ = &data.do_[row * c.v_dim];
  const auto key_row = [&](int64_t j) {
    return (b * c.kv_tokens + j) * c.kv_heads + h * c.kv_heads / c.q_heads;
  };
  std::vector<double> s(c.kv_tokens), slope(c.kv_tokens, 1), p(c.kv_tokens);
  double top = -HUGE_VAL, sum = 0, delta = -data.dlse[row];
  for (int64_t j = 0; j < c.kv_tokens; j++) {
    s[j] = dot(q, &data.k[key_row(j) * c.dim], c.dim) * scale;
    if (c.has_bias) s[j] += data.bias[t * c.kv_tokens + j];
    if (c.softcap > 0) {
      const double x = std::tanh(s[j] / c.softcap);
      s[j] = c.softcap * x;
      slope[j] = 1 - x * x;
    }
    if (data.is_visible(b, t, h, j)) top = std::fmax(top, s[j]);
  }
  for (int64_t j = 0; j < c.kv_tokens; j++) sum += data.is_visible(b, t, h, j) ? std::exp(s[j] - top) : 0;
  to->lse[row] = top + std::log(sum);
  for (int64_t j = 0; j < c.kv_tokens; j++) {
    if (!data.is_visible(b, t, h, j)) continue;
    p[j] = std::exp(s[j] - top) / sum;
    const float* v = &data.v[key_row(j) * c.v_dim];
    for (int64_t d = 0; d < c.v_dim; d++) to->o[row * c.v_dim + d] += p[j] * v[d];
    delta += p[j] * dot(do_, v, c.v_dim);
  }
  for (int64_t j = 0; j < c.kv_tokens; j++) {
    if (!data.is_visible(b, t, h, j)) continue;
    const double ds =
        p[j] * (dot(do_, &data.v[key_row(j) * c.v_dim], c.v_dim) - delta) * slope[j];
    for (int64_t d = 0; d < c.dim; d++) {
      to->dq[row * c.dim + d] += scale * ds * data.k[key_row(j) * c.dim + d];
      to->dk[key_row(j) * c.dim + d] += scale * ds * q[d];
    }
    for (int64_t d = 0; d < c.v_dim; d++) to->dv[key_row(j) * c.v_dim + d] += p[j] * do_[d];
    if (c.has_bias) to->dbias[t * c.kv_tokens + j] += ds;
  }
}

Expected expect(const Case& c, const Data& data) {
  Expected x = make_results<Expected>(c);
  for (int64_t b = 0; b < c.batch; b++)
    for (int64_t t = 0; t < c.q_tokens; t++)
      for (int64_t h = 0; h < c.q_heads; h++) expect_row(c, data, b, t, h, &x);
  return x;
}

void require(const std::string& error) {
  if (error.empty()) return;
  std::fprintf(stderr, "%s\n", error.c_str());
  std::exit(2);
}

std::unique_ptr<Call> make_call(const Case& c, const Data& data, Results* results) {
  auto call = std::make_unique<Call>();
  Problem& p = call->problem;
  p.batch = c.batch, p.q_tokens = c.q_tokens, p.kv_tokens = c.kv_tokens;
  p.q_heads = c.q_heads, p.kv_heads = c.kv_heads, p.dim = c.dim, p.v_dim = c.v_dim;
  p.block_q = c.block_q, p.block_kv = c.block_kv;
  p.q_blocks = (c.q_tokens + c.block_q - 1) / c.block_q;
  p.kv_blocks = (c.kv_tokens + c.block_kv - 1) / c.block_kv;
  p.layout_batch = p.layout_heads = p.program_heads = 1;
  p.scale = 1 / std::sqrt(static_cast<float>(c.dim)), p.softcap = c.softcap;
  p.q = data.q.data(), p.k = data.k.data(), p.v = data.v.data();
  p.row_starts = data.row_starts.data(), p.kv_block = data.kv_block.data();
  p.is_partial = data.is_partial.data();
  if (c.has_bias) p.bias = data.bias.data(), p.bias_batch = p.bias_heads = 1;
  p.o = results->o.data(), p.lse = results->lse.data();
  p.do_ = data.do_.data(), p.dlse = data.dlse.data();
  p.dq = results->dq.data(), p.dk = results->dk.data(), p.dv = results->dv.data();
  p.dbias = c.has_bias ? results->dbias.data() : nullptr;
  const auto count = [](const auto& x) { return static_cast<int64_t>(x.size()); };
  if (c.num_slots) {
    p.selected = data.blocks.data(), p.num_slots = c.num_slots;
    require(check_selected(count(data.blocks), call.get()));
    return call;
  }
  const ListSizes sizes{count(data.row_starts), count(data.kv_block), count(data.is_partial),
                        0, 0, 0};
  require(check_sizes(p));
  require(check_lists(p, sizes, call.get()));
  p.is_listed = call->is_listed.data();
  if (c.is_causal) require(parse_program(kCausal, std::size(kCausal), 0, call.get()));
  return call;
}

using MakeJob = std::shared_ptr<Job> (*)(std::unique_ptr<Call>);

void run(const JobSizes& sizes, MakeJob make_job, std::unique_ptr<Call> call, int threads) {
  const int64_t size = sizes.arrays + threads * sizes.slot;
  std::unique_ptr<void, void (*)(void*)> memory(
      std::aligned_alloc(kAlign, static_cast<size_t>(round_up(size, kAlign))), std::free);
  call->problem.workspace = static_cast<char*>(memory.get());
  call->scratch = call->problem.workspace + sizes.arrays;
  call->scratch_size = threads * sizes.slot;
  const auto job = make_job(std::move(call));
  std::atomic<int> done{0};
  const auto work = [&] { job->work([&] { done.fetch_add(1); }); };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  if (done.load() != 1) require("done was called " + std::to_string(done.load()) + " times");
}

double largest_error(const std::vector<float>& x, const std::vector<double>& expected) {
  double error = 0, size = 1e-3;
  for (size_t i = 0; i < x.size(); i++) {
    size = std::fmax(size, std::isfinite(expected[i]) ? std::fabs(expected[i]) : 0);
    if (std::isnan(x[i]) || std::isinf(x[i]) != std::isinf(expected[i])) return HUGE_VAL;
    if (std::isfinite(x[i])) error = std::fmax(error, std::fabs(x[i] - expected[i]));
  }
  return error / size;
}

bool check(const char* name, const std::vector<float>& x, const std::vector<double>& expected) {
  const double error = largest_error(x, expected);
  std::printf("  %-6s %.1e\n", name, error);
  return error < 4e-6;
}

bool is_same(const Results& x, const Results& y) {
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  };
  return same(x.o, y.o) && same(x.lse, y.lse) && same(x.dq, y.dq) && same(x.dk, y.dk) &&
         same(x.dv, y.dv) && same(x.dbias, y.dbias);
}

bool run_case(const Case& c, int threads, int repeats) {
  const Data data(c);
  const Expected expected = expect(c, data);
  Results first = make_results<Results>(c);
  bool is_right = true;
  std::printf("%s\n", c.name);
  for (int i = 0; i < repeats; i++) {
    Results results = make_results<Results>(c);
    const auto call = [&] { return make_call(c, data, &results); };
    const WorkspaceSizes z = sizes_of(call()->problem);
    if (c.num_slots) {
      run(selected_sizes(z), selected_job, call(), threads);
      run(selected_backward_sizes(z), selected_backward_job, call(), threads);
    } else {
      run(decode_sizes(z), decode_job, call(), threads);
      if (i == 0) {
        is_right &= check("decode", results.o, expected.o);
        is_right &= check("lse", results.lse, expected.lse);
      }
      run(forward_sizes(z), forward_job, call(), threads);
      run(backward_sizes(z), backward_job, call(), threads);
    }
    if (i == 0) first = results;
    is_right &= is_same(results, first);
  }
  is_right &= check("o", first.o, expected.o) && check("lse", first.lse, expected.lse);
  is_right &= check("dq", first.dq, expected.dq) && check("dk", first.dk, expected.dk);
  is_right &= check("dv", first.dv, expected.dv) && check("dbias", first.dbias, expected.dbias);
  return is_right;
}

// Lists of blocks by whole numbers, whose products are exact.
bool run_top_blocks(int threads, int repeats) {
  constexpr int64_t kBatch = 2, kTokens = 333, kGroups = 2, kHeads = 4, kDim = 20, kBlock = 24;
  constexpr int64_t kNumber = (kTokens + kBlock - 1) / kBlock, kSlots = 5, kRows = kBatch * kTokens;
  std::printf("top blocks\n");
  std::mt19937 random(7);
  std::vector<float> q(kRows * kHeads * kDim), k(kRows * kGroups * kDim), weights(kRows * kHeads);
  for (auto* x : {&q, &k, &weights})
    for (float& value : *x) value = static_cast<float>(static_cast<int>(random() % 19) - 9);
  std::vector<int32_t> position(kRows), start(kRows, 0);
  for (int64_t i = 0; i < kRows; i++) position[i] = static_cast<int32_t>(i % kTokens);
  const auto score = [&](int64_t row, int64_t group, int64_t key) {
    double sum = 0;
    for (int64_t h = group * kHeads / kGroups; h < (group + 1) * kHeads / kGroups; h++) {
      const float* a = &q[(row * kHeads + h) * kDim];
      const float* b = &k[((row / kTokens * kTokens + key) * kGroups + group) * kDim];
      sum += weights[row * kHeads + h] * std::fmax(0, dot(a, b, kDim));
    }
    return sum;
  };
  std::vector<int32_t> expected(kRows * kGroups * kSlots, -1);
  for (int64_t row = 0; row < kRows; row++)
    for (int64_t group = 0; group < kGroups; group++) {
      const int64_t own = position[row] / kBlock;
      std::vector<std::pair<double, int32_t>> order{{-HUGE_VAL, static_cast<int32_t>(own)}};
      for (int64_t j = 0; j < own; j++) {
        double best = -HUGE_VAL;
        for (int64_t key = j * kBlock; key < (j + 1) * kBlock; key++)
          best = std::fmax(best, score(row, group, key));
        order.push_back({-best, static_cast<int32_t>(j)});
      }
      std::sort(order.begin() + 1, order.end());
      for (size_t i = 0; i < std::min<size_t>(kSlots, order.size()); i++)
        expected[(row * kGroups + group) * kSlots + i] = order[i].second;
    }
  bool is_right = true;
  for (int i = 0; i < repeats; i++) {
    std::vector<int32_t> blocks(expected.size());
    auto call = std::make_unique<Call>();
    call->top_blocks = {kBatch, kTokens, kTokens, kHeads, kGroups, kDim, kGroups,
                        kBlock, kNumber, kSlots, 0, 1,
                        true, q.data(), k.data(), weights.data(), position.data(),
                        start.data(), blocks.data(), nullptr};
    const WorkspaceSizes sizes{kBatch, kTokens, kTokens, kHeads, kGroups, kDim,
                               0, kHeads / kGroups, kBlock, 0, 0};
    run(top_blocks_sizes(sizes), top_blocks_job, std::move(call), threads);
    is_right &= blocks == expected;
  }
  std::printf("  %s\n", is_right ? "equal" : "DIFFERENT");
  return is_right;
}

}  // namespace
}  // namespace xsake_cpu

int main(int argc, char** argv) {
  using namespace xsake_cpu;
  const int threads = argc > 1 ? std::atoi(argv[1]) : 4, repeats = argc > 2 ? std::atoi(argv[2]) : 3;
  std::printf("%s, %d threads, %d repeats\n", kernels().name, threads, repeats);
  bool is_right = true;
  for (const Case& c : kCases) is_right &= run_case(c, threads, repeats);
  is_right &= run_top_blocks(threads, repeats);
  std::printf(is_right ? "all right\n" : "WRONG\n");
  return is_right ? 0 : 1;
}
