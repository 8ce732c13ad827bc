// One row of a packed matrix back as floats, written once over the policy.

// Lane `lane` of one half of a line of half floats.
inline float scale_of(const std::uint8_t* block, int line, int half, int lane) {
  float sixteen[kTileRows];
  store(sixteen, load_scales(block, line, half));
  return sixteen[lane];
}

// Stored number k of row `lane` of a block of 64 k, its scale not applied.
inline float stored_at(Kind kind, const std::uint8_t* block, int lane, int k) {
  if (kind == Kind::f32) {
    float value;
    std::memcpy(&value, line_at(block, k) + 4 * lane, sizeof value);
    return value;
  }
  if (kind == Kind::bf16) {
    const B pairs = broadcast_bytes(line_at(block, k / 2) + 4 * lane);
    float sixteen[kTileRows];
    store(sixteen, k % 2 == 0 ? even_bf16(pairs) : odd_bf16(pairs));
    return sixteen[0];
  }
  if (kind == Kind::q16) {
    std::int16_t q;
    std::memcpy(&q, block + 2 * (k * kTileRows + lane), sizeof q);
    return static_cast<float>(q);
  }
  if (kind == Kind::q8) return static_cast<float>(line_at(block, k / 4)[4 * lane + k % 4] - 128);
  const std::uint8_t both = line_at(block, k / 8)[4 * lane + k % 4];
  const int q = k / 4 % 2 == 0 ? both & 15 : both >> 4;
  return static_cast<float>(kind == Kind::q4 ? q - 8 : q);
}

void unpack_row(const Matrix& w, int row, float* out) {
  const int lane = row % kTileRows;
  const int scales = w.kind == Kind::q16 ? 32 : w.kind == Kind::q8 ? 16 : 8;
  const std::uint8_t* tile =
      w.data + static_cast<std::size_t>(row / kTileRows) * tile_bytes(w.kind, w.cols);
  for (int start = 0; start < w.cols; start += kGroup) {
    const std::uint8_t* block =
        tile + static_cast<std::size_t>(start / kBlock) * block_bytes(w.kind);
    const int half = start / kGroup % 2;
    const int count = w.cols - start < kGroup ? w.cols - start : kGroup;
    for (int k = 0; k < count; ++k) {
      out[start + k] = stored_at(w.kind, block, lane, half * kGroup + k);
    }
    if (w.kind == Kind::f32 || w.kind == Kind::bf16) continue;
    const float scale = scale_of(block, scales, half, lane);
    for (int k = 0; k < count; ++k) out[start + k] *= scale;
    if (w.kind != Kind::q4m) continue;
    const float minimum = scale_of(block, scales + 1, half, lane);
    for (int k = 0; k < count; ++k) out[start + k] += minimum;
  }
}
