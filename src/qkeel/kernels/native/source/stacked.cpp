// The layers and updates of a stack of runs, without attention: products of small matrices, GELU with its slope, RMS
// norm with a gain by run, cross entropy with its gradient, clipping and Adam by run. float32, dense. A run's numbers
// depend on its own alone, and sums go in an order of their own shape's: not on how many runs there are, nor on threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "rows.h"
#include "tile.h"

namespace {

using namespace qkeel;
using at::Tensor;
using at::TensorList;
using Maybe = std::optional<Tensor>;

constexpr int64_t GRAIN = 1 << 15; // numbers a thread takes at least
constexpr int64_t ROWS = 64;       // rows of a partial sum of a gain's gradient
constexpr int64_t TILE = 1 << 10;  // squares summed as floats, before they join a double

void check(const Tensor& x, const char* what) {
  TORCH_CHECK(x.device().is_cpu() && x.scalar_type() == at::kFloat && x.is_contiguous(), "expected ", what,
              " dense in float32 on the CPU, got ", x.sizes(), " of ", x.scalar_type());
}

// The dispatcher leaves counting changes to who makes them.
void changed(const Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

// f(place, count) for every few numbers, LANES of them or what is left.
template <typename F> void each(int64_t from, int64_t to, F&& f) {
  int64_t i = from;
  for (; i + LANES <= to; i += LANES) f(i, LANES);
  if (i < to) f(i, to - i);
}
inline Lanes some(const float* p, int64_t n) {
  if (n == LANES) return lanes(p);
  Lanes x{};
  std::memcpy(&x, p, n * sizeof(float));
  return x;
}
inline void put_some(float* p, Lanes x, int64_t n) {
  if (n == LANES) return put(p, x);
  std::memcpy(p, &x, n * sizeof(float));
}
inline float sum_of(Lanes x) {
  for (int64_t n = LANES / 2; n; n /= 2)
    for (int64_t i = 0; i < n; ++i) x[i] += x[i + n];
  return x[0];
}

// Columns [from, from + WIDTH) of C = A · B by panels of B that lie close: A [m k], TURNED: [k m]; B [k n], ACROSS: [n k].
// k goes in blocks of DEEP: what one block adds up lies in registers, and a panel in the first cache.
constexpr int64_t DEEP = 256;
template <bool TURNED, bool ACROSS, typename F, int64_t N>
void columns(int64_t m, int64_t n, int64_t k, int64_t from, const float* a, const float* b, float* c) {
  constexpr int64_t L = sizeof(F) / 4, WIDTH = N * L;
  alignas(64) float close[DEEP * WIDTH];
  for (int64_t p = 0; p < k; p += DEEP) {
    const int64_t deep = std::min(DEEP, k - p);
    if constexpr (ACROSS) transpose(WIDTH, deep, b + from * k + p, k, 1.0f, close, WIDTH);
    else
      for (int64_t q = 0; q < deep; ++q) std::memcpy(close + q * WIDTH, b + (p + q) * n + from, sizeof(float) * WIDTH);
    panel<F, N, TURNED>(m, deep, a + (TURNED ? p * m : p), TURNED ? m : k, close, WIDTH, c + from, n, p > 0);
  }
}

// C [runs m n] = A · B by run.
template <bool TURNED, bool ACROSS> void products(int64_t runs, int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c) {
  const int64_t panels = (n + WIDE - 1) / WIDE;
  at::parallel_for(0, runs * panels, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t run = i / panels;
      const float *x = a + run * m * k, *y = b + run * n * k;
      float* z = c + run * m * n;
      int64_t j = i % panels * WIDE;
      if (j + WIDE <= n) {
        columns<TURNED, ACROSS, Lanes, 2>(m, n, k, j, x, y, z);
      } else {
        for (; j + LANES <= n; j += LANES) columns<TURNED, ACROSS, Lanes, 1>(m, n, k, j, x, y, z);
        for (; j < n; j += 8) columns<TURNED, ACROSS, Eight, 1>(m, n, k, j, x, y, z);
      }
    }
  });
}

// x [runs rows in], w [runs out in] -> x · w' [runs rows out].
Tensor linear(const Tensor& x, const Tensor& w) {
  check(x, "x"), check(w, "w");
  TORCH_CHECK(x.dim() == 3 && w.dim() == 3 && x.size(0) == w.size(0) && x.size(2) == w.size(2) && w.size(1) % 8 == 0 &&
                  w.size(2) % 8 == 0, "expected x [runs rows in], w [runs out in], out and in of 8; got ", x.sizes(), ", ", w.sizes());
  Tensor y = at::empty({x.size(0), x.size(1), w.size(1)}, x.options());
  products<false, true>(x.size(0), x.size(1), w.size(1), x.size(2), x.const_data_ptr<float>(), w.const_data_ptr<float>(),
                        y.mutable_data_ptr<float>());
  return y;
}

// The gradients of x and w by that of x · w'.
std::tuple<Tensor, Tensor> linear_backward(const Tensor& dy, const Tensor& x, const Tensor& w) {
  check(dy, "the gradient"), check(x, "x"), check(w, "w");
  TORCH_CHECK(x.dim() == 3 && w.dim() == 3, "expected x [runs rows in] and w [runs out in], got ", x.sizes(), ", ", w.sizes());
  const int64_t runs = x.size(0), rows = x.size(1), in = x.size(2), out = w.size(1);
  TORCH_CHECK(dy.numel() == runs * rows * out && w.size(0) == runs && w.size(2) == in && in % 8 == 0,
              "expected a gradient [runs rows out] of x ", x.sizes(), " and w ", w.sizes(), ", got ", dy.sizes());
  Tensor dx = at::empty_like(x), dw = at::empty_like(w);
  const float* up = dy.const_data_ptr<float>();
  products<false, false>(runs, rows, in, out, up, w.const_data_ptr<float>(), dx.mutable_data_ptr<float>());
  products<true, false>(runs, out, in, rows, up, x.const_data_ptr<float>(), dw.mutable_data_ptr<float>());
  return {dx, dw};
}

// Φ(x) by Abramowitz & Stegun 7.1.26, to 1e-7, and its slope x·φ(x) + Φ(x).
inline void gelu_of(Lanes x, Lanes& y, Lanes& slope) {
  const Lanes e = exponential(-0.5f * x * x), size = x < 0.0f ? -x : x;
  const Lanes t = 1.0f / (size * 0.231641885f + 1.0f);
  Lanes p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Lanes tail = 0.5f * p * t * e, phi = x < 0.0f ? tail : 1.0f - tail;
  y = x * phi;
  slope = x * e * 0.398942280f + phi;
}

// gelu(x); x becomes its slope there.
Tensor gelu_(const Tensor& x) {
  check(x, "x");
  Tensor y = at::empty_like(x);
  float *in = x.mutable_data_ptr<float>(), *out = y.mutable_data_ptr<float>();
  at::parallel_for(0, (x.numel() + LANES - 1) / LANES, GRAIN / LANES, [&](int64_t from, int64_t to) {
    each(from * LANES, std::min(to * LANES, x.numel()), [&](int64_t i, int64_t n) {
      Lanes made, slope;
      gelu_of(some(in + i, n), made, slope);
      put_some(out + i, made, n), put_some(in + i, slope, n);
    });
  });
  changed(x);
  return y;
}

// x [runs rows d], gain [runs d] -> x / rms(x) · gain, 1 / rms(x) [runs rows].
std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Maybe& gain, double eps) {
  check(x, "x");
  TORCH_CHECK(x.dim() == 3, "expected x [runs rows d], got ", x.sizes());
  const int64_t runs = x.size(0), rows = x.size(1), d = x.size(2);
  if (gain) check(*gain, "the gain");
  TORCH_CHECK(d % 8 == 0 && (!gain || gain->numel() == runs * d),
              "expected x [runs rows d] with d a multiple of 8 and a gain [runs d], got ", x.sizes());
  Tensor y = at::empty_like(x), inverse = at::empty({runs, rows}, x.options());
  const float *in = x.const_data_ptr<float>(), *gains = gain ? gain->const_data_ptr<float>() : nullptr;
  float *out = y.mutable_data_ptr<float>(), *inv = inverse.mutable_data_ptr<float>();
  at::parallel_for(0, runs * rows, std::max<int64_t>(1, GRAIN / d), [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
      const float *v = in + row * d, *g = gains ? gains + row / rows * d : nullptr;
      const float k = inv[row] = 1.0f / std::sqrt(sum8(d, [v](int64_t i) { return at8(v + i) * at8(v + i); }) / float(d) + float(eps));
      float* o = out + row * d;
      for (int64_t i = 0; i < d; i += 8) put8(o + i, g ? k * at8(v + i) * at8(g + i) : k * at8(v + i));
    }
  });
  return {y, inverse};
}

// The gradients of x, and of the gain where there is one.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& inverse,
                                             const Maybe& gain) {
  check(dy, "the gradient"), check(x, "x"), check(inverse, "1 / rms");
  if (gain) check(*gain, "the gain");
  TORCH_CHECK(x.dim() == 3 && x.size(2) % 8 == 0 && dy.sizes() == x.sizes() && inverse.numel() == x.size(0) * x.size(1) &&
                  (!gain || gain->numel() == x.size(0) * x.size(2)),
              "expected a gradient like x ", x.sizes(), " and what belongs to it, got ", dy.sizes(), " and ", inverse.sizes());
  const int64_t runs = x.size(0), rows = x.size(1), d = x.size(2), parts = (rows + ROWS - 1) / ROWS;
  Tensor dx = at::empty_like(x), dgain = at::empty(gain ? at::IntArrayRef{runs, d} : at::IntArrayRef{0}, x.options());
  std::vector<float> sums(gain ? runs * parts * d : 0, 0.0f), ones(gain ? 0 : d, 1.0f), unread(d, 0.0f);
  const float *in = x.const_data_ptr<float>(), *up = dy.const_data_ptr<float>(), *inv = inverse.const_data_ptr<float>();
  const float* gains = gain ? gain->const_data_ptr<float>() : ones.data();
  float* out = dx.mutable_data_ptr<float>();
  at::parallel_for(0, runs * parts, std::max<int64_t>(1, GRAIN / (d * ROWS)), [&](int64_t from, int64_t to) {
    for (int64_t part = from; part < to; ++part) {
      const int64_t run = part / parts, first = part % parts * ROWS, last = std::min(first + ROWS, rows);
      const float* g = gains + (gain ? run * d : 0);
      float* sum = gain ? sums.data() + part * d : nullptr;
      for (int64_t row = run * rows + first; row < run * rows + last; ++row) {
        const float *v = in + row * d, *u = up + row * d, k = inv[row];
        float* o = out + row * d;
        const float along = k * k * k / float(d) * sum8(d, [&](int64_t i) { return at8(u + i) * at8(g + i) * at8(v + i); });
        for (int64_t i = 0; i < d; i += 8) {
          const V a = at8(u + i), b = at8(v + i);
          put8(o + i, k * (a * at8(g + i)) - along * b);
          if (sum) put8(sum + i, at8(sum + i) + k * a * b);
        }
      }
    }
  });
  for (int64_t run = 0; gain && run < runs; ++run) {
    float* to = dgain.mutable_data_ptr<float>() + run * d;
    std::copy_n(sums.data() + run * parts * d, d, to);
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t i = 0; i < d; ++i) to[i] += sums[(run * parts + part) * d + i];
  }
  return {dx, dgain};
}

// The loss of a row of logits; with `grad` they become share · (softmax - 1 at the target).
float row_loss(float* z, int64_t size, int64_t target, float share, bool grad) {
  Lanes most = Lanes{} - std::numeric_limits<float>::infinity(), sums{};
  each(0, size, [&](int64_t i, int64_t n) {
    if (n == LANES) most = larger(most, lanes(z + i));
    else for (int64_t j = i; j < size; ++j) most[0] = std::max(most[0], z[j]);
  });
  float top = most[0];
  for (int64_t i = 1; i < LANES; ++i) top = std::max(top, most[i]);
  const float right = z[target];
  alignas(64) float kept[LANES];
  each(0, size, [&](int64_t i, int64_t n) {
    Lanes e = exponential(some(z + i, n) - top);
    if (n < LANES) {
      put(kept, e);
      std::fill(kept + n, kept + LANES, 0.0f);
      e = lanes(kept);
    }
    sums += e;
    if (grad) put_some(z + i, e, n);
  });
  const float sum = sum_of(sums);
  if (grad) {
    const float times = share / sum;
    each(0, size, [&](int64_t i, int64_t n) { put_some(z + i, some(z + i, n) * times, n); });
    z[target] -= share;
  }
  return std::log(sum) + (top - right);
}

// logits [runs rows vocab], targets [runs|1 rows] -> each run's mean loss. With `grad` logits become its gradient.
Tensor cross_entropy_(const Tensor& logits, const Tensor& targets, bool grad) {
  check(logits, "logits");
  TORCH_CHECK(logits.dim() == 3, "expected logits [runs rows vocab], got ", logits.sizes());
  const int64_t runs = logits.size(0), rows = logits.size(1), size = logits.size(2);
  TORCH_CHECK(targets.scalar_type() == at::kLong && targets.is_contiguous() && targets.numel() > 0 &&
                  (targets.numel() == runs * rows || targets.numel() == rows),
              "expected dense int64 targets [runs|1 rows] of logits ", logits.sizes(), ", got ", targets.sizes());
  const bool own = targets.numel() == runs * rows;
  const int64_t* right = targets.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < targets.numel(); ++i)
    TORCH_CHECK_INDEX(0 <= right[i] && right[i] < size, "target ", right[i], " is out of bounds of ", size, " logits");
  Tensor found = at::empty({runs}, logits.options());
  std::vector<float> losses(runs * rows);
  float* z = grad ? logits.mutable_data_ptr<float>() : const_cast<float*>(logits.const_data_ptr<float>());
  at::parallel_for(0, runs * rows, std::max<int64_t>(1, GRAIN / size), [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i)
      losses[i] = row_loss(z + i * size, size, right[own ? i : i % rows], 1.0f / float(rows), grad);
  });
  for (int64_t run = 0; run < runs; ++run) {
    double sum = 0;
    for (int64_t i = run * rows; i < (run + 1) * rows; ++i) sum += double(losses[i]);
    found.mutable_data_ptr<float>()[run] = float(sum / double(rows));
  }
  if (grad) changed(logits);
  return found;
}

double squares(const float* x, int64_t size) {
  double sum = 0;
  for (int64_t start = 0; start < size; start += TILE) {
    const int64_t end = std::min(size, start + TILE);
    Lanes s[4] = {};
    int64_t i = start;
    for (; i + 4 * LANES <= end; i += 4 * LANES)
      for (int64_t j = 0; j < 4; ++j) s[j] += lanes(x + i + j * LANES) * lanes(x + i + j * LANES);
    each(i, end, [&](int64_t at, int64_t n) { s[0] += some(x + at, n) * some(x + at, n); });
    sum += double(sum_of((s[0] + s[1]) + (s[2] + s[3])));
  }
  return sum;
}

// The norm of each run's gradients, tensors [runs ...]; they are made no longer than the limit, where that is above 0.
Tensor clip_(TensorList gradients, double limit) {
  TORCH_CHECK(!gradients.empty(), "expected gradients, got none");
  TORCH_CHECK(gradients[0].dim() > 0, "expected gradients [runs ...], got a number");
  const int64_t runs = gradients[0].size(0);
  for (const Tensor& g : gradients) {
    check(g, "a gradient");
    TORCH_CHECK(g.dim() > 0 && g.size(0) == runs && runs > 0, "expected gradients of ", runs, " runs, got ", g.sizes());
  }
  Tensor norms = at::empty({runs}, gradients[0].options());
  float* found = norms.mutable_data_ptr<float>();
  at::parallel_for(0, runs, 1, [&](int64_t from, int64_t to) {
    for (int64_t run = from; run < to; ++run) {
      double sum = 0;
      for (const Tensor& g : gradients) sum += squares(g.const_data_ptr<float>() + run * (g.numel() / runs), g.numel() / runs);
      found[run] = float(std::sqrt(sum));
      const float times = float(limit) / (found[run] + 1e-6f);
      if (limit <= 0 || times >= 1.0f) continue; // NaN goes on
      for (const Tensor& g : gradients) {
        float* x = g.mutable_data_ptr<float>() + run * (g.numel() / runs);
        each(0, g.numel() / runs, [&](int64_t i, int64_t n) { put_some(x + i, some(x + i, n) * times, n); });
      }
    }
  });
  for (const Tensor& g : gradients) changed(g);
  return norms;
}

// One step of AdamW for tensors [runs ...]: rates [tensors runs] float64, of which those below 0 are left out.
void adamw_(TensorList weights, TensorList gradients, TensorList means, TensorList variances, const Tensor& steps,
            const Tensor& rates, at::ArrayRef<double> decays, double beta1, double beta2, double eps) {
  TORCH_CHECK(rates.dim() == 2 && rates.size(1) > 0, "expected rates [tensors runs], got ", rates.sizes());
  const int64_t many = int64_t(weights.size()), runs = rates.size(1);
  TORCH_CHECK(rates.scalar_type() == at::kDouble && rates.is_contiguous() && rates.size(0) == many &&
                  int64_t(decays.size()) == many * runs, "expected a rate and a decay for each tensor and run");
  check(steps, "steps");
  TORCH_CHECK(steps.sizes() == rates.sizes(), "expected steps like rates ", rates.sizes(), ", got ", steps.sizes());
  for (TensorList list : {gradients, means, variances}) TORCH_CHECK(int64_t(list.size()) == many, "expected ", many, " of each");
  for (int64_t p = 0; p < many; ++p)
    for (const Tensor* x : {&weights[p], &gradients[p], &means[p], &variances[p]}) {
      check(*x, "weights, gradients and state");
      TORCH_CHECK(x->dim() > 0 && x->sizes() == weights[p].sizes() && x->size(0) == runs, "expected gradient and state like a weight ",
                  weights[p].sizes(), " of ", runs, " runs, got ", x->sizes());
    }
  const double* rate = rates.const_data_ptr<double>();
  float* step = steps.mutable_data_ptr<float>();
  at::parallel_for(0, many * runs, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t p = i / runs, run = i % runs, size = weights[p].numel() / runs;
      if (rate[i] < 0) continue;
      const double now = step[i] += 1.0f, part1 = 1 - std::pow(beta1, now), part2 = 1 - std::pow(beta2, now);
      const float keep = float(1 - rate[i] * decays[i]), toward = float(1 - beta1), kept = float(beta2), grown = float(1 - beta2);
      const float over = float(1 / std::sqrt(part2)), small = float(eps), length = float(rate[i] / part1);
      float *w = weights[p].mutable_data_ptr<float>() + run * size, *m = means[p].mutable_data_ptr<float>() + run * size,
            *v = variances[p].mutable_data_ptr<float>() + run * size;
      const float* g = gradients[p].const_data_ptr<float>() + run * size;
      each(0, size, [&](int64_t at, int64_t n) {
        const Lanes x = some(g + at, n), old = some(m + at, n), mean = old + toward * (x - old);
        const Lanes variance = some(v + at, n) * kept + grown * x * x;
        put_some(m + at, mean, n), put_some(v + at, variance, n);
        put_some(w + at, some(w + at, n) * keep - length * mean / (root(variance) * over + small), n);
      });
    }
  });
  for (TensorList list : {weights, means, variances})
    for (const Tensor& x : list) changed(x);
  changed(steps);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(qkeel_native, m) {
  m.def("stacked_linear(Tensor x, Tensor w) -> Tensor");
  m.def("stacked_linear_backward(Tensor dy, Tensor x, Tensor w) -> (Tensor, Tensor)");
  m.def("stacked_gelu_(Tensor(a!) x) -> Tensor");
  m.def("stacked_rms_norm(Tensor x, Tensor? gain, float eps) -> (Tensor, Tensor)");
  m.def("stacked_rms_norm_backward(Tensor dy, Tensor x, Tensor inverse, Tensor? gain) -> (Tensor, Tensor)");
  m.def("stacked_cross_entropy_(Tensor(a!) logits, Tensor targets, bool grad) -> Tensor");
  m.def("stacked_clip_(Tensor(a!)[] gradients, float limit) -> Tensor");
  m.def("stacked_adamw_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] means, Tensor(c!)[] variances,"
        " Tensor(d!) steps, Tensor rates, float[] decays, float beta1, float beta2, float eps) -> ()");
}

TORCH_LIBRARY_IMPL(qkeel_native, CPU, m) {
  m.impl("stacked_linear", &linear);
  m.impl("stacked_linear_backward", &linear_backward);
  m.impl("stacked_gelu_", &gelu_);
  m.impl("stacked_rms_norm", &rms_norm);
  m.impl("stacked_rms_norm_backward", &rms_norm_backward);
  m.impl("stacked_cross_entropy_", &cross_entropy_);
  m.impl("stacked_clip_", &clip_);
  m.impl("stacked_adamw_", &adamw_);
}
