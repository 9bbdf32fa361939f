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
#include "array.h"

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

// C [m n] = A · B, or C += with `add`; A is [m k], TURNED: [k m]. n a multiple of 8; m and k any. lda, ldb, ldc:
// floats from row to row as stored. Best for k of 48 and more and B of at most half the first cache.
template <bool TURNED>
void multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
              int64_t ldc, bool add);

// to [d ldt] = scale · from' of from [rows d], d a multiple of 8; columns from `rows` up to the next 8 become 0.
void transpose(int64_t rows, int64_t d, const float* from, int64_t ldf, float scale, float* to, int64_t ldt);

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
