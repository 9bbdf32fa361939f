// What the C++ sources share: rows of storage as rows of float and back, and eight floats at once.
#pragma once
#ifdef __AVX__
#include <immintrin.h>
#endif

#include "array.h"

namespace qkeel {

// Rows of storage as rows of float. For float itself nothing is copied.
inline void widen_bfloat16(const uint16_t* x, float* to, int64_t d) {
  for (int64_t i = 0; i < d; ++i) to[i] = std::bit_cast<float>(uint32_t(x[i]) << 16);
}
inline void widen_half(const _Float16* x, float* to, int64_t d) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= d; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
  for (; i < d; ++i) to[i] = float(x[i]);
}
inline const float* load(const void* x, Type type, float* to, int64_t d) {
  if (type == Type::FLOAT) return static_cast<const float*>(x);
  if (type == Type::BFLOAT16) widen_bfloat16(static_cast<const uint16_t*>(x), to, d);
  else widen_half(static_cast<const _Float16*>(x), to, d);
  return to;
}

// Where a row of float is made that shall be stored as `type`: there at once, or in the buffer; and the storing.
inline float* target(void* y, Type type, float* buffer) { return type == Type::FLOAT ? static_cast<float*>(y) : buffer; }
inline void store(const float* from, void* y, Type type, int64_t d) {
  if (type == Type::FLOAT) return;
  if (type == Type::BFLOAT16) {
    uint16_t* bits = static_cast<uint16_t*>(y);
    for (int64_t i = 0; i < d; ++i) {
      uint32_t u = std::bit_cast<uint32_t>(from[i]);
      uint32_t nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
      bits[i] = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
    }
    return;
  }
  _Float16* to = static_cast<_Float16*>(y);
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= d; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < d; ++i) to[i] = _Float16(from[i]);
}

// Eight floats; the compiler lowers them to what the processor has. Unaligned, since rows are.
typedef float V __attribute__((vector_size(32), aligned(4), may_alias));
inline V at8(const float* p) { return *reinterpret_cast<const V*>(p); }
inline void put8(float* p, V v) { *reinterpret_cast<V*>(p) = v; }

// The square roots of eight floats, or of another width; for eight, GCC would take them one by one.
template <typename F> inline F root(F x) {
#ifdef __AVX__
  if constexpr (sizeof(F) == sizeof(__m256)) return F(_mm256_sqrt_ps(__m256(x)));
#endif
  for (size_t i = 0; i < sizeof(F) / sizeof(float); ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

inline float total(V a) {
  a += __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
  a += __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
  a += __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6);
  return a[0];
}

// The sums of eight vectors, one after the other.
inline V totals(const V* s) {
  auto two = [](V a, V b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  };
  auto four = [](V a, V b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
  };
  const V a = four(two(s[0], s[1]), two(s[2], s[3])), b = four(two(s[4], s[5]), two(s[6], s[7]));
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

// Sum over a row of f(place), f giving eight floats: four running sums, then one.
template <typename F> inline float sum8(int64_t d, F&& f) {
  V s[4] = {};
  int64_t i = 0;
  for (; i + 32 <= d; i += 32)
    for (int64_t j = 0; j < 4; ++j) s[j] += f(i + 8 * j);
  for (; i < d; i += 8) s[0] += f(i);
  return total((s[0] + s[1]) + (s[2] + s[3]));
}

// Rows of float, and how many floats lie from one to the next.
struct Rows {
  const float* at;
  int64_t stride;
};
// n rows of storage as rows of float, `stride` numbers apart; those of float as they lie, others in `to`.
inline Rows load_rows(const char* from, Type type, int64_t stride, int64_t n, int64_t d, float* to, int64_t width) {
  if (type == Type::FLOAT) return {reinterpret_cast<const float*>(from), stride};
  for (int64_t i = 0; i < n; ++i) load(from + i * stride * 2, type, to + i * width, d);
  return {to, width};
}

// Where rows of float are made that shall be stored as `type`, and the storing.
inline Rows target_rows(char* y, Type type, int64_t stride, float* to, int64_t width) {
  return type == Type::FLOAT ? Rows{reinterpret_cast<float*>(y), stride} : Rows{to, width};
}
inline void store_rows(const float* from, char* y, Type type, int64_t stride, int64_t n, int64_t d) {
  for (int64_t i = 0; i < n && type != Type::FLOAT; ++i) store(from + i * d, y + i * stride * 2, type, d);
}

} // namespace qkeel
