#include "engine/pass.h"

#include <algorithm>

#include "engine/profile.h"

namespace smollm2 {
namespace {

// Bytes of activations that are to stay in the second-level cache while weights go by.
constexpr int kActivationBytes = 128 << 10;

// Rows that are multiplied together by each tile.
int block_rows(const Activations& in, int rows) {
  const int bytes = in.forms().quantized ? in.stride() * 5 / 4 : in.stride() * 4;
  return std::min(rows, std::max(16, kActivationBytes / bytes / 16 * 16));
}

// Calls f(row, rows) for blocks of the rows.
template <typename F>
void for_blocks(int rows, int rows_at_once, F f) {
  for (int row = 0; row < rows; row += rows_at_once) f(row, std::min(rows_at_once, rows - row));
}

constexpr int kGroupTiles = kGroup / kTileRows;

// Where a worker begins to read a matrix of which it takes these tiles.
const std::uint8_t* start_of(const Matrix& w, Range range) { return tiles_of(w, range).data; }

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
  const int layers = static_cast<int>(in_.model.layers.size());
  for (int i = 0; i < layers; ++i) {
    const Layer& layer = in_.model.layers[static_cast<std::size_t>(i)];
    phase(Profile::qkv, [&] { qkv(w, layer); });
    if (!in_.plan.decode) phase(Profile::store, [&] { store(w, i); });
    phase(Profile::attention, [&] { attend(w, i); });
    phase(Profile::output, [&] { output(w, layer); });
    phase(Profile::gate_up, [&] { gate_up(w, layer); });
    phase(Profile::down, [&] { down(w, layer, start_of_layer(w, i + 1)); });
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

void Pass::multiply(const Matrix& matrix, const Activations& in, int row, int rows,
                    const Output& out, const std::uint8_t* next) const {
  const int last = tiles(matrix.rows);
  if (is_integer(matrix.kind)) {
    kernels_.linear_integer(matrix, in.quantized(), row, rows, 0, last, out, next);
  } else {
    kernels_.linear_float(matrix, in.floats(row), in.stride(), rows, 0, last, out, next);
  }
}

// A worker's share of a product: whole pairs of tiles, which the kernels like best.
Range Pass::own_tiles(const Worker& w, const Matrix& matrix) const {
  return w.seat.share(tiles(matrix.rows), kGroupTiles);
}

// A worker's share of gate and up, in whole groups of columns, which it rounds itself.
Range Pass::own_groups(const Worker& w, const Layer& layer) const {
  return w.seat.share((tiles(layer.gate.rows) + kGroupTiles - 1) / kGroupTiles);
}

// A worker's share of query, key and value side by side.
std::array<Range, 3> Pass::own_parts(const Worker& w, const Layer& layer) const {
  const std::array parts{&layer.query, &layer.key, &layer.value};
  int all = 0;
  for (const Matrix* part : parts) all += tiles(part->rows);
  const Range mine = w.seat.share(all, kGroupTiles);
  std::array<Range, 3> ranges{};
  int before = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const int own = tiles(parts[i]->rows);
    ranges[i] = {std::clamp(mine.first - before, 0, own), std::clamp(mine.last - before, 0, own)};
    before += own;
  }
  return ranges;
}

// Where a worker begins to read a layer, or the head after the last one.
const std::uint8_t* Pass::start_of_layer(const Worker& w, int number) const {
  const Model& model = in_.model;
  const auto i = static_cast<std::size_t>(number);
  if (i == model.layers.size()) return start_of(model.head, own_tiles(w, model.head));
  const Layer& layer = model.layers[i];
  const std::array parts{&layer.query, &layer.key, &layer.value};
  const std::array<Range, 3> ranges = own_parts(w, layer);
  for (std::size_t part = 0; part < parts.size(); ++part) {
    if (ranges[part].size() > 0) return start_of(*parts[part], ranges[part]);
  }
  return nullptr;
}

void Pass::qkv(const Worker& w, const Layer& layer) {
  const Activations& in = normalise(w, layer.input_norm);
  const std::array parts{&layer.query, &layer.key, &layer.value};
  const std::array<Range, 3> ranges = own_parts(w, layer);
  for_blocks(rows_, block_rows(in, rows_), [&](int row, int count) {
    int col = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool more = i + 1 < parts.size() && ranges[i + 1].size() > 0;
      const std::uint8_t* next = more ? start_of(*parts[i + 1], ranges[i + 1])
                                      : start_of(layer.output, own_tiles(w, layer.output));
      if (ranges[i].size() > 0) {
        multiply(tiles_of(*parts[i], ranges[i]), in, row, count,
                 {qkv_row(row, col + ranges[i].first * kTileRows), qkv_size_}, next);
      }
      col += parts[i]->rows;
    }
  });
}

// x += matrix * in, the worker's own columns of it.
void Pass::add_product(const Worker& w, const Matrix& matrix, const Activations& in,
                       const std::uint8_t* next) {
  const Range mine = own_tiles(w, matrix);
  for_blocks(rows_, block_rows(in, rows_), [&](int row, int count) {
    multiply(tiles_of(matrix, mine), in, row, count,
             {x(row) + mine.first * kTileRows, shape_.hidden, true}, next);
  });
}

void Pass::output(const Worker& w, const Layer& layer) {
  const int first = own_groups(w, layer).first * kGroupTiles;
  add_product(w, layer.output, mixed(w), start_of(layer.gate, {first, first}));
}

void Pass::down(const Worker& w, const Layer& layer, const std::uint8_t* next) {
  add_product(w, layer.down, space_.gated, next);
}

void Pass::gate_up(const Worker& w, const Layer& layer) {
  const Activations& in = normalise(w, layer.mlp_norm);
  const Range groups = own_groups(w, layer);
  const int at_once = std::min(block_rows(in, rows_), kColumnFloats / kGroup);
  for_blocks(rows_, at_once, [&](int row, int count) {
    const int step = std::max(1, kColumnFloats / kGroup / count);
    for (int group = groups.first; group < groups.last; group += step) {
      gate_part(w, layer, in, row, count, {group, std::min(group + step, groups.last)});
    }
  });
}

// Some rows and some groups of columns of silu(gate) * up, in the forms that the next product
// needs.
void Pass::gate_part(const Worker& w, const Layer& layer, const Activations& in, int row, int rows,
                     Range groups) const {
  const Activations& to = space_.gated;
  float* gate = w.own.columns[0].get();
  float* up = w.own.columns[1].get();
  const int end = groups.last * kGroupTiles;
  const Range range{groups.first * kGroupTiles, std::min(end, tiles(layer.gate.rows))};
  const Matrix part = tiles_of(layer.gate, range);
  const bool more = groups.last < own_groups(w, layer).last;
  const std::uint8_t* next =
      more ? start_of(layer.gate, {end, end}) : start_of(layer.down, own_tiles(w, layer.down));
  multiply(part, in, row, rows, {gate, part.rows}, start_of(layer.up, range));
  multiply(tiles_of(layer.up, range), in, row, rows, {up, part.rows}, next);
  for (int r = 0; r < rows; ++r, gate += part.rows, up += part.rows) {
    const int col = groups.first * kGroup;
    float* out = to.forms().floats ? to.floats(row + r, col) : gate;
    kernels_.silu_mul(gate, up, part.rows, out);
    if (!to.forms().quantized) continue;
    const QuantizedRows rounded = to.quantized_part(row + r, col, groups.size() * kGroup);
    kernels_.quantize_row(out, part.rows, rounded, 0);
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
  const int at_once = std::min(block_rows(to, count), kColumnFloats / kTileRows / 2);
  for_blocks(count, at_once, [&](int row, int part_rows) { head_rows(w, to, row, part_rows); });
}

// Some rows of the logits, by way of columns that stay in the cache: products of many rows would
// each begin lines of memory that no one fetched. One tile of space between rows, since rows whose
// distance is a power of two compete for the same places of the cache.
void Pass::head_rows(const Worker& w, const Activations& in, int row, int rows) const {
  const Matrix& head = in_.model.head;
  float* columns = w.own.columns[0].get();
  const Range mine = own_tiles(w, head);
  const int step = kColumnFloats / kTileRows / rows - 1;
  for (int tile = mine.first; tile < mine.last; tile += step) {
    const int last = std::min(tile + step, mine.last);
    const Matrix part = tiles_of(head, {tile, last});
    const std::uint8_t* next =
        last < mine.last ? start_of(head, {last, last}) : start_of_layer(w, 0);
    const int stride = (step + 1) * kTileRows;
    multiply(part, in, row, rows, {columns, stride}, next);
    for (int r = 0; r < rows; ++r) {
      const auto to =
          static_cast<std::size_t>(in_.batch.wanted[static_cast<std::size_t>(row + r)].row);
      std::copy_n(columns + r * stride, part.rows,
                  in_.logits + to * static_cast<std::size_t>(shape_.vocabulary) + tile * kTileRows);
    }
  }
}

}  // namespace smollm2
