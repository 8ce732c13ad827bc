// Packing weights into tiles, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/kernels.h"

namespace smollm2 {

// Rows as files hold them: dense little-endian floats, or ggml's groups of 32.
enum class RowKind : std::uint8_t { f32, f16, bf16, q8_0, q4_0, q4_1 };

// By GGUF's name, as "Q8_0".
std::optional<RowKind> row_kind(std::string_view name);

// Bytes of a row of `cols` values; groups need cols to be a multiple of 32.
std::size_t row_bytes(RowKind kind, int cols);

// Weights [rows, cols], row-major, not owned.
struct Rows {
  RowKind kind;
  const std::uint8_t* data;
  int rows;
  int cols;
};

// Which rows go where: row i of the packed matrix is row order[i] of the source, zeros where that
// is -1. The caller stacks matrices, interleaves tiles and undoes permutations by it.
struct RowOrder {
  const std::int32_t* index;
  int rows;
};

// Why a source could not be packed.
enum class PackError : std::uint8_t { none, not_finite, not_lossless };

// Fills out [packed_bytes(kind, order.rows, rows.cols)], tiles in parallel; the result does not
// depend on `threads`.
//   Dense rows go to every kind: f32 exactly, bf16 to nearest even, quantized kinds as
//   round_group() says; those need finite weights (else not_finite). importance [cols] says how
//   much an error in a column counts; nullptr: all the same.
//   Groups go to the kind that holds them without loss, and to f32: Q8_0 to q8, Q4_0 to q4,
//   Q4_1 to q4m (else not_lossless).
PackError pack(const Rows& rows, const RowOrder& order, Kind kind, int threads, std::uint8_t* out,
               const float* importance = nullptr);

// True where every value is a bf16.
bool fits_bf16(const Rows& rows);

}  // namespace smollm2
