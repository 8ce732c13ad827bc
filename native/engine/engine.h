// A loaded model that runs batches on its own team of threads.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/batch.h"
#include "engine/kv_cache.h"
#include "engine/model.h"
#include "engine/profile.h"
#include "engine/shares.h"
#include "engine/workspace.h"
#include "runtime/threads.h"

namespace smollm2 {

// Tokens of one pass at most: what they write stays small, and a longer batch goes in parts.
constexpr int kMostTokens = 512;

class Engine {
 public:
  // The model's matrices and gains must outlive the engine.
  Engine(Model model, int threads, const Kernels& kernels);

  const Model& model() const { return model_; }
  const Kernels& kernels() const { return kernels_; }
  int threads() const { return threads_.count(); }
  Profile& profile() { return profile_; }

  // After fork(), the child's first call: whoever was in forward() then will never leave it. Not to
  // be called by two threads at once.
  void notice_fork();

  // The result of the wanted tokens, [wanted, V or C]; stores the batch's keys and values. At most
  // kMostTokens tokens. Calls from several threads run one after the other.
  void forward(const Batch& batch, KvCache& cache, float* out, Result result = Result::logits);

 private:
  Model model_;
  const Kernels& kernels_;
  InputForms forms_;
  Threads threads_;
  std::vector<Private> workers_;
  std::optional<Workspace> space_;
  SharedBlocks shared_;
  Shares shares_;
  Profile profile_;
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
  long owner_;
};

}  // namespace smollm2
