// What attention and its gradient share.
#pragma once
#include "mask.h"
#include "rows.h"
#include "tile.h"

namespace qkeel {

inline Lanes hidden_as(Lanes like, Lanes z) { return like <= HIDDEN ? like : z; }

struct Sizes {
  int64_t b, h, g, t, s, d, e;
};
struct Range {
  int64_t from, to;
  Range within(int64_t low, int64_t high) const {
    int64_t a = std::clamp(from, low, high);
    return {a, std::max(a, std::min(to, high))};
  }
};

// Which keys are visible to which rows before any mask: row i is at position i + offset among the keys.
struct Visibility {
  bool causal;
  int64_t window, offset, t, s;  // window 0: none

  Range keys(int64_t i) const {
    int64_t at = i + offset;
    return Range{window ? at - window + 1 : 0, causal ? at + 1 : window ? at + window : s}.within(0, s);
  }
  Range keys(int64_t first, int64_t last) const { return {keys(first).from, keys(last).to}; }
};

inline Sizes sizes_of(const Array& q, const Array& k, const Array& v) {
  return {q.size[0], q.size[1], k.size[1], q.size[2], k.size[2], q.size[3], v.size[3]};
}

// Rows lie far apart, so the processor does not see which comes next.
constexpr int64_t AHEAD = 8;  // rows from one that is read to the one that is asked for
inline void soon(const Array& x, const char* row) {
  for (int64_t i = 0; i < x.size[3] * bytes(x.type); i += 64) __builtin_prefetch(row + i);
}

// n rows as float, `stride` apart, times `by`.
inline void fetch(const Array& x, int64_t b, int64_t h, int64_t from, int64_t n, float by, float* to, int64_t stride) {
  const int64_t last = x.size[2] - 1, d = x.size[3];
  for (int64_t i = 0; i < n; ++i, to += stride) {
    soon(x, x.row(b, h, std::min(from + i + AHEAD, last)));
    const float* row = load(x.row(b, h, from + i), x.type, to, d);
    for (int64_t j = 0; j < d; j += 8) put8(to + j, at8(row + j) * by);
  }
}

} // namespace qkeel
