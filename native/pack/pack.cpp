#include "pack/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <vector>

#include "pack/half.h"
#include "pack/rows.h"

namespace smollm2 {
namespace {

void put_half(std::uint8_t* line, int half, int lane, std::uint16_t value) {
  std::memcpy(line + 2 * (half * kTileRows + lane), &value, sizeof value);
}

// Puts one group at one lane of a block of 64 k, as kernels.h lays it out.
void place_group(Kind kind, const Group& group, std::uint8_t* block, int half, int lane) {
  for (int i = 0; i < kGroup; ++i) {
    const int k = half * kGroup + i;
    if (kind == Kind::q16) {
      std::memcpy(block + 2 * (k * kTileRows + lane), &group.q[i], 2);
    } else if (kind == Kind::q8) {
      block[k / 4 * 64 + lane * 4 + k % 4] = static_cast<std::uint8_t>(group.q[i] + 128);
    } else {
      std::uint8_t& both = block[k / 8 * 64 + lane * 4 + k % 4];
      const int nibble = k / 4 % 2 == 0 ? group.q[i] : group.q[i] << 4;
      both = static_cast<std::uint8_t>(both | nibble);
    }
  }
  const int lines = kind == Kind::q16 ? 32 : kind == Kind::q8 ? 16 : 8;
  put_half(block + lines * 64, half, lane, group.scale);
  if (kind == Kind::q4m) put_half(block + (lines + 1) * 64, half, lane, group.minimum);
}

void place_floats(Kind kind, const float* values, std::uint8_t* block, int half, int lane) {
  for (int i = 0; i < kGroup; ++i) {
    const int k = half * kGroup + i;
    if (kind == Kind::f32) {
      std::memcpy(block + k * 64 + lane * 4, &values[i], 4);
    } else {
      const std::uint16_t rounded = bf16_of(values[i]);
      std::memcpy(block + k / 2 * 64 + lane * 4 + k % 2 * 2, &rounded, 2);
    }
  }
}

// The kind that holds a kind of groups without loss.
std::optional<Kind> native_kind(RowKind kind) {
  if (kind == RowKind::q8_0) return Kind::q8;
  if (kind == RowKind::q4_0) return Kind::q4;
  if (kind == RowKind::q4_1) return Kind::q4m;
  return std::nullopt;
}

struct Job {
  const Rows& rows;
  const RowOrder& order;
  Kind kind;
  const float* importance;  // [padded(cols)]
  std::uint8_t* out;
};

// Places one group of source row `row` (-1: zeros). False where it is not finite and must be.
bool pack_group(const Job& job, int row, int group, std::uint8_t* block, int lane) {
  const int half = group % 2;
  const bool is_zero = row < 0 || group * kGroup >= job.rows.cols;
  float values[kGroup] = {};
  if (job.kind == Kind::f32 || job.kind == Kind::bf16) {
    if (!is_zero) read_floats(job.rows, row, group, values);
    place_floats(job.kind, values, block, half, lane);
    return true;
  }
  Group stored;
  if (is_zero) {
    stored = zero_group(job.kind);
  } else if (native_kind(job.rows.kind)) {
    stored = read_group(job.rows, row, group);
  } else {
    read_floats(job.rows, row, group, values);
    if (!std::all_of(values, values + kGroup, [](float x) { return std::isfinite(x); })) {
      return false;
    }
    stored = round_group(job.kind, values, job.importance + group * kGroup);
  }
  place_group(job.kind, stored, block, half, lane);
  return true;
}

bool pack_tiles(const Job& job, int first, int last) {
  const std::size_t bytes = tile_bytes(job.kind, job.rows.cols);
  const int groups = padded(job.rows.cols) / kGroup;
  for (int tile = first; tile < last; ++tile) {
    std::uint8_t* blocks = job.out + static_cast<std::size_t>(tile) * bytes;
    std::memset(blocks, 0, bytes);
    for (int lane = 0; lane < kTileRows; ++lane) {
      const int row = tile * kTileRows + lane;
      const int source = row < job.order.rows ? job.order.index[row] : -1;
      for (int group = 0; group < groups; ++group) {
        std::uint8_t* block = blocks + static_cast<std::size_t>(group / 2) * block_bytes(job.kind);
        if (!pack_group(job, source, group, block, lane)) return false;
      }
    }
  }
  return true;
}

}  // namespace

PackError pack(const Rows& rows, const RowOrder& order, Kind kind, int threads, std::uint8_t* out,
               const float* importance) {
  const std::optional<Kind> native = native_kind(rows.kind);
  if (native && kind != *native && kind != Kind::f32) return PackError::not_lossless;
  std::vector<float> counts(static_cast<std::size_t>(padded(rows.cols)), 1.0f);
  if (importance != nullptr) std::copy_n(importance, rows.cols, counts.begin());
  const Job job{rows, order, kind, counts.data(), out};
  const int all = tiles(order.rows);
  const int parts = std::clamp(threads, 1, std::max(all, 1));
  std::vector<std::future<bool>> others;
  for (int part = 1; part < parts; ++part) {
    others.push_back(std::async(std::launch::async, [&job, all, part, parts] {
      return pack_tiles(job, all * part / parts, all * (part + 1) / parts);
    }));
  }
  bool finite = pack_tiles(job, 0, all / parts);
  for (std::future<bool>& other : others) finite = other.get() && finite;
  return finite ? PackError::none : PackError::not_finite;
}

}  // namespace smollm2
