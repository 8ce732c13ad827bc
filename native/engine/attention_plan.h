// Who attends to what: the same in every layer, so it is laid out once a pass.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/batch.h"
#include "engine/model.h"

namespace smollm2 {

// Pages that share a softmax in the kernels, which is merged with the next ones' in order: whether
// in one call or in several, the bits are the same.
constexpr int kChunkPages = kPagesAtOnce;

// Query rows that attend together at most.
constexpr int kQueryRows = 192;

// Consecutive tokens of one run: those that attend together as queries, or that are stored in one
// page, at one kv head.
struct Block {
  const Run* run;
  int head;   // kv head
  int first;  // token of the batch
  int count;

  int place(int token) const { return run->place + (token - run->first); }
  // Pages that the last of the tokens sees.
  int pages() const { return place(first + count - 1) / kPage + 1; }
};

// Chunks [first, last) of a block's keys, which one worker takes. Where a block is in several
// pieces, `shared` numbers it and whoever is through with the last of them merges all chunks.
struct Piece {
  int block;
  int first;
  int last;
  int shared;  // -1: all chunks are here
};

// A block in several pieces: how many, and where its partials begin.
struct Shared {
  int block;
  int pieces;
  std::size_t rows_before;  // partial rows of the shared blocks before it
};

struct AttentionPlan {
  // Every run has one token only: whoever attends to its last chunk also stores it.
  bool decode;
  std::vector<Block> stores;  // pages to write, where it is not decode
  std::vector<Block> blocks;  // of queries
  std::vector<Piece> pieces;  // of blocks, in order
  std::vector<Shared> shared;
  std::size_t shared_rows;  // partial rows of all shared blocks: queries times chunks
};

inline int chunks_of(const Block& block) { return (block.pages() + kChunkPages - 1) / kChunkPages; }

AttentionPlan plan_attention(const Batch& batch, const Shape& shape, int workers);

}  // namespace smollm2
