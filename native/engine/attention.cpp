// The attention of a pass: rotary embedding, storing keys and values, mixing values.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "engine/pass.h"

namespace smollm2 {
namespace {

constexpr int kMostPages = 4 * kChunkPages;        // of one call
constexpr double kLog2E = 1.44269504088896340736;  // the kernels' softmax has base 2

}  // namespace

// The query heads of one token that share a kv head, rotated and scaled, to `to` [H/K, D].
void Pass::turn_queries(const Block& block, int token, float* to) const {
  const int size = shape_.head_size, group = shape_.group();
  const float* from = qkv_row(token, block.head * group * size);
  const auto angle =
      static_cast<std::size_t>(in_.batch.positions[token]) * static_cast<std::size_t>(size / 2);
  const float factor = static_cast<float>(kLog2E / std::sqrt(static_cast<double>(size)));
  std::memcpy(to, from, static_cast<std::size_t>(group * size) * sizeof(float));
  for (int head = 0; head < group; ++head) {
    kernels_.rope(to + head * size, in_.batch.cosines + angle, in_.batch.sines + angle, size);
  }
  for (int i = 0; i < group * size; ++i) to[i] *= factor;
}

// Rotates a token's key at one kv head and stores it with its value.
void Pass::store_token(const Block& block, int token, int layer, float* key) const {
  const int size = shape_.head_size, place = block.place(token);
  const int key_col = shape_.query_size() + block.head * size;
  const auto angle =
      static_cast<std::size_t>(in_.batch.positions[token]) * static_cast<std::size_t>(size / 2);
  std::memcpy(key, qkv_row(token, key_col), static_cast<std::size_t>(size) * sizeof(float));
  kernels_.rope(key, in_.batch.cosines + angle, in_.batch.sines + angle, size);
  std::uint8_t* at = in_.cache.block(block.run->pages[place / kPage], layer, block.head);
  kernels_.kv_write(in_.cache.kind(), at, place % kPage, key,
                    qkv_row(token, key_col + shape_.kv_size()), size);
}

// A page of a kv head is written by one worker, since values of neighbouring places share words.
void Pass::store(const Worker& w, int layer) {
  const int size = shape_.head_size, group = shape_.group();
  each(w, static_cast<int>(in_.plan.stores.size()), [&](int i) {
    const Block& block = in_.plan.stores[static_cast<std::size_t>(i)];
    for (int token = block.first; token < block.first + block.count; ++token) {
      store_token(block, token, layer, w.own.key.get());
      const auto at = static_cast<std::size_t>(block.head) * static_cast<std::size_t>(rows_) +
                      static_cast<std::size_t>(token);
      turn_queries(block, token,
                   space_.queries.get() + at * static_cast<std::size_t>(group * size));
    }
  });
}

// How many places of the pages from the first of a chunk on each query row sees.
void Pass::see(const Block& block, int chunk, int pages, std::vector<int>& visible) const {
  const int group = shape_.group();
  for (int i = 0; i < block.count; ++i) {
    const int last = block.place(block.first + i);
    const int seen = std::clamp(last + 1 - chunk * kChunkPages * kPage, 0, pages * kPage);
    std::fill_n(visible.begin() + i * group, group, seen);
  }
}

// Blocks that are read from a chunk of a piece on, in that order: `most` at most.
int Pass::blocks_from(const Piece* piece, int chunk, int layer, int most,
                      const std::uint8_t** out) const {
  const std::vector<Piece>& pieces = in_.plan.pieces;
  int count = 0;
  for (; piece != pieces.data() + pieces.size() && count < most; ++piece, chunk = -1) {
    const Block& block = in_.plan.blocks[static_cast<std::size_t>(piece->block)];
    const int last = std::min(block.pages(), piece->last * kChunkPages);
    for (int page = (chunk < 0 ? piece->first : chunk) * kChunkPages; page < last; ++page) {
      if (count == most) break;
      out[count++] = in_.cache.block(block.run->pages[page], layer, block.head);
    }
  }
  return count;
}

// Begins to read the keys that a worker needs first in a layer, while it still waits for others.
void Pass::fetch(const Worker& w, int layer) const {
  const std::uint8_t* blocks[kBlocksAhead];
  const Piece* first =
      in_.plan.pieces.data() + w.seat.share(static_cast<int>(in_.plan.pieces.size())).first;
  const int count = blocks_from(first, -1, layer, kBlocksAhead, blocks);
  for (int i = 0; i < count; ++i) kernels_.fetch(blocks[i], in_.cache.block_bytes());
}

// Merges chunks [first, last) of a piece into partials.
void Pass::attend_chunks(const Worker& w, const Piece& piece, int first, int last, int layer,
                         const float* queries, Partial* out) {
  const Block& block = in_.plan.blocks[static_cast<std::size_t>(piece.block)];
  const std::uint8_t* blocks[kMostPages + kBlocksAhead];
  for (int chunk = first; chunk < last; chunk += kMostPages / kChunkPages) {
    const int end = std::min(block.pages(), last * kChunkPages);
    const int pages = std::min(kMostPages, end - chunk * kChunkPages);
    const int all = blocks_from(&piece, chunk, layer, pages + kBlocksAhead, blocks);
    see(block, chunk, pages, w.own.visible);
    kernels_.attend(in_.cache.kind(), queries, block.count * shape_.group(), blocks, pages,
                    all - pages, w.own.visible.data(), shape_.head_size, out);
  }
}

const float* Pass::queries_of(const Worker& w, const Block& block, bool last, int layer) {
  const int size = shape_.group() * shape_.head_size;
  if (in_.plan.decode) {
    if (last) store_token(block, block.first, layer, w.own.key.get());
    turn_queries(block, block.first, w.own.queries.get());
    return w.own.queries.get();
  }
  const auto at = static_cast<std::size_t>(block.head) * static_cast<std::size_t>(rows_) +
                  static_cast<std::size_t>(block.first);
  return space_.queries.get() + at * static_cast<std::size_t>(size);
}

void Pass::attend(const Worker& w, int layer) {
  each(w, static_cast<int>(in_.plan.pieces.size()),
       [&](int i) { attend_piece(w, in_.plan.pieces[static_cast<std::size_t>(i)], layer); });
}

void Pass::attend_piece(const Worker& w, const Piece& piece, int layer) {
  const Block& block = in_.plan.blocks[static_cast<std::size_t>(piece.block)];
  const auto rows = static_cast<std::size_t>(block.count * shape_.group());
  const bool last = piece.last == chunks_of(block);
  const float* queries = queries_of(w, block, last, layer);
  if (piece.shared < 0) {
    w.own.total.empty(0, rows);
    attend_chunks(w, piece, 0, piece.last, layer, queries, w.own.total.at(0));
    return finish(block, w.own.total.at(0));
  }
  const Shared& shared = in_.plan.shared[static_cast<std::size_t>(piece.shared)];
  for (int chunk = piece.first; chunk < piece.last; ++chunk) {
    const std::size_t at = shared.rows_before + rows * static_cast<std::size_t>(chunk);
    shared_.partials.empty(at, rows);
    attend_chunks(w, piece, chunk, chunk + 1, layer, queries, shared_.partials.at(at));
  }
  merge_shared(w, piece);
}

// Merges all chunks in order, if this was the last of the block's pieces to be done.
void Pass::merge_shared(const Worker& w, const Piece& piece) {
  const Shared& shared = in_.plan.shared[static_cast<std::size_t>(piece.shared)];
  const Block& block = in_.plan.blocks[static_cast<std::size_t>(piece.block)];
  std::atomic<int>& arrived = shared_.arrived[static_cast<std::size_t>(piece.shared)];
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < shared.pieces) return;
  arrived.store(0, std::memory_order_relaxed);
  const auto rows = static_cast<std::size_t>(block.count * shape_.group());
  Partial* total = shared_.partials.at(shared.rows_before);
  for (int chunk = 1; chunk < chunks_of(block); ++chunk) {
    see(block, chunk, kChunkPages, w.own.visible);
    const Partial* part =
        shared_.partials.at(shared.rows_before + rows * static_cast<std::size_t>(chunk));
    for (std::size_t r = 0; r < rows; ++r) {
      if (w.own.visible[r] > 0) kernels_.merge(total[r], part[r], shape_.head_size);
    }
  }
  finish(block, total);
}

// Divides by the softmax's sum; rows go to their token and query head.
void Pass::finish(const Block& block, const Partial* rows) const {
  const int size = shape_.head_size, group = shape_.group();
  for (int i = 0; i < block.count; ++i) {
    for (int g = 0; g < group; ++g) {
      const Partial& row = rows[i * group + g];
      float* out = space_.mixed.floats(block.first + i, (block.head * group + g) * size);
      const float factor = 1.0f / row.sum;
      for (int d = 0; d < size; ++d) out[d] = row.mixed[d] * factor;
    }
  }
}

}  // namespace smollm2
