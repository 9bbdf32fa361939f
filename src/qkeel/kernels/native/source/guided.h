// What follows from the logsumexps of rows: bounds on their largest logits, and the largest logits of the rows with the
// largest logsumexps: no other row holds a logit larger than its own logsumexp.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "rows.h"
#include "tile.h"

namespace qkeel {

constexpr int64_t KEYS = 128;  // a tile's

// The m + 1 rows of largest lse [t], largest first, fewer if t is less; NaN counts as the largest.
inline std::vector<std::pair<float, int64_t>> largest_rows(const float* lse, int64_t stride, int64_t t, int64_t m) {
  std::vector<std::pair<float, int64_t>> best;
  for (int64_t i = 0; i < t; ++i) {
    const float x = std::isnan(lse[i * stride]) ? std::numeric_limits<float>::infinity() : lse[i * stride];
    if (int64_t(best.size()) > m) {
      if (!(x > best.back().first)) continue;
      best.pop_back();
    }
    auto at = best.end();
    while (at != best.begin() && (at - 1)->first < x) --at;
    best.insert(at, {x, i});
  }
  return best;
}

// Maxima of z [keys width] down the keys, row i over those up to last[i]; NaN where one of them is.
inline void column_maxima(const float* z, int64_t keys, int64_t width, int64_t key, const int64_t* last, float* top) {
  for (int64_t i = 0; i < width; ++i) {
    const int64_t n = std::min(keys, last[i] + 1 - key);
    for (int64_t j = 0; j < n; ++j) {
      const float x = z[j * width + i];
      if (!(x <= top[i])) top[i] = std::isnan(top[i]) ? top[i] : x;
    }
  }
}

// found [b h]: the largest logit of the m rows of largest lse; others [b h]: the next largest lse.
inline void guided(const Array& q, const Array& k, const Array& lse, float scale, bool causal, int64_t m, float* found,
                   float* others) {
  const int64_t h = q.size[1], g = k.size[1], t = q.size[2], s = k.size[2], d = q.size[3], each = h / g;
  const int64_t width = round_up(each * std::min(m, t), 8), stride = row_stride(d), q_stride = row_stride(width);
  parallel_for(0, q.size[0] * g, 1, [&](int64_t first, int64_t last) {
    std::vector<float> rows(width * stride), turned(d * q_stride), keys(KEYS * stride), z(KEYS * width), top(width);
    std::vector<int64_t> until(width);
    for (int64_t i = first; i < last; ++i) {
      const int64_t n = i / g, group = i % g;
      std::fill(rows.begin(), rows.end(), 0.0f), std::fill(top.begin(), top.end(), -HUGE_VALF);
      std::fill(until.begin(), until.end(), -1);
      int64_t col = 0;
      for (int64_t head = group * each; head < (group + 1) * each; ++head) {
        const float* values = lse.as<float>() + n * lse.stride[0] + head * lse.stride[1];
        const auto best = largest_rows(values, lse.stride[2], t, m);
        others[n * h + head] = int64_t(best.size()) > m ? values[best[m].second * lse.stride[2]] : -HUGE_VALF;
        for (int64_t r = 0; r < std::min(m, t); ++r, ++col) {
          if (best[r].first == -HUGE_VALF) continue;  // a row left out
          const int64_t row = best[r].second;
          const float* x = load(q.row(n, head, row), q.type, rows.data() + col * stride, d);
          if (x != rows.data() + col * stride) std::copy(x, x + d, rows.data() + col * stride);
          until[col] = causal ? std::min(row, s - 1) : s - 1;
        }
      }
      transpose(width, d, rows.data(), stride, scale, turned.data(), q_stride);
      const int64_t end = *std::max_element(until.begin(), until.end()) + 1;
      for (int64_t j = 0; j < end; j += KEYS) {
        const int64_t some = std::min(KEYS, end - j);
        const Rows tile = load_rows(k.row(n, group, j), k.type, k.stride[2], some, d, keys.data(), stride);
        multiply<false>(some, width, d, tile.at, tile.stride, turned.data(), q_stride, z.data(), width, false);
        column_maxima(z.data(), some, width, j, until.data(), top.data());
      }
      for (int64_t head = 0; head < each; ++head) {
        float most = -HUGE_VALF;
        for (int64_t r = head * std::min(m, t); r < (head + 1) * std::min(m, t); ++r)
          if (!(top[r] <= most)) most = std::isnan(most) ? most : top[r];
        found[n * h + group * each + head] = most;
      }
    }
  });
}

template <bool DENSE>
void bracket_row(const float* from, int64_t along, int64_t h, float keys, float* __restrict lower, float* __restrict upper) {
  for (int64_t head = 0; head < h; ++head) {
    const float x = from[DENSE ? head : head * along], y = x - keys, most = upper[head], least = lower[head];
    upper[head] = x <= most || most != most ? most : x;
    lower[head] = y <= least || least != least ? least : y;
  }
}

// Per head of lse [b h t], over the rows that count [b t] (none given: all): the largest, and the largest of lse - ln n,
// n the keys visible to a row: `s`, or with `causal` those up to its own. A NaN among them is the largest.
inline void bracket(const Array& lse, const Array& counted, bool causal, int64_t s, float* lower, float* upper) {
  const int64_t b = lse.size[0], h = lse.size[1], t = lse.size[2], n0 = lse.stride[0], along = lse.stride[1], n2 = lse.stride[2];
  const float* all = lse.as<float>();
  const bool* counts = counted.as<bool>();
  std::fill_n(lower, h, -HUGE_VALF), std::fill_n(upper, h, -HUGE_VALF);
  for (int64_t i = 0; i < t; ++i) {
    const float keys = std::log(float(causal ? i + 1 : s));
    for (int64_t n = 0; n < b; ++n) {
      if (counts && !counts[n * counted.stride[0] + i * counted.stride[1]]) continue;
      const float* from = all + n * n0 + i * n2;
      if (along == 1) bracket_row<true>(from, 1, h, keys, lower, upper);  // as torch's kernels leave it
      else bracket_row<false>(from, along, h, keys, lower, upper);
    }
  }
}

} // namespace qkeel
