#include "pack/rows.h"

#include <algorithm>
#include <cstring>

#include "pack/half.h"

namespace smollm2 {
namespace {

// Layouts of groups: ggml's block_q8_0, block_q4_0 and block_q4_1
// (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
constexpr std::size_t kBytesQ8_0 = 2 + 32;
constexpr std::size_t kBytesQ4_0 = 2 + 16;
constexpr std::size_t kBytesQ4_1 = 4 + 16;

std::uint16_t half_at(const std::uint8_t* p) {
  return static_cast<std::uint16_t>(p[0] | p[1] << 8);
}

std::uint32_t word_at(const std::uint8_t* p) {
  return half_at(p) | static_cast<std::uint32_t>(half_at(p + 2)) << 16;
}

// Low nibbles are values 0 ... 15, high ones 16 ... 31.
void read_nibbles(const std::uint8_t* p, std::int16_t* q) {
  for (int i = 0; i < kGroup / 2; ++i) {
    q[i] = static_cast<std::int16_t>(p[i] & 15);
    q[i + kGroup / 2] = static_cast<std::int16_t>(p[i] >> 4);
  }
}

float dense_value(RowKind kind, const std::uint8_t* row, int k) {
  if (kind == RowKind::f32) return float_of(word_at(row + 4 * static_cast<std::ptrdiff_t>(k)));
  const std::uint16_t half = half_at(row + 2 * static_cast<std::ptrdiff_t>(k));
  return kind == RowKind::f16 ? float_of_half(half) : float_of_bf16(half);
}

float value_of(RowKind kind, const Group& group, int i) {
  const float scale = float_of_half(group.scale);
  if (kind == RowKind::q8_0) return static_cast<float>(group.q[i]) * scale;
  if (kind == RowKind::q4_0) return static_cast<float>(group.q[i] - 8) * scale;
  return static_cast<float>(group.q[i]) * scale + float_of_half(group.minimum);
}

const std::uint8_t* row_at(const Rows& rows, int row) {
  return rows.data + static_cast<std::size_t>(row) * row_bytes(rows.kind, rows.cols);
}

bool is_dense(RowKind kind) {
  return kind == RowKind::f32 || kind == RowKind::f16 || kind == RowKind::bf16;
}

}  // namespace

std::optional<RowKind> row_kind(std::string_view name) {
  if (name == "F32") return RowKind::f32;
  if (name == "F16") return RowKind::f16;
  if (name == "BF16") return RowKind::bf16;
  if (name == "Q8_0") return RowKind::q8_0;
  if (name == "Q4_0") return RowKind::q4_0;
  if (name == "Q4_1") return RowKind::q4_1;
  return std::nullopt;
}

std::size_t row_bytes(RowKind kind, int cols) {
  const auto values = static_cast<std::size_t>(cols);
  switch (kind) {
    case RowKind::f32:
      return 4 * values;
    case RowKind::f16:
    case RowKind::bf16:
      return 2 * values;
    case RowKind::q8_0:
      return values / kGroup * kBytesQ8_0;
    case RowKind::q4_0:
      return values / kGroup * kBytesQ4_0;
    case RowKind::q4_1:
      return values / kGroup * kBytesQ4_1;
  }
  return 0;
}

void read_floats(const Rows& rows, int row, int group, float* out) {
  const int start = group * kGroup;
  const int count = std::clamp(rows.cols - start, 0, kGroup);
  std::fill(out + count, out + kGroup, 0.0f);
  if (is_dense(rows.kind)) {
    const std::uint8_t* values = row_at(rows, row);
    for (int i = 0; i < count; ++i) out[i] = dense_value(rows.kind, values, start + i);
  } else if (count > 0) {
    const Group stored = read_group(rows, row, group);
    for (int i = 0; i < count; ++i) out[i] = value_of(rows.kind, stored, i);
  }
}

Group read_group(const Rows& rows, int row, int group) {
  const std::uint8_t* p =
      row_at(rows, row) + static_cast<std::size_t>(group) * row_bytes(rows.kind, kGroup);
  Group out{};
  out.scale = half_at(p);
  if (rows.kind == RowKind::q8_0) {
    for (int i = 0; i < kGroup; ++i) {
      std::int8_t q;
      std::memcpy(&q, p + 2 + i, 1);
      out.q[i] = q;
    }
  } else if (rows.kind == RowKind::q4_0) {
    read_nibbles(p + 2, out.q);
  } else {
    out.minimum = half_at(p + 2);
    read_nibbles(p + 4, out.q);
  }
  return out;
}

bool fits_bf16(const Rows& rows) {
  float values[kGroup];
  for (int row = 0; row < rows.rows; ++row) {
    for (int group = 0; group * kGroup < rows.cols; ++group) {
      read_floats(rows, row, group, values);
      for (const float x : values) {
        if ((bits_of(x) & 0xffffU) != 0) return false;
      }
    }
  }
  return true;
}

}  // namespace smollm2
