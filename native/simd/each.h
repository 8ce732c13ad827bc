// Loops that are written out, for every policy. GCC unrolls a loop only after it has decided which
// arrays become registers: sums that are indexed in loops would lie on the stack before and after
// the innermost one.
#pragma once

// Also for what only fetches: GCC drops calls of functions that compute nothing, unless they have
// been inlined before it looks.
#if defined(_MSC_VER) && !defined(__clang__)
#define SMOLLM2_INLINE [[msvc::forceinline]]
#else
#define SMOLLM2_INLINE __attribute__((always_inline))
#endif

namespace smollm2 {
namespace {

template <int i>
struct Index {
  constexpr operator int() const { return i; }
};

// f(0), ..., f(n - 1), each as a constant. F is to be inlined as well.
template <int n, typename F>
SMOLLM2_INLINE inline void each(const F& f) {
  if constexpr (n > 0) {
    each<n - 1>(f);
    f(Index<n - 1>{});
  }
}

// f(row, tile) of all rows and tiles.
template <int rows, int tiles, typename F>
SMOLLM2_INLINE inline void each_sum(const F& f) {
  each<rows>([&](auto r) SMOLLM2_INLINE { each<tiles>([&](auto t) SMOLLM2_INLINE { f(r, t); }); });
}

}  // namespace
}  // namespace smollm2
