// How the rows of q or k are walked, and what of gains and angles goes with them.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>

#include "norm_rope.h"

namespace qkeel {

using Maybe = std::optional<at::Tensor>;

// The gain of a norm that has none.
struct Ones {
  float at[WIDEST];
  constexpr Ones() : at() {
    for (float& x : at) x = 1.0f;
  }
};
inline constexpr Ones ONES;

// The first of some rows, how many there are, where their gain is and what turns the first.
struct Block {
  int64_t n, h, t, rows;
  const float *gain, *cos, *sin;
};

// x [b h t d] walked in the order it lies in memory, with cos and sin, the gain as [gains = 1 or h][d] floats.
struct Walk {
  int64_t b, h, t, d, half = 0;
  bool heads_inner;
  const float *gain = ONES.at, *cos = nullptr, *sin = nullptr;
  int64_t gains = 1, gain_step = 0, cos_b = 0, cos_t = 0;
  at::Tensor held[3]; // what was made for it

  Walk(const at::Tensor& x, const Maybe& g, const Maybe& c, const Maybe& s)
      : b(x.size(0)), h(x.size(1)), t(x.size(2)), d(x.size(3)), heads_inner(x.stride(1) < x.stride(2)) {
    if (g) take_gain(*g);
    if (!c) return;
    cos = floats(*c, held[1]), sin = floats(*s, held[2]);
    half = c->size(-1);
    cos_b = c->size(0) == 1 ? 0 : c->size(2) * half;
    cos_t = c->size(2) == 1 ? 0 : half;
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
        f(Block{n, head, at, std::min(most, count - i), gain + head * gain_step, cos + place, sin + place});
      }
      if (++rest == many) rest = 0, ++n;
    }
  }
  int64_t at_once() const { return std::clamp<int64_t>(BLOCK / d, 1, MOST); }
  int64_t gains_apart() const { return heads_inner ? gain_step : 0; }
  int64_t angles_apart() const { return heads_inner ? 0 : cos_t; }
  bool alike() const { return !gains_apart() && !angles_apart(); }
  int64_t apart(const at::Tensor& x) const { return x.stride(heads_inner ? 1 : 2); }
  With with(const Block& k) const { return {k.gain, k.cos, k.sin, k.rows, d, half, gains_apart(), angles_apart()}; }

 private:
  static const float* floats(const at::Tensor& x, at::Tensor& kept) {
    if (x.is_contiguous()) return x.const_data_ptr<float>();
    kept = x.contiguous();
    return kept.const_data_ptr<float>();
  }
  void take_gain(const at::Tensor& g) {
    if (g.dim() == 1 && g.scalar_type() == at::kFloat && g.is_contiguous() && g.size(0) == d) {
      gain = g.const_data_ptr<float>(); // the usual one, as it is: for one token every operation counts
      return;
    }
    gains = g.dim() == 2 ? h : 1;
    held[0] = g.detach().to(at::kFloat).expand({gains, d}).contiguous();
    gain = held[0].const_data_ptr<float>();
    gain_step = g.dim() == 2 ? d : 0;
  }
};

inline void check(const at::Tensor& x, const Maybe& cos, const Maybe& sin) {
  TORCH_CHECK(x.dim() == 4 && x.size(3) % 8 == 0 && x.size(3) <= WIDEST,
              "expected x [b h t d] with d a multiple of 8, at most ", WIDEST, "; got ", x.sizes());
  TORCH_CHECK(cos.has_value() == sin.has_value(), "expected both cos and sin, or neither");
  if (!cos) return;
  TORCH_CHECK(cos->scalar_type() == at::kFloat && sin->scalar_type() == at::kFloat && cos->sizes() == sin->sizes() &&
                  cos->dim() == 4 && cos->size(1) == 1 && (cos->size(0) == 1 || cos->size(0) == x.size(0)) &&
                  (cos->size(2) == 1 || cos->size(2) == x.size(2)) && 2 * cos->size(3) <= x.size(3),
              "expected float cos and sin of shape [1|b 1 1|t half], got ", cos->sizes());
}

// As at::empty_like, without the dispatcher where x has no gaps.
inline at::Tensor room_for(const at::Tensor& x) {
  if (!x.is_non_overlapping_and_dense()) return at::empty_like(x);
  return at::detail::empty_strided_cpu(x.sizes(), x.strides(), x.scalar_type());
}

} // namespace qkeel
