// NumPy arrays in and out of the extension, for all areas that bind.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/kernels.h"

namespace smollm2 {

using Bytes = nanobind::ndarray<nanobind::numpy, std::uint8_t, nanobind::ndim<1>>;
template <typename T>
using Out = nanobind::ndarray<nanobind::numpy, T>;

// Any array as it comes: nothing is converted, and checked() says in one line what is wrong.
using AnyIn = nanobind::ndarray<nanobind::ro>;
using AnyOut = nanobind::ndarray<>;

template <typename T, int dimensions>
using Array =
    nanobind::ndarray<T, nanobind::ndim<dimensions>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T, int dimensions>
using In = Array<const T, dimensions>;

template <typename T>
constexpr const char* type_name() {
  if (std::is_same_v<T, float>) return "float32";
  if (std::is_same_v<T, std::uint8_t>) return "uint8";
  if (std::is_same_v<T, std::int8_t>) return "int8";
  return "int32";
}

template <typename T, int dimensions, typename Any>
auto checked(const Any& array, const char* name) {
  bool fits = array.is_valid() && array.device_type() == nanobind::device::cpu::value &&
              array.dtype() == nanobind::dtype<std::remove_const_t<T>>() &&
              array.ndim() == dimensions;
  std::int64_t stride = 1;
  for (int i = dimensions - 1; fits && array.size() > 0 && i >= 0; --i) {
    const auto axis = static_cast<std::size_t>(i);
    fits = array.shape(axis) <= 1 || array.stride(axis) == stride;
    stride *= static_cast<std::int64_t>(array.shape(axis));
  }
  if (!fits) {
    throw std::invalid_argument(
        std::string(name) + " must be a C-contiguous " + type_name<std::remove_const_t<T>>() +
        " array of " + std::to_string(dimensions) + " dimension" + (dimensions == 1 ? "" : "s"));
  }
  return Array<T, dimensions>(array);
}

// Memory that is aligned to a line of the cache, and goes with its array.
template <typename T>
T* aligned_new(std::size_t count) {
  const std::size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
  return static_cast<T*>(::operator new(bytes == 0 ? 64 : bytes, std::align_val_t{64}));
}

inline nanobind::capsule aligned_owner(void* memory) {
  return {memory, [](void* p) noexcept { ::operator delete(p, std::align_val_t{64}); }};
}

inline Kind kind_of(const std::string& name) {
  static constexpr const char* names[] = {"f32", "bf16", "q16", "q8", "q4", "q4m"};
  for (int i = 0; i < 6; ++i) {
    if (name == names[i]) return static_cast<Kind>(i);
  }
  throw std::invalid_argument("unknown kind of packed weight '" + name +
                              "': choose from f32, bf16, q16, q8, q4, q4m");
}

// Asks the CPU once only: a hypervisor takes microseconds to answer.
inline const Kernels& table_of(const std::string& isa) {
  static const std::vector<std::string> names = isa_names();
  static const std::vector<const Kernels*> tables = [] {
    std::vector<const Kernels*> all;
    for (const std::string& name : names) all.push_back(kernels_for(name));
    return all;
  }();
  std::string message = "no kernels '" + isa + "' here: choose from";
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == isa) return *tables[i];
    message += " " + names[i];
  }
  throw std::invalid_argument(message);
}

// A packed matrix over bytes that the caller keeps alive.
inline Matrix matrix_of(const AnyIn& array, const std::string& kind, int rows, int cols) {
  const auto packed = checked<const std::uint8_t, 1>(array, "packed");
  const Matrix w{kind_of(kind), rows, cols, packed.data()};
  if (rows < 1 || cols < 1) {
    throw std::invalid_argument("a packed matrix needs rows and columns: got " +
                                std::to_string(rows) + " x " + std::to_string(cols));
  }
  const std::size_t bytes = packed_bytes(w.kind, rows, cols);
  if (packed.size() != bytes) {
    throw std::invalid_argument("a packed " + kind + " matrix of " + std::to_string(rows) + " x " +
                                std::to_string(cols) + " has " + std::to_string(bytes) +
                                " bytes: got " + std::to_string(packed.size()));
  }
  return w;
}

}  // namespace smollm2
