// Blocks of cached keys and values: what each kind's lines hold, where the parts lie, and the
// writing of one place. Layouts: kernels.h.

constexpr int kPlaceTiles = kPage / kTileRows;

constexpr int whole_tiles(int size) { return (size + kTileRows - 1) / kTileRows * kTileRows; }

// Lines are [16 lanes] float.
struct FloatDot {
  static constexpr int tiles = kLineTiles;  // whose sums lie in registers together
  using Acc = V;
  using Line = V;
  using Factor = V;
  static void prepare(const V* x, int count, std::uint32_t* factors) {
    auto* to = reinterpret_cast<float*>(factors);
    for (int i = 0; i < count; i += kLanes) store(to + i, x[i / kLanes]);
  }
  static Acc begin(std::int32_t) { return zero(); }
  static Line line(const std::uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static Factor factor(const std::uint32_t* factors, int step, int) {
    float x;
    std::memcpy(&x, factors + step, sizeof x);
    return broadcast(x);
  }
  static Acc step(Acc acc, Line a, Factor x) { return fma(a, x, acc); }
  static V end(Acc acc) { return acc; }
};

// What a kind's lines hold in each lane (`width` values), and how they are multiplied.
struct FloatKv {
  using Key = FloatDot;
  using Value = FloatDot;
  static constexpr int width = 1;
  static constexpr bool whole = false;
};
// Queries in two terms: rounding them to one bf16 costs as much as rounding the keys does.
// Probabilities in one: no difference was measured.
struct PairKv {
  using Key = PairDot<2>;
  using Value = PairDot<1>;
  static constexpr int width = 2;
  static constexpr bool whole = false;
};
struct QuadKv {
  using Key = QuadDot<true>;
  using Value = QuadDot<false>;
  static constexpr int width = 4;
  static constexpr bool whole = true;  // numbers, with a scale for each place
  // What two signed bytes hold, with room for rounding.
  static constexpr float top_query = 32512.0f, top_probability = 32512.0f;
};

// Where the parts of a block lie.
template <typename Kv>
struct Block {
  explicit Block(int head_size)
      : key_steps((head_size + Kv::width - 1) / Kv::width),
        columns(whole_tiles(head_size)),
        key_tile_bytes(static_cast<std::size_t>(key_steps) * 64),
        value_step_bytes(static_cast<std::size_t>(columns) * 4),
        values(kPlaceTiles * key_tile_bytes),
        scales(values + kPage / Kv::width * value_step_bytes) {}
  int key_steps, columns;
  std::size_t key_tile_bytes, value_step_bytes, values, scales;
};

// A row [size] as vectors, the last one padded with zeros; returns the size of all.
int load_row(const float* x, int size, V* out) {
  for_vectors(size, [&](int i, auto get, auto) { out[i / kLanes] = get(x + i); });
  return whole_tiles(size);
}

// What -top ... top is to a row, which it may be multiplied with: 0 where it is all zeros (or
// almost), NaN where it is not finite.
struct Scale {
  float factor, inverse;
};

Scale scale_to(float top, const V* x, int count) {
  float magnitude = 0.0f;
  for (int i = 0; i < count / kLanes && magnitude < INFINITY; ++i) {
    const float tile = greatest_magnitude(x[i], zero());
    magnitude = tile <= magnitude ? magnitude : tile;
  }
  if (!(magnitude < INFINITY)) return {0.0f, NAN};
  const float factor = top / magnitude;
  if (!(factor < INFINITY)) return {0.0f, 0.0f};
  return {factor, magnitude / top};
}

void round_row(const V* x, int count, Scale scale, I* out) {
  for (int i = 0; i < count / kLanes; ++i) {
    out[i] = scale.factor > 0.0f ? to_int(mul(x[i], broadcast(scale.factor))) : broadcast_int(0);
  }
}

// Elements [D] to where key d and value d of a place lie.
template <typename Kv, typename Element>
void scatter(std::uint8_t* block, int place, const Element* key, const Element* value,
             int head_size) {
  constexpr int width = Kv::width;
  const Block<Kv> parts(head_size);
  const auto tile = static_cast<std::size_t>(place / kTileRows);
  const auto step = static_cast<std::size_t>(place / width);
  auto* k = reinterpret_cast<Element*>(block + tile * parts.key_tile_bytes);
  auto* v = reinterpret_cast<Element*>(block + parts.values + step * parts.value_step_bytes);
  for (int d = 0; d < head_size; ++d) {
    k[(d / width * kTileRows + place % kTileRows) * width + d % width] = key[d];
    v[d * width + place % width] = value[d];
  }
}

void write_pairs(std::uint8_t* block, int place, const float* key, const float* value,
                 int head_size) {
  V x[kMaxHeadSize / kLanes];
  std::uint16_t halves[2][kMaxHeadSize];
  for (int which = 0; which < 2; ++which) {
    const int count = load_row(which == 0 ? key : value, head_size, x);
    for (int i = 0; i < count; i += kLanes) store_bf16(halves[which] + i, x[i / kLanes]);
  }
  scatter<PairKv>(block, place, halves[0], halves[1], head_size);
}

void write_quads(std::uint8_t* block, int place, const float* key, const float* value,
                 int head_size) {
  V x[kMaxHeadSize / kLanes];
  I whole[kMaxHeadSize / kLanes];
  std::int8_t bytes[2][kMaxHeadSize];
  float* scales = reinterpret_cast<float*>(block + Block<QuadKv>(head_size).scales) + place;
  for (int which = 0; which < 2; ++which) {
    const int count = load_row(which == 0 ? key : value, head_size, x);
    const Scale scale = scale_to(127.0f, x, count);
    scales[which * kPage] = scale.inverse;
    round_row(x, count, scale, whole);
    for (int i = 0; i < count; i += kLanes) store_int8(bytes[which] + i, whole[i / kLanes]);
  }
  for (int d = 0; d < head_size; ++d) bytes[0][d] = static_cast<std::int8_t>(bytes[0][d] ^ -128);
  scatter<QuadKv>(block, place, bytes[0], bytes[1], head_size);
}

void kv_write(KvKind kind, std::uint8_t* block, int place, const float* key, const float* value,
              int head_size) {
  switch (kind) {
    case KvKind::f32:
      return scatter<FloatKv>(block, place, key, value, head_size);
    case KvKind::bf16:
      return write_pairs(block, place, key, value, head_size);
    case KvKind::int8:
      return write_quads(block, place, key, value, head_size);
  }
}
