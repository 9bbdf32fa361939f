// The products and the transposition of tile.h, compiled once for all kernels.
#include "tile.h"

namespace qkeel {
namespace {

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
void micro_rest(int64_t m, Rest... rest) {  // the last m < STRIP rows
  if constexpr (M > 0) {
    if (m == M) return micro<F, M, N, TURNED>(rest...);
    micro_rest<F, M - 1, N, TURNED>(m, rest...);
  }
}

// One panel of columns.
template <typename F, int64_t N, bool TURNED>
void panel(int64_t m, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                  int64_t ldc, bool add) {
  int64_t i = 0;
  for (; i + STRIP <= m; i += STRIP)
    micro<F, STRIP, N, TURNED>(k, a + (TURNED ? i : i * lda), lda, b, ldb, c + i * ldc, ldc, add);
  micro_rest<F, STRIP - 1, N, TURNED>(m - i, k, a + (TURNED ? i : i * lda), lda, b, ldb, c + i * ldc, ldc, add);
}

} // namespace

template <bool TURNED>
void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
                     float* c, int64_t ldc, bool add) {
  int64_t j = 0;
  for (; j + WIDE <= n; j += WIDE) panel<Lanes, 2, TURNED>(m, k, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j + LANES <= n; j += LANES) panel<Lanes, 1, TURNED>(m, k, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j < n; j += 8) panel<Eight, 1, TURNED>(m, k, a, lda, b + j, ldb, c + j, ldc, add);
}

template void multiply<false>(int64_t, int64_t, int64_t, const float*, int64_t, const float*, int64_t, float*, int64_t, bool);
template void multiply<true>(int64_t, int64_t, int64_t, const float*, int64_t, const float*, int64_t, float*, int64_t, bool);

void transpose(int64_t rows, int64_t d, const float* from, int64_t ldf, float scale, float* to, int64_t ldt) {
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

} // namespace qkeel
