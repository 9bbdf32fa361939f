// What attention and its gradient share.
#pragma once
#include "mask.h"
#include "tile.h"

namespace qkeel {

inline Lanes hidden_as(Lanes like, Lanes z) { return like <= HIDDEN ? like : z; }

struct Sizes {
  int64_t b, h, g, t, s, d, e;
};
inline Sizes sizes_of(const Array& q, const Array& k, const Array& v) {
  return {q.size[0], q.size[1], k.size[1], q.size[2], k.size[2], q.size[3], v.size[3]};
}

} // namespace qkeel
