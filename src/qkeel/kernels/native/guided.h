// The largest logits of the rows whose logsumexps are largest: no other row can hold a larger one than it tells.
#pragma once
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "tile.h"

namespace qkeel {

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

} // namespace qkeel
