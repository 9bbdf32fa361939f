// What the C++ sources share: rows of storage as rows of float and back, and eight floats at once.
#pragma once
#if defined(__clang_major__) ? __clang_major__ < 14 : defined(__GNUC__) && __GNUC__ < 12  // GCC 11 has no __builtin_shufflevector
#error qkeel expects GCC 12 or clang 14 or newer; set CXX to a newer compiler
#endif
#include <ATen/core/Tensor.h>

#include <bit>
#include <cstdint>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace qkeel {

// x, or a copy whose last dimension has its numbers next to each other.
inline at::Tensor with_last_dense(const at::Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous();
}

// Rows of storage as rows of float. For float itself nothing is copied.
inline const float* load(const float* x, float*, int64_t) { return x; }
inline const float* load(const c10::BFloat16* x, float* to, int64_t d) {
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(x);
  for (int64_t i = 0; i < d; ++i) to[i] = std::bit_cast<float>(uint32_t(bits[i]) << 16);
  return to;
}
inline const float* load(const c10::Half* x, float* to, int64_t d) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= d; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
  for (; i < d; ++i) to[i] = float(x[i]);
  return to;
}

inline float* target(float* y, float*) { return y; }
template <typename T> float* target(T*, float* buffer) { return buffer; }

inline void store(const float*, float*, int64_t) {}
inline void store(const float* from, c10::BFloat16* y, int64_t d) {
  uint16_t* bits = reinterpret_cast<uint16_t*>(y);
  for (int64_t i = 0; i < d; ++i) {
    uint32_t u = std::bit_cast<uint32_t>(from[i]);
    uint32_t nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bits[i] = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
  }
}
inline void store(const float* from, c10::Half* y, int64_t d) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= d; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < d; ++i) y[i] = c10::Half(from[i]);
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
// Rows of storage as rows of float; those of float as they lie, others in `to`.
inline Rows load_rows(const float* from, int64_t stride, int64_t, int64_t, float*, int64_t) { return {from, stride}; }
template <typename T> Rows load_rows(const T* from, int64_t stride, int64_t n, int64_t d, float* to, int64_t width) {
  for (int64_t i = 0; i < n; ++i) load(from + i * stride, to + i * width, d);
  return {to, width};
}

// Where rows of float are made that shall be stored as rows of T: there at once, or in `to`; and the storing.
inline Rows target_rows(float* y, int64_t stride, float*, int64_t) { return {y, stride}; }
template <typename T> Rows target_rows(T*, int64_t, float* to, int64_t width) { return {to, width}; }
inline void store_rows(const float*, float*, int64_t, int64_t, int64_t) {}
template <typename T> void store_rows(const float* from, T* y, int64_t stride, int64_t n, int64_t d) {
  for (int64_t i = 0; i < n; ++i) store(from + i * d, y + i * stride, d);
}

} // namespace qkeel
