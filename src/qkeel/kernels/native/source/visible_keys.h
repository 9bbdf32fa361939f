// Which keys are visible to which rows: spans of keys and masks, read a tile at a time.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "guided.h"
#include "logit_pass.h"

namespace qkeel {

// Keys of a tile: those from `from` to before `to`, and whether the mask hides some of these or adds to them.
struct Stretch {
  int64_t from, to;
  bool masked;
};

// n numbers of a mask, `along` apart, as floats: a boolean's as 0, or -1 where it hides.
inline void widen(const char* from, Type type, int64_t n, int64_t along, float* to) {
  auto take = [=]<typename M>(const M* x, auto number) {
    if (along == 1)  // for the vectoriser
      for (int64_t j = 0; j < n; ++j) to[j] = number(x[j]);
    else
      for (int64_t j = 0; j < n; ++j) to[j] = number(x[j * along]);
  };
  if (type == Type::BOOL) take(reinterpret_cast<const uint8_t*>(from), [](uint8_t x) { return float(x) - 1.0f; });
  else if (type == Type::FLOAT) take(reinterpret_cast<const float*>(from), [](float x) { return x; });
  else if (type == Type::HALF) take(reinterpret_cast<const _Float16*>(from), [](_Float16 x) { return float(x); });
  else take(reinterpret_cast<const uint16_t*>(from), [](uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); });
}
// What hides: these numbers and smaller ones.
inline float least(Type type) {
  if (type == Type::BOOL) return -1.0f;
  if (type == Type::HALF) return -65504.0f;
  return type == Type::FLOAT ? -std::numeric_limits<float>::max() : std::bit_cast<float>(0xff7f0000u);
}

// The keys from low to high, and what the mask says of a pair.
struct Visibility {
  int64_t s;
  Array low, high;  // [b t] by their strides, if they are given
  Array mask;       // [b h t s] likewise
  // Of a mask that tells all rows the same, as padding does: what each key is, [b|1 h|1 s].
  enum Key : uint8_t { SEEN, HIDDEN, ADDED };
  std::vector<uint8_t> keys;
  int64_t keys_at[2] = {0, 0};

  Visibility(const Array& q, const Array& k, const Array& low, const Array& high, const Array& mask)
      : s(k.size[2]), low(low.broadcast()), high(high.broadcast()), mask(mask.broadcast()) {
    if (mask.given && mask.size[2] == 1 && q.size[2] > 1 && q.size[0] * q.size[1] * s > 0) read_keys(mask.size[0], mask.size[1]);
  }
  // The first key that row r of sequence n may see, and the one after the last.
  int64_t first(int64_t n, int64_t r) const { return low.given ? within(low, n, r) : 0; }
  int64_t end(int64_t n, int64_t r) const { return high.given ? within(high, n, r) : s; }
  bool added() const { return mask.given && mask.type != Type::BOOL; }
  const char* at(int64_t n, int64_t head, int64_t row, int64_t key) const {
    return mask.row(n, head, row) + key * mask.stride[3] * bytes(mask.type);
  }

  // Of the keys from `from` to before `to`: without those at either end that are visible to no row.
  Stretch stretch(int64_t n, int64_t head, int64_t from, int64_t to) const {
    if (keys.empty()) return {from, to, mask.given};
    const uint8_t* at = keys.data() + n * keys_at[0] + head * keys_at[1];
    while (from < to && at[from] == HIDDEN) ++from;
    while (to > from && at[to - 1] == HIDDEN) --to;
    uint8_t other = SEEN;
    for (int64_t j = from; j < to; ++j) other |= at[j];
    return {from, to, other != SEEN};
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
      widen(at(i / h, i % h, 0, 0), mask.type, s, mask.stride[3], row.data());
      for (int64_t j = 0; j < s; ++j) keys[i * s + j] = row[j] <= least(mask.type) ? HIDDEN : row[j] == 0.0f ? SEEN : ADDED;
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
  Seen hide_more(const Visibility& visibility, const Pairs& at) {
    read(visibility, at);
    Flags some{}, every = ~Flags{};
    for (int64_t i = 0; i < at.keys * WIDE; i += LANES)
      some |= flags(hidden.data() + i), every &= flags(hidden.data() + i);
    if (!any(~every)) return NOTHING;
    return !any(some) && !visibility.added() ? EVERYTHING : SOME;
  }

private:
  void read(const Visibility& visibility, const Pairs& at) {
    const Array& from = visibility.mask;
    for (int64_t i = 0; i < at.rows; ++i)
      widen(visibility.at(at.n, at.head, at.row + i, at.from), from.type, at.keys, from.stride[3], mask.data() + i * KEYS);
    transpose(at.rows, round_up(at.keys, 8), mask.data(), KEYS, 1.0f, bias.data(), WIDE);
    const float most = least(from.type);
    const bool adds = visibility.added();
    for (int64_t i = 0; i < at.keys * WIDE; i += LANES) {
      const Lanes x = lanes(bias.data() + i);
      const Flags hides = x <= most;
      put(hidden.data() + i, flags(hidden.data() + i) | hides);
      if (adds) put(bias.data() + i, where_off(x, hides));
    }
  }
};

} // namespace qkeel
