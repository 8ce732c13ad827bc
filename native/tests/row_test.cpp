// Kernels over single rows, and rows out of packed weights, against the plain ones.
#include "tests/check.h"

namespace smollm2::test {
namespace {

const std::vector<int> kSizes{1, 2, 15, 16, 17, 31, 33, 64, 100, 576, 960, 1536, 2048};

std::string described(const Kernels& table, const char* what, int size) {
  return std::string(table.name) + " " + what + " of " + std::to_string(size);
}

// Quantized rows as one row of numbers, to compare.
std::vector<float> listed(const Activations& x, int rows) {
  const QuantizedRows q = x.quantized();
  std::vector<float> out;
  for (int i = 0; i < rows * q.padded; ++i) out.push_back(q.q[i]);
  for (int i = 0; i < rows * q.padded / kGroup; ++i) {
    out.push_back(q.scale[i]);
    out.push_back(static_cast<float>(q.sum[i]));
  }
  return out;
}

void quantized_rows() {
  Random random(10);
  for (const int one_in : {1 << 30, 100, 4}) {
    for (const int cols : kSizes) {
      const std::vector<float> x = hard_numbers(random, cols, one_in);
      for (const int terms : {1, 2}) {
        std::vector<float> expected;
        for (const Kernels* table : tables()) {
          Activations out(1, cols, {false, true}, terms);
          const auto kernel = terms == 1 ? table->quantize_row : table->quantize_row_twice;
          kernel(x.data(), cols, out.quantized(), 0);
          const std::vector<float> got = listed(out, terms);
          if (expected.empty()) expected = got;
          expect_same(got, expected, described(*table, "quantize_row", cols));
        }
      }
    }
  }
}

void rounding_is_to_the_nearest() {
  Random random(11);
  constexpr int cols = 96;
  const std::vector<float> x = numbers(random, cols);
  for (const Kernels* table : tables()) {
    Activations out(1, cols, {false, true}, 2);
    table->quantize_row_twice(x.data(), cols, out.quantized(), 0);
    const QuantizedRows q = out.quantized();
    for (int k = 0; k < cols; ++k) {
      const float scale = q.scale[k / kGroup];
      const float once = static_cast<float>(q.q[k]) * scale;
      const int second = q.padded + k;
      const float twice = once + static_cast<float>(q.q[second]) * q.scale[second / kGroup];
      const auto at = static_cast<std::size_t>(k);
      expect(std::fabs(once - x[at]) <= 0.501f * scale, "the first term");
      expect(std::fabs(twice - x[at]) <= 0.51f * scale / 254, "both terms");
    }
  }
}

void elementwise() {
  Random random(12);
  for (const int one_in : {1 << 30, 30}) {
    for (const int size : kSizes) {
      const std::vector<float> a = hard_numbers(random, size, one_in);
      const std::vector<float> b = hard_numbers(random, size, one_in);
      std::vector<float> wide = numbers(random, size, 100.0f);  // over all of exp
      std::vector<float> norm, gate;
      for (const Kernels* table : tables()) {
        std::vector<float> out(a.size());
        const auto check = [&](std::vector<float>& expected, const char* what) {
          if (expected.empty()) expected = out;
          expect_same(out, expected, described(*table, what, size));
        };
        table->rms_norm(a.data(), b.data(), 1e-5f, size, out.data());
        check(norm, "rms_norm");
        table->silu_mul(one_in == 30 ? a.data() : wide.data(), b.data(), size, out.data());
        check(gate, "silu_mul");
      }
    }
  }
}

void rotation() {
  Random random(13);
  for (const int half : {1, 5, 16, 32, 40, 128}) {
    const std::vector<float> head = numbers(random, 2 * half);
    const std::vector<float> cos = numbers(random, half), sin = numbers(random, half);
    std::vector<float> expected;
    for (const Kernels* table : tables()) {
      std::vector<float> out = head;
      table->rope(out.data(), cos.data(), sin.data(), 2 * half);
      if (expected.empty()) expected = out;
      expect_same(out, expected, described(*table, "rope", 2 * half));
    }
  }
}

void unpacked_rows() {
  Random random(14);
  for (const Kind kind : kKinds) {
    for (const int cols : {1, 33, 100, 576}) {
      const int rows = random.integer(1, 40);
      const Weights weights = any_weights(random, kind, rows, cols);
      for (int row = 0; row < rows; ++row) {
        std::vector<float> expected(static_cast<std::size_t>(cols)), out = expected;
        tables()[0]->unpack_row(weights.matrix, row, expected.data());
        for (const Kernels* table : tables()) {
          table->unpack_row(weights.matrix, row, out.data());
          expect_same(out, expected, described(*table, "unpack_row", cols));
        }
      }
    }
  }
}

}  // namespace

Tests row_tests() {
  return {
      {"rows: quantized alike everywhere", quantized_rows},
      {"rows: rounding is to the nearest", rounding_is_to_the_nearest},
      {"rows: norm and gate are alike everywhere", elementwise},
      {"rows: rotation is alike everywhere", rotation},
      {"rows: any bytes unpack alike everywhere", unpacked_rows},
  };
}

}  // namespace smollm2::test
