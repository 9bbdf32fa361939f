// The arithmetic of norm and rotation, forward and back, on rows of float.
#pragma once
#include <algorithm>
#include <cmath>

#include "rows.h"

namespace qkeel {

enum Kind : int64_t { NONE = 0, RMS = 1, L2 = 2, LAYER = 3 };
constexpr int64_t BLOCK = 2048;    // numbers in the rows that are worked on together, at most
constexpr int64_t MOST = 8;        // such rows, at most

inline float mean_of(const float* v, int64_t d, int64_t kind) {
  return kind == LAYER ? sum8(d, [v](int64_t i) { return at8(v + i); }) / float(d) : 0.0f;
}

// f(i, i + half) for the pairs, eight at once where half allows; then g(i) for the eights that are not rotated.
// What is left over of either goes one by one to f1 and g1.
template <typename F, typename F1, typename G, typename G1>
inline void pairs(int64_t d, int64_t half, F&& f, F1&& f1, G&& g, G1&& g1) {
  int64_t i = 0;
  for (; i + 8 <= half; i += 8) f(i, i + half);
  if (half % 8)
    for (; i < half; ++i) f1(i, i + half);
  for (i = 2 * half; i + 8 <= d; i += 8) g(i);
  if (half % 4)
    for (; i < d; ++i) g1(i);
}

// (a, b) turned by an angle, and turned back.
template <typename X> inline void turn(X& a, X& b, X c, X s) {
  X was = a;
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
    auto one = [=](int64_t i) { return (MEAN ? v[i] - m : v[i]) * k * g[i]; };
    pairs(
        w.d, w.half,
        [=](int64_t i, int64_t j) {
          V a = eight(i), b = eight(j);
          turn(a, b, at8(c + i), at8(s + i));
          put8(o + i, a), put8(o + j, b);
        },
        [=](int64_t i, int64_t j) {
          float a = one(i), b = one(j);
          turn(a, b, c[i], s[i]);
          o[i] = a, o[j] = b;
        },
        [=](int64_t i) { put8(o + i, eight(i)); }, [=](int64_t i) { o[i] = one(i); });
    v += x.stride, o += y.stride, g += w.gain_step, c += w.angle_step, s += w.angle_step;
  }
}

// What the way back reads of a row and needs of it in the end.
struct Row {
  const float *kept, *up, *gain, *over_gain, *cos, *sin;
  float mean, inverse;
  float *hat, *dn, *dgain; // x̂; the gradient of x̂; where that of the gain is summed
  float dot, sum;          // ⟨dn, x̂⟩ and Σ dn
};

// x̂, the normed row before its gain, is made from what was kept: x, or y = rotation(gain · x̂).
template <bool KEPT_X> inline void restore(Row& row, int64_t d, int64_t half) {
  const float *v = row.kept, *u = row.up, *g = row.gain, *og = row.over_gain, *c = row.cos, *s = row.sin;
  const float m = row.mean, k = row.inverse;
  const float undo = half ? 1.0f / (c[0] * c[0] + s[0] * s[0]) : 1.0f; // some tables stretch what they turn
  float *__restrict hat = row.hat, *__restrict dn = row.dn, *__restrict dg = row.dgain;
  V dots[2] = {}, sums[2] = {};
  float dot = 0, sum = 0;
  auto eight = [&](int64_t i, V h, V up, int64_t lane) {
    put8(dg + i, at8(dg + i) + up * h);
    up *= at8(g + i);
    dots[lane] += up * h;
    sums[lane] += up;
    put8(hat + i, h), put8(dn + i, up);
  };
  auto one = [&](int64_t i, float h, float up) {
    dg[i] += up * h;
    up *= g[i];
    dot += up * h;
    sum += up;
    hat[i] = h, dn[i] = up;
  };
  pairs(
      d, half,
      [&](int64_t i, int64_t j) {
        V cos = at8(c + i), sin = -at8(s + i), a = at8(v + i), b = at8(v + j), da = at8(u + i), db = at8(u + j);
        if (KEPT_X) a = (a - m) * k, b = (b - m) * k;
        else turn(a, b, cos, sin), a *= undo * at8(og + i), b *= undo * at8(og + j);
        turn(da, db, cos, sin);
        eight(i, a, da, 0), eight(j, b, db, 1);
      },
      [&](int64_t i, int64_t j) {
        float a = v[i], b = v[j], da = u[i], db = u[j];
        if (KEPT_X) a = (a - m) * k, b = (b - m) * k;
        else turn(a, b, c[i], -s[i]), a *= undo * og[i], b *= undo * og[j];
        turn(da, db, c[i], -s[i]);
        one(i, a, da), one(j, b, db);
      },
      [&](int64_t i) { eight(i, KEPT_X ? (at8(v + i) - m) * k : at8(v + i) * at8(og + i), at8(u + i), 0); },
      [&](int64_t i) { one(i, KEPT_X ? (v[i] - m) * k : v[i] * og[i], u[i]); });
  row.dot = dot + total(dots[0] + dots[1]);
  row.sum = sum + total(sums[0] + sums[1]);
}

} // namespace qkeel
