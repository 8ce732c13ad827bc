// One forward pass: what each worker does, layer by layer.
#pragma once

#include <array>
#include <vector>

#include "engine/attention_plan.h"
#include "engine/batch.h"
#include "engine/kv_cache.h"
#include "engine/model.h"
#include "engine/profile.h"
#include "engine/shares.h"
#include "engine/split.h"
#include "engine/workspace.h"
#include "kernels/kernels.h"

namespace smollm2 {

// What a pass reads and writes.
struct PassInput {
  const Model& model;
  const Kernels& kernels;
  const Batch& batch;
  const AttentionPlan& plan;
  KvCache& cache;
  Result result;
  float* out;  // [wanted rows, V or C]
};

// The phases of a layer:
//   norm and QKV | RoPE, store | attention | output, residual | norm, gate, up | down, residual
// In decode, RoPE and storing belong to attention. Many rows are normalised and rounded in phases
// of their own. A column of a product and a query row are computed by one worker, whichever takes
// them, in one order: the result does not depend on the workers.
class Pass {
 public:
  Pass(const PassInput& input, Workspace& space, SharedBlocks& shared, Shares& shares,
       std::vector<Private>& workers, Profile& profile);

  int phases() const { return static_cast<int>(phases_.size()); }
  // What a worker does in a phase, whoever else takes part in it.
  void run(int worker, int phase);

 private:
  struct Worker {
    Seat seat;
    Private& own;
    int phase;
  };
  // One phase, of one layer where it has several.
  using Step = void (Pass::*)(const Worker& w, int layer);
  struct Phase {
    Profile::Phase name;
    Step step;
    int layer;
  };

  void plan_phases();
  void embed(const Worker& w, int);
  void norm_of_input(const Worker& w, int layer);
  void qkv(const Worker& w, int layer);
  void round_mixed(const Worker& w, int);
  void output(const Worker& w, int layer);
  void norm_of_mlp(const Worker& w, int layer);
  void gate_up(const Worker& w, int layer);
  void gate_part(const Worker& w, const Layer& layer, const Activations& in, int row, int rows,
                 Range range, const std::uint8_t* next) const;
  void down(const Worker& w, int layer);
  void write_hidden(const Worker& w, int);
  void norm_of_head(const Worker& w, int);
  void head(const Worker& w, int);
  void head_row(const Worker& w, int row, const Activations& to) const;
  void head_part(const Worker& w, const Activations& in, int row, int rows, Range range,
                 const std::uint8_t* next) const;

  // attention.cpp
  void store(const Worker& w, int layer);
  void attend(const Worker& w, int layer);
  void attend_piece(const Worker& w, const Piece& piece, int layer);
  const float* queries_of(const Worker& w, const Block& block, bool last, int layer);
  void turn_queries(const Block& block, int token, float* to) const;
  void store_token(const Block& block, int token, int layer, float* key) const;
  void see(const Block& block, int chunk, int pages, std::vector<int>& visible) const;
  int blocks_from(const Piece* piece, int chunk, int layer, int most,
                  const std::uint8_t** out) const;
  void fetch(const Worker& w, int layer) const;
  void attend_chunks(const Worker& w, const Piece& piece, int first, int last, int layer,
                     const float* queries, Partial* out);
  void finish(const Block& block, const Partial* rows) const;
  void merge_shared(const Worker& w, const Piece& piece);

  bool few() const { return rows_ <= kFewRows; }
  const Layer& at(int layer) const { return in_.model.layers[static_cast<std::size_t>(layer)]; }
  const Activations& normalised(const Worker& w, const float* gain) const;
  void normalise(const Worker& w, const float* gain);
  void normalise_row(const Worker& w, const float* gain, int row, const Activations& to) const;
  bool rounds_mixed_itself() const;
  const Activations& mixed(const Worker& w) const;
  // Calls f(i) for things 0 ... n - 1, until all are taken.
  template <typename F>
  void each(const Worker& w, int n, F f) {
    shares_.deal(w.seat, w.phase, n, 1, [&](Range run, bool) { f(run.first); });
  }
  template <typename F>
  void share(const Worker& w, int rows, int rows_at_once, int tiles, int tiles_at_once, F f);
  int first_tile(const Worker& w, int all) const;
  const std::uint8_t* own_start(const Worker& w, const Matrix& matrix) const;
  const std::uint8_t* start_of_layer(const Worker& w, int number) const;
  void add_product(const Worker& w, const Matrix& matrix, const Activations& in,
                   const std::uint8_t* next);
  void multiply(const Matrix& matrix, const Activations& in, int row, int rows, const Output& out,
                const std::uint8_t* next) const;

  float* x(int row) const;
  float* qkv_row(int row, int col) const;

  const PassInput in_;
  const Shape& shape_;
  const Kernels& kernels_;
  const int rows_;
  const int qkv_size_;
  Workspace& space_;
  SharedBlocks& shared_;
  Shares& shares_;
  std::vector<Private>& workers_;
  Profile& profile_;
  std::vector<Phase> phases_;
};

}  // namespace smollm2
