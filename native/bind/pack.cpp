#include "pack/pack.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <climits>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/released.h"
#include "pack/dart.h"

namespace nb = nanobind;

namespace smollm2 {
namespace {

Rows rows_of(const AnyIn& array, const std::string& name, int cols) {
  const auto data = checked<const std::uint8_t, 2>(array, "data");
  const std::optional<RowKind> kind = row_kind(name);
  if (!kind) {
    throw std::invalid_argument("cannot pack rows of " + name +
                                ": choose from F32, F16, BF16, Q8_0, Q4_0, Q4_1");
  }
  if (cols < 1 || cols > (1 << 24) || data.shape(0) > INT_MAX) {
    throw std::invalid_argument("cannot pack a matrix of " + std::to_string(data.shape(0)) + " x " +
                                std::to_string(cols));
  }
  const bool grouped = *kind != RowKind::f32 && *kind != RowKind::f16 && *kind != RowKind::bf16;
  if (grouped && cols % kGroup != 0) {
    throw std::invalid_argument(name + " needs rows of a multiple of 32 values: got " +
                                std::to_string(cols));
  }
  const std::size_t bytes = row_bytes(*kind, cols);
  if (data.shape(1) != bytes) {
    throw std::invalid_argument("a row of " + std::to_string(cols) + " values in " + name +
                                " has " + std::to_string(bytes) + " bytes: got " +
                                std::to_string(data.shape(1)));
  }
  return {*kind, data.data(), static_cast<int>(data.shape(0)), cols};
}

// All rows in order where none is given. The indices are checked.
std::vector<std::int32_t> order_of(const std::optional<AnyIn>& given, int rows) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  if (given) {
    const auto index = checked<const std::int32_t, 1>(*given, "row_order");
    order.assign(index.data(), index.data() + index.size());
  }
  if (order.empty() || order.size() > INT_MAX) {
    throw std::invalid_argument("cannot pack " + std::to_string(order.size()) + " rows");
  }
  for (const std::int32_t row : order) {
    if (row < -1 || row >= rows) {
      throw std::invalid_argument("row " + std::to_string(row) + " of a matrix of " +
                                  std::to_string(rows) + " rows cannot be packed");
    }
  }
  return order;
}

const float* importance_of(const AnyIn& given, int cols) {
  const auto counts = checked<const float, 1>(given, "importance");
  bool fits = counts.size() == static_cast<std::size_t>(cols);
  for (std::size_t i = 0; fits && i < counts.size(); ++i) {
    fits = counts(i) >= 0.0f && std::isfinite(counts(i));
  }
  if (!fits) {
    throw std::invalid_argument("importance must be " + std::to_string(cols) +
                                " finite numbers of at least 0");
  }
  return counts.data();
}

Bytes pack_array(const AnyIn& data, const std::string& row_name, int cols,
                 const std::string& kind_name, const std::optional<AnyIn>& row_order, int threads,
                 const std::optional<AnyIn>& importance) {
  const Kind kind = kind_of(kind_name);
  const Rows rows = rows_of(data, row_name, cols);
  const std::vector<std::int32_t> order = order_of(row_order, rows.rows);
  const float* counts = importance ? importance_of(*importance, cols) : nullptr;
  const int out_rows = static_cast<int>(order.size());
  const std::size_t bytes = packed_bytes(kind, out_rows, cols);
  auto* out = aligned_new<std::uint8_t>(bytes);
  const nb::capsule owner = aligned_owner(out);
  PackError error;
  {
    const Released released;
    error = pack(rows, {order.data(), out_rows}, kind, threads, out, counts);
  }
  if (error == PackError::not_lossless) {
    throw std::invalid_argument(row_name + " is not held without loss by " + kind_name +
                                ": decode it to float32 first");
  }
  if (error == PackError::not_finite) {
    throw std::invalid_argument("weights with NaN or infinity cannot be packed as " + kind_name +
                                ": pack them as f32 or bf16");
  }
  return Bytes(out, {bytes}, owner);
}

Out<float> unpack_array(const AnyIn& packed, const std::string& kind, int rows, int cols) {
  const Matrix w = matrix_of(packed, kind, rows, cols);
  const auto width = static_cast<std::size_t>(cols);
  auto* out = aligned_new<float>(static_cast<std::size_t>(rows) * width);
  const nb::capsule owner = aligned_owner(out);
  {
    const Released released;
    for (int row = 0; row < rows; ++row) {
      kernels().unpack_row(w, row, out + static_cast<std::size_t>(row) * width);
    }
  }
  return Out<float>(out, {static_cast<std::size_t>(rows), width}, owner);
}

std::pair<std::uint32_t, std::uint32_t> hash_array(const AnyIn& array, const std::string& kind) {
  const auto values = checked<const std::uint8_t, 1>(array, "values");
  const std::optional<std::size_t> bytes = dart_value_bytes(kind);
  if (!bytes || values.size() % *bytes != 0) {
    throw std::invalid_argument("cannot hash " + std::to_string(values.size()) + " bytes as '" +
                                kind + "': the Dart package has q8, q16 and bf16");
  }
  const Released released;
  const DartHashes hashes = dart_hashes(kind, values.data(), values.size() / *bytes);
  return {hashes.first, hashes.second};
}

}  // namespace

void bind_pack(nb::module_& m) {
  m.def("pack", &pack_array, nb::arg("data"), nb::arg("row_kind"), nb::arg("cols"), nb::arg("kind"),
        nb::arg("row_order").none() = nb::none(), nb::arg("threads") = 1,
        nb::arg("importance").none() = nb::none(),
        "Rows of bytes [rows, bytes a row] of a GGUF kind as packed tiles of `kind`.\n\n"
        "Row i of the result is row row_order[i] of the data, zeros where that is -1; importance\n"
        "[cols] says how much a rounding error in a column counts.\n"
        "Raises ValueError where kinds and shapes do not fit, or weights to quantize are not "
        "finite.");
  m.def(
      "fits_bf16",
      [](const AnyIn& data, const std::string& row_name, int cols) {
        const Rows rows = rows_of(data, row_name, cols);
        const Released released;
        return fits_bf16(rows);
      },
      nb::arg("data"), nb::arg("row_kind"), nb::arg("cols"), "Whether every value is a bf16.");
  m.def(
      "packed_bytes",
      [](const std::string& kind, int rows, int cols) {
        if (rows < 0 || cols < 0 || cols > (1 << 24)) {
          throw std::invalid_argument("no matrix of " + std::to_string(rows) + " x " +
                                      std::to_string(cols));
        }
        return packed_bytes(kind_of(kind), rows, cols);
      },
      nb::arg("kind"), nb::arg("rows"), nb::arg("cols"), "Bytes of a packed matrix.");
  m.def("unpack", &unpack_array, nb::arg("packed"), nb::arg("kind"), nb::arg("rows"),
        nb::arg("cols"), "A packed matrix as float32 [rows, cols].");
  m.def("dart_hashes", &hash_array, nb::arg("values"), nb::arg("kind"),
        "The two hashes that the Dart package stores of the bytes of q8, q16 or bf16 values.");
}

}  // namespace smollm2
