// Statistics of the logits of a panel of query rows, a tile of keys at a time. Rows lie next to each other in a
// register, so every statistic runs down the keys and none needs a sum across.
#pragma once
#include "tile.h"

namespace qkeel {

constexpr int64_t KEYS = 128;  // a tile's
constexpr float INF = std::numeric_limits<float>::infinity(), NONE_LARGER = std::numeric_limits<float>::max();
constexpr float GONE = -88.0f;  // e to this is 0 next to a 1

inline Lanes all(float x) { return Lanes{} + x; }
inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }  // b where either is NaN
inline Flags flags(const int32_t* p) { return *reinterpret_cast<const Flags*>(p); }
inline void put(int32_t* p, Flags v) { *reinterpret_cast<Flags*>(p) = v; }
inline Lanes where_off(Lanes x, Flags hidden) { return Lanes(Flags(x) & ~hidden); }
// NaN where hidden: `larger` and `smaller` take the other, and no comparison holds.
inline Lanes nan_where(Lanes x, Flags hidden) { return Lanes(Flags(x) | hidden); }
inline bool any(Flags x) {
  int32_t found = 0;
  for (int64_t i = 0; i < LANES; ++i) found |= x[i];
  return found != 0;
}

// Running statistics of one panel. mass = Σ e^(z - reference), spread = Σ (z - reference) e^(z - reference), of capped
// z, the reference a running maximum: the entropy is ln mass - spread / mass, without cancellation at any size of z.
// mass_squares = Σ e^2(z - reference): of the weights, mass_squares / mass².
// peak is the largest scale · q·k, without the mask's bias, and level the sum of these after the cap.
struct Panel {
  alignas(64) float top[WIDE], low[WIDE], total[WIDE], squares[WIDE], z_squares[WIDE], angle_top[WIDE], angle[WIDE],
      reference[WIDE], mass[WIDE], mass_squares[WIDE], spread[WIDE], first[WIDE], peak[WIDE], level[WIDE];
  alignas(64) int32_t seen[WIDE], above[WIDE];

  void clear() {
    for (int64_t i = 0; i < WIDE; ++i) {
      top[i] = angle_top[i] = peak[i] = -INF, low[i] = INF, reference[i] = -NONE_LARGER;
      total[i] = squares[i] = z_squares[i] = angle[i] = mass[i] = mass_squares[i] = spread[i] = first[i] = level[i] = 0;
      seen[i] = above[i] = 0;
    }
  }
};

// `keys` keys of a tile: products [keys WIDE] (q·k; z is left there), hidden and bias likewise where there are any.
struct Tile {
  int64_t keys;
  float *z, *capped;
  const float *inverse, *bias, *scale;  // inverse: 1 / |k|, one a key; scale: one a row
  const int32_t* hidden;
  float cap, threshold;
};

inline Lanes softcap(Lanes z, float cap) { return cap * hyperbolic_tangent(z / cap); }

// The first logit of rows that saw none before.
template <bool HIDES> void first(Panel& p, const Tile& t, const float* z, Flags before, int64_t from) {
  for (int64_t i = from; i < from + LANES; ++i) {
    if (before[i - from]) continue;
    int64_t j = 0;
    if (HIDES)
      while (j < t.keys && t.hidden[j * WIDE + i]) ++j;
    if (j < t.keys) p.first[i] = z[j * WIDE + i];
  }
}

template <bool HIDES> void above(Panel& p, const Tile& t, int64_t i) {
  Flags count{};
  for (int64_t j = 0; j < t.keys; ++j) {
    Flags over = lanes(t.z + j * WIDE + i) > t.threshold;
    if constexpr (HIDES) over &= ~flags(t.hidden + j * WIDE + i);
    count -= over;
  }
  put(p.above + i, flags(p.above + i) + count);
}

template <bool HIDES> void weights(Panel& p, const Tile& t, const float* z, Lanes top, int64_t i) {
  const Lanes old = lanes(p.reference + i), now = larger(top, old);
  Lanes mass{}, mass_squares{}, spread{};
  for (int64_t j = 0; j < t.keys; ++j) {
    Lanes below = larger(lanes(z + j * WIDE + i) - now, all(GONE)), e = exponential(below);
    if constexpr (HIDES) e = where_off(e, flags(t.hidden + j * WIDE + i));
    mass += e, mass_squares += e * e, spread += e * below;
  }
  const Lanes fall = larger(old - now, all(GONE)), keep = exponential(fall), was = lanes(p.mass + i);
  put(p.reference + i, now);
  put(p.mass + i, keep * was + mass);
  put(p.mass_squares + i, keep * keep * lanes(p.mass_squares + i) + mass_squares);
  put(p.spread + i, keep * (lanes(p.spread + i) + was * fall) + spread);
}

template <bool HIDES, bool BIAS, bool CAP, bool ALL>
void logits(Panel& p, const Tile& t, int64_t i) {
  const Lanes scale = lanes(t.scale + i);
  Lanes top = all(-INF), low = all(INF), total{}, squares{}, z_squares{}, angle_top = all(-INF), angle{};
  Lanes peak = all(-INF), level{};
  Flags gone{};
  for (int64_t j = 0; j < t.keys; ++j) {
    const int64_t at = j * WIDE + i;
    Lanes product = lanes(t.z + at);
    Flags hidden{};
    if constexpr (HIDES) hidden = flags(t.hidden + at), gone += hidden, product = where_off(product, hidden);
    const Lanes scaled = scale * product, entering = CAP ? softcap(scaled, t.cap) : scaled;
    Lanes z = scaled;
    level += entering;
    if constexpr (BIAS) {
      z = where_off(z + lanes(t.bias + at), hidden), z_squares += z * z;
      peak = larger(HIDES ? nan_where(scaled, hidden) : scaled, peak);
    }
    Lanes shown = HIDES ? nan_where(z, hidden) : z;
    top = larger(shown, top), low = smaller(shown, low);
    squares += product * product;
    if constexpr (!ALL) continue;
    total += z;
    Lanes cosine = product * t.inverse[j];
    angle += cosine;
    angle_top = larger(HIDES ? nan_where(cosine, hidden) : cosine, angle_top);
    put(t.z + at, z);
    if constexpr (CAP) put(t.capped + at, BIAS ? softcap(z, t.cap) : entering);
  }
  put(p.top + i, larger(lanes(p.top + i), top)), put(p.low + i, smaller(lanes(p.low + i), low));
  put(p.peak + i, larger(lanes(p.peak + i), BIAS ? peak : top)), put(p.level + i, lanes(p.level + i) + level);
  put(p.squares + i, lanes(p.squares + i) + squares);
  if constexpr (BIAS) put(p.z_squares + i, lanes(p.z_squares + i) + z_squares);
  const Flags before = flags(p.seen + i);
  put(p.seen + i, before + (int32_t(t.keys) + gone));
  if constexpr (!ALL) return;
  put(p.total + i, lanes(p.total + i) + total);
  put(p.angle + i, lanes(p.angle + i) + angle);
  put(p.angle_top + i, larger(lanes(p.angle_top + i), angle_top));
  if (any(before == 0)) first<HIDES>(p, t, CAP ? t.capped : t.z, before, i);
  if (any(top > t.threshold)) above<HIDES>(p, t, i);
  weights<HIDES>(p, t, CAP ? t.capped : t.z, CAP ? softcap(top, t.cap) : top, i);
}

} // namespace qkeel
