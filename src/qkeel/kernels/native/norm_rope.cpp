// Norm, gain and rotation of q or k in one pass over memory, and the way back. Storage float, bfloat16 or half;
// arithmetic float. No -ffast-math: sums are reordered only where a pragma says so, in a way that depends on the
// shape alone, never on the number of threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

enum Kind : int64_t { NONE = 0, RMS = 1, L2 = 2, LAYER = 3 };
constexpr int64_t WIDEST = 1024;   // numbers in a head: what the row buffers hold
constexpr int64_t CHUNKS = 64;     // partial sums of the gain's gradient: fixed, so threads change no bit
constexpr int64_t GRAIN = 1 << 15; // numbers a thread takes at least

// Rows of storage as rows of float. For float itself nothing is copied.
const float* load(const float* x, float*, int64_t) { return x; }
const float* load(const c10::BFloat16* x, float* to, int64_t d) {
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(x);
  for (int64_t i = 0; i < d; ++i) to[i] = std::bit_cast<float>(uint32_t(bits[i]) << 16);
  return to;
}
const float* load(const c10::Half* x, float* to, int64_t d) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= d; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
#endif
  for (; i < d; ++i) to[i] = float(x[i]);
  return to;
}

float* target(float* y, float*) { return y; }
template <typename T> float* target(T*, float* buffer) { return buffer; }

void store(const float*, float*, int64_t) {}
void store(const float* from, c10::BFloat16* y, int64_t d) {
  uint16_t* bits = reinterpret_cast<uint16_t*>(y);
  for (int64_t i = 0; i < d; ++i) {
    uint32_t u = std::bit_cast<uint32_t>(from[i]);
    uint32_t nearest = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bits[i] = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
  }
}
void store(const float* from, c10::Half* y, int64_t d) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= d; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < d; ++i) y[i] = c10::Half(from[i]);
}

float sum(const float* v, int64_t d) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t i = 0; i < d; ++i) s += v[i];
  return s;
}
float squares(const float* v, float mean, int64_t d) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (int64_t i = 0; i < d; ++i) s += (v[i] - mean) * (v[i] - mean);
  return s;
}

float mean_of(const float* v, int64_t d, int64_t kind) { return kind == LAYER ? sum(v, d) / float(d) : 0.0f; }

// 1 over the size of a row.
float inverse(const float* v, float mean, int64_t d, int64_t kind, float eps) {
  if (kind == NONE) return 1.0f;
  float s = squares(v, mean, d);
  if (kind == L2) return 1.0f / std::max(std::sqrt(s), eps);
  return 1.0f / std::sqrt(s / float(d) + eps);
}

// x [b h t d] walked in the order it lies in memory, cos and sin beside it, the gain as [1 or h][d] floats.
struct Walk {
  int64_t b, h, t, d, half = 0;
  bool heads_inner;
  Tensor gain, cos, sin;
  int64_t gain_step = 0, cos_b = 0, cos_t = 0;

  Walk(const Tensor& x, const Maybe& g, const Maybe& c, const Maybe& s)
      : b(x.size(0)), h(x.size(1)), t(x.size(2)), d(x.size(3)), heads_inner(x.stride(1) < x.stride(2)) {
    auto floats = x.options().dtype(at::kFloat);
    gain = at::ones({1, d}, floats);
    if (g) {
      bool each = g->dim() == 2;
      gain = g->detach().to(at::kFloat).expand({each ? h : 1, d}).contiguous();
      gain_step = each ? d : 0;
    }
    if (c) {
      cos = c->contiguous(), sin = s->contiguous();
      half = cos.size(-1);
      cos_b = cos.size(0) == 1 ? 0 : cos.size(2) * half;
      cos_t = cos.size(2) == 1 ? 0 : half;
    }
  }
  int64_t outer() const { return b * (heads_inner ? t : h); }
  int64_t inner() const { return heads_inner ? h : t; }

  template <typename F> void rows(int64_t from, int64_t to, F&& f) const {
    const float* c = half ? cos.const_data_ptr<float>() : nullptr;
    const float* s = half ? sin.const_data_ptr<float>() : nullptr;
    int64_t many = heads_inner ? t : h;
    for (int64_t o = from; o < to; ++o)
      for (int64_t i = 0; i < inner(); ++i) {
        int64_t n = o / many, head = heads_inner ? i : o % many, at = heads_inner ? o % many : i;
        int64_t place = n * cos_b + at * cos_t;
        f(n, head, at, head * gain_step, c + place, s + place);
      }
  }
};

void check(const Tensor& x, const Maybe& cos, const Maybe& sin) {
  TORCH_CHECK(x.dim() == 4 && x.size(3) % 8 == 0 && x.size(3) <= WIDEST,
              "expected x [b h t d] with d a multiple of 8, at most ", WIDEST, "; got ", x.sizes());
  TORCH_CHECK(cos.has_value() == sin.has_value(), "expected both cos and sin, or neither");
  if (!cos) return;
  TORCH_CHECK(cos->scalar_type() == at::kFloat && sin->scalar_type() == at::kFloat && cos->sizes() == sin->sizes() &&
                  cos->dim() == 4 && cos->size(1) == 1 && (cos->size(0) == 1 || cos->size(0) == x.size(0)) &&
                  (cos->size(2) == 1 || cos->size(2) == x.size(2)) && 2 * cos->size(3) <= x.size(3),
              "expected float cos and sin of shape [1|b 1 1|t half], got ", cos->sizes());
}

Tensor with_last_dense(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

template <typename T>
void forward(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  const T* in = x.const_data_ptr<T>();
  T* out = y.mutable_data_ptr<T>();
  float* inv = r.numel() ? r.mutable_data_ptr<float>() : nullptr;
  const float* gains = w.gain.const_data_ptr<float>();
  auto xs = x.strides(), ys = y.strides();
  int64_t d = w.d, half = w.half;
  at::parallel_for(0, w.outer(), std::max<int64_t>(1, GRAIN / (w.inner() * d)), [&](int64_t from, int64_t to) {
    alignas(64) float loaded[WIDEST], made[WIDEST];
    w.rows(from, to, [&](int64_t n, int64_t h, int64_t t, int64_t gs, const float* c, const float* s) {
      const float* v = load(in + n * xs[0] + h * xs[1] + t * xs[2], loaded, d);
      T* end = out + n * ys[0] + h * ys[1] + t * ys[2];
      float* __restrict o = target(end, made);
      const float* g = gains + gs;
      float m = mean_of(v, d, kind), k = inverse(v, m, d, kind, eps);
      if (inv) inv[(n * w.h + h) * w.t + t] = k;
      for (int64_t i = 0; i < half; ++i) {
        float a = (v[i] - m) * k * g[i], e = (v[i + half] - m) * k * g[i + half];
        o[i] = a * c[i] - e * s[i];
        o[i + half] = e * c[i] + a * s[i];
      }
      for (int64_t i = 2 * half; i < d; ++i) o[i] = (v[i] - m) * k * g[i];
      store(o, end, d);
    });
  });
}

std::tuple<Tensor, Tensor> norm_rope(const Tensor& x_, const Maybe& gain, const Maybe& cos, const Maybe& sin,
                                     int64_t kind, double eps, bool) {
  check(x_, cos, sin);
  Tensor x = with_last_dense(x_);
  Walk w(x, gain, cos, sin);
  Tensor y = at::empty_like(x_);
  auto floats = x.options().dtype(at::kFloat);
  Tensor r = kind == NONE ? at::empty({0}, floats) : at::empty({w.b, w.h, w.t}, floats);
  if (x.scalar_type() == at::kFloat) forward<float>(x, y, r, w, kind, float(eps));
  else if (x.scalar_type() == at::kBFloat16) forward<c10::BFloat16>(x, y, r, w, kind, float(eps));
  else if (x.scalar_type() == at::kHalf) forward<c10::Half>(x, y, r, w, kind, float(eps));
  else TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", x.scalar_type());
  return {y, r};
}

// x̂, the normed row before its gain, from what was kept: x, or y = rotation(gain · x̂).
template <bool KEPT_X>
void restore(const float* v, float* __restrict hat, int64_t d, int64_t half, float m, float k, float w,
             const float* over_gain, const float* c, const float* s) {
  if (KEPT_X) {
    for (int64_t i = 0; i < d; ++i) hat[i] = (v[i] - m) * k;
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    hat[i] = (v[i] * c[i] + v[i + half] * s[i]) * w * over_gain[i];
    hat[i + half] = (v[i + half] * c[i] - v[i] * s[i]) * w * over_gain[i + half];
  }
  for (int64_t i = 2 * half; i < d; ++i) hat[i] = v[i] * over_gain[i];
}

struct Options {
  int64_t kind;
  float eps;
  bool kept_x;
};

template <typename T>
void backward(const Tensor& dy, const Tensor& kept, const Tensor& r, Tensor& dx, float* dgain, const Walk& w,
              const Options& o) {
  const T *up = dy.const_data_ptr<T>(), *was = kept.const_data_ptr<T>();
  T* out = dx.mutable_data_ptr<T>();
  const float *inv = r.const_data_ptr<float>(), *gains = w.gain.const_data_ptr<float>();
  Tensor over = w.gain.reciprocal();
  const float* over_gains = over.const_data_ptr<float>();
  auto us = dy.strides(), ks = kept.strides(), xs = dx.strides();
  int64_t d = w.d, half = w.half, outer = w.outer(), chunks = std::min(CHUNKS, outer);
  float clamped = 1.0f / o.eps;
  at::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    alignas(64) float loaded[2][WIDEST], made[WIDEST], hat[WIDEST], dn[WIDEST];
    for (int64_t chunk = first; chunk < last; ++chunk)
      w.rows(outer * chunk / chunks, outer * (chunk + 1) / chunks, [&](int64_t n, int64_t h, int64_t t, int64_t gs,
                                                                      const float* c, const float* s) {
        const float* u = load(up + n * us[0] + h * us[1] + t * us[2], loaded[0], d);
        const float* v = load(was + n * ks[0] + h * ks[1] + t * ks[2], loaded[1], d);
        const float* g = gains + gs;
        float k = inv[(n * w.h + h) * w.t + t];
        float undo = half ? 1.0f / (c[0] * c[0] + s[0] * s[0]) : 1.0f; // some tables stretch what they turn
        if (o.kept_x) restore<true>(v, hat, d, half, mean_of(v, d, o.kind), k, undo, over_gains + gs, c, s);
        else restore<false>(v, hat, d, half, 0.0f, k, undo, over_gains + gs, c, s);
        for (int64_t i = 0; i < half; ++i) {
          dn[i] = u[i] * c[i] + u[i + half] * s[i];
          dn[i + half] = u[i + half] * c[i] - u[i] * s[i];
        }
        for (int64_t i = 2 * half; i < d; ++i) dn[i] = u[i];
        if (dgain) {
          float* __restrict sums = dgain + chunk * w.gain.numel() + gs;
          for (int64_t i = 0; i < d; ++i) sums[i] += dn[i] * hat[i];
        }
        float dot = 0, total = 0;
#pragma omp simd reduction(+ : dot, total)
        for (int64_t i = 0; i < d; ++i) {
          dn[i] *= g[i];
          dot += dn[i] * hat[i];
          total += dn[i];
        }
        float along = o.kind == L2 ? (k < clamped ? dot : 0.0f) : dot / float(d);
        float mean = o.kind == LAYER ? total / float(d) : 0.0f;
        T* end = out + n * xs[0] + h * xs[1] + t * xs[2];
        float* __restrict to = target(end, made);
        for (int64_t i = 0; i < d; ++i) to[i] = k * (dn[i] - mean - hat[i] * along);
        store(to, end, d);
      });
  });
}

std::tuple<Tensor, Tensor> norm_rope_backward(const Tensor& dy_, const Tensor& kept, const Tensor& r,
                                              const Maybe& gain, const Maybe& cos, const Maybe& sin, int64_t kind,
                                              double eps, bool kept_x) {
  check(kept, cos, sin);
  TORCH_CHECK(kind != NONE && dy_.sizes() == kept.sizes() && dy_.scalar_type() == kept.scalar_type(),
              "expected a norm, and gradient and kept tensor of one shape and dtype");
  Tensor dy = with_last_dense(dy_), base = with_last_dense(kept), dx = at::empty_like(kept);
  Walk w(base, gain, cos, sin);
  Options o{kind, float(eps), kept_x};
  Tensor parts;
  if (gain) parts = at::zeros({std::min(CHUNKS, std::max<int64_t>(1, w.outer())), w.gain.size(0), w.d}, w.gain.options());
  float* sums = gain ? parts.mutable_data_ptr<float>() : nullptr;
  if (kept.scalar_type() == at::kFloat) backward<float>(dy, base, r, dx, sums, w, o);
  else if (kept.scalar_type() == at::kBFloat16) backward<c10::BFloat16>(dy, base, r, dx, sums, w, o);
  else backward<c10::Half>(dy, base, r, dx, sums, w, o);
  return {dx, gain ? parts.sum(0) : at::empty({0}, w.gain.options())};
}

// min |g| / max |g|: how much dividing a rotated pair by its gains magnifies rounding, at most, as its inverse.
double gain_spread(const Tensor& gain) {
  Tensor g = gain.detach().to(at::kFloat).contiguous();
  float low = std::numeric_limits<float>::infinity(), high = 0;
  const float* v = g.const_data_ptr<float>();
  for (int64_t i = 0; i < g.numel(); ++i) {
    if (!(std::abs(v[i]) > 0)) return 0.0;  // NaN too
    low = std::min(low, std::abs(v[i])), high = std::max(high, std::abs(v[i]));
  }
  return low / high;
}

} // namespace

TORCH_LIBRARY(qkeel_native, m) {
  m.def("norm_rope(Tensor x, Tensor? gain, Tensor? cos, Tensor? sin, int kind, float eps, bool keep_x)"
        " -> (Tensor, Tensor)");
  m.def("norm_rope_backward(Tensor dy, Tensor kept, Tensor inverse, Tensor? gain, Tensor? cos, Tensor? sin, int kind,"
        " float eps, bool kept_x) -> (Tensor, Tensor)");
  m.def("gain_spread(Tensor gain) -> float");
}

TORCH_LIBRARY_IMPL(qkeel_native, CPU, m) {
  m.impl("norm_rope", &norm_rope);
  m.impl("norm_rope_backward", &norm_rope_backward);
  m.impl("gain_spread", &gain_spread);
}
