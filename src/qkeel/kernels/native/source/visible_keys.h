// Which keys are visible to which rows: spans of keys and masks, read a tile at a time.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "guided.h"
#include "logit_pass.h"

namespace qkeel {

// Keys of a tile: those from `from` to before `to`, and whether the mask hides some of these or adds to them.
struct Stretch {
  int64_t from, to;
  bool masked;
};

inline float number(uint8_t x) { return float(x) - 1.0f; }  // a boolean's byte: 0, or -1 where it hides
template <typename M> float number(M x) { return float(x); }
template <typename M> constexpr float least() { return float(std::numeric_limits<M>::lowest()); }
template <> constexpr float least<uint8_t>() { return -1.0f; }

// The keys from low to high, and what the mask says of a pair.
struct Visibility {
  int64_t s;
  at::Tensor low, high, mask;
  const int64_t *low_at = nullptr, *high_at = nullptr;
  int64_t mask_at[4] = {0, 0, 0, 0};  // strides
  at::ScalarType kind = at::kBool;
  // Of a mask that tells all rows the same, as padding does: what each key is, [b|1 h|1 s].
  enum Key : uint8_t { SEEN, HIDDEN, ADDED };
  std::vector<uint8_t> keys;
  int64_t keys_at[2] = {0, 0};

  using Maybe = std::optional<at::Tensor>;
  Visibility(const at::Tensor& q, const at::Tensor& k, const Maybe& low_, const Maybe& high_, const Maybe& mask_)
      : s(k.size(2)) {
    const int64_t b = q.size(0), h = q.size(1), t = q.size(2);
    TORCH_CHECK(s < (int64_t(1) << 30), "expected fewer than 2^30 keys");
    TORCH_CHECK(low_.has_value() == high_.has_value(), "expected both ends of what rows see, or none");
    if (low_) {
      for (const at::Tensor& x : {*low_, *high_})
        TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kLong && x.size(1) == t && (x.size(0) == 1 || x.size(0) == b) &&
                        x.device().is_cpu(),
                    "expected the ends of what rows see as int64 [b|1 t]");
      low = low_->expand({b, t}).contiguous(), high = high_->expand({b, t}).contiguous();
      low_at = low.const_data_ptr<int64_t>(), high_at = high.const_data_ptr<int64_t>();
    }
    if (mask_) {
      TORCH_CHECK(mask_->dim() == 4 && mask_->device().is_cpu(), "expected a mask of four dimensions on the CPU");
      mask = mask_->expand({b, h, t, s});
      kind = mask.scalar_type();
      TORCH_CHECK(kind == at::kBool || kind == at::kFloat || kind == at::kHalf || kind == at::kBFloat16,
                  "expected a mask of bool, float32, bfloat16 or float16, got ", kind);
      for (int64_t i = 0; i < 4; ++i) mask_at[i] = mask.stride(i);
      if (mask_->size(2) == 1 && t > 1 && b * h * s > 0) read_keys(mask_->size(0), mask_->size(1));
    }
  }
  bool added() const { return mask.defined() && kind != at::kBool; }

  template <typename F> void with_mask(F&& read) const {
    if (kind == at::kBool) read(static_cast<const uint8_t*>(mask.const_data_ptr()));
    else if (kind == at::kFloat) read(mask.const_data_ptr<float>());
    else if (kind == at::kBFloat16) read(mask.const_data_ptr<c10::BFloat16>());
    else read(mask.const_data_ptr<c10::Half>());
  }

  // Of the keys from `from` to before `to`: without those at either end that are visible to no row.
  Stretch stretch(int64_t n, int64_t head, int64_t from, int64_t to) const {
    if (keys.empty()) return {from, to, mask.defined()};
    const uint8_t* at = keys.data() + n * keys_at[0] + head * keys_at[1];
    while (from < to && at[from] == HIDDEN) ++from;
    while (to > from && at[to - 1] == HIDDEN) --to;
    uint8_t other = SEEN;
    for (int64_t j = from; j < to; ++j) other |= at[j];
    return {from, to, other != SEEN};
  }

private:
  void read_keys(int64_t b, int64_t h) {
    keys.resize(b * h * s);
    keys_at[0] = b > 1 ? h * s : 0, keys_at[1] = h > 1 ? s : 0;
    with_mask([&]<typename M>(const M* from) {
      for (int64_t i = 0; i < b * h; ++i)
        for (int64_t j = 0; j < s; ++j) {
          const float x = number(from[i / h * mask_at[0] + i % h * mask_at[1] + j * mask_at[3]]);
          keys[i * s + j] = x <= least<M>() ? HIDDEN : x == 0.0f ? SEEN : ADDED;
        }
    });
  }
};

template <typename M> void widen(const M* from, int64_t n, int64_t along, float* to) {
  if (along == 1)  // for the vectoriser
    for (int64_t j = 0; j < n; ++j) to[j] = number(from[j]);
  else
    for (int64_t j = 0; j < n; ++j) to[j] = number(from[j * along]);
}

// Where a panel's rows begin, and which keys of it are asked for.
struct Pairs {
  int64_t n, head, row, rows, from, keys;
};

// What is known of the pairs of a panel and a tile, [keys WIDE]: hidden or not, and what is added to the others.
struct Shade {
  std::vector<float> bias, mask;
  std::vector<int32_t> hidden;

  explicit Shade(bool masks) : bias(masks ? KEYS * WIDE : 0), mask(masks ? WIDE * KEYS : 0), hidden(KEYS * WIDE) {}

  // low, high [WIDE]: the keys that rows see.
  void hide(const int32_t* low, const int32_t* high, const Pairs& at) {
    for (int64_t i = 0; i < WIDE; i += LANES) {
      const Flags from = flags(low + i), to = flags(high + i);
      for (int64_t j = 0; j < at.keys; ++j) {
        const int32_t key = int32_t(at.from + j);
        put(hidden.data() + j * WIDE + i, (from > key) | (to <= key));
      }
    }
  }

  enum Seen { NOTHING, SOME, EVERYTHING };

  // After `hide`: what the mask hides as well, and what it adds.
  Seen hide_more(const Visibility& visibility, const Pairs& at) {
    visibility.with_mask([&](auto* from) { read(visibility, from, at); });
    Flags some{}, every = ~Flags{};
    for (int64_t i = 0; i < at.keys * WIDE; i += LANES)
      some |= flags(hidden.data() + i), every &= flags(hidden.data() + i);
    if (!any(~every)) return NOTHING;
    return !any(some) && !visibility.added() ? EVERYTHING : SOME;
  }

private:
  template <typename M> void read(const Visibility& visibility, const M* from, const Pairs& at) {
    const auto* to = visibility.mask_at;
    from += at.n * to[0] + at.head * to[1] + at.row * to[2] + at.from * to[3];
    for (int64_t i = 0; i < at.rows; ++i) widen(from + i * to[2], at.keys, to[3], mask.data() + i * KEYS);
    transpose(at.rows, round_up(at.keys, 8), mask.data(), KEYS, 1.0f, bias.data(), WIDE);
    for (int64_t i = 0; i < at.keys * WIDE; i += LANES) {
      const Lanes x = lanes(bias.data() + i);
      const Flags hides = x <= least<M>();
      put(hidden.data() + i, flags(hidden.data() + i) | hides);
      if (!std::is_same_v<M, uint8_t>) put(bias.data() + i, where_off(x, hides));
    }
  }
};

} // namespace qkeel
