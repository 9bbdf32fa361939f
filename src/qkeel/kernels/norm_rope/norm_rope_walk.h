// How the rows of q or k are walked, and what of gains and angles goes with them.
#pragma once
#include "norm_rope.h"

namespace qkeel {

// A gain of shape [], [d], [h 1] or [h d] as rows of float [1|h d]; ones if none is given.
struct Gain {
  int64_t rows = 1, step = 0;  // floats from row to row, 0 for one row
  std::vector<float> numbers;

  Gain(const Array& g, int64_t h, int64_t d) {
    if (g.dims == 2) rows = h, step = d;
    numbers.assign(rows * d, 1.0f);
    if (!g.given) return;
    const Array wide = g.broadcast();
    const int64_t down = g.dims == 2 ? wide.stride[0] : 0, along = g.dims ? wide.stride[g.dims - 1] : 0;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < d; ++i) {
        const char* from = g.as<char>() + (row * down + i * along) * bytes(g.type);
        float& to = numbers[row * d + i];
        to = g.type == Type::DOUBLE ? float(*reinterpret_cast<const double*>(from)) : *load(from, g.type, &to, 1);
      }
  }
};

// The first of some rows, how many there are, where their gain is and what turns the first.
struct Block {
  int64_t n, h, t, rows;
  const float *gain, *cos, *sin;
};

// x [b h t d] walked in the order it lies in memory, with cos and sin, the gain as [gains = 1 or h][d] floats.
struct Walk {
  int64_t b, h, t, d, half = 0;
  bool heads_inner;
  Gain gain;
  const float *cos = nullptr, *sin = nullptr;
  int64_t cos_b = 0, cos_t = 0;

  Walk(const Array& x, const Array& g, const Array& c, const Array& s)
      : b(x.size[0]), h(x.size[1]), t(x.size[2]), d(x.size[3]), heads_inner(x.stride[1] < x.stride[2]), gain(g, h, d) {
    if (!c.given) return;
    cos = c.as<float>(), sin = s.as<float>(), half = c.size[3];
    cos_b = c.size[0] == 1 ? 0 : c.size[2] * half;
    cos_t = c.size[2] == 1 ? 0 : half;
  }
  int64_t outer() const { return b * (heads_inner ? t : h); }
  int64_t inner() const { return heads_inner ? h : t; }

  // f for every few rows that lie one step apart in memory.
  template <typename F> void blocks(int64_t from, int64_t to, int64_t most, F&& f) const {
    const int64_t many = heads_inner ? t : h, count = inner();
    int64_t n = from / many, rest = from % many;
    for (int64_t o = from; o < to; ++o) {
      for (int64_t i = 0; i < count; i += most) {
        int64_t head = heads_inner ? i : rest, at = heads_inner ? rest : i, place = n * cos_b + at * cos_t;
        f(Block{n, head, at, std::min(most, count - i), gain.numbers.data() + head * gain.step, cos + place, sin + place});
      }
      if (++rest == many) rest = 0, ++n;
    }
  }
  int64_t at_once() const { return std::clamp<int64_t>(BLOCK / d, 1, MOST); }
  int64_t gains_apart() const { return heads_inner ? gain.step : 0; }
  int64_t angles_apart() const { return heads_inner ? 0 : cos_t; }
  bool alike() const { return !gains_apart() && !angles_apart(); }
  int64_t apart(const Array& x) const { return x.stride[heads_inner ? 1 : 2]; }
  With with(const Block& k) const { return {k.gain, k.cos, k.sin, k.rows, d, half, gains_apart(), angles_apart()}; }
};

} // namespace qkeel
