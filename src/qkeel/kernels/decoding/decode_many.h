// Decoding of many queries per key head, as of heads that share a latent: products of matrices that lie in cache.
// Logits and values are kept transposed, queries next to each other in a register; a panel is as many queries as the
// microkernel takes. Values may lie in the keys' own rows: these are then read once.
#pragma once
#include "decode.h"
#include "rows.h"

namespace qkeel {

constexpr int64_t KEYS = 60;   // worked on at once, whole strips: with 576 numbers each, a quarter of an L2 cache
constexpr int64_t DEEP = 64;   // of a head's numbers are summed at once: several sums, later added, round less

// A panel: queries [d WIDE], values [width WIDE], and of each query its largest logit and the sum of its weights.
struct Panel {
  std::vector<float> q, values;
  float top[WIDE], sum[WIDE] = {};
  int64_t first, many, wide; // rows, and in whole eights

  Panel(const Call& c, const float* rows, int64_t first)
      : q(c.d * WIDE), values(c.width * WIDE), first(first), many(std::min(WIDE, c.rows - first)), wide(round_up(many, 8)) {
    transpose(many, c.d, rows + first * c.d, c.d, 1.0f, q.data(), WIDE);
    std::fill(top, top + WIDE, NEVER);
  }

  // Logits [many WIDE] of keys become weights under the new largest logits; sums and values so far shrink to these.
  void weights(int64_t keys, float* z) {
    for (int64_t at = 0; at < wide; at += LANES) {
      const Lanes old = lanes(top + at);
      Lanes now = old;
      for (int64_t j = 0; j < keys; ++j) now = larger(lanes(z + j * WIDE + at), now);
      const Lanes from = now == NEVER ? Lanes{} : now;
      Lanes total{};
      for (int64_t j = 0; j < keys; ++j) {
        const Lanes p = exponential(lanes(z + j * WIDE + at) - from);
        total += p;
        put(z + j * WIDE + at, p);
      }
      const Lanes fade = old == NEVER ? Lanes{} + 1.0f : exponential(old - from); // nothing so far, or no number
      put(sum + at, lanes(sum + at) * fade + total);
      put(top + at, now);
      bool less = false;
      for (int64_t i = 0; i < LANES; ++i) less |= fade[i] != 1.0f;
      if (!less) continue;
      float* shrink = values.data() + at;
      for (const float* end = shrink + values.size(); shrink < end; shrink += WIDE) put(shrink, lanes(shrink) * fade);
    }
  }

  void finish(const Call& c, State* states) const {
    std::vector<float> turned(round_up(many, 8) * c.width);
    transpose(c.width, wide, values.data(), WIDE, 1.0f, turned.data(), c.width);
    for (int64_t r = 0; r < many; ++r) {
      states[first + r].top = top[r], states[first + r].sum = sum[r];
      std::copy_n(turned.data() + r * c.width, c.width, states[first + r].values);
    }
  }
};

// Makes logits of q·k: a factor per head and key, a cap, and keys that are hidden.
inline void finish_logits(const Call& c, const Panel& p, int64_t n, int64_t g, int64_t start, int64_t many, float* z) {
  alignas(64) float own[WIDE * round_up(KEYS, 8)], turned[WIDE * round_up(KEYS, 8)];
  if (c.factors.given) {
    for (int64_t r = 0; r < p.many; ++r)
      std::copy_n(c.row_factors(n, g, p.first + r, start), many, own + r * round_up(KEYS, 8));
    for (int64_t r = 0; r < p.many; ++r) std::fill(own + r * round_up(KEYS, 8) + many, own + r * round_up(KEYS, 8) + round_up(many, 8), 0.0f);
    transpose(p.many, round_up(many, 8), own, round_up(KEYS, 8), 1.0f, turned, WIDE);
    for (int64_t j = 0; j < many; ++j)
      for (int64_t i = 0; i < p.wide; i += 8) put8(z + j * WIDE + i, at8(z + j * WIDE + i) * at8(turned + j * WIDE + i));
  }
  if (c.cap) capped(z, many * WIDE, c.cap);
  for (int64_t r = 0; r < p.many; ++r) c.hide(n, g, p.first + r, start, many, z + r, WIDE);
}

inline void many(const Call& c, int64_t n, int64_t g, int64_t from, int64_t to, const float* q, State* states) {
  const Type type = c.k.type;
  const int64_t key = c.k.stride[2], value = c.v.stride[2], size = bytes(type);
  const bool one = c.k.row(n, g, 0) == c.v.row(n, g, 0) && key == value && c.width <= c.d;
  std::vector<Panel> panels;
  for (int64_t first = 0; first < c.rows; first += WIDE) panels.emplace_back(c, q, first);
  std::vector<float> room(type == Type::FLOAT ? 0 : KEYS * (c.d + (one ? 0 : c.width)));
  alignas(64) float z[KEYS * WIDE] = {};
  const int64_t pieces = std::max<int64_t>(2, (c.d + DEEP - 1) / DEEP), deepest = round_up((c.d + pieces - 1) / pieces, 8);
  for (int64_t start = from; start < to; start += KEYS) {
    const int64_t count = std::min(KEYS, to - start), next = std::min(KEYS, to - start - count);
    const char *key_rows = c.k.row(n, g, start), *value_rows = c.v.row(n, g, start);
    const Rows k = load_rows(key_rows, type, key, count, c.d, room.data(), c.d);
    const Rows v = one ? k : load_rows(value_rows, type, value, count, c.width, room.data() + KEYS * c.d, c.width);
    Ahead keys(key_rows + count * key * size, key * size, c.d * size, next);
    Ahead values(value_rows + count * value * size, value * size, c.width * size, one ? 0 : next);
    // Cache lines per strip of work, so that all are asked for by the end of the block.
    const float work = float(panels.size() * KEYS * (c.d + c.width) / STRIP), lines = KEYS * (c.d + (one ? 0 : c.width)) * size / 64.0f;
    auto ask = [&, rate = lines / work](int64_t work) {
      const int64_t share = int64_t(float(work) * rate) + 1;
      if (keys.left) keys.ask(share);
      else values.ask(share);
    };
    for (Panel& p : panels) {
      for (int64_t i = 0; i < c.d; i += deepest)
        for (int64_t j = 0; j < count; j += STRIP) {
          const int64_t deep = std::min(deepest, c.d - i);
          multiply<false>(std::min(STRIP, count - j), p.wide, deep, k.at + j * k.stride + i, k.stride, p.q.data() + i * WIDE,
                          WIDE, z + j * WIDE, WIDE, i > 0);
          ask(deep);
        }
      finish_logits(c, p, n, g, start, count, z);
      p.weights(count, z);
      for (int64_t i = 0; i < c.width; i += STRIP) {
        multiply<true>(std::min(STRIP, c.width - i), p.wide, count, v.at + i, v.stride, z, WIDE, p.values.data() + i * WIDE,
                       WIDE, true);
        ask(count);
      }
    }
  }
  for (const Panel& p : panels) p.finish(c, states);
}

} // namespace qkeel
