// What attention and its gradient share: the sizes, the mask, what is asked of the tensors.
#pragma once
#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>
#include <type_traits>

#include "tile.h"

namespace qkeel {

using Maybe = std::optional<at::Tensor>;

constexpr float HIDDEN = -std::numeric_limits<float>::max();  // what a hidden logit becomes: exp gives 0, and 0 times it is 0, as of no infinity

inline Lanes hidden_as(Lanes like, Lanes z) { return like <= HIDDEN ? like : z; }

struct Sizes {
  int64_t b, h, g, t, s, d, e;
};

// A mask of any type as floats to add, HIDDEN where it hides.
struct Mask {
  const void* data = nullptr;
  at::ScalarType type = at::kBool;
  int64_t step[4] = {};  // 0 where it is broadcast

  Mask(const Maybe& m) {
    if (!m) return;
    data = m->const_data_ptr(), type = m->scalar_type();
    for (int64_t i = 0; i < 4; ++i) step[i] = m->size(i) == 1 ? 0 : m->stride(i);
  }
  template <typename T> static float value(T x) {
    if constexpr (std::is_same_v<T, bool>) return x ? 0.0f : HIDDEN;
    else return x <= std::numeric_limits<T>::lowest() ? HIDDEN : float(x);
  }
  template <typename T> void read_as(int64_t at, int64_t n, float* to) const {
    const T* from = static_cast<const T*>(data) + at;
    if (step[3] == 1) for (int64_t j = 0; j < n; ++j) to[j] = value(from[j]);
    else for (int64_t j = 0; j < n; ++j) to[j] = value(from[j * step[3]]);
  }
  void read(int64_t at, int64_t n, float* to) const {  // a row
    if (type == at::kBool) read_as<bool>(at, n, to);
    else if (type == at::kFloat) read_as<float>(at, n, to);
    else if (type == at::kDouble) read_as<double>(at, n, to);
    else if (type == at::kBFloat16) read_as<c10::BFloat16>(at, n, to);
    else read_as<c10::Half>(at, n, to);
  }
};

inline bool holds(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf;
}

inline Sizes check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Maybe& mask, const Maybe& slopes) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && k.size(0) == q.size(0) && v.size(0) == q.size(0) &&
                  k.size(1) == v.size(1) && k.size(1) > 0 && q.size(1) % k.size(1) == 0 && k.size(2) == v.size(2) &&
                  k.size(3) == q.size(3) && q.size(3) % 8 == 0 && v.size(3) % 8 == 0,
              "expected q [b h t d], k [b g s d], v [b g s e], h a multiple of g, d and e of 8; got ", q.sizes(), ", ",
              k.sizes(), ", ", v.sizes());
  TORCH_CHECK(holds(q) && k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
              "expected q, k, v of float32, bfloat16 or float16, all alike; got ", q.scalar_type(), ", ",
              k.scalar_type(), ", ", v.scalar_type());
  Sizes n{q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3)};
  if (mask) {
    const int64_t full[4] = {n.b, n.h, n.t, n.s};
    bool fits = mask->dim() == 4 && (mask->scalar_type() == at::kBool || mask->scalar_type() == at::kDouble || holds(*mask));
    for (int64_t i = 0; fits && i < 4; ++i) fits = mask->size(i) == 1 || mask->size(i) == full[i];
    TORCH_CHECK(fits, "expected a boolean or float mask broadcasting to ", at::IntArrayRef(full, 4), " with 4 dimensions; got ",
                mask->sizes(), " of ", mask->scalar_type());
  }
  TORCH_CHECK(!slopes || (slopes->dim() == 1 && slopes->size(0) == n.h && slopes->scalar_type() == at::kFloat),
              "expected ", n.h, " slopes of float32");
  return n;
}

} // namespace qkeel
