// Phases of independent items on XLA's thread pool.
//
// The context of a handler ends when the handler returns, and with it the right to schedule. So all
// workers are scheduled at once, and each takes items of one phase after the other. The calling
// thread is one of them; it returns a future when no item is left to take, and waits for no one.
// Between two phases a worker waits for items that other threads are computing at that moment, not
// for workers that may never start, so no number of calls can deadlock the pool. It gives up after
// a few milliseconds: the thread that finishes the last item of a phase always continues.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "call.h"

namespace xsake_cpu {

class Job {
 public:
  using Body = std::function<void(int64_t item, char* scratch)>;

  Job(std::unique_ptr<Call> call, int64_t slot_size)
      : call_(std::move(call)), slot_size_(slot_size) {
    num_slots_ = slot_size ? call_->scratch_size / slot_size : INT64_MAX;
  }

  Call& call() { return *call_; }
  void add_phase(int64_t items, Body body) {
    if (items > 0) phases_.push_back(std::make_unique<Phase>(items, std::move(body)));
  }
  int64_t max_workers() const {
    int64_t items = 1;
    for (const auto& phase : phases_) items = max_of(items, phase->items);
    return min_of(items, num_slots_);
  }
  bool is_empty() const { return phases_.empty(); }

  // Takes items until none is left; `done` is called once, by the thread that finishes the last
  // one.
  template <class Done>
  void work(Done&& done) {
    const int64_t slot = next_slot_.fetch_add(1, std::memory_order_relaxed);
    if (slot >= num_slots_) return;
    char* scratch = call_->scratch + slot * slot_size_;
    for (const auto& phase : phases_) {
      const bool is_last = &phase == &phases_.back();
      for (;;) {
        const int64_t item = phase->next.fetch_add(1, std::memory_order_relaxed);
        if (item >= phase->items) break;
        phase->body(item, scratch);
        if (phase->unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1 && is_last) done();
      }
      if (is_last || !wait(*phase)) return;
    }
  }

 private:
  struct Phase {
    Phase(int64_t n, Body f) : items(n), body(std::move(f)), unfinished(n) {}
    const int64_t items;
    const Body body;
    std::atomic<int64_t> next{0}, unfinished;
  };

  // Spins first: most items of the first phase take microseconds.
  static bool wait(const Phase& phase) {
    const auto is_done = [&] { return phase.unfinished.load(std::memory_order_acquire) == 0; };
    for (int i = 0; i < 1000; i++) {
      if (is_done()) return true;
      relax();
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
    while (!is_done()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::yield();
    }
    return true;
  }

  std::unique_ptr<Call> call_;
  int64_t slot_size_, num_slots_;
  std::atomic<int64_t> next_slot_{0};
  std::vector<std::unique_ptr<Phase>> phases_;
};

}  // namespace xsake_cpu
