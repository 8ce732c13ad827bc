// Packing: what is packed comes back, for any bytes and any number of threads.
#include "pack/pack.h"

#include <cstring>
#include <numeric>

#include "pack/dart.h"
#include "pack/half.h"
#include "tests/check.h"

namespace smollm2::test {

namespace {

std::vector<std::int32_t> in_order(int rows) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

PackError pack_all(RowKind from, const std::uint8_t* data, int threads, Weights& to,
                   const float* importance = nullptr) {
  const Matrix& w = to.matrix;
  const std::vector<std::int32_t> order = in_order(w.rows);
  return pack({from, data, w.rows, w.cols}, {order.data(), w.rows}, w.kind, threads, to.bytes.get(),
              importance);
}

// The packed kind that holds a kind of rows without loss.
Kind own_kind(RowKind kind) {
  switch (kind) {
    case RowKind::q8_0:
      return Kind::q8;
    case RowKind::q4_0:
      return Kind::q4;
    case RowKind::q4_1:
      return Kind::q4m;
    case RowKind::bf16:
      return Kind::bf16;
    default:
      return Kind::f32;
  }
}

constexpr RowKind kRowKinds[] = {RowKind::f32,  RowKind::f16,  RowKind::bf16,
                                 RowKind::q8_0, RowKind::q4_0, RowKind::q4_1};

float half_at(const std::uint8_t* p) {
  return float_of_half(static_cast<std::uint16_t>(p[0] | p[1] << 8));
}

// Value k of a row, by the description of the formats.
float value_at(RowKind kind, const std::uint8_t* row, int k) {
  if (kind == RowKind::f32) {
    float x;
    std::memcpy(&x, row + 4 * k, sizeof x);
    return x;
  }
  if (kind == RowKind::f16) return half_at(row + 2 * k);
  if (kind == RowKind::bf16) {
    return float_of_bf16(static_cast<std::uint16_t>(row[2 * k] | row[2 * k + 1] << 8));
  }
  const std::uint8_t* group = row + row_bytes(kind, kGroup) * static_cast<std::size_t>(k / kGroup);
  const int i = k % kGroup;
  if (kind == RowKind::q8_0) {
    return static_cast<float>(static_cast<std::int8_t>(group[2 + i])) * half_at(group);
  }
  const std::uint8_t both = group[(kind == RowKind::q4_0 ? 2 : 4) + i % 16];
  const int q = i < 16 ? both & 15 : both >> 4;
  if (kind == RowKind::q4_0) return static_cast<float>(q - 8) * half_at(group);
  return static_cast<float>(q) * half_at(group) + half_at(group + 2);
}

void what_is_held_without_loss_comes_back() {
  Random random(30);
  for (const RowKind kind : kRowKinds) {
    for (const int cols : {32, 96, 576}) {
      const int rows = random.integer(1, 40);
      const std::size_t each = row_bytes(kind, cols);
      std::vector<std::uint8_t> data(each * static_cast<std::size_t>(rows));
      fill_with_any_bytes(random, data.data(), data.size());
      for (const Kind to : {own_kind(kind), Kind::f32}) {
        Weights weights(to, rows, cols);
        expect(pack_all(kind, data.data(), 1, weights) == PackError::none, "refused");
        std::vector<float> out(static_cast<std::size_t>(cols)), expected = out;
        for (int row = 0; row < rows; ++row) {
          tables().back()->unpack_row(weights.matrix, row, out.data());
          for (int k = 0; k < cols; ++k) {
            expected[static_cast<std::size_t>(k)] =
                value_at(kind, data.data() + each * static_cast<std::size_t>(row), k);
          }
          expect_same(out, expected, "row " + std::to_string(row) + " as " + name_of(to));
        }
      }
    }
  }
}

void any_number_of_threads_packs_alike() {
  Random random(31);
  for (const Kind kind : kKinds) {
    const int rows = 100, cols = 200;
    std::vector<float> values = numbers(random, rows * cols);
    const auto* data = reinterpret_cast<const std::uint8_t*>(values.data());
    Weights one(kind, rows, cols);
    expect(pack_all(RowKind::f32, data, 1, one) == PackError::none, "refused");
    for (const int threads : {2, 3, 50}) {
      Weights many(kind, rows, cols);
      pack_all(RowKind::f32, data, threads, many);
      expect(std::memcmp(one.bytes.get(), many.bytes.get(), one.size()) == 0,
             name_of(kind) + " by " + std::to_string(threads) + " threads");
    }
  }
}

// Floats of any bits: rounded where all are finite, refused where one is not.
void any_floats_can_be_rounded() {
  Random random(32);
  int refused = 0, taken = 0;
  for (int i = 0; i < 600; ++i) {
    const RowKind from = random.one_of<RowKind>({RowKind::f32, RowKind::f16, RowKind::bf16});
    const Kind kind = random.one_of<Kind>({Kind::q16, Kind::q8, Kind::q4, Kind::q4m, Kind::bf16});
    std::uint8_t data[4 * kGroup];
    fill_with_any_bytes(random, data, sizeof data);
    bool finite = true;
    for (int k = 0; k < kGroup; ++k) finite = finite && std::isfinite(value_at(from, data, k));
    Weights weights(kind, 1, kGroup);
    const PackError error = pack_all(from, data, 1, weights);
    const bool fits = finite || kind == Kind::bf16;
    expect(error == (fits ? PackError::none : PackError::not_finite), "another answer");
    ++(fits ? taken : refused);
  }
  expect(refused > 50 && taken > 50, "both are tried");
}

// Vectors of the format's description, as bytes.
void hashes_are_those_of_the_dart_package() {
  struct Vector {
    const char* kind;
    std::vector<std::uint8_t> bytes;
    std::uint32_t first, second;
  };
  const std::vector<Vector> vectors{
      {"q8", {}, 0x811c9dc5, 0x1f2be47c},
      {"q8", {0}, 0x050c5d1f, 0xf1f4c930},
      {"q8", {1, 254, 3}, 0xa730c52f, 0xfffee672},
      {"q8", {127, 129, 0, 5}, 0x41730846, 0xe559f889},
      {"q16", {0x01, 0x80, 0xff, 0x7f, 12, 0}, 0xede73adf, 0x6fabd1f9},
      {"bf16", {0x80, 0x3f, 0x80, 0xbf, 0, 0}, 0x391de7b7, 0x85593483},
  };
  for (const Vector& vector : vectors) {
    const std::size_t each = dart_value_bytes(vector.kind).value();
    const DartHashes got =
        dart_hashes(vector.kind, vector.bytes.data(), vector.bytes.size() / each);
    expect(got.first == vector.first && got.second == vector.second, vector.kind);
  }
  expect(!dart_value_bytes("f32"), "f32 has no hashes");
}

// The squared error of packed values, each times what an error in its column counts.
double weighted_error(const Weights& packed, const std::vector<float>& values,
                      const std::vector<float>& importance) {
  const std::size_t cols = importance.size();
  std::vector<float> out(cols);
  double error = 0.0;
  for (int row = 0; row < packed.matrix.rows; ++row) {
    tables().back()->unpack_row(packed.matrix, row, out.data());
    for (std::size_t k = 0; k < cols; ++k) {
      const double off = static_cast<double>(out[k]) -
                         static_cast<double>(values[static_cast<std::size_t>(row) * cols + k]);
      error += off * off * static_cast<double>(importance[k]);
    }
  }
  return error;
}

void errors_are_smaller_where_they_count() {
  Random random(33);
  const int rows = 20, cols = 101;
  const std::vector<float> values = numbers(random, rows * cols);
  const auto* data = reinterpret_cast<const std::uint8_t*>(values.data());
  std::vector<float> importance(static_cast<std::size_t>(cols));
  for (float& count : importance) count = random.integer(0, 9) == 0 ? 100.0f : 1.0f;
  const std::vector<float> ones(importance.size(), 1.0f);
  for (const Kind kind : kKinds) {
    Weights plain(kind, rows, cols), same(kind, rows, cols), weighted(kind, rows, cols);
    pack_all(RowKind::f32, data, 1, plain);
    pack_all(RowKind::f32, data, 1, same, ones.data());
    expect(std::memcmp(plain.bytes.get(), same.bytes.get(), plain.size()) == 0,
           name_of(kind) + ": ones are nothing special");
    pack_all(RowKind::f32, data, 2, weighted, importance.data());
    const double before = weighted_error(plain, values, importance);
    const double after = weighted_error(weighted, values, importance);
    const bool searched = kind == Kind::q4 || kind == Kind::q4m;
    expect(searched ? after < 0.8 * before : after == before, name_of(kind) + ": the error");
  }
}

}  // namespace

Weights random_weights(Random& random, Kind kind, int rows, int cols) {
  Weights weights(kind, rows, cols);
  const std::vector<float> values = numbers(random, rows * cols);
  pack_all(RowKind::f32, reinterpret_cast<const std::uint8_t*>(values.data()), 1, weights);
  return weights;
}

Tests pack_tests() {
  return {
      {"pack: what is held without loss comes back", what_is_held_without_loss_comes_back},
      {"pack: any number of threads packs alike", any_number_of_threads_packs_alike},
      {"pack: any floats can be rounded", any_floats_can_be_rounded},
      {"pack: hashes are those of the Dart package", hashes_are_those_of_the_dart_package},
      {"pack: errors are smaller where they count", errors_are_smaller_where_they_count},
  };
}

}  // namespace smollm2::test
