// What the two ways of decoding share: the call, which keys are visible, and the state of a query after some keys.
#pragma once
#include "tile.h"

namespace qkeel {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct Call {
  const Array &k, &v;
  Array mask, factors;  // [b h t s] and, of logits, [b h s], by their strides, if they are given
  float scale, cap;     // cap 0: none
  bool causal;
  int64_t window;       // 0: none
  int64_t b, h, g, t, s, d, width;
  int64_t rows, part, parts;  // queries per key head; keys that one thread takes together; how often that is

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
    if (!mask.given) return;
    const int64_t along = mask.stride[3];
    const bool* seen = reinterpret_cast<const bool*>(mask.row(n, head(group, row), i)) + start * along;
    for (int64_t j = from; j < to; ++j)
      if (!seen[j * along]) z[j * step] = NEVER;
  }
  // The factors of a row's logits with keys from `start` on.
  const float* row_factors(int64_t n, int64_t group, int64_t row, int64_t start) const {
    return reinterpret_cast<const float*>(factors.row(n, head(group, row), start));
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
  Ahead(const char* rows, int64_t stride, int64_t width, int64_t many) : row(rows), step(stride), size(width), left(many) {
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

} // namespace qkeel
