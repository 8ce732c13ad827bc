// Blocks of cached keys and values: what each kind's lines hold, where the parts lie, and the
// writing of one place. Layouts: kernels.h.

constexpr int kPlaceTiles = kPage / kTileRows;

constexpr int whole_tiles(int size) { return (size + kTileRows - 1) / kTileRows * kTileRows; }

// Lines are [16 lanes] float.
struct FloatDot {
  static constexpr int tiles = kLineTiles;  // whose sums lie in registers together
  static constexpr bool scaled = false;
  static constexpr int word = 1;  // factors in each
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

// The greatest whole numbers of two rows whose products' sum fits 32 bits.
inline float top_of_pairs(int head_size) {
  const float top = std::floor(std::sqrt(2147483647.0f / static_cast<float>(head_size)) - 0.5f);
  return top < 32767.0f ? top : 32767.0f;
}

// What a kind's lines hold in each lane (`width` values), and how they are multiplied.
struct FloatKv {
  using Key = FloatDot;
  using Value = FloatDot;
  static constexpr int key_width = 1, value_width = 1;
  static constexpr bool whole = false;
  static constexpr int part = kPage;  // places whose probabilities are prepared together
};
// Whole numbers, with a scale for each place. Probabilities times the scales of their values get 8
// bits and a scale for each 32 places: for each 256 it costs ten times as much quality.
struct PairKv {
  using Key = PairDot;
  using Value = MixDot;
  static constexpr int key_width = 2, value_width = 4;
  static constexpr bool whole = true;
  static constexpr int part = 32;
  static constexpr std::int32_t offset = 0;  // of the keys' numbers
  static float top_key(int head_size) { return top_of_pairs(head_size); }
  static float top_query(int head_size) { return top_of_pairs(head_size); }
};
struct QuadKv {
  using Key = QuadDot;
  using Value = MixDot;
  static constexpr int key_width = 4, value_width = 4;
  static constexpr bool whole = true;
  static constexpr int part = 32;
  static constexpr std::int32_t offset = 128;
  static float top_key(int) { return 127.0f; }
  static float top_query(int) { return 32512.0f; }
};

constexpr std::size_t kKeyStepBytes = kPlaceTiles * 64;

// Where the parts of a block lie.
template <typename Kv>
struct Block {
  explicit Block(int head_size)
      : key_steps((head_size + Kv::key_width - 1) / Kv::key_width),
        columns(whole_tiles(head_size)),
        value_step_bytes(static_cast<std::size_t>(columns) * 4),
        values(static_cast<std::size_t>(key_steps) * kKeyStepBytes),
        scales(values + kPage / Kv::value_width * value_step_bytes) {}
  int key_steps, columns;
  std::size_t value_step_bytes, values, scales;
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

// The words of a key, each among those of the page's other places.
template <typename Word>
void scatter_key(std::uint8_t* keys, int place, const Word* key, int steps) {
  auto* to = reinterpret_cast<Word*>(keys) + place;
  for (int step = 0; step < steps; ++step) to[step * kPage] = key[step];
}

void write_floats(std::uint8_t* block, int place, const float* key, const float* value,
                  int head_size) {
  const Block<FloatKv> parts(head_size);
  scatter_key(block, place, key, head_size);
  std::memcpy(block + parts.values + static_cast<std::size_t>(place) * parts.value_step_bytes,
              value, sizeof(float) * static_cast<std::size_t>(head_size));
}

// Bytes to one of the 4 places of each of the words of a line.
inline void set_bytes(std::uint32_t* words, int place, const std::uint8_t* bytes, int count) {
  const int shift = 8 * (place % 4);
  const std::uint32_t others = ~(std::uint32_t{0xff} << shift);
  for (int i = 0; i < count; ++i) {
    words[i] = (words[i] & others) | (std::uint32_t{bytes[i]} << shift);
  }
}

template <typename Kv>
void write_whole(std::uint8_t* block, int place, const float* key, const float* value,
                 int head_size) {
  V x[kMaxHeadSize / kLanes];
  I whole[kMaxHeadSize / kLanes];
  alignas(64) std::uint8_t bytes[2 * kMaxHeadSize];
  const Block<Kv> parts(head_size);
  float* scales = reinterpret_cast<float*>(block + parts.scales) + place;

  const int count = load_row(key, head_size, x);
  Scale scale = scale_to(Kv::top_key(head_size), x, count);
  scales[0] = scale.inverse;
  round_row(x, count, scale, whole);
  // Whole words: a head size that is no multiple of the width is filled up with zeros.
  for (int i = 0; i < count; i += kLanes) {
    if constexpr (Kv::key_width == 2) {
      store_int16(reinterpret_cast<std::int16_t*>(bytes) + i, whole[i / kLanes]);
    } else {
      store_int8(reinterpret_cast<std::int8_t*>(bytes) + i, whole[i / kLanes]);
      for (int lane = 0; lane < kLanes; ++lane)
        bytes[i + lane] ^= static_cast<std::uint8_t>(Kv::offset);
    }
  }
  std::uint32_t words[kMaxHeadSize];
  std::memcpy(words, bytes, static_cast<std::size_t>(parts.key_steps) * 4);
  scatter_key(block, place, words, parts.key_steps);

  load_row(value, head_size, x);
  scale = scale_to(127.0f, x, count);
  scales[kPage] = scale.inverse;
  round_row(x, count, scale, whole);
  for (int i = 0; i < count; i += kLanes) {
    store_int8(reinterpret_cast<std::int8_t*>(bytes) + i, whole[i / kLanes]);
  }
  std::uint8_t* line = block + parts.values +
                       static_cast<std::size_t>(place / Kv::value_width) * parts.value_step_bytes;
  set_bytes(reinterpret_cast<std::uint32_t*>(line), place, bytes, head_size);
}

void kv_write(KvKind kind, std::uint8_t* block, int place, const float* key, const float* value,
              int head_size) {
  switch (kind) {
    case KvKind::f32:
      return write_floats(block, place, key, value, head_size);
    case KvKind::int16:
      return write_whole<PairKv>(block, place, key, value, head_size);
    case KvKind::int8:
      return write_whole<QuadKv>(block, place, key, value, head_size);
  }
}
