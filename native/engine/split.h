// Sharing work among workers: the same cut each time, so that a worker meets its weights again.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace smollm2 {

struct Range {
  int first;
  int last;

  int size() const { return last - first; }
};

// A worker among `count`.
struct Seat {
  int worker;
  int count;

  // This worker's part of n things.
  Range share(int n) const {
    const auto cut = [&](int w) { return static_cast<int>(std::int64_t{n} * w / count); };
    return {cut(worker), cut(worker + 1)};
  }
};

// Tiles [first, last) of a matrix as a matrix.
inline Matrix tiles_of(const Matrix& w, Range range) {
  const int end = range.last * kTileRows < w.rows ? range.last * kTileRows : w.rows;
  return {w.kind, end - range.first * kTileRows, w.cols,
          w.data + static_cast<std::size_t>(range.first) * tile_bytes(w.kind, w.cols)};
}

}  // namespace smollm2
