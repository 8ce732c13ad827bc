#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "engine/pass.h"
#include "runtime/process.h"

namespace smollm2 {

Engine::Engine(Model model, int threads, const Kernels& kernels)
    : model_(std::move(model)),
      kernels_(kernels),
      forms_(model_),
      threads_(threads),
      shares_(threads_.count()),
      owner_(process_id()) {
  workers_.reserve(static_cast<std::size_t>(threads_.count()));
  for (int i = 0; i < threads_.count(); ++i) workers_.emplace_back(model_, forms_);
}

void Engine::notice_fork() {
  if (owner_ == process_id()) return;
  static_cast<void>(mutex_.release());  // it may be locked for ever
  mutex_ = std::make_unique<std::mutex>();
  owner_ = process_id();
}

void Engine::forward(const Batch& batch, KvCache& cache, float* out, Result result) {
  const std::lock_guard lock(*mutex_);
  // A token may be wanted several times.
  const int needed = std::max(batch.count, static_cast<int>(batch.wanted.size()));
  if (!space_ || space_->rows < needed) {
    int rows = kFewRows;
    while (rows < needed) rows *= 2;
    space_.emplace(model_, forms_, rows);
  }
  const AttentionPlan plan = plan_attention(batch, model_.shape, threads_.count());
  shared_.fit(plan, model_.shape.head_size);
  Pass pass({model_, kernels_, batch, plan, cache, result, out}, *space_, shared_, shares_,
            workers_, profile_);
  shares_.begin(threads_.count());
  threads_.run(pass.phases(), [&](int worker, int phase) { pass.run(worker, phase); });
}

}  // namespace smollm2
