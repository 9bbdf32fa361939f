// Decoding of a few queries per key head: every logit is a dot product along the head.
#pragma once
#include <cmath>
#include <vector>

#include "decode.h"
#include "rows.h"
#include "tile.h"

namespace qkeel {

constexpr int64_t NUMBERS = 4096; // of keys, or of values, that are worked on at once: half an L1 cache

// The larger of each pair; NaN if one is.
inline V larger_or_none(V a, V b) { return (a > b) | (a != a) ? a : b; }
inline float largest(V a) {
  a = larger_or_none(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3));
  a = larger_or_none(a, __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5));
  return larger_or_none(a, __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}

// The sums of eight vectors, one beside the other.
inline V totals(const V* s) {
  auto two = [](V a, V b) {
    return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  };
  auto four = [](V a, V b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  };
  const V a = four(two(s[0], s[1]), two(s[2], s[3])), b = four(two(s[4], s[5]), two(s[6], s[7]));
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

// Logits of one query with n keys.
inline void logits(const float* q, const float* const* keys, int64_t n, int64_t d, float* out) {
  for (int64_t j = 0; j < n; j += 8) {
    V s[8] = {};
    const float* const* k = keys + j;
    for (int64_t i = 0; i < d; i += 8) {
      const V x = at8(q + i);
      for (int64_t c = 0; c < 8; ++c) s[c] += x * at8(k[c] + i);
    }
    put8(out + j, totals(s));
  }
}

// values += weights · rows of v, eight vectors of it at a time in registers.
template <int64_t N> inline void weigh(float* values, const float* p, const float* const* v, int64_t n, int64_t at) {
  V sum[N];
  for (int64_t i = 0; i < N; ++i) sum[i] = at8(values + at + 8 * i);
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < N; ++i) sum[i] += p[j] * at8(v[j] + at + 8 * i);
  for (int64_t i = 0; i < N; ++i) put8(values + at + 8 * i, sum[i]);
}

// z: n logits, -inf behind them up to a whole register.
inline void add(State& x, float* z, const float* const* v, int64_t n, int64_t width) {
  V most = at8(z);
  for (int64_t j = 8; j < n; j += 8) most = larger_or_none(at8(z + j), most);
  const float top = largest(most);
  if (top == NEVER) return;
  if (!(top <= x.top)) {
    const float down = x.top == NEVER ? 0.0f : std::exp(x.top - top);
    x.sum *= down;
    for (int64_t i = 0; i < width; i += 8) put8(x.values + i, at8(x.values + i) * down);
    x.top = top;
  }
  Lanes sum{};
  for (int64_t j = 0; j < n; j += LANES) {
    const Lanes p = exponential(lanes(z + j) - x.top);
    sum += p;
    put(z + j, p);
  }
  for (int64_t i = 0; i < LANES; ++i) x.sum += sum[i];
  int64_t i = 0;
  for (; i + 64 <= width; i += 64) weigh<8>(x.values, z, v, n, i);
  for (; i < width; i += 8) weigh<1>(x.values, z, v, n, i);
}

// Asks for rows of memory that will be read soon.
template <typename T> inline void fetch(const T* rows, int64_t step, int64_t width, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j)
    for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(rows + j * step + i);
}

// Keys from .. to for the queries q [rows d] of one key head.
template <typename T> void few(const Call& c, int64_t n, int64_t g, int64_t from, int64_t to, const float* q, State* states) {
  const Cache<T> cache(c, n, g);
  const int64_t block = std::max<int64_t>(NUMBERS / std::max(c.d, c.width) / 8 * 8, 8), line = round_up(block, 16);
  std::vector<float> room(2 * block * std::max(c.d, c.width)), z(c.rows * line);
  std::vector<const float*> k(line), v(line);
  for (int64_t start = from; start < to; start += block) {
    const int64_t many = std::min(block, to - start);
    const T *keys = cache.keys + start * c.k.stride(2), *values = cache.values + start * c.v.stride(2);
    for (int64_t j = 0; j < many; ++j) k[j] = load(keys + j * c.k.stride(2), room.data() + j * c.d, c.d);
    for (int64_t j = many; j < round_up(many, 8); ++j) k[j] = k[0];
    for (int64_t r = 0; r < c.rows; ++r) {
      // While these are worked on, the next are on their way: the values of the block, then the keys of the one after.
      fetch(values, c.v.stride(2), c.width, many * r / c.rows, many * (r + 1) / c.rows);
      float* own = z.data() + r * line;
      logits(q + r * c.d, k.data(), many, c.d, own);
      std::fill(own + many, own + round_up(many, 16), NEVER);
      c.hide(n, g, r, start, many, own, 1);
    }
    for (int64_t j = 0; j < many; ++j)
      v[j] = load(values + j * c.v.stride(2), room.data() + block * c.d + j * c.width, c.width);
    const int64_t next = std::min(block, to - start - many);
    for (int64_t r = 0; r < c.rows; ++r) {
      fetch(keys + many * c.k.stride(2), c.k.stride(2), c.d, next * r / c.rows, next * (r + 1) / c.rows);
      add(states[r], z.data() + r * line, v.data(), many, c.width);
    }
  }
}

} // namespace qkeel
