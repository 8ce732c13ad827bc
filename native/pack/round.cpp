#include "pack/round.h"

#include <algorithm>
#include <cmath>

#include "pack/half.h"

namespace smollm2 {
namespace {

constexpr std::uint16_t kGreatestHalf = 0x7bff;

// The half float nearest to x, at most the greatest that is finite.
std::uint16_t finite_half(float x) {
  const std::uint16_t half = half_of(x);
  const std::uint16_t magnitude = std::min<std::uint16_t>(half & 0x7fffU, kGreatestHalf);
  return static_cast<std::uint16_t>((half & 0x8000U) | magnitude);
}

// To the nearest whole number, half to even, between -most and most <= 32767.
std::int16_t nearest(float x, float most) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: its unit in the last place is 1
  const float inside = std::clamp(x, -most, most);
  return static_cast<std::int16_t>((inside + magic) - magic);
}

Group by_magnitude(const float* w, float most) {
  float magnitude = 0.0f;
  for (int i = 0; i < kGroup; ++i) magnitude = std::max(magnitude, std::fabs(w[i]));
  Group group{};
  if (magnitude == 0.0f) return group;
  group.scale = finite_half(magnitude / most);
  const float fits = most + 0.5f;
  if (group.scale < kGreatestHalf && float_of_half(group.scale) * fits <= magnitude) ++group.scale;
  const float scale = float_of_half(group.scale);
  for (int i = 0; i < kGroup; ++i) group.q[i] = nearest(w[i] / scale, most);
  return group;
}

// The sum of 32 numbers, folded by halves: the compiler keeps that in vectors, a plain sum it may
// not reorder.
float folded(float* x) {
  for (int i = 0; i < 16; ++i) x[i] += x[i + 16];
  for (int i = 0; i < 8; ++i) x[i] += x[i + 8];
  for (int i = 0; i < 4; ++i) x[i] += x[i + 4];
  return (x[0] + x[2]) + (x[1] + x[3]);
}

// A group of nibbles while it is sought: w = scale * (q - zero) + minimum.
struct Candidate {
  float zero;
  std::uint16_t scale = 0;
  std::uint16_t minimum = 0;
  float q[kGroup] = {};
};

// Rounds w by the candidate's scale and minimum to q from 0 to 15; returns the squared error.
float round_nibbles(const float* w, const float* importance, Candidate& to) {
  const float scale = float_of_half(to.scale);
  const float minimum = float_of_half(to.minimum) - scale * to.zero;
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  float squares[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    float steps = (w[i] - minimum) * inverse + 0.5f;
    steps = steps > 0.0f ? steps : 0.0f;
    steps = steps < 15.0f ? steps : 15.0f;
    const float q = static_cast<float>(static_cast<std::int32_t>(steps));
    const float off = scale * q + minimum - w[i];
    to.q[i] = q;
    squares[i] = off * off * importance[i];
  }
  return folded(squares);
}

// The candidate of the least squared error.
class Best {
 public:
  Best(const float* w, const float* importance, float zero)
      : w_(w), importance_(importance), best_{zero} {
    float sum[kGroup];
    std::copy_n(importance, kGroup, sum);
    total_ = folded(sum);
  }

  // Tries a scale and a minimum, then the ones that fit the q so found by least squares.
  void offer(float scale, float minimum) {
    Candidate tried{best_.zero};
    tried.scale = finite_half(scale);
    tried.minimum = finite_half(minimum);
    take(tried);
    if (best_.zero > 0.0f) {
      refit_scale(tried);
    } else {
      refit_line(tried);
    }
  }

  Group group() const {
    Group group{};
    group.scale = best_.scale;
    group.minimum = best_.minimum;
    for (int i = 0; i < kGroup; ++i) group.q[i] = static_cast<std::int16_t>(best_.q[i]);
    return group;
  }

 private:
  void take(Candidate& tried) {
    const float error = round_nibbles(w_, importance_, tried);
    // The first one is taken whatever its error, which overflows for weights beyond 1e19.
    if (taken_ && !(error < error_)) return;
    best_ = tried;
    error_ = error;
    taken_ = true;
  }

  // The slope of w over q - shift, where w is counted from `from`; 0 where q is constant.
  float slope(const float* q, float shift, float from) const {
    float products[kGroup], squares[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      const float x = q[i] - shift;
      const float weighted = x * importance_[i];
      products[i] = weighted * (w_[i] - from);
      squares[i] = weighted * x;
    }
    const float square = folded(squares);
    return square == 0.0f ? 0.0f : folded(products) / square;
  }

  void refit_scale(Candidate& tried) {
    tried.scale = finite_half(slope(tried.q, tried.zero, 0.0f));
    take(tried);
  }

  // The line through the points (q, w).
  void refit_line(Candidate& tried) {
    if (total_ == 0.0f) return;
    float q_sum[kGroup], w_sum[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      q_sum[i] = tried.q[i] * importance_[i];
      w_sum[i] = w_[i] * importance_[i];
    }
    const float q_mean = folded(q_sum) / total_, w_mean = folded(w_sum) / total_;
    tried.scale = finite_half(slope(tried.q, q_mean, w_mean));
    tried.minimum = finite_half(w_mean - float_of_half(tried.scale) * q_mean);
    take(tried);
  }

  const float* w_;
  const float* importance_;
  float total_;  // of the importance
  Candidate best_;
  float error_ = 0.0f;
  bool taken_ = false;
};

Group symmetric(const float* w, const float* importance) {
  float farthest = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    if (std::fabs(w[i]) > std::fabs(farthest)) farthest = w[i];
  }
  if (farthest == 0.0f) return zero_group(Kind::q4);
  Best best(w, importance, 8.0f);
  // The farthest value at q = 0 (-8 steps), at 15 (+7 steps), and cut off a little.
  for (const float steps : {-8.0f, -7.6f, -8.3f, -8.6f, -7.3f, -9.0f, 7.0f, 7.4f}) {
    best.offer(farthest / steps, 0.0f);
  }
  return best.group();
}

Group spanned(const float* w, const float* importance) {
  const auto [low, high] = std::minmax_element(w, w + kGroup);
  const float span = *high - *low;
  Best best(w, importance, 0.0f);
  for (const float cut : {0.0f, 0.02f, 0.04f, 0.07f}) {  // of the span, off both ends
    best.offer(span * (1.0f - 2.0f * cut) / 15.0f, *low + cut * span);
  }
  return best.group();
}

}  // namespace

Group zero_group(Kind kind) {
  Group group{};
  if (kind == Kind::q4) std::fill(group.q, group.q + kGroup, std::int16_t{8});
  return group;
}

Group round_group(Kind kind, const float* w, const float* importance) {
  if (kind == Kind::q16) return by_magnitude(w, 32767.0f);
  if (kind == Kind::q8) return by_magnitude(w, 127.0f);
  return kind == Kind::q4 ? symmetric(w, importance) : spanned(w, importance);
}

}  // namespace smollm2
