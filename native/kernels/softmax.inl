// The softmax of attention in base 2: powers, what a row does not see, and the merging of parts.

constexpr float kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// `a` at places of tile `tile` before `seen`, `rest` at the others.
inline V keep_seen(V a, int tile, int seen, float rest) {
  const int here = seen - tile * kTileRows;
  if (here >= kTileRows) return a;
  return if_greater(broadcast(static_cast<float>(here)), load(kLaneNumbers), a, broadcast(rest));
}

// 2^x for x <= 0, off by less than 2e-7; 0 below -126, so that nothing is subnormal.
// 2^r - 1 = r q(r): q fitted for the least greatest relative error of 2^r over |r| <= 1/2.
inline V power_not_positive(V x) {
  const V n = round(x);
  const V r = sub(x, n);
  V q = broadcast(0x1.5bba14p-10f);
  q = fma(q, r, broadcast(0x1.3cea88p-7f));
  q = fma(q, r, broadcast(0x1.c6b752p-5f));
  q = fma(q, r, broadcast(0x1.ebf9bcp-3f));
  q = fma(q, r, broadcast(0x1.62e42ap-1f));
  return scale_unless_below(fma(q, r, broadcast(1.0f)), n, x, -126.0f);
}

// total[r] merged with part[r] where the part is not empty.
template <int rows>
void merge_rows(Partial* total, const Partial* part, int head_size) {
  float fall[kLanes] = {};
  for (int r = 0; r < rows; ++r) {
    const float rise = part[r].maximum - total[r].maximum;  // +inf where the total is empty
    fall[r] = rise > 0.0f ? -rise : rise;
  }
  store(fall, power_not_positive(load(fall)));
  for (int r = 0; r < rows; ++r) {
    if (part[r].sum == 0.0f) continue;
    const bool rises = part[r].maximum > total[r].maximum;
    const float keep = rises ? fall[r] : 1.0f, take = rises ? 1.0f : fall[r];
    const V kept = broadcast(keep), taken = broadcast(take);
    float* const to = total[r].mixed;
    const float* const from = part[r].mixed;
    for_vectors(head_size, [&](int d, auto get, auto put) {
      put(to + d, fma(get(to + d), kept, mul(get(from + d), taken)));
    });
    total[r].sum = total[r].sum * keep + part[r].sum * take;
    total[r].maximum = rises ? part[r].maximum : total[r].maximum;
  }
}

void merge(Partial& total, const Partial& part, int head_size) {
  merge_rows<1>(&total, &part, head_size);
}
