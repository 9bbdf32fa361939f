// The arithmetic of norm and rotation, forward and back, on rows of float.
#pragma once
#include "rows.h"

namespace qkeel {

enum Kind : int64_t { NONE = 0, RMS = 1, L2 = 2, LAYER = 3 };
constexpr int64_t BLOCK = 2048;    // numbers in the rows that are worked on together, at most
constexpr int64_t MOST = 8;        // such rows, at most

inline float mean_of(const float* v, int64_t d, int64_t kind) {
  return kind == LAYER ? sum8(d, [v](int64_t i) { return at8(v + i); }) / float(d) : 0.0f;
}

// f(i, i + half) for the pairs, eight at once, then g(i) for the eights that are not rotated.
template <typename F, typename G> inline void pairs(int64_t d, int64_t half, F&& f, G&& g) {
  for (int64_t i = 0; i < half; i += 8) f(i, i + half);
  for (int64_t i = 2 * half; i < d; i += 8) g(i);
}

// (a, b) turned by an angle, and turned back.
inline void turn(V& a, V& b, V c, V s) {
  const V was = a;
  a = a * c - b * s;
  b = b * c + was * s;
}

// What goes with some rows, and how far it is from that of one to that of the next.
struct With {
  const float *gain, *cos, *sin;
  int64_t rows, d, half, gain_step, angle_step;
};

// The means of rows (MEAN: of a LayerNorm) and 1 over their sizes.
template <bool MEAN> inline void measure(Rows x, int64_t rows, int64_t d, int64_t kind, float eps, float* mean, float* inverse) {
  alignas(32) float squares[MOST] = {};
  for (int64_t r = 0; r < rows; ++r) {
    const float* v = x.at + r * x.stride;
    const float m = MEAN ? mean_of(v, d, LAYER) : 0.0f;
    mean[r] = m;
    squares[r] = kind == NONE ? 0.0f : sum8(d, [v, m](int64_t i) {
      V a = MEAN ? at8(v + i) - m : at8(v + i);
      return a * a;
    });
  }
  for (int64_t r = 0; r < MOST; ++r) // all at once: roots and divisions are slow one by one
    inverse[r] = kind == NONE ? 1.0f
                 : kind == L2 ? 1.0f / std::max(std::sqrt(squares[r]), eps)
                              : 1.0f / std::sqrt(squares[r] / float(d) + eps);
}

// gain · (x - mean) · inverse of every row, turned. y may be x.
template <bool MEAN> inline void apply(Rows x, Rows y, const With& w, const float* means, const float* inverses) {
  const float *g = w.gain, *c = w.cos, *s = w.sin, *v = x.at;
  float* o = const_cast<float*>(y.at);
  for (int64_t r = 0; r < w.rows; ++r) {
    const float m = means[r], k = inverses[r];
    auto eight = [=](int64_t i) { return (MEAN ? at8(v + i) - m : at8(v + i)) * k * at8(g + i); };
    pairs(
        w.d, w.half,
        [=](int64_t i, int64_t j) {
          V a = eight(i), b = eight(j);
          turn(a, b, at8(c + i), at8(s + i));
          put8(o + i, a), put8(o + j, b);
        },
        [=](int64_t i) { put8(o + i, eight(i)); });
    v += x.stride, o += y.stride, g += w.gain_step, c += w.angle_step, s += w.angle_step;
  }
}

// x̂, the normed row before its gain, is made from what was kept: x, or y = rotation(gain · x̂); then the gradient of x̂,
// and that of the gain is summed. Returns ⟨dn, x̂⟩ and Σ dn.
template <bool KEPT_X>
inline std::pair<float, float> restore(const float* v, const float* u, const With& w, const float* og, float m, float k,
                                       float* __restrict hat, float* __restrict dn, float* __restrict dg) {
  const float *g = w.gain, *c = w.cos, *s = w.sin;
  const float undo = w.half ? 1.0f / (c[0] * c[0] + s[0] * s[0]) : 1.0f; // some tables stretch what they turn
  V dots[2] = {}, sums[2] = {};
  auto eight = [&](int64_t i, V h, V up, int64_t lane) {
    put8(dg + i, at8(dg + i) + up * h);
    up *= at8(g + i);
    dots[lane] += up * h;
    sums[lane] += up;
    put8(hat + i, h), put8(dn + i, up);
  };
  pairs(
      w.d, w.half,
      [&](int64_t i, int64_t j) {
        V cos = at8(c + i), sin = -at8(s + i), a = at8(v + i), b = at8(v + j), da = at8(u + i), db = at8(u + j);
        if (KEPT_X) a = (a - m) * k, b = (b - m) * k;
        else turn(a, b, cos, sin), a *= undo * at8(og + i), b *= undo * at8(og + j);
        turn(da, db, cos, sin);
        eight(i, a, da, 0), eight(j, b, db, 1);
      },
      [&](int64_t i) { eight(i, KEPT_X ? (at8(v + i) - m) * k : at8(v + i) * at8(og + i), at8(u + i), 0); });
  return {total(dots[0] + dots[1]), total(sums[0] + sums[1])};
}

} // namespace qkeel
