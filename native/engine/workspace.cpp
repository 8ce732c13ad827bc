#include "engine/workspace.h"

#include <algorithm>
#include <limits>

namespace smollm2 {
namespace {

std::size_t size_of(int rows, int cols) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
}

Forms with_floats(Forms forms) { return {true, forms.quantized}; }

}  // namespace

InputForms::InputForms(const Model& model) {
  for (const Layer& layer : model.layers) {
    for (const Matrix* w : {&layer.query, &layer.key, &layer.value, &layer.gate, &layer.up}) {
      normed.add(*w);
    }
    mixed.add(layer.output);
    gated.add(layer.down);
  }
  head.add(model.head);
}

Partials::Partials(std::size_t rows, int head_size)
    : size_(static_cast<std::size_t>(head_size)), each_(rows), mixed_(rows * size_) {
  for (std::size_t r = 0; r < rows; ++r) each_[r] = {0, 0, mixed_.get() + r * size_};
}

void Partials::empty(std::size_t first, std::size_t count) {
  for (std::size_t r = first; r < first + count; ++r) {
    each_[r].maximum = -std::numeric_limits<float>::infinity();
    each_[r].sum = 0;
    std::fill_n(each_[r].mixed, size_, 0.0f);
  }
}

Private::Private(const Model& model, const InputForms& forms)
    : normed(kFewRows, model.shape.hidden, forms.normed),
      mixed(kFewRows, model.shape.query_size(), forms.mixed),
      head(kFewRows, model.shape.hidden, forms.head, 2),
      row(static_cast<std::size_t>(padded(model.shape.hidden))),
      columns{Buffer<float>(kColumnFloats), Buffer<float>(kColumnFloats)} {
  const Shape& shape = model.shape;
  const auto most = static_cast<std::size_t>(std::max(kQueryRows, shape.group()));
  total = Partials(most, shape.head_size);
  queries = Buffer<float>(size_of(shape.group(), shape.head_size));
  key = Buffer<float>(static_cast<std::size_t>(shape.head_size));
  visible.resize(most);
}

Workspace::Workspace(const Model& model, const InputForms& forms, int rows_)
    : rows(rows_),
      x(size_of(rows, model.shape.hidden)),
      qkv(size_of(rows, model.shape.query_size() + 2 * model.shape.kv_size())),
      queries(size_of(rows, model.shape.query_size())),
      normed(rows, model.shape.hidden, forms.normed),
      mixed(rows, model.shape.query_size(), with_floats(forms.mixed)),
      gated(rows, model.shape.mlp, forms.gated),
      head(rows, model.shape.hidden, forms.head, 2) {}

void SharedBlocks::fit(const AttentionPlan& plan, int head_size) {
  if (partials.rows() < plan.shared_rows) partials = Partials(plan.shared_rows, head_size);
  if (count < plan.shared.size()) {
    count = plan.shared.size();
    arrived = std::make_unique<std::atomic<int>[]>(count);
  }
}

}  // namespace smollm2
