// One forward pass: what each worker does, layer by layer.
#pragma once

#include <array>
#include <vector>

#include "engine/attention_plan.h"
#include "engine/batch.h"
#include "engine/kv_cache.h"
#include "engine/model.h"
#include "engine/shares.h"
#include "engine/split.h"
#include "engine/workspace.h"
#include "kernels/kernels.h"
#include "runtime/threads.h"

namespace smollm2 {

class Profile;

// What a pass reads and writes.
struct PassInput {
  const Model& model;
  const Kernels& kernels;
  const Batch& batch;
  const AttentionPlan& plan;
  KvCache& cache;
  float* logits;  // [wanted rows, V]
};

// The phases of a layer, with a barrier after each:
//   norm and QKV | RoPE, store | attention | output, residual | norm, gate, up | down, residual
// In decode, RoPE and storing belong to attention. A column of a product and a query row are
// computed by one worker, whichever takes them, in one order: the result does not depend on the
// workers.
class Pass {
 public:
  Pass(const PassInput& input, Workspace& space, SharedBlocks& shared, Shares& shares,
       std::vector<Private>& workers, Threads& threads, Profile& profile);

  // Called by each worker.
  void run(int worker);

 private:
  struct Worker {
    Seat seat;
    Private& own;
  };

  void embed(const Worker& w);
  void qkv(const Worker& w, const Layer& layer);
  void output(const Worker& w, const Layer& layer);
  void gate_up(const Worker& w, const Layer& layer);
  void gate_part(const Worker& w, const Layer& layer, const Activations& in, int row, int rows,
                 Range range, const std::uint8_t* next) const;
  void down(const Worker& w, const Layer& layer, const std::uint8_t* next);
  void head(const Worker& w);
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
  int blocks_from(const Worker& w, const Piece* piece, int chunk, int layer, int most,
                  const std::uint8_t** out) const;
  void fetch(const Worker& w, int layer) const;
  void attend_chunks(const Worker& w, const Piece& piece, int first, int last, int layer,
                     const float* queries, Partial* out);
  void finish(const Block& block, const Partial* rows) const;
  void merge_shared(const Worker& w, const Piece& piece);

  const Activations& normalise(const Worker& w, const float* gain);
  void normalise_row(const Worker& w, const float* gain, int row, const Activations& to) const;
  const Activations& mixed(const Worker& w);
  template <typename F>
  void share(const Worker& w, int rows, int rows_at_once, int tiles, int tiles_at_once, F f);
  int first_tile(const Worker& w, int all) const;
  const std::uint8_t* own_start(const Worker& w, const Matrix& matrix) const;
  const std::uint8_t* start_of_layer(const Worker& w, int number) const;
  void add_product(const Worker& w, const Matrix& matrix, const Activations& in,
                   const std::uint8_t* next);
  void multiply(const Matrix& matrix, const Activations& in, int row, int rows, const Output& out,
                const std::uint8_t* next) const;
  void wait(const Worker& w) { threads_.barrier(w.seat.worker); }

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
  Threads& threads_;
  Profile& profile_;
};

}  // namespace smollm2
