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

// Logits of one query with n keys; `between` comes after every eight.
template <typename F> inline void logits(const float* q, Rows keys, int64_t n, int64_t d, float* out, F&& between) {
  for (int64_t j = 0; j < n; j += 8) {
    V s[8] = {};
    const float* k[8];
    for (int64_t c = 0; c < 8; ++c) k[c] = keys.at + std::min(j + c, n - 1) * keys.stride;
    for (int64_t i = 0; i < d; i += 8) {
      const V x = at8(q + i);
      for (int64_t c = 0; c < 8; ++c) s[c] += x * at8(k[c] + i);
    }
    put8(out + j, totals(s));
    between();
  }
}

// values += weights · rows of v, N vectors of it at a time in registers.
template <int64_t N, typename F>
inline void weigh(float* values, const float* p, Rows v, int64_t n, int64_t at, F&& between) {
  V sum[N];
  for (int64_t i = 0; i < N; ++i) sum[i] = at8(values + at + 8 * i);
  const float* row = v.at + at;
  for (int64_t j = 0; j < n;) {
    for (const int64_t end = std::min(j + 8, n); j < end; ++j, row += v.stride)
      for (int64_t i = 0; i < N; ++i) sum[i] += p[j] * at8(row + 8 * i);
    between();
  }
  for (int64_t i = 0; i < N; ++i) put8(values + at + 8 * i, sum[i]);
}

// z: n logits, -inf behind them up to a whole register.
template <typename F> inline void add(State& x, float* z, Rows v, int64_t n, int64_t width, F&& between) {
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
  for (; i + 64 <= width; i += 64) weigh<8>(x.values, z, v, n, i, between);
  for (; i < width; i += 8) weigh<1>(x.values, z, v, n, i, between);
}

// Rows of storage as rows of float; those that lie one behind the other at once.
template <typename T> inline Rows dense(const T* from, int64_t stride, int64_t n, int64_t d, float* to) {
  if (stride == d) return {load(from, to, n * d), d};
  return load_rows(from, stride, n, d, to, d);
}

// Keys from .. to for the queries q [rows d] of one key head.
template <typename T> void few(const Call& c, int64_t n, int64_t g, int64_t from, int64_t to, const float* q, State* states) {
  const Cache<T> cache(c, n, g);
  const int64_t widest = std::max(c.d, c.width), block = std::max<int64_t>(NUMBERS / widest / 8 * 8, 8), line = round_up(block, 16);
  std::vector<float> room(block * widest), z(c.rows * line);
  // Cache lines to ask for after eight keys of one query: of values once, of keys with each piece of the values.
  auto share = [](int64_t width, int64_t times) { return (width * int64_t(sizeof(T)) / 8 + times - 1) / times; };
  const int64_t pieces = c.width / 64 + c.width % 64 / 8;
  const int64_t values_share = share(c.width, c.rows), keys_share = share(c.d, c.rows * pieces);
  for (int64_t start = from; start < to; start += block) {
    const int64_t many = std::min(block, to - start);
    const T *keys = cache.keys + start * cache.key, *values = cache.values + start * cache.value;
    // While these are worked on, the next are on their way: the values of the block, then the keys of the one after.
    Ahead now(values, cache.value, c.width, many), then(keys + many * cache.key, cache.key, c.d, std::min(block, to - start - many));
    const Rows k = dense(keys, cache.key, many, c.d, room.data());
    for (int64_t r = 0; r < c.rows; ++r) {
      float* own = z.data() + r * line;
      logits(q + r * c.d, k, many, c.d, own, [&] { now.ask(values_share); });
      if (c.factors) {
        const float* factors = c.factors + n * c.f0 + c.head(g, r) * c.f1 + start;
        for (int64_t j = 0; j < many; ++j) own[j] *= factors[j];
      }
      if (c.cap) capped(own, round_up(many, 16), c.cap);
      std::fill(own + many, own + round_up(many, 16), NEVER);
      c.hide(n, g, r, start, many, own, 1);
    }
    const Rows v = dense(values, cache.value, many, c.width, room.data());
    for (int64_t r = 0; r < c.rows; ++r) add(states[r], z.data() + r * line, v, many, c.width, [&] { then.ask(keys_share); });
  }
}

} // namespace qkeel
