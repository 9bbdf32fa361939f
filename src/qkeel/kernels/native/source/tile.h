// Products of small float matrices that lie in cache, and the functions attention applies to their entries, as many
// floats at once as the processor takes. Every number's sum runs over k in ascending order in one accumulator per
// call, so results depend on the block sizes alone, never on threads.
//
// Attention needs two forms only, if the logits are kept transposed, S' [keys rows]:
//   multiply<false>  C [m n] = A [m k] · B [k n]:  S' = K · Q',  dP' = V · dO',  dV += P' · dO,  dK += dS' · Q
//   multiply<true>   C [m n] = A' · B, A [k m]:    O += P · V,   dQ += dS · K
// K, V, Q, dO are rows as they lie (of float, the last dimension dense); only Q' and dO' are transposed copies, of one
// row block, made by `transpose`. Softmax over keys then runs down the columns of S': no sums across a register.
#pragma once
#include <algorithm>
#include <cstdint>

namespace qkeel {

// A register of floats, and the tile of C that the registers hold: STRIP rows by WIDE columns. A test builds for the
// registers of another processor by QKEEL_LANES.
#if defined(QKEEL_LANES)
constexpr int64_t LANES = QKEEL_LANES;
#elif defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
constexpr int64_t STRIP = LANES == 16 ? 12 : 6, WIDE = 2 * LANES;
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Flags __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

inline Lanes lanes(const float* p) { return *reinterpret_cast<const Lanes*>(p); }
inline void put(float* p, Lanes v) { *reinterpret_cast<Lanes*>(p) = v; }
inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }  // b where either is NaN
constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Floats between rows of d in a buffer: an odd number of cache lines, so that columns do not fall on few cache sets.
constexpr int64_t row_stride(int64_t d) { return (d / 16 | 1) * 16 < d ? (d / 16 | 1) * 16 + 32 : (d / 16 | 1) * 16; }

// A function of its own: within another's loops its sums would not all stay in registers, at half the speed.
template <typename F, int64_t M, int64_t N, bool TURNED>
[[gnu::noinline]] void micro(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  constexpr int64_t L = sizeof(F) / 4;
  typedef F Loose __attribute__((aligned(4), may_alias));  // as a template's argument a type loses its attributes
  F sum[M][N] = {};
  for (int64_t p = 0; p < k; ++p) {
    F right[N];
#pragma GCC unroll 4
    for (int64_t j = 0; j < N; ++j) right[j] = *reinterpret_cast<const Loose*>(b + p * ldb + j * L);
#pragma GCC unroll 16
    for (int64_t i = 0; i < M; ++i) {
      const float left = TURNED ? a[p * lda + i] : a[i * lda + p];
#pragma GCC unroll 4
      for (int64_t j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < M; ++i)
#pragma GCC unroll 4
    for (int64_t j = 0; j < N; ++j) {
      Loose& to = *reinterpret_cast<Loose*>(c + i * ldc + j * L);
      to = add ? to + sum[i][j] : sum[i][j];
    }
}

template <typename F, int64_t M, int64_t N, bool TURNED, typename... Rest>
inline void micro_rest(int64_t m, Rest... rest) {  // the last m < STRIP rows
  if constexpr (M > 0) {
    if (m == M) return micro<F, M, N, TURNED>(rest...);
    micro_rest<F, M - 1, N, TURNED>(m, rest...);
  }
}

// One panel of columns.
template <typename F, int64_t N, bool TURNED>
inline void panel(int64_t m, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                  int64_t ldc, bool add) {
  int64_t i = 0;
  for (; i + STRIP <= m; i += STRIP)
    micro<F, STRIP, N, TURNED>(k, a + (TURNED ? i : i * lda), lda, b, ldb, c + i * ldc, ldc, add);
  micro_rest<F, STRIP - 1, N, TURNED>(m - i, k, a + (TURNED ? i : i * lda), lda, b, ldb, c + i * ldc, ldc, add);
}

// C [m n] = A · B, or C += with `add`; A is [m k], TURNED: [k m]. n a multiple of 8; m and k any. lda, ldb, ldc:
// floats from row to row as stored. Best for k of 48 and more and B of at most half the first cache.
template <bool TURNED>
inline void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                     float* c, int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + WIDE <= n; j += WIDE) panel<Lanes, 2, TURNED>(m, k, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j + LANES <= n; j += LANES) panel<Lanes, 1, TURNED>(m, k, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j < n; j += 8) panel<Eight, 1, TURNED>(m, k, a, lda, b + j, ldb, c + j, ldc, add);
}

// to [d ldt] = scale · from' of from [rows d], d a multiple of 8; columns from `rows` up to the next 8 become 0.
inline void transpose(int64_t rows, int64_t d, const float* from, int64_t ldf, float scale, float* to, int64_t ldt) {
  for (int64_t r = 0; r < rows; r += 8)
    for (int64_t i = 0; i < d; i += 8) {
      Eight x[8], y[8];
#pragma GCC unroll 8
      for (int64_t q = 0; q < 8; ++q)
        x[q] = r + q < rows ? *reinterpret_cast<const Eight*>(from + (r + q) * ldf + i) * scale : Eight{};
#pragma GCC unroll 4
      for (int64_t q = 0; q < 8; q += 2) {
        y[q] = __builtin_shufflevector(x[q], x[q + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        y[q + 1] = __builtin_shufflevector(x[q], x[q + 1], 1, 9, 3, 11, 5, 13, 7, 15);
      }
#pragma GCC unroll 2
      for (int64_t q = 0; q < 8; q += 4)
#pragma GCC unroll 2
        for (int64_t e = 0; e < 2; ++e) {
          x[q + e] = __builtin_shufflevector(y[q + e], y[q + e + 2], 0, 1, 8, 9, 4, 5, 12, 13);
          x[q + e + 2] = __builtin_shufflevector(y[q + e], y[q + e + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
#pragma GCC unroll 4
      for (int64_t q = 0; q < 4; ++q) {
        float* at = to + (i + q) * ldt + r;
        *reinterpret_cast<Eight*>(at) = __builtin_shufflevector(x[q], x[q + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *reinterpret_cast<Eight*>(at + 4 * ldt) = __builtin_shufflevector(x[q], x[q + 4], 4, 5, 6, 7, 12, 13, 14, 15);
      }
    }
}

// e^x to about 1 unit in the last place for x <= 88; below -87.3, and at -inf, 0; NaN stays.
inline Lanes exponential(Lanes x) {
  constexpr float magic = 12582912.0f;  // 1.5 · 2^23: what is added to it is rounded to whole numbers
  Lanes shifted = x * 1.44269504f + magic;
  Lanes n = shifted - magic;
  Lanes r = x - n * 0.693145751953125f;
  r = r - n * 1.42860677e-6f;
  Lanes p = r * 0.00138144637f + 0.00836878084f;
  p = p * r + 0.0416683927f;
  p = p * r + 0.166665196f;
  p = p * r + 0.49999994f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Flags power = (Flags(shifted) << 23) + (127 << 23);  // n in the place of an exponent
  Lanes found = p * Lanes(power);
  return x < -87.3f ? Lanes{} : found;
}

// tanh x, relatively accurate near 0 too.
inline Lanes hyperbolic_tangent(Lanes x) {
  Lanes size = x < 0.0f ? -x : x, square = x * x;
  Lanes e = exponential(-2.0f * size), far = (1.0f - e) / (1.0f + e);
  Lanes p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  Lanes near = p * square * x + x;
  return size < 0.625f ? near : x < 0.0f ? -far : far;
}

} // namespace qkeel
