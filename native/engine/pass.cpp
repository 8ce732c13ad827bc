#include "engine/pass.h"

#include <algorithm>
#include <cstring>

#include "engine/profile.h"

namespace smollm2 {
namespace {

// Bytes of activations that are to stay in the second-level cache while weights go by.
constexpr int kActivationBytes = 400 << 10;

// Rows that are multiplied together by each tile.
int block_rows(const Activations& in, int rows) {
  const int bytes = in.forms().quantized ? in.stride() * 5 / 4 : in.stride() * 4;
  return std::min(rows, std::max(16, kActivationBytes / bytes / 16 * 16));
}

// Tiles whose columns of so many rows a worker can hold.
int block_tiles(int rows) { return std::max(1, kColumnFloats / kTileRows / rows); }

// Calls f(row, rows, tiles) for blocks of the rows and of a range of tiles.
template <typename F>
void for_blocks(int rows, int rows_at_once, Range tiles, F f) {
  for (int row = 0; row < rows; row += rows_at_once) {
    const int count = std::min(rows_at_once, rows - row);
    const int step = block_tiles(count);
    for (int tile = tiles.first; tile < tiles.last; tile += step) {
      f(row, count, Range{tile, std::min(tile + step, tiles.last)});
    }
  }
}

}  // namespace

Pass::Pass(const PassInput& input, Workspace& space, SharedBlocks& shared,
           std::vector<Private>& workers, Threads& threads, Profile& profile)
    : in_(input),
      shape_(input.model.shape),
      kernels_(input.kernels),
      rows_(input.batch.count),
      qkv_size_(shape_.query_size() + 2 * shape_.kv_size()),
      space_(space),
      shared_(shared),
      workers_(workers),
      threads_(threads),
      profile_(profile) {}

float* Pass::x(int row) const {
  return space_.x.get() + static_cast<std::size_t>(row) * static_cast<std::size_t>(shape_.hidden);
}

float* Pass::qkv_row(int row, int col) const {
  return space_.qkv.get() + static_cast<std::size_t>(row) * static_cast<std::size_t>(qkv_size_) +
         col;
}

void Pass::run(int worker) {
  const Worker w{{worker, threads_.count()}, workers_[static_cast<std::size_t>(worker)]};
  const bool first = worker == 0;
  const auto phase = [&](Profile::Phase which, auto work) {
    work();
    if (first) profile_.end_work(which);
    wait(w);
    if (first) profile_.end_wait(which);
  };
  if (first) profile_.begin();
  phase(Profile::embed, [&] { embed(w); });
  for (std::size_t i = 0; i < in_.model.layers.size(); ++i) {
    const Layer& layer = in_.model.layers[i];
    const int number = static_cast<int>(i);
    phase(Profile::qkv, [&] {
      qkv(w, layer);
      fetch(w, number);
    });
    if (!in_.plan.decode) phase(Profile::store, [&] { store(w, number); });
    phase(Profile::attention, [&] { attend(w, number); });
    phase(Profile::output, [&] { output(w, layer); });
    phase(Profile::gate_up, [&] { gate_up(w, layer); });
    phase(Profile::down, [&] { down(w, layer); });
  }
  head(w);
  if (first) profile_.end_work(Profile::head);
}

void Pass::embed(const Worker& w) {
  const Range rows = w.seat.share(rows_);
  for (int row = rows.first; row < rows.last; ++row) {
    kernels_.unpack_row(in_.model.embedding, in_.batch.ids[row], x(row));
  }
}

void Pass::normalise_row(const Worker& w, const float* gain, int row, const Activations& to) const {
  float* normed = to.forms().floats ? to.floats(row) : w.own.row.get();
  kernels_.rms_norm(x(row), gain, shape_.epsilon, shape_.hidden, normed);
  if (to.forms().quantized) kernels_.quantize_row(normed, shape_.hidden, to.quantized(), row);
}

const Activations& Pass::normalise(const Worker& w, const float* gain) {
  if (rows_ <= kFewRows) {
    for (int row = 0; row < rows_; ++row) normalise_row(w, gain, row, w.own.normed);
    return w.own.normed;
  }
  const Range rows = w.seat.share(rows_);
  for (int row = rows.first; row < rows.last; ++row) normalise_row(w, gain, row, space_.normed);
  wait(w);
  return space_.normed;
}

// The attention's result in the forms that the output product needs.
const Activations& Pass::mixed(const Worker& w) {
  const Activations& all = space_.mixed;
  if (!all.forms().quantized) return all;
  const int size = shape_.query_size();
  if (rows_ <= kFewRows && !w.own.mixed.forms().floats) {
    const QuantizedRows to = w.own.mixed.quantized();
    for (int row = 0; row < rows_; ++row) kernels_.quantize_row(all.floats(row), size, to, row);
    return w.own.mixed;
  }
  const Range rows = w.seat.share(rows_);
  for (int row = rows.first; row < rows.last; ++row) {
    kernels_.quantize_row(all.floats(row), size, all.quantized(), row);
  }
  wait(w);
  return all;
}

void Pass::multiply(const Matrix& matrix, const Activations& in, int row, int rows, float* out,
                    int stride) const {
  const int last = tiles(matrix.rows);
  if (is_integer(matrix.kind)) {
    kernels_.linear_integer(matrix, in.quantized(), row, rows, 0, last, out, stride);
  } else {
    kernels_.linear_float(matrix, in.floats(row), in.stride(), rows, 0, last, out, stride);
  }
}

void Pass::qkv(const Worker& w, const Layer& layer) {
  const Activations& in = normalise(w, layer.input_norm);
  const Matrix* const parts[] = {&layer.query, &layer.key, &layer.value};
  const int all = tiles(layer.query.rows) + tiles(layer.key.rows) + tiles(layer.value.rows);
  const Range mine = w.seat.share(all, 2);
  const int at_once = block_rows(in, rows_);
  for (int row = 0; row < rows_; row += at_once) {
    const int count = std::min(at_once, rows_ - row);
    int before = 0, col = 0;
    for (const Matrix* part : parts) {
      const int own = tiles(part->rows);
      const Range range{std::clamp(mine.first - before, 0, own),
                        std::clamp(mine.last - before, 0, own)};
      if (range.size() > 0) {
        multiply(tiles_of(*part, range), in, row, count,
                 qkv_row(row, col + range.first * kTileRows), qkv_size_);
      }
      before += own;
      col += part->rows;
    }
  }
}

// x += matrix * in, the worker's own columns of it.
void Pass::add_product(const Worker& w, const Matrix& matrix, const Activations& in) {
  float* columns = w.own.columns[0].get();
  const Range mine = w.seat.share(tiles(matrix.rows), 2);
  for_blocks(rows_, block_rows(in, rows_), mine, [&](int row, int count, Range range) {
    const Matrix part = tiles_of(matrix, range);
    multiply(part, in, row, count, columns, part.rows);
    for (int r = 0; r < count; ++r) {
      kernels_.add(x(row + r) + range.first * kTileRows, columns + r * part.rows, part.rows);
    }
  });
}

void Pass::output(const Worker& w, const Layer& layer) { add_product(w, layer.output, mixed(w)); }

void Pass::down(const Worker& w, const Layer& layer) { add_product(w, layer.down, space_.gated); }

// A worker's columns come in whole groups of 32, which it rounds itself.
void Pass::gate_up(const Worker& w, const Layer& layer) {
  const Activations& in = normalise(w, layer.mlp_norm);
  const Activations& to = space_.gated;
  float* gate = w.own.columns[0].get();
  float* up = w.own.columns[1].get();
  constexpr int pair = kGroup / kTileRows;
  const Range groups = w.seat.share((tiles(layer.gate.rows) + pair - 1) / pair);
  const int at_once = std::min(block_rows(in, rows_), kColumnFloats / kGroup);
  for (int row = 0; row < rows_; row += at_once) {
    const int count = std::min(at_once, rows_ - row);
    const int step = std::max(1, kColumnFloats / kGroup / count);
    for (int group = groups.first; group < groups.last; group += step) {
      const int last = std::min(group + step, groups.last);
      const Range range{group * pair, std::min(last * pair, tiles(layer.gate.rows))};
      const Matrix gate_part = tiles_of(layer.gate, range);
      const int cols = gate_part.rows;
      multiply(gate_part, in, row, count, gate, cols);
      multiply(tiles_of(layer.up, range), in, row, count, up, cols);
      for (int r = 0; r < count; ++r) {
        float* out = to.forms().floats ? to.floats(row + r, group * kGroup) : gate + r * cols;
        kernels_.silu_mul(gate + r * cols, up + r * cols, cols, out);
        if (!to.forms().quantized) continue;
        const int width = (last - group) * kGroup;
        kernels_.quantize_row(out, cols, to.quantized_part(row + r, group * kGroup, width), 0);
      }
    }
  }
}

// Final norm and head of the wanted rows; a head of 8 or 4 bits takes its input in two terms,
// since it alone would cause much of the error.
void Pass::head(const Worker& w) {
  const std::vector<Wanted>& wanted = in_.batch.wanted;
  const int count = static_cast<int>(wanted.size());
  if (count == 0) return;
  const bool few = count <= kFewRows;
  const Activations& to = few ? w.own.head : space_.head;
  const bool twice = to.forms().quantized;
  const Range rows = few ? Range{0, count} : w.seat.share(count);
  for (int row = rows.first; row < rows.last; ++row) {
    float* normed = twice ? w.own.row.get() : to.floats(row);
    kernels_.rms_norm(x(wanted[static_cast<std::size_t>(row)].token), in_.model.final_norm,
                      shape_.epsilon, shape_.hidden, normed);
    if (twice) kernels_.quantize_row_twice(normed, shape_.hidden, to.quantized(), 2 * row);
  }
  if (!few) wait(w);
  const int terms = twice ? 2 : 1;
  float* columns = w.own.columns[0].get();
  const Range mine = w.seat.share(tiles(shape_.vocabulary), 2);
  const int at_once = std::max(1, block_rows(to, terms * count) / terms);
  for_blocks(terms * count, terms * at_once, mine, [&](int row, int part_rows, Range range) {
    const Matrix part = tiles_of(in_.model.head, range);
    multiply(part, to, row, part_rows, columns, part.rows);
    for (int r = 0; r < part_rows; r += terms) {
      const float* from = columns + r * part.rows;
      float* out =
          in_.logits +
          static_cast<std::size_t>(wanted[static_cast<std::size_t>((row + r) / terms)].row) *
              static_cast<std::size_t>(shape_.vocabulary) +
          range.first * kTileRows;
      if (twice) {
        for (int i = 0; i < part.rows; ++i) out[i] = from[i] + from[part.rows + i];
      } else {
        std::memcpy(out, from, static_cast<std::size_t>(part.rows) * sizeof(float));
      }
    }
  });
}

}  // namespace smollm2
