// What the two ways of decoding share: the call, which keys are visible, and the state of a query after some keys.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "tile.h"

namespace qkeel {

using Maybe = std::optional<at::Tensor>;

constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Call {
  at::Tensor k, v;
  float scale, cap; // cap 0: none
  bool causal;
  int64_t window; // 0: none
  int64_t b, h, g, t, s, d, width;
  int64_t rows, part, parts; // queries per key head; keys that one thread takes together; how often that is
  Maybe mask = {}, inverse = {};
  const bool* seen = nullptr;
  const float* factors = nullptr; // of logits, per head and key
  int64_t m0 = 0, m1 = 0, m2 = 0, m3 = 0, f0 = 0, f1 = 0;

  // The keys that the query at place i may see, by its place alone.
  int64_t first(int64_t i) const { return window ? std::max<int64_t>(0, s - t + i - window + 1) : 0; }
  int64_t end(int64_t i) const {
    const int64_t at = s - t + i;
    return std::clamp<int64_t>(causal ? at + 1 : window ? at + window : s, 0, s);
  }
  int64_t head(int64_t group, int64_t row) const { return group * (h / g) + row / t; }

  // Logits of the query `row` of a group with keys start, start + 1, …, `step` apart: those of keys it may not see
  // become -inf.
  void hide(int64_t n, int64_t group, int64_t row, int64_t start, int64_t many, float* z, int64_t step) const {
    const int64_t i = row % t;
    const int64_t from = std::clamp<int64_t>(first(i) - start, 0, many), to = std::clamp<int64_t>(end(i) - start, from, many);
    for (int64_t j = 0; j < from; ++j) z[j * step] = NEVER;
    for (int64_t j = to; j < many; ++j) z[j * step] = NEVER;
    if (!seen) return;
    const bool* own = seen + n * m0 + head(group, row) * m1 + i * m2 + start * m3;
    for (int64_t j = from; j < to; ++j)
      if (!own[j * m3]) z[j * step] = NEVER;
  }
};

// The largest logit of a query, the sum of its weights, its weighted values. Numbers that are none show in the sums.
struct State {
  float top, sum;
  float* values;
};

inline void capped(float* z, int64_t n, float cap) { // n: whole registers
  for (int64_t i = 0; i < n; i += LANES) put(z + i, hyperbolic_tangent(lanes(z + i) / cap) * cap);
}

// Rows that are asked for before they are read, a few at a time: the processor keeps few requests open.
struct Ahead {
  const char* row;
  int64_t step, size, left, at = 0; // bytes, bytes, rows, bytes
  template <typename T>
  Ahead(const T* rows, int64_t stride, int64_t width, int64_t many)
      : row(reinterpret_cast<const char*>(rows)), step(stride * sizeof(T)), size(width * sizeof(T)), left(many) {
    if (step == size) size *= left, left = left > 0; // one behind the other: as one row
  }
  void ask(int64_t lines) {
    for (; lines > 0 && left > 0; --left, at = 0, row += step) {
      const int64_t end = std::min(at + 64 * lines, size);
      for (lines -= (end - at + 63) / 64; at < end; at += 64) __builtin_prefetch(row + at, 0, 2);
      if (at < size) return;
    }
  }
};

template <typename T> struct Cache {
  const T *keys, *values;
  int64_t key, value; // numbers from one to the next
  Cache(const Call& c, int64_t n, int64_t g)
      : keys(c.k.const_data_ptr<T>() + n * c.k.stride(0) + g * c.k.stride(1)),
        values(c.v.const_data_ptr<T>() + n * c.v.stride(0) + g * c.v.stride(1)), key(c.k.stride(2)), value(c.v.stride(2)) {}
};

} // namespace qkeel
