// Products with packed weights: every instruction set against the plain one.
#include <algorithm>

#include "engine/split.h"
#include "tests/check.h"

namespace smollm2::test {
namespace {

constexpr float kUntouched = 7.5f;

// Columns of the three sizes of SmolLM2, and odd ones.
const std::vector<int> kCols{1, 31, 33, 64, 100, 129, 576, 960, 1536, 2048, 2560, 8192};

// Rows of activations as floats and as quantized rows in so many terms, padded with zeros.
Activations activations(Random& random, int m, int cols, int hard_one_in, int terms = 1) {
  Activations out(m, cols, {true, true}, terms);
  for (int row = 0; row < m; ++row) {
    const std::vector<float> x = hard_numbers(random, cols, hard_one_in);
    std::copy(x.begin(), x.end(), out.floats(row));
    const Kernels& plain = *kernels_for("scalar");
    const auto quantize = terms == 1 ? plain.quantize_row : plain.quantize_row_twice;
    quantize(x.data(), cols, out.quantized(), row * terms);
  }
  return out;
}

// Rows `first` ... `first + m - 1` times tiles of w; columns of other tiles stay untouched.
std::vector<float> product(const Kernels& table, const Matrix& w, const Activations& x, int first,
                           int m, Range range, bool add = false) {
  std::vector<float> out(static_cast<std::size_t>(m) * static_cast<std::size_t>(w.rows),
                         kUntouched);
  const Output to{out.data(), w.rows, add};
  if (is_integer(w.kind)) {
    table.linear_integer(w, x.quantized(), first, m, range.first, range.last, to, w.data);
  } else {
    table.linear_float(w, x.floats(first), x.stride(), m, range.first, range.last, to, nullptr);
  }
  return out;
}

std::vector<float> product(const Kernels& table, const Matrix& w, const Activations& x, int m) {
  return product(table, w, x, 0, m, {0, tiles(w.rows)});
}

std::string described(const Kernels& table, const Matrix& w, int m) {
  return std::string(table.name) + " " + name_of(w.kind) + " " + std::to_string(m) + " x " +
         std::to_string(w.rows) + " x " + std::to_string(w.cols);
}

void compare_all(const Weights& weights, const Activations& x, int m) {
  const std::vector<float> expected = product(*tables()[0], weights.matrix, x, m);
  for (const Kernels* table : tables()) {
    expect_same(product(*table, weights.matrix, x, m), expected,
                described(*table, weights.matrix, m));
  }
}

void same_bits_everywhere() {
  Random random(1);
  for (const Kind kind : kKinds) {
    for (const int cols : kCols) {
      const int rows = random.integer(1, cols > 1000 ? 40 : 70), m = random.integer(1, 21);
      const Weights weights = random_weights(random, kind, rows, cols);
      for (const int terms : {1, 2}) {
        compare_all(weights, activations(random, m, cols, 1 << 30, terms), m);
      }
    }
  }
}

void any_bytes_are_weights() {
  Random random(2);
  for (const Kind kind : kKinds) {
    for (const int cols : {1, 100, 576}) {
      const int rows = random.integer(1, 40), m = random.integer(1, 9);
      compare_all(any_weights(random, kind, rows, cols), activations(random, m, cols, 200), m);
    }
  }
}

// Against float64, so that not all are wrong alike.
void products_are_products() {
  Random random(3);
  constexpr int rows = 37, cols = 300, m = 3;
  for (const Kind kind : kKinds) {
    const Weights weights = random_weights(random, kind, rows, cols);
    const Activations x = activations(random, m, cols, 1 << 30);
    const std::vector<float> got = product(*tables().back(), weights.matrix, x, m);
    float w[cols];
    for (int n = 0; n < rows; ++n) {
      tables()[0]->unpack_row(weights.matrix, n, w);
      for (int row = 0; row < m; ++row) {
        double sum = 0, magnitude = 0;
        const QuantizedRows q = x.quantized();
        for (int k = 0; k < cols; ++k) {
          const int at = row * q.padded + k;
          const double a = is_integer(kind) ? static_cast<double>(q.q[at]) * q.scale[at / kGroup]
                                            : static_cast<double>(x.floats(row)[k]);
          sum += a * static_cast<double>(w[k]);
          magnitude += std::fabs(a * static_cast<double>(w[k]));
        }
        const auto value = static_cast<double>(got[static_cast<std::size_t>(row * rows + n)]);
        expect(std::fabs(value - sum) <= 1e-5 * magnitude, name_of(kind) + " is off");
      }
    }
  }
}

void a_row_depends_on_itself_alone() {
  Random random(4);
  for (const Kernels* table : tables()) {
    for (const Kind kind : kKinds) {
      constexpr int rows = 75, cols = 320, m = 21;
      const Weights weights = random_weights(random, kind, rows, cols);
      const Activations x = activations(random, m, cols, 1 << 30);
      const std::vector<float> whole = product(*table, weights.matrix, x, m);
      for (int count = 1; count < m; ++count) {
        const int first = random.integer(0, m - count);
        const std::vector<float> part =
            product(*table, weights.matrix, x, first, count, {0, tiles(rows)});
        expect_same(part.data(), whole.data() + first * rows, part.size(),
                    described(*table, weights.matrix, count));
      }
    }
  }
}

void tiles_can_be_cut_anywhere() {
  Random random(5);
  for (const Kernels* table : tables()) {
    for (const Kind kind : kKinds) {
      constexpr int rows = 75, cols = 128;  // five tiles, the last one of 11 rows
      const Weights weights = random_weights(random, kind, rows, cols);
      for (const int m : {1, 3, 20}) {
        const Activations x = activations(random, m, cols, 1 << 30);
        const std::vector<float> whole = product(*table, weights.matrix, x, m);
        const int first = random.integer(0, 5), last = random.integer(first, 5);
        std::vector<float> part = product(*table, weights.matrix, x, 0, m, {first, last});
        for (int i = 0; i < m * rows; ++i) {
          const int tile = i % rows / kTileRows;
          const bool inside = first <= tile && tile < last;
          const float want = inside ? whole[static_cast<std::size_t>(i)] : kUntouched;
          expect_same(&part[static_cast<std::size_t>(i)], &want, 1,
                      described(*table, weights.matrix, m));
        }
      }
    }
  }
}

void products_are_added() {
  Random random(6);
  constexpr int rows = 37, cols = 100, m = 7;
  for (const Kind kind : kKinds) {
    const Weights weights = random_weights(random, kind, rows, cols);
    const Activations x = activations(random, m, cols, 1 << 30);
    for (const Kernels* table : tables()) {
      std::vector<float> expected = product(*table, weights.matrix, x, m);
      for (float& value : expected) value = kUntouched + value;
      expect_same(product(*table, weights.matrix, x, 0, m, {0, tiles(rows)}, true), expected,
                  described(*table, weights.matrix, m));
    }
  }
}

// Weights of -128 and 127 against activations of 127: more than 16 bits hold.
void the_greatest_products_do_not_saturate() {
  constexpr int rows = 16, cols = 64;
  for (const std::uint8_t code : {std::uint8_t{0}, std::uint8_t{255}}) {
    for (const Kind kind : {Kind::q8, Kind::q4, Kind::q4m}) {
      Weights weights(kind, rows, cols);
      std::fill_n(weights.bytes.get(), weights.size(), code);
      const std::size_t lines = kind == Kind::q8 ? 16 : 8;
      for (std::size_t i = lines * 64; i < weights.size(); i += 2) {  // scales and minimums of 1
        weights.bytes.get()[i] = 0x00;
        weights.bytes.get()[i + 1] = 0x3c;
      }
      const int nibble = code & 15;
      const int w = kind == Kind::q8 ? code - 128 : kind == Kind::q4 ? nibble - 8 : nibble + 1;
      Activations x(1, cols, {true, true});
      std::fill_n(x.floats(0), cols, 127.0f);
      tables()[0]->quantize_row(x.floats(0), cols, x.quantized(), 0);
      const auto sum = static_cast<float>(cols * 127 * w);
      for (const Kernels* table : tables()) {
        expect_same(product(*table, weights.matrix, x, 1), std::vector<float>(rows, sum),
                    described(*table, weights.matrix, 1));
      }
    }
  }
}

}  // namespace

Tests linear_tests() {
  return {
      {"linear: every instruction set gives the bits of the plain one", same_bits_everywhere},
      {"linear: any bytes are weights", any_bytes_are_weights},
      {"linear: a product is that of float64", products_are_products},
      {"linear: a row depends on itself alone", a_row_depends_on_itself_alone},
      {"linear: tiles can be cut anywhere", tiles_can_be_cut_anywhere},
      {"linear: products are added to what is there", products_are_added},
      {"linear: the greatest products do not saturate", the_greatest_products_do_not_saturate},
  };
}

}  // namespace smollm2::test
