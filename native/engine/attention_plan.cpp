#include "engine/attention_plan.h"

#include <algorithm>

namespace smollm2 {
namespace {

// Tokens of a run, cut where `size` says, at each kv head.
template <typename Size>
void cut(const Run& run, int heads, Size size, std::vector<Block>& out) {
  for (int done = 0; done < run.count;) {
    const int count = std::min(size(run.place + done), run.count - done);
    for (int head = 0; head < heads; ++head) out.push_back({&run, head, run.first + done, count});
    done += count;
  }
}

int pages_in(const Block& block, int chunk) {
  return std::min(kChunkPages, block.pages() - chunk * kChunkPages);
}

// Pieces of an equal share of all rows times pages that each worker may take.
constexpr int kPiecesEach = 8;

// Cuts blocks into pieces between chunks, where there are several workers and a block is large.
void cut_blocks(AttentionPlan& plan, int group, int workers) {
  const auto cost = [&](const Block& block, int chunk) {
    return std::int64_t{block.count} * group * pages_in(block, chunk);
  };
  std::int64_t total = 0;
  for (const Block& block : plan.blocks) {
    for (int c = 0; c < chunks_of(block); ++c) total += cost(block, c);
  }
  const std::int64_t enough = workers == 1 ? total : total / (workers * kPiecesEach);
  for (std::size_t b = 0; b < plan.blocks.size(); ++b) {
    const Block& block = plan.blocks[b];
    std::int64_t size = 0;
    for (int c = 0; c < chunks_of(block); ++c) {
      if (c == 0 || size >= enough) {
        plan.pieces.push_back({static_cast<int>(b), c, c, -1});
        size = 0;
      }
      plan.pieces.back().last = c + 1;
      size += cost(block, c);
    }
  }
}

// Numbers the blocks that are in several pieces.
void find_shared(AttentionPlan& plan, int group) {
  for (Piece& piece : plan.pieces) {
    const Block& block = plan.blocks[static_cast<std::size_t>(piece.block)];
    if (piece.first == 0 && piece.last == chunks_of(block)) continue;
    if (piece.first == 0) {
      plan.shared.push_back({piece.block, 0, plan.shared_rows});
      plan.shared_rows += static_cast<std::size_t>(block.count) *
                          static_cast<std::size_t>(group * chunks_of(block));
    }
    ++plan.shared.back().pieces;
    piece.shared = static_cast<int>(plan.shared.size()) - 1;
  }
}

}  // namespace

AttentionPlan plan_attention(const Batch& batch, const Shape& shape, int workers) {
  AttentionPlan plan{};
  plan.decode = std::all_of(batch.runs.begin(), batch.runs.end(),
                            [](const Run& run) { return run.count == 1; });
  const int tokens = std::clamp(kQueryRows / shape.group(), 1, kPage);
  for (const Run& run : batch.runs) {
    cut(run, shape.kv_heads, [&](int) { return tokens; }, plan.blocks);
    if (plan.decode) continue;
    cut(run, shape.kv_heads, [](int place) { return kPage - place % kPage; }, plan.stores);
  }
  cut_blocks(plan, shape.group(), workers);
  find_shared(plan, shape.group());
  return plan;
}

}  // namespace smollm2
