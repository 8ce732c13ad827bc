// What the tests of the C++ code share: numbers to try, comparison by bits, packed matrices.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/buffers.h"
#include "kernels/kernels.h"

namespace smollm2::test {

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void expect(bool holds, const std::string& what) {
  if (!holds) throw Failed(what);
}

// Each area adds its tests: a name that says what holds, and a function that throws where it does
// not.
struct Test {
  const char* name;
  void (*run)();
};
using Tests = std::vector<Test>;

Tests dispatch_tests();
Tests linear_tests();
Tests row_tests();
Tests attention_tests();
Tests pack_tests();
Tests engine_tests();
Tests thread_tests();

// xorshift64*: the same numbers on every system, unlike the distributions of <random>.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15U + 1) {}

  std::uint32_t bits() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<std::uint32_t>((state_ * 0x2545f4914f6cdd1dU) >> 32);
  }
  // From first to last, both included.
  int integer(int first, int last) {
    return first + static_cast<int>(bits() % static_cast<std::uint32_t>(last - first + 1));
  }
  // Between -1 and 1, most of them near 0.
  float number() {
    const float x = static_cast<float>(static_cast<std::int32_t>(bits())) * 0x1p-31f;
    return x * std::fabs(x);
  }
  template <typename T>
  T one_of(const std::vector<T>& all) {
    return all[static_cast<std::size_t>(integer(0, static_cast<int>(all.size()) - 1))];
  }

 private:
  std::uint64_t state_;
};

inline std::vector<float> numbers(Random& random, int count, float spread = 1.0f) {
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& x : out) x = random.number() * spread;
  return out;
}

// Now and then a number that is none, or that rounding has trouble with.
inline std::vector<float> hard_numbers(Random& random, int count, int one_in) {
  constexpr float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> hard{0.0f,   -0.0f,   1e-30f, 1e-40f, 3e38f, -3e38f,
                                100.0f, -100.0f, inf,    -inf,   NAN};
  std::vector<float> out = numbers(random, count);
  for (float& x : out) {
    if (random.integer(1, one_in) == 1) x = random.one_of(hard);
  }
  return out;
}

inline void fill_with_any_bytes(Random& random, std::uint8_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<std::uint8_t>(random.bits());
}

// Bit for bit, where all NaN are alike: instruction sets give NaN different signs.
inline void expect_same(const float* a, const float* b, std::size_t count,
                        const std::string& what) {
  for (std::size_t i = 0; i < count; ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    expect(std::bit_cast<std::uint32_t>(a[i]) == std::bit_cast<std::uint32_t>(b[i]),
           what + ": " + std::to_string(a[i]) + " is not " + std::to_string(b[i]) + " at " +
               std::to_string(i));
  }
}
inline void expect_same(const std::vector<float>& a, const std::vector<float>& b,
                        const std::string& what) {
  expect(a.size() == b.size(), what + ": other sizes");
  expect_same(a.data(), b.data(), a.size(), what);
}

constexpr Kind kKinds[] = {Kind::f32, Kind::bf16, Kind::q16, Kind::q8, Kind::q4, Kind::q4m};
constexpr KvKind kKvKinds[] = {KvKind::f32, KvKind::int16, KvKind::int8};

inline std::string name_of(Kind kind) {
  static constexpr const char* names[] = {"f32", "bf16", "q16", "q8", "q4", "q4m"};
  return names[static_cast<int>(kind)];
}
inline std::string name_of(KvKind kind) {
  static constexpr const char* names[] = {"f32", "int16", "int8"};
  return names[static_cast<int>(kind)];
}

// Tables that can run here, scalar first.
inline std::vector<const Kernels*> tables() {
  std::vector<const Kernels*> all;
  for (const std::string& name : isa_names()) all.push_back(kernels_for(name));
  return all;
}

// A packed matrix that owns its bytes.
struct Weights {
  Weights() = default;
  Weights(Kind kind, int rows, int cols)
      : bytes(packed_bytes(kind, rows, cols)), matrix{kind, rows, cols, bytes.get()} {}
  std::size_t size() const { return packed_bytes(matrix.kind, matrix.rows, matrix.cols); }

  Buffer<std::uint8_t> bytes;
  Matrix matrix;
};

Weights random_weights(Random& random, Kind kind, int rows, int cols);

// The same shape of any bytes: scales may be NaN or infinite, codes anything.
inline Weights any_weights(Random& random, Kind kind, int rows, int cols) {
  Weights weights(kind, rows, cols);
  fill_with_any_bytes(random, weights.bytes.get(), weights.size());
  return weights;
}

}  // namespace smollm2::test
