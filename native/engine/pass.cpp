#include "engine/pass.h"

#include <algorithm>
#include <climits>

namespace smollm2 {
namespace {

// Bytes of activations that are to stay in the second-level cache while weights go by.
constexpr int kActivationBytes = 128 << 10;

// Rows that are multiplied together by each tile.
int block_rows(const Activations& in, int rows) {
  const int bytes = in.forms().quantized ? in.stride() * 5 / 4 : in.stride() * 4;
  return std::min(rows, std::max(16, kActivationBytes / bytes / 16 * 16));
}

// Tiles are taken in whole groups, which are also the pairs that the kernels like best.
constexpr int kGroupTiles = kGroup / kTileRows;

int parts_of(int n, int at_once) { return (n + at_once - 1) / at_once; }

const std::uint8_t* start_of(const Matrix& w, int tile) { return tiles_of(w, {tile, tile}).data; }

}  // namespace

Pass::Pass(const PassInput& input, Workspace& space, SharedBlocks& shared, Shares& shares,
           std::vector<Private>& workers, Profile& profile)
    : in_(input),
      shape_(input.model.shape),
      kernels_(input.kernels),
      rows_(input.batch.count),
      qkv_size_(shape_.query_size() + 2 * shape_.kv_size()),
      space_(space),
      shared_(shared),
      shares_(shares),
      workers_(workers),
      profile_(profile) {
  plan_phases();
}

float* Pass::x(int row) const {
  return space_.x.get() + static_cast<std::size_t>(row) * static_cast<std::size_t>(shape_.hidden);
}

float* Pass::qkv_row(int row, int col) const {
  return space_.qkv.get() + static_cast<std::size_t>(row) * static_cast<std::size_t>(qkv_size_) +
         col;
}

void Pass::plan_phases() {
  const auto add = [&](Profile::Phase name, Step step, int layer, bool needed = true) {
    if (needed) phases_.push_back({name, step, layer});
  };
  const int layers = static_cast<int>(in_.model.layers.size());
  add(Profile::embed, &Pass::embed, 0);
  for (int i = 0; i < layers; ++i) {
    add(Profile::qkv, &Pass::norm_of_input, i, !few());
    add(Profile::qkv, &Pass::qkv, i);
    add(Profile::store, &Pass::store, i, !in_.plan.decode);
    add(Profile::attention, &Pass::attend, i);
    add(Profile::output, &Pass::round_mixed, i,
        space_.mixed.forms().quantized && !rounds_mixed_itself());
    add(Profile::output, &Pass::output, i);
    add(Profile::gate_up, &Pass::norm_of_mlp, i, !few());
    add(Profile::gate_up, &Pass::gate_up, i);
    add(Profile::down, &Pass::down, i);
  }
  const std::size_t wanted = in_.batch.wanted.size();
  if (in_.result == Result::hidden) {
    add(Profile::head, &Pass::write_hidden, 0, wanted > 0);
    return;
  }
  add(Profile::head, &Pass::norm_of_head, 0, wanted > kFewRows);
  add(Profile::head, &Pass::head, 0, wanted > 0);
}

void Pass::run(int worker, int phase) {
  const auto self = static_cast<std::size_t>(worker);
  const Phase& which = phases_[static_cast<std::size_t>(phase)];
  if (worker == 0) phase == 0 ? profile_.begin() : profile_.end_wait();
  const Seat seat{worker, static_cast<int>(workers_.size())};
  (this->*which.step)({seat, workers_[self], phase}, which.layer);
  if (worker == 0) profile_.end_work(which.name);
}

void Pass::embed(const Worker& w, int) {
  each(w, rows_,
       [&](int row) { kernels_.unpack_row(in_.model.embedding, in_.batch.ids[row], x(row)); });
}

void Pass::normalise_row(const Worker& w, const float* gain, int row, const Activations& to) const {
  float* normed = to.forms().floats ? to.floats(row) : w.own.row.get();
  kernels_.rms_norm(x(row), gain, shape_.epsilon, shape_.hidden, normed);
  if (to.forms().quantized) kernels_.quantize_row(normed, shape_.hidden, to.quantized(), row);
}

// Many rows, for all workers.
void Pass::normalise(const Worker& w, const float* gain) {
  each(w, rows_, [&](int row) { normalise_row(w, gain, row, space_.normed); });
}

void Pass::norm_of_input(const Worker& w, int layer) { normalise(w, at(layer).input_norm); }

void Pass::norm_of_mlp(const Worker& w, int layer) { normalise(w, at(layer).mlp_norm); }

// The rows normalised: few ones by each worker for itself.
const Activations& Pass::normalised(const Worker& w, const float* gain) const {
  if (!few()) return space_.normed;
  for (int row = 0; row < rows_; ++row) normalise_row(w, gain, row, w.own.normed);
  return w.own.normed;
}

// Whether each worker rounds the attention's result for itself.
bool Pass::rounds_mixed_itself() const { return few() && !workers_[0].mixed.forms().floats; }

void Pass::round_mixed(const Worker& w, int) {
  const Activations& all = space_.mixed;
  each(w, rows_, [&](int row) {
    kernels_.quantize_row(all.floats(row), shape_.query_size(), all.quantized(), row);
  });
}

// The attention's result in the forms that the output product needs.
const Activations& Pass::mixed(const Worker& w) const {
  const Activations& all = space_.mixed;
  if (!all.forms().quantized || !rounds_mixed_itself()) return all;
  const QuantizedRows to = w.own.mixed.quantized();
  for (int row = 0; row < rows_; ++row) {
    kernels_.quantize_row(all.floats(row), shape_.query_size(), to, row);
  }
  return w.own.mixed;
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

// The tile at which a worker begins.
int Pass::first_tile(const Worker& w, int all) const {
  return w.seat.share(parts_of(all, kGroupTiles)).first * kGroupTiles;
}
const std::uint8_t* Pass::own_start(const Worker& w, const Matrix& matrix) const {
  return start_of(matrix, first_tile(w, tiles(matrix.rows)));
}

// Where a worker begins to read a layer, or the head after the last one.
const std::uint8_t* Pass::start_of_layer(const Worker& w, int number) const {
  const Model& model = in_.model;
  const auto i = static_cast<std::size_t>(number);
  if (i == model.layers.size()) return own_start(w, model.head);
  const Layer& layer = model.layers[i];
  int tile =
      first_tile(w, tiles(layer.query.rows) + tiles(layer.key.rows) + tiles(layer.value.rows));
  for (const Matrix* part : {&layer.query, &layer.key, &layer.value}) {
    if (tile < tiles(part->rows)) return start_of(*part, tile);
    tile -= tiles(part->rows);
  }
  return nullptr;
}

// Takes blocks of rows and tiles until all are taken, at most so many at once: f(row, rows, tiles,
// more), where `more` says whether the tiles after these are likely to come next.
template <typename F>
void Pass::share(const Worker& w, int rows, int rows_at_once, int tiles, int tiles_at_once, F f) {
  const int parts = parts_of(tiles, kGroupTiles), most = parts_of(tiles_at_once, kGroupTiles);
  const int all = parts_of(rows, rows_at_once) * parts;
  shares_.deal(w.seat, w.phase, all, INT_MAX, [&](Range run, bool more) {
    for (int i = run.first; i < run.last;) {
      const int row = i / parts * rows_at_once, part = i % parts;
      const int end = std::min({part + most, part + run.last - i, parts});
      const Range range{part * kGroupTiles, std::min(end * kGroupTiles, tiles)};
      i += end - part;
      f(row, std::min(rows_at_once, rows - row), range, (i < run.last || more) && end < parts);
    }
  });
}

// Query, key and value side by side.
void Pass::qkv(const Worker& w, int number) {
  const Layer& layer = at(number);
  const Activations& in = normalised(w, layer.input_norm);
  const std::array parts{&layer.query, &layer.key, &layer.value};
  int all = 0;
  for (const Matrix* part : parts) all += tiles(part->rows);
  share(w, rows_, block_rows(in, rows_), all, all, [&](int row, int rows, Range taken, bool more) {
    int before = 0, col = 0;
    for (const Matrix* part : parts) {
      const int own = tiles(part->rows);
      const Range range{std::clamp(taken.first - before, 0, own),
                        std::clamp(taken.last - before, 0, own)};
      const bool here = more && range.last < own;
      const std::uint8_t* next = here ? start_of(*part, range.last) : own_start(w, layer.output);
      if (range.size() > 0) {
        multiply(tiles_of(*part, range), in, row, rows,
                 {qkv_row(row, col + range.first * kTileRows), qkv_size_}, next);
      }
      before += own;
      col += part->rows;
    }
  });
  fetch(w, number);
}

// x += matrix * in
void Pass::add_product(const Worker& w, const Matrix& matrix, const Activations& in,
                       const std::uint8_t* next) {
  share(w, rows_, block_rows(in, rows_), tiles(matrix.rows), tiles(matrix.rows),
        [&](int row, int rows, Range range, bool more) {
          multiply(tiles_of(matrix, range), in, row, rows,
                   {x(row) + range.first * kTileRows, shape_.hidden, true},
                   more ? start_of(matrix, range.last) : next);
        });
}

void Pass::output(const Worker& w, int layer) {
  add_product(w, at(layer).output, mixed(w), own_start(w, at(layer).gate));
}

void Pass::down(const Worker& w, int layer) {
  add_product(w, at(layer).down, space_.gated, start_of_layer(w, layer + 1));
}

// Columns are taken in whole groups, which are rounded right away.
void Pass::gate_up(const Worker& w, int number) {
  const Layer& layer = at(number);
  const Activations& in = normalised(w, layer.mlp_norm);
  const int rows_at_once = std::min(block_rows(in, rows_), kColumnFloats / kGroup);
  const int fit = kColumnFloats / kGroup / rows_at_once * kGroupTiles;
  share(w, rows_, rows_at_once, tiles(layer.gate.rows), fit,
        [&](int row, int rows, Range range, bool more) {
          gate_part(w, layer, in, row, rows, range,
                    more ? start_of(layer.gate, range.last) : own_start(w, layer.down));
        });
}

// Some rows and columns of silu(gate) * up, in the forms that the next product needs.
void Pass::gate_part(const Worker& w, const Layer& layer, const Activations& in, int row, int rows,
                     Range range, const std::uint8_t* next) const {
  const Activations& to = space_.gated;
  float* gate = w.own.columns[0].get();
  float* up = w.own.columns[1].get();
  const Matrix part = tiles_of(layer.gate, range);
  multiply(part, in, row, rows, {gate, part.rows}, start_of(layer.up, range.first));
  multiply(tiles_of(layer.up, range), in, row, rows, {up, part.rows}, next);
  const int col = range.first * kTileRows, width = parts_of(part.rows, kGroup) * kGroup;
  for (int r = 0; r < rows; ++r, gate += part.rows, up += part.rows) {
    float* out = to.forms().floats ? to.floats(row + r, col) : gate;
    kernels_.silu_mul(gate, up, part.rows, out);
    if (!to.forms().quantized) continue;
    kernels_.quantize_row(out, part.rows, to.quantized_part(row + r, col, width), 0);
  }
}

// Final norm of the wanted rows, as they are.
void Pass::write_hidden(const Worker& w, int) {
  each(w, static_cast<int>(in_.batch.wanted.size()), [&](int row) {
    const auto [token, to] = in_.batch.wanted[static_cast<std::size_t>(row)];
    kernels_.rms_norm(
        x(token), in_.model.final_norm, shape_.epsilon, shape_.hidden,
        in_.out + static_cast<std::size_t>(to) * static_cast<std::size_t>(shape_.hidden));
  });
}

// Final norm of a wanted row; a head of 8 or 4 bits takes its input in two terms, since it alone
// would cause much of the error.
void Pass::head_row(const Worker& w, int row, const Activations& to) const {
  const bool twice = to.forms().quantized;
  float* normed = twice ? w.own.row.get() : to.floats(row);
  kernels_.rms_norm(x(in_.batch.wanted[static_cast<std::size_t>(row)].token), in_.model.final_norm,
                    shape_.epsilon, shape_.hidden, normed);
  if (twice) kernels_.quantize_row_twice(normed, shape_.hidden, to.quantized(), 2 * row);
}

void Pass::norm_of_head(const Worker& w, int) {
  each(w, static_cast<int>(in_.batch.wanted.size()),
       [&](int row) { head_row(w, row, space_.head); });
}

void Pass::head(const Worker& w, int) {
  const int count = static_cast<int>(in_.batch.wanted.size());
  const Activations& to = count <= kFewRows ? w.own.head : space_.head;
  if (count <= kFewRows) {
    for (int row = 0; row < count; ++row) head_row(w, row, to);
  }
  // By way of columns that stay in the cache: products of many rows would each begin lines of
  // memory that no one fetched. One tile of space between rows, since rows whose distance is a
  // power of two compete for the same places of the cache.
  const Matrix& head = in_.model.head;
  const int room = kColumnFloats / kTileRows;
  const int rows_at_once = std::min(block_rows(to, count), room / (kGroupTiles + 1));
  const int fit = (room / rows_at_once - 1) / kGroupTiles * kGroupTiles;
  share(w, count, rows_at_once, tiles(head.rows), fit,
        [&](int row, int part_rows, Range range, bool more) {
          head_part(w, to, row, part_rows, range,
                    more ? start_of(head, range.last) : start_of_layer(w, 0));
        });
}

// Some rows and columns of the logits.
void Pass::head_part(const Worker& w, const Activations& in, int row, int rows, Range range,
                     const std::uint8_t* next) const {
  const Matrix part = tiles_of(in_.model.head, range);
  const int stride = (range.size() + 1) * kTileRows;
  const float* columns = w.own.columns[0].get();
  multiply(part, in, row, rows, {w.own.columns[0].get(), stride}, next);
  for (int r = 0; r < rows; ++r, columns += stride) {
    const auto to =
        static_cast<std::size_t>(in_.batch.wanted[static_cast<std::size_t>(row + r)].row);
    std::copy_n(
        columns, part.rows,
        in_.out + to * static_cast<std::size_t>(shape_.vocabulary) + range.first * kTileRows);
  }
}

}  // namespace smollm2
