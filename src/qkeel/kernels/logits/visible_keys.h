// Which keys are visible to which rows: spans of keys and masks, read a tile at a time.
#pragma once
#include "logit_pass.h"
#include "mask.h"

namespace qkeel {

// Keys of a tile: those from `from` to before `to`, and whether the mask hides some of these or adds to them.
struct Stretch {
  int64_t from, to;
  bool masked;
};

// The keys from low to high, and what the mask says of a pair.
struct VisibleKeys {
  int64_t s;
  Array low, high;  // [b t] by their strides, if they are given
  bool masked, added;  // whether there is a mask, and whether it adds to logits
  Mask mask;
  // Of a mask that tells all rows the same, as padding does: what each key is, [b|1 h|1 s].
  enum Key : uint8_t { SHOWN, UNSEEN, ADDED };
  std::vector<uint8_t> keys;
  int64_t keys_at[2] = {0, 0};

  VisibleKeys(const Array& q, const Array& k, const Array& low, const Array& high, const Array& m)
      : s(k.size[2]), low(low.broadcast()), high(high.broadcast()), masked(m.given), added(m.given && m.type != Type::BOOL),
        mask(m) {
    if (masked && m.size[2] == 1 && q.size[2] > 1 && q.size[0] * q.size[1] * s > 0) read_keys(m.size[0], m.size[1]);
  }
  // The first key that row r of sequence n may see, and the one after the last.
  int64_t first(int64_t n, int64_t r) const { return low.given ? within(low, n, r) : 0; }
  int64_t end(int64_t n, int64_t r) const { return high.given ? within(high, n, r) : s; }

  // Of the keys from `from` to before `to`: without those at either end that are visible to no row.
  Stretch stretch(int64_t n, int64_t head, int64_t from, int64_t to) const {
    if (keys.empty()) return {from, to, masked};
    const uint8_t* at = keys.data() + n * keys_at[0] + head * keys_at[1];
    while (from < to && at[from] == UNSEEN) ++from;
    while (to > from && at[to - 1] == UNSEEN) --to;
    uint8_t other = SHOWN;
    for (int64_t j = from; j < to; ++j) other |= at[j];
    return {from, to, other != SHOWN};
  }

private:
  int64_t within(const Array& ends, int64_t n, int64_t r) const {
    return std::clamp<int64_t>(ends.as<int64_t>()[n * ends.stride[0] + r * ends.stride[1]], 0, s);
  }
  void read_keys(int64_t b, int64_t h) {
    keys.resize(b * h * s);
    keys_at[0] = b > 1 ? h * s : 0, keys_at[1] = h > 1 ? s : 0;
    std::vector<float> row(s);
    for (int64_t i = 0; i < b * h; ++i) {
      mask.read(i / h, i % h, 0, 0, s, row.data());
      for (int64_t j = 0; j < s; ++j) keys[i * s + j] = row[j] <= HIDDEN ? UNSEEN : row[j] == 0.0f ? SHOWN : ADDED;
    }
  }
};

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
  Seen hide_more(const VisibleKeys& visibility, const Pairs& at) {
    for (int64_t i = 0; i < at.rows; ++i)
      visibility.mask.read(at.n, at.head, at.row + i, at.from, at.keys, mask.data() + i * KEYS);
    transpose(at.rows, round_up(at.keys, 8), mask.data(), KEYS, 1.0f, bias.data(), WIDE);
    Flags some{}, every = ~Flags{};
    for (int64_t i = 0; i < at.keys * WIDE; i += LANES) {
      const Lanes x = lanes(bias.data() + i);
      const Flags hides = x <= HIDDEN, all = flags(hidden.data() + i) | hides;
      put(hidden.data() + i, all);
      if (visibility.added) put(bias.data() + i, where_off(x, hides));
      some |= all, every &= all;
    }
    if (!any(~every)) return NOTHING;
    return !any(some) && !visibility.added ? EVERYTHING : SOME;
  }
};

} // namespace qkeel
