// Masks of any type as floats that are added to logits.
#pragma once
#include "array.h"

namespace qkeel {

// What a hidden logit becomes: exp gives 0, and 0 times it is 0, as of no infinity.
constexpr float HIDDEN = -std::numeric_limits<float>::max();

// A mask [b h t s], HIDDEN where it hides: by its dtype's most negative number and -inf, or by false.
struct Mask {
  const char* data = nullptr;
  Type type = Type::BOOL;
  int64_t step[4] = {};  // 0 where it is broadcast

  explicit Mask(const Array& m) : data(m.as<char>()), type(m.type) { std::copy_n(m.broadcast().stride, 4, step); }
  // The numbers from (b, h, row, key) on, along the keys.
  void read(int64_t b, int64_t h, int64_t row, int64_t key, int64_t n, float* to) const {
    const int64_t at = b * step[0] + h * step[1] + row * step[2] + key * step[3];
    if (type == Type::BOOL) read_as<bool>(at, n, to);
    else if (type == Type::FLOAT) read_as<float>(at, n, to);
    else if (type == Type::BFLOAT16) read_as<uint16_t>(at, n, to);
    else read_as<_Float16>(at, n, to);
  }

 private:
  static float value(bool x) { return x ? 0.0f : HIDDEN; }
  static float value(float x) { return x <= HIDDEN ? HIDDEN : x; }
  static float value(_Float16 x) { return float(x) <= -65504.0f ? HIDDEN : float(x); }
  static float value(uint16_t x) {
    const float wide = std::bit_cast<float>(uint32_t(x) << 16);
    return wide <= std::bit_cast<float>(0xff7f0000u) ? HIDDEN : wide;  // bfloat16's most negative number
  }
  template <typename T> void read_as(int64_t at, int64_t n, float* to) const {
    const T* from = reinterpret_cast<const T*>(data) + at;
    if (step[3] == 1) for (int64_t j = 0; j < n; ++j) to[j] = value(from[j]);
    else for (int64_t j = 0; j < n; ++j) to[j] = value(from[j * step[3]]);
  }
};

} // namespace qkeel
