// What a forward pass writes to on its way: shared arrays, and each worker's own.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "engine/attention_plan.h"
#include "engine/buffers.h"
#include "engine/model.h"

namespace smollm2 {

// Rows up to this number are normalised and rounded by every worker for itself, which costs less
// than waiting for one another.
constexpr int kFewRows = 8;

// Forms in which each product's input is needed by some layer.
struct InputForms {
  explicit InputForms(const Model& model);

  Forms normed, mixed, gated, head;
};

// Running softmax of many query rows.
class Partials {
 public:
  Partials() = default;
  Partials(std::size_t rows, int head_size);
  // Makes rows [first, first + count) those of an empty softmax.
  void empty(std::size_t first, std::size_t count);
  Partial* at(std::size_t row) { return each_.data() + row; }
  std::size_t rows() const { return each_.size(); }

 private:
  std::size_t size_ = 0;
  std::vector<Partial> each_;
  Buffer<float> mixed_;
};

// One worker's own arrays.
struct Private {
  Private(const Model& model, const InputForms& forms);

  Activations normed, mixed, head;  // kFewRows rows
  Buffer<float> row;                // the longest row that is needed as floats in between
  Buffer<float> columns[2];         // kColumnFloats: some columns of some rows
  Partials total;
  Buffer<float> queries, key;  // one token at one kv head
  std::vector<int> visible;
};

// Columns of products that a worker holds before they go on.
constexpr int kColumnFloats = 16384;

// Arrays for passes of up to `rows` tokens, and as many wanted rows.
struct Workspace {
  Workspace(const Model& model, const InputForms& forms, int rows);

  int rows;
  Buffer<float> x;                         // [rows, C], the residual stream
  Buffer<float> qkv;                       // [rows, (H + 2K) D]
  Buffer<float> queries;                   // [K, rows, H/K, D] after RoPE, scaled
  Activations normed, mixed, gated, head;  // head: in two terms
};

// Partials of blocks that are in several pieces, and how many of those are done.
struct SharedBlocks {
  void fit(const AttentionPlan& plan, int head_size);

  Partials partials;
  std::unique_ptr<std::atomic<int>[]> arrived;
  std::size_t count = 0;
};

}  // namespace smollm2
