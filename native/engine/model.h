// What a loaded model is made of: sizes, packed matrices, gains of the norms. Nothing is owned.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace smollm2 {

struct Shape {
  int vocabulary;
  int hidden;     // C
  int mlp;        // F
  int heads;      // H query heads
  int kv_heads;   // K, divides H
  int head_size;  // D
  float epsilon;

  int group() const { return heads / kv_heads; }  // query heads that share a kv head
  int query_size() const { return heads * head_size; }
  int kv_size() const { return kv_heads * head_size; }
};

struct Layer {
  const float* input_norm;  // [C]
  Matrix query, key, value, output;
  const float* mlp_norm;  // [C]
  Matrix gate, up, down;
};

struct Model {
  Shape shape;
  Matrix embedding;  // [V, C]
  std::vector<Layer> layers;
  const float* final_norm;  // [C]
  Matrix head;              // [V, C], the embedding where they are tied
};

}  // namespace smollm2
