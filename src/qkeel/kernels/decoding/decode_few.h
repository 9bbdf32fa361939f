// Decoding of a few queries per key head: every logit is a dot product along the head.
#pragma once
#include "decode.h"
#include "rows.h"

namespace qkeel {

constexpr int64_t NUMBERS = 4096; // of keys, or of values, that are worked on at once: half an L1 cache

// Eight numbers of storage as floats.
inline V widened(const float* x) { return at8(x); }
inline V widened(const uint16_t* x) {  // bfloat16
  typedef uint16_t Short __attribute__((vector_size(16), aligned(2), may_alias));
  typedef uint32_t Long __attribute__((vector_size(32)));
  return V(__builtin_convertvector(*reinterpret_cast<const Short*>(x), Long) << 16);
}
inline V widened(const _Float16* x) {
  float to[8];
  widen_half(x, to, 8);
  return at8(to);
}

// Logits of R queries with n keys, 8 / R keys at a time: sums in eight registers. `between` comes after each.
template <int64_t R, typename T, typename F>
inline void logits(const float* q, const T* keys, int64_t stride, int64_t n, int64_t d, float* out, int64_t line, F&& between) {
  constexpr int64_t K = 8 / R;
  for (int64_t j = 0; j < n; j += K) {
    V s[8] = {};
    const T* k[K];
    for (int64_t c = 0; c < K; ++c) k[c] = keys + std::min(j + c, n - 1) * stride;
    for (int64_t i = 0; i < d; i += 8) {
      V x[K];
      for (int64_t c = 0; c < K; ++c) x[c] = widened(k[c] + i);
      for (int64_t r = 0; r < R; ++r) {
        const V y = at8(q + r * d + i);
        for (int64_t c = 0; c < K; ++c) s[r * K + c] += y * x[c];
      }
    }
    const V sums = totals(s);
    for (int64_t r = 0; r < R; ++r) std::memcpy(out + r * line + j, reinterpret_cast<const char*>(&sums) + r * K * 4, K * 4);
    between();
  }
}

// Logits of a query, -inf behind them up to a whole register, become weights under the new largest logit.
inline void weights(State& x, float* z, int64_t n, int64_t width) {
  Lanes most = lanes(z);
  for (int64_t j = LANES; j < n; j += LANES) most = larger(lanes(z + j), most);
  float top = x.top;
  for (int64_t i = 0; i < LANES; ++i) top = most[i] > top ? most[i] : top;
  if (top != x.top) {
    const float fade = x.top == NEVER ? 1.0f : std::exp(x.top - top); // 1: nothing so far, or no number
    x.sum *= fade;
    for (int64_t i = 0; i < width; i += 8) put8(x.values + i, at8(x.values + i) * fade);
    x.top = top;
  }
  const float from = top == NEVER ? 0.0f : top;
  constexpr int64_t SUMS = LANES < 8 ? 8 / LANES : 1; // at least eight partial sums: the error grows with their length
  Lanes sum[SUMS]{};
  for (int64_t j = 0; j < n; j += LANES) {
    const Lanes p = exponential(lanes(z + j) - from);
    sum[j / LANES % SUMS] += p;
    put(z + j, p);
  }
  for (int64_t i = 0; i < SUMS * LANES; ++i) x.sum += sum[i / LANES][i % LANES];
}

// values += weights · rows of v for R queries, N vectors of each in registers.
template <int64_t R, int64_t N, typename T, typename F>
inline void weigh(State* states, const float* p, int64_t line, const T* v, int64_t stride, int64_t n, int64_t at, F&& between) {
  V sum[R][N];
  for (int64_t r = 0; r < R; ++r)
    for (int64_t i = 0; i < N; ++i) sum[r][i] = at8(states[r].values + at + 8 * i);
  v += at;
  for (int64_t j = 0; j < n;) {
    for (const int64_t end = std::min(j + 8, n); j < end; ++j, v += stride) {
      V x[N];
      for (int64_t i = 0; i < N; ++i) x[i] = widened(v + 8 * i);
      for (int64_t r = 0; r < R; ++r)
        for (int64_t i = 0; i < N; ++i) sum[r][i] += p[r * line + j] * x[i];
    }
    between();
  }
  for (int64_t r = 0; r < R; ++r)
    for (int64_t i = 0; i < N; ++i) put8(states[r].values + at + 8 * i, sum[r][i]);
}

// f(r, the number of queries as a type) for queries r, four at once, then two, then one.
template <typename F> inline void by_fours(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) f(r, std::integral_constant<int64_t, 4>());
  if (r + 2 <= rows) f(r, std::integral_constant<int64_t, 2>()), r += 2;
  if (r < rows) f(r, std::integral_constant<int64_t, 1>());
}

// Keys from .. to for the queries q [rows d] of one key head.
template <typename T> void few(const Call& c, int64_t n, int64_t g, int64_t from, int64_t to, const float* q, State* states) {
  const int64_t key = c.k.stride[2], value = c.v.stride[2], size = sizeof(T);  // numbers from one to the next
  const int64_t block = std::max<int64_t>(NUMBERS / std::max(c.d, c.width) / 8 * 8, 8), line = round_up(block, 16);
  std::vector<float> z(c.rows * line);
  // Cache lines to ask for after eight keys of one query: of values once, of keys with each piece of the values.
  auto share = [](int64_t width, int64_t times) { return (width * int64_t(sizeof(T)) / 8 + times - 1) / times; };
  const int64_t pieces = c.width / 64 + c.width % 64 / 8;
  const int64_t values_share = share(c.width, c.rows), keys_share = share(c.d, c.rows * pieces);
  for (int64_t start = from; start < to; start += block) {
    const int64_t many = std::min(block, to - start);
    const char *key_rows = c.k.row(n, g, start), *value_rows = c.v.row(n, g, start);
    const T *keys = reinterpret_cast<const T*>(key_rows), *values = reinterpret_cast<const T*>(value_rows);
    // While these are worked on, the next are on their way: the values of the block, then the keys of the one after.
    Ahead now(value_rows, value * size, c.width * size, many);
    Ahead then(key_rows + many * key * size, key * size, c.d * size, std::min(block, to - start - many));
    by_fours(c.rows, [&](int64_t r, auto R) {
      logits<R()>(q + r * c.d, keys, key, many, c.d, z.data() + r * line, line, [&] { now.ask(values_share); });
    });
    for (int64_t r = 0; r < c.rows; ++r) {
      float* own = z.data() + r * line;
      if (c.factors.given) {
        const float* factors = c.row_factors(n, g, r, start);
        for (int64_t j = 0; j < many; ++j) own[j] *= factors[j];
      }
      if (c.cap) capped(own, round_up(many, 16), c.cap);
      std::fill(own + many, own + round_up(many, 16), NEVER);
      c.hide(n, g, r, start, many, own, 1);
      weights(states[r], own, many, c.width);
    }
    by_fours(c.rows, [&](int64_t r, auto R) {
      constexpr int64_t N = 8 / R();
      auto piece = [&]<int64_t M>(int64_t i, std::integral_constant<int64_t, M>) {
        weigh<R(), M>(states + r, z.data() + r * line, line, values, value, many, i, [&] { then.ask(keys_share); });
      };
      int64_t i = 0;
      for (; i + 8 * N <= c.width; i += 8 * N) piece(i, std::integral_constant<int64_t, N>());
      for (; i < c.width; i += 8) piece(i, std::integral_constant<int64_t, 1>());
    });
  }
}

} // namespace qkeel
