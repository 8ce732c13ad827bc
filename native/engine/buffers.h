// Numbers on their way through the model: aligned arrays, and rows as the products take them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "kernels/kernels.h"

namespace smollm2 {

// `count` zeros that begin with a line of the cache.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t count)
      : data_(static_cast<T*>(::operator new(count * sizeof(T) + 64, std::align_val_t{64}))) {
    std::fill_n(data_.get(), count, T{});
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Free> data_;
};

// What products take: floats, quantized rows, or both.
struct Forms {
  bool floats = false;
  bool quantized = false;

  void add(const Matrix& w) { (is_integer(w.kind) ? quantized : floats) = true; }
};

// Rows of activations in the forms that were asked for, padded with zeros.
class Activations {
 public:
  Activations() = default;
  // `terms` of the quantized form: 1 or 2.
  Activations(int rows, int cols, Forms forms, int terms = 1)
      : forms_(forms), stride_(padded(cols)), terms_(terms) {
    const std::size_t each = static_cast<std::size_t>(rows) * static_cast<std::size_t>(stride_);
    if (forms.floats) floats_ = Buffer<float>(each);
    if (forms.quantized) {
      const std::size_t size = each * static_cast<std::size_t>(terms);
      q_ = Buffer<std::int8_t>(size);
      scales_ = Buffer<float>(size / kGroup);
      sums_ = Buffer<std::int32_t>(size / kGroup);
    }
  }

  Forms forms() const { return forms_; }
  int stride() const { return stride_; }
  // Floats of a row, from column `col` on.
  float* floats(int row, int col = 0) const {
    return floats_.get() + static_cast<std::size_t>(row) * static_cast<std::size_t>(stride_) +
           static_cast<std::size_t>(col);
  }
  QuantizedRows quantized() const {
    return {q_.get(), scales_.get(), sums_.get(), stride_, terms_};
  }
  // Columns col ... col + cols - 1 of one row as a row by themselves; multiples of a group.
  QuantizedRows quantized_part(int row, int col, int cols) const {
    const std::size_t at = static_cast<std::size_t>(row) * static_cast<std::size_t>(stride_) +
                           static_cast<std::size_t>(col);
    return {q_.get() + at, scales_.get() + at / kGroup, sums_.get() + at / kGroup, cols};
  }

 private:
  Forms forms_;
  int stride_ = 0;
  int terms_ = 1;
  Buffer<float> floats_;
  Buffer<std::int8_t> q_;
  Buffer<float> scales_;
  Buffer<std::int32_t> sums_;
};

}  // namespace smollm2
