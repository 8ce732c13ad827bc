// Kernels over single rows of floats, written once over the policy: norm, rotation, gate, and
// rounding a row to 8 bits.

// The first n < kLanes floats, then zeros.
inline V load_part(const float* p, int n) {
  float part[kLanes] = {};
  std::memcpy(part, p, static_cast<std::size_t>(n) * sizeof(float));
  return load(part);
}

inline void store_part(float* p, V a, int n) {
  float part[kLanes];
  store(part, a);
  std::memcpy(p, part, static_cast<std::size_t>(n) * sizeof(float));
}

// Calls f(index, load, store) for each 16 of n floats; the last ones come zero-padded.
template <typename F>
inline void for_vectors(int n, F f) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    f(i, [](const float* p) { return load(p); }, [](float* p, V a) { store(p, a); });
  }
  if (const int rest = n - i; rest > 0) {
    f(
        i, [rest](const float* p) { return load_part(p, rest); },
        [rest](float* p, V a) { store_part(p, a, rest); });
  }
}

void rms_norm(const float* x, const float* weight, float eps, int cols, float* out) {
  V squares[4] = {zero(), zero(), zero(), zero()};  // in turn, so that four sums are under way
  for_vectors(cols, [&](int i, auto get, auto) {
    const V a = get(x + i);
    V& total = squares[i / kLanes % 4];
    total = fma(a, a, total);
  });
  const float mean =
      sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(cols);
  const V factor = broadcast(1.0f / std::sqrt(mean + eps));
  for_vectors(cols, [&](int i, auto get, auto put) {
    put(out + i, mul(mul(get(x + i), factor), get(weight + i)));
  });
}

void rope(float* head, const float* cos, const float* sin, int head_size) {
  const int half = head_size / 2;
  float* other = head + half;
  for_vectors(half, [&](int i, auto get, auto put) {
    const V a = get(head + i), b = get(other + i), c = get(cos + i), s = get(sin + i);
    put(head + i, sub(mul(a, c), mul(b, s)));
    put(other + i, add(mul(b, c), mul(a, s)));
  });
}

void silu_mul(const float* gate, const float* up, int n, float* out) {
  for_vectors(n, [&](int i, auto get, auto put) {
    const V g = get(gate + i);
    const V below = add(broadcast(1.0f), exp(sub(zero(), g)));
    put(out + i, mul(div(g, below), get(up + i)));
  });
}

// ---- rows of 8 bits

struct Group {
  V low, high;  // 32 values
};

// The group's values, zeros from `cols` on.
inline Group load_group(const float* x, int start, int cols) {
  if (start + kGroup <= cols) return {load(x + start), load(x + start + kLanes)};
  float part[kGroup] = {};
  if (start < cols) {
    std::memcpy(part, x + start, static_cast<std::size_t>(cols - start) * sizeof(float));
  }
  return {load(part), load(part + kLanes)};
}

// Rounds the group times `factor`, and takes `scale` times that off the group.
inline void round_group(Group& x, float factor, float scale, const QuantizedRows& out, int row,
                        int group) {
  const V low = round(mul(x.low, broadcast(factor)));
  const V high = round(mul(x.high, broadcast(factor)));
  const I low_int = to_int(low), high_int = to_int(high);
  const std::size_t at = static_cast<std::size_t>(row) * static_cast<std::size_t>(out.padded) +
                         static_cast<std::size_t>(group) * kGroup;
  store_int8(out.q + at, low_int);
  store_int8(out.q + at + kLanes, high_int);
  out.scale[at / kGroup] = scale;
  out.sum[at / kGroup] = sum(add(low_int, high_int));
  x.low = fma(broadcast(-scale), low, x.low);
  x.high = fma(broadcast(-scale), high, x.high);
}

// A group under this in magnitude counts as zero: the factors below stay finite.
constexpr float kLeastMagnitude = 1e-30f;

// What a group that has NaN or infinity gives: NaN in all that it touches.
inline Group without_numbers() { return {zero(), zero()}; }

template <bool twice>
void quantize(const float* x, int cols, const QuantizedRows& out, int row) {
  for (int group = 0; group < out.padded / kGroup; ++group) {
    Group values = load_group(x, group * kGroup, cols);
    const float magnitude = greatest_magnitude(values.low, values.high);
    float factor = 0.0f, scale = 0.0f;
    if (!(magnitude < INFINITY)) {
      values = without_numbers();
      scale = NAN;
    } else if (magnitude >= kLeastMagnitude) {
      factor = 127.0f / magnitude;
      scale = magnitude / 127.0f;
    }
    round_group(values, factor, scale, out, row, group);
    if (twice) {
      if (!(magnitude < INFINITY)) values = without_numbers();
      constexpr auto ratio = static_cast<float>(kTermRatio);
      const float second = factor > 0.0f ? ratio / scale : 0.0f;
      round_group(values, second, scale / ratio, out, row + 1, group);
    }
  }
}

void quantize_row(const float* x, int cols, const QuantizedRows& out, int row) {
  quantize<false>(x, cols, out, row);
}

void quantize_row_twice(const float* x, int cols, const QuantizedRows& out, int row) {
  quantize<true>(x, cols, out, row);
}
