// The tokens of one forward pass, checked by whoever made it.
#pragma once

#include <cstdint>
#include <vector>

namespace smollm2 {

// Consecutive new tokens of one sequence: tokens first ... first + count - 1 of the batch, which
// go to places place ... place + count - 1 of the sequence. pages[i] holds its places from 64 i on.
struct Run {
  int first;
  int count;
  int place;
  const std::int32_t* pages;
};

// A token that is wanted, and the row of the result that it goes to.
struct Wanted {
  int token;
  std::int64_t row;
};

// What is computed of each wanted token: logits [V], or its hidden state after the final norm [C].
enum class Result : std::uint8_t { logits, hidden };

// `count` tokens; runs cover all of them in order. Angles [D/2] of a token's position are
// cosines + position * D/2 and sines likewise.
struct Batch {
  int count;
  const std::int32_t* ids;
  const std::int32_t* positions;
  const float* cosines;
  const float* sines;
  std::vector<Run> runs;
  std::vector<Wanted> wanted;
};

}  // namespace smollm2
