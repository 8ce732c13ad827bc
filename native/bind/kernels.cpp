#include "kernels/kernels.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <climits>
#include <tuple>
#include <utility>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/released.h"

namespace nb = nanobind;

namespace smollm2 {
namespace {

void need(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

int size_of(std::size_t size) {
  need(size <= INT_MAX, "an array of " + std::to_string(size) + " values is too long for a kernel");
  return static_cast<int>(size);
}

template <typename T>
Out<T> new_array(std::size_t rows, std::size_t cols) {
  T* memory = aligned_new<T>(rows * cols);
  return Out<T>(memory, {rows, cols}, aligned_owner(memory));
}

// The tiles [first, last) of a call, all where `last` is not given.
int last_tile(const Matrix& w, int first, std::optional<int> last) {
  const int end = last.value_or(tiles(w.rows));
  need(first >= 0 && first <= end && end <= tiles(w.rows),
       "tiles " + std::to_string(first) + " to " + std::to_string(end) + " of a matrix of " +
           std::to_string(tiles(w.rows)));
  return end;
}

// What a call of a linear kernel needs besides the activations.
struct Call {
  const Kernels& table;
  Matrix w;
  int m;
  int first, last;
  Output out;
  int repeats;
};

Call call_of(const std::string& isa, const AnyIn& packed, const std::string& kind, int cols,
             const AnyOut& result, std::pair<int, std::optional<int>> range, bool add,
             int repeats) {
  const auto out = checked<float, 2>(result, "out");
  const int rows = size_of(out.shape(1));
  const Matrix w = matrix_of(packed, kind, rows, cols);
  const int last = last_tile(w, range.first, range.second);
  return {table_of(isa),           w,      size_of(out.shape(0)), range.first, last,
          {out.data(), rows, add}, repeats};
}

void linear_float(const std::string& isa, const AnyIn& packed, const std::string& kind, int cols,
                  const AnyIn& activations, const AnyOut& out, int first, std::optional<int> last,
                  bool add, int repeats) {
  const auto x = checked<const float, 2>(activations, "x");
  const Call call = call_of(isa, packed, kind, cols, out, {first, last}, add, repeats);
  need(!is_integer(call.w.kind), kind + " takes quantized activations: call linear_integer");
  need(x.shape(0) == static_cast<std::size_t>(call.m) &&
           x.shape(1) == static_cast<std::size_t>(padded(cols)),
       "activations must be [" + std::to_string(call.m) + ", " + std::to_string(padded(cols)) +
           "]: got [" + std::to_string(x.shape(0)) + ", " + std::to_string(x.shape(1)) + "]");
  const Released released;
  for (int i = 0; i < call.repeats; ++i) {
    call.table.linear_float(call.w, x.data(), padded(cols), call.m, call.first, call.last, call.out,
                            nullptr);
  }
}

void linear_integer(const std::string& isa, const AnyIn& packed, const std::string& kind, int cols,
                    const std::tuple<AnyOut, AnyOut, AnyOut>& rows, const AnyOut& out,
                    int first_row, int first, std::optional<int> last, bool add, bool twice,
                    int repeats) {
  const Call call = call_of(isa, packed, kind, cols, out, {first, last}, add, repeats);
  need(is_integer(call.w.kind), kind + " takes activations as floats: call linear_float");
  const auto q = checked<std::int8_t, 2>(std::get<0>(rows), "q");
  const auto scale = checked<float, 2>(std::get<1>(rows), "scale");
  const auto sum = checked<std::int32_t, 2>(std::get<2>(rows), "sum");
  const auto width = static_cast<std::size_t>(padded(cols));
  need(q.shape(1) == width && scale.shape(1) == width / kGroup && sum.shape(1) == width / kGroup &&
           scale.shape(0) == q.shape(0) && sum.shape(0) == q.shape(0),
       "quantized activations do not fit " + std::to_string(cols) + " columns");
  const int terms = twice ? 2 : 1;
  const std::size_t there = q.shape(0) / static_cast<std::size_t>(terms);
  need(first_row >= 0 &&
           static_cast<std::size_t>(call.m) + static_cast<std::size_t>(first_row) <= there,
       "rows " + std::to_string(first_row) + " to " + std::to_string(first_row + call.m) + " of " +
           std::to_string(there) + " quantized activations");
  const QuantizedRows x{q.data(), scale.data(), sum.data(), padded(cols), terms};
  const Released released;
  for (int i = 0; i < call.repeats; ++i) {
    call.table.linear_integer(call.w, x, first_row, call.m, call.first, call.last, call.out,
                              nullptr);
  }
}

std::tuple<Out<std::int8_t>, Out<float>, Out<std::int32_t>> quantize(const std::string& isa,
                                                                     const AnyIn& array,
                                                                     bool twice) {
  const auto x = checked<const float, 2>(array, "x");
  const Kernels& table = table_of(isa);
  const int cols = size_of(x.shape(1));
  const std::size_t each = twice ? 2 : 1, rows = x.shape(0) * each;
  const auto width = static_cast<std::size_t>(padded(cols));
  auto q = new_array<std::int8_t>(rows, width);
  auto scale = new_array<float>(rows, width / kGroup);
  auto sum = new_array<std::int32_t>(rows, width / kGroup);
  const QuantizedRows out{q.data(), scale.data(), sum.data(), padded(cols)};
  const auto kernel = twice ? table.quantize_row_twice : table.quantize_row;
  for (std::size_t row = 0; row < x.shape(0); ++row) {
    kernel(x.data() + row * x.shape(1), cols, out, size_of(row * each));
  }
  return {q, scale, sum};
}

In<float, 1> vector_of(const AnyIn& array, const char* name) {
  return checked<const float, 1>(array, name);
}

Out<float> rms_norm(const std::string& isa, const AnyIn& values, const AnyIn& gain, float eps) {
  const auto x = vector_of(values, "x"), weight = vector_of(gain, "weight");
  need(x.size() == weight.size() && x.size() > 0, "x and weight must have one length, at least 1");
  auto out = new_array<float>(1, x.size());
  table_of(isa).rms_norm(x.data(), weight.data(), eps, size_of(x.size()), out.data());
  return out;
}

Out<float> rope(const std::string& isa, const AnyIn& values, const AnyIn& cosines,
                const AnyIn& sines) {
  const auto head = vector_of(values, "head");
  const auto cos = vector_of(cosines, "cos"), sin = vector_of(sines, "sin");
  need(head.size() == 2 * cos.size() && cos.size() == sin.size(),
       "a head has twice as many values as cos and sin");
  auto out = new_array<float>(1, head.size());
  std::copy_n(head.data(), head.size(), out.data());
  table_of(isa).rope(out.data(), cos.data(), sin.data(), size_of(head.size()));
  return out;
}

Out<float> silu_mul(const std::string& isa, const AnyIn& gates, const AnyIn& factors) {
  const auto gate = vector_of(gates, "gate"), up = vector_of(factors, "up");
  need(gate.size() == up.size(), "gate and up must have one length");
  auto out = new_array<float>(1, gate.size());
  table_of(isa).silu_mul(gate.data(), up.data(), size_of(gate.size()), out.data());
  return out;
}

Out<float> unpack_row(const std::string& isa, const AnyIn& packed, const std::string& kind,
                      int rows, int cols, int row) {
  const Matrix w = matrix_of(packed, kind, rows, cols);
  need(row >= 0 && row < rows,
       "row " + std::to_string(row) + " of a matrix of " + std::to_string(rows) + " rows");
  auto out = new_array<float>(1, static_cast<std::size_t>(cols));
  table_of(isa).unpack_row(w, row, out.data());
  return out;
}

}  // namespace

void bind_kernels(nb::module_& parent) {
  nb::module_ m = parent.def_submodule(
      "kernels", "Single kernels of one instruction set, for tests and benchmarks.");
  m.def("isa_names", &isa_names, "Tables of kernels that can run here, the best last.");
  m.def("chosen", [] { return std::string(kernels().name); }, "The table that the engine uses.");
  m.def("linear_float", &linear_float, nb::arg("isa"), nb::arg("packed"), nb::arg("kind"),
        nb::arg("cols"), nb::arg("x"), nb::arg("out"), nb::arg("first") = 0,
        nb::arg("last").none() = nb::none(), nb::arg("add") = false, nb::arg("repeats") = 1,
        "Activations [m, padded cols] times a packed f32, bf16 or q16 matrix, into (or added to) "
        "out [m, rows].");
  m.def("linear_integer", &linear_integer, nb::arg("isa"), nb::arg("packed"), nb::arg("kind"),
        nb::arg("cols"), nb::arg("rows"), nb::arg("out"), nb::arg("first_row") = 0,
        nb::arg("first") = 0, nb::arg("last").none() = nb::none(), nb::arg("add") = false,
        nb::arg("twice") = false, nb::arg("repeats") = 1,
        "What quantize() returned times a packed q8, q4 or q4m matrix, into (or added to) out [m, "
        "rows].");
  m.def("quantize", &quantize, nb::arg("isa"), nb::arg("x"), nb::arg("twice") = false,
        "Rows [m, cols] as (q, scale, sum); `twice` gives two rows for each.");
  m.def("rms_norm", &rms_norm, nb::arg("isa"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"));
  m.def("rope", &rope, nb::arg("isa"), nb::arg("head"), nb::arg("cos"), nb::arg("sin"));
  m.def("silu_mul", &silu_mul, nb::arg("isa"), nb::arg("gate"), nb::arg("up"));
  m.def("unpack_row", &unpack_row, nb::arg("isa"), nb::arg("packed"), nb::arg("kind"),
        nb::arg("rows"), nb::arg("cols"), nb::arg("row"));
}

}  // namespace smollm2
