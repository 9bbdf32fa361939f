// Rows of heads that rotate whole, D numbers each, D known to the compiler: gains and angles are multiplied first, once
// for all rows that share them, and the way back needs no x̂ but in passing, since a rotation keeps inner products:
// ⟨gradient of x̂, x̂⟩ = ⟨g · R⁻¹u, R⁻¹y / g⟩ = ⟨u, y⟩.
#pragma once
#include "norm_rope.h"

namespace qkeel {

// What goes with the eights i and i + D / 2 of a row: numbers that a pair (a, b) is multiplied by.
struct Turn {
  V cos1, sin1, cos2, sin2;
};

// (a, b) -> (cos1 a - sin2 b, cos2 b + sin1 a), and back.
inline void ahead(V& a, V& b, const Turn& t) {
  const V was = a;
  a = a * t.cos1 - b * t.sin2;
  b = b * t.cos2 + was * t.sin1;
}
inline void behind(V& a, V& b, const Turn& t) {
  const V was = a;
  a = a * t.cos1 + b * t.sin1;
  b = b * t.cos2 - was * t.sin2;
}

// rotation(gain · x): y1 = g1 c a - g2 s b, y2 = g2 c b + g1 s a; the gain times `size`.
inline Turn turn_at(const float* g, const float* c, const float* s, int64_t i, int64_t half, float size = 1.0f) {
  const V g1 = at8(g + i) * size, g2 = at8(g + i + half) * size, cos = at8(c + i), sin = at8(s + i);
  return {g1 * cos, g1 * sin, g2 * cos, g2 * sin};
}

// f(row, place) summed over the D numbers of each of up to MOST = 8 rows.
template <int64_t D, typename F> inline V sums_of(int64_t rows, F&& f) {
  V sums[MOST] = {};
  for (int64_t r = 0; r < rows; ++r) {
    V s[2] = {};
    for (int64_t i = 0; i < D; i += 16) s[0] += f(r, i), s[1] += f(r, i + 8);
    sums[r] = s[0] + s[1];
  }
  return totals(sums);
}

// The means of rows (MEAN: of a LayerNorm) and 1 over their sizes.
template <int64_t D, bool MEAN>
inline void measure_whole(Rows x, int64_t rows, int64_t kind, float eps, float* mean, float* inverse) {
  if (kind == NONE) return put8(inverse, V{} + 1.0f);
  if (MEAN) put8(mean, sums_of<D>(rows, [x](int64_t r, int64_t i) { return at8(x.at + r * x.stride + i); }) / float(D));
  const V squares = sums_of<D>(rows, [x, mean](int64_t r, int64_t i) {
    const V a = MEAN ? at8(x.at + r * x.stride + i) - mean[r] : at8(x.at + r * x.stride + i);
    return a * a;
  });
  V found = V{} + 1.0f;
  if (kind == L2) {
    const V size = root(squares);
    found /= size > eps ? size : (size == size ? V{} + eps : size);
  } else {
    found /= root(squares / float(D) + eps);
  }
  put8(inverse, found);
}

// rotation(gain · (x - mean) · inverse) of every row. y may be x.
template <int64_t D, bool MEAN, bool SHARED>
inline void apply_whole(Rows x, Rows y, const With& w, const float* means, const float* inverses) {
  constexpr int64_t HALF = D / 2;
  Turn turns[HALF / 8];
  if (SHARED)
    for (int64_t i = 0; i < HALF; i += 8) turns[i / 8] = turn_at(w.gain, w.cos, w.sin, i, HALF);
  for (int64_t r = 0; r < w.rows; ++r) {
    const float* v = x.at + r * x.stride;
    float* o = const_cast<float*>(y.at) + r * y.stride;
    const float *g = w.gain + r * w.gain_step, *c = w.cos + r * w.angle_step, *s = w.sin + r * w.angle_step;
    const float m = means[r], k = inverses[r];
    for (int64_t i = 0; i < HALF; i += 8) {
      __builtin_prefetch(v + 2 * i + w.rows * x.stride);  // the arithmetic of these rows hides the way of the next
      V a = (MEAN ? at8(v + i) - m : at8(v + i)) * k, b = (MEAN ? at8(v + i + HALF) - m : at8(v + i + HALF)) * k;
      ahead(a, b, SHARED ? turns[i / 8] : turn_at(g, c, s, i, HALF));
      put8(o + i, a), put8(o + i + HALF, b);
    }
  }
}

// What the way back reads of some rows, and where it writes.
struct Back {
  Rows y, up, to;
  const float *over_gain, *inverse;
  float* sums; // Σ x̂ · its gradient, the gain's times the gain: [d], those of the next row gain_step further
};

// The gradient of x under an RMS or L2 norm from y = rotation(gain · x̂): (dn - x̂ · ⟨dn, x̂⟩) · inverse. All rows take
// their turn at sixteen numbers each, so that what they share stays in registers.
template <int64_t D, bool SHARED>
inline void back_whole(const Back& p, const With& w, int64_t kind, float clamped) {
  constexpr int64_t HALF = D / 2;
  const Rows y = p.y, up = p.up, to = p.to;
  const int64_t rows = w.rows;
  alignas(32) float inverse[MOST] = {}, along[MOST];
  for (int64_t r = 0; r < rows; ++r) inverse[r] = p.inverse[r];
  const V dots = sums_of<D>(rows, [y, up](int64_t r, int64_t i) {
    return at8(up.at + r * up.stride + i) * at8(y.at + r * y.stride + i);
  });
  const V k8 = at8(inverse);
  put8(along, kind == L2 ? (k8 < clamped ? dots * k8 : V{}) : dots / float(D) * k8);
  alignas(32) float sizes[MOST]; // some tables stretch what they turn
  for (int64_t r = 0; r < (SHARED ? 1 : rows); ++r) {
    const float c = w.cos[r * w.angle_step], s = w.sin[r * w.angle_step];
    sizes[r] = 1.0f / (c * c + s * s);
  }
  for (int64_t i = 0; i < HALF; i += 8) {
    Turn turn = turn_at(w.gain, w.cos, w.sin, i, HALF), undo = turn_at(p.over_gain, w.cos, w.sin, i, HALF, sizes[0]);
    const float *v = y.at + i, *u = up.at + i;
    float *o = const_cast<float*>(to.at) + i, *sums = p.sums + i;
    V sum1 = at8(sums), sum2 = at8(sums + HALF);
    for (int64_t r = 0; r < rows; ++r) {
      if (!SHARED && r) {
        const float *c = w.cos + r * w.angle_step, *s = w.sin + r * w.angle_step;
        turn = turn_at(w.gain + r * w.gain_step, c, s, i, HALF);
        undo = turn_at(p.over_gain + r * w.gain_step, c, s, i, HALF, sizes[r]);
        if (w.gain_step) {
          put8(sums, sum1), put8(sums + HALF, sum2);
          sums += w.gain_step;
          sum1 = at8(sums), sum2 = at8(sums + HALF);
        }
      }
      __builtin_prefetch(v + i + rows * y.stride), __builtin_prefetch(u + i + rows * up.stride);
      V a = at8(v), b = at8(v + HALF), da = at8(u), db = at8(u + HALF);
      behind(a, b, undo);
      behind(da, db, turn);
      sum1 += da * a, sum2 += db * b;
      put8(o, da * inverse[r] - a * along[r]), put8(o + HALF, db * inverse[r] - b * along[r]);
      v += y.stride, u += up.stride, o += to.stride;
    }
    put8(sums, sum1), put8(sums + HALF, sum2);
  }
}

} // namespace qkeel
