// Norm, gain and rotation of q or k in one pass over memory, and the way back. Storage float, bfloat16 or half;
// arithmetic float. No -ffast-math: sums are reordered only where a pragma says so, in a way that depends on the
// shape alone, never on the number of threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "norm_rope.h"

namespace {

using namespace qkeel;

using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t CHUNKS = 64;     // partial sums of the gain's gradient: fixed, so threads change no bit
constexpr int64_t GRAIN = 1 << 15; // numbers a thread takes at least
constexpr int64_t CACHED = 4 << 20; // bytes up to which several rows at once are faster: past it memory is waited for

// The first of some rows, how many there are, where their gain is and what turns the first.
struct Block {
  int64_t n, h, t, rows, gain;
  const float *cos, *sin;
};

// x [b h t d] walked in the order it lies in memory, cos and sin beside it, the gain as [1 or h][d] floats.
struct Walk {
  int64_t b, h, t, d, half = 0;
  bool heads_inner;
  Tensor gain, cos, sin;
  int64_t gain_step = 0, cos_b = 0, cos_t = 0;

  Walk(const Tensor& x, const Maybe& g, const Maybe& c, const Maybe& s)
      : b(x.size(0)), h(x.size(1)), t(x.size(2)), d(x.size(3)), heads_inner(x.stride(1) < x.stride(2)) {
    auto floats = x.options().dtype(at::kFloat);
    if (!g) {
      gain = at::ones({1, d}, floats);
    } else if (g->dim() == 1 && g->scalar_type() == at::kFloat && g->is_contiguous() && g->size(0) == d) {
      gain = *g;  // the usual one, as it is: for one token every operation counts
    } else {
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
      for (int64_t n = o / many, rest = o % many, i = 0; i < inner(); ++i) {
        int64_t head = heads_inner ? i : rest, at = heads_inner ? rest : i;
        int64_t place = n * cos_b + at * cos_t;
        f(n, head, at, head * gain_step, c + place, s + place);
      }
  }
  // f for every few rows that lie one step apart in memory.
  template <typename F> void blocks(int64_t from, int64_t to, int64_t most, F&& f) const {
    const float* c = half ? cos.const_data_ptr<float>() : nullptr;
    const float* s = half ? sin.const_data_ptr<float>() : nullptr;
    const int64_t many = heads_inner ? t : h, count = inner();
    int64_t n = from / many, rest = from % many;
    for (int64_t o = from; o < to; ++o) {
      for (int64_t i = 0; i < count; i += most) {
        int64_t head = heads_inner ? i : rest, at = heads_inner ? rest : i, place = n * cos_b + at * cos_t;
        f(Block{n, head, at, std::min(most, count - i), head * gain_step, c + place, s + place});
      }
      if (++rest == many) rest = 0, ++n;
    }
  }
  int64_t at_once() const { return std::clamp<int64_t>(BLOCK / d, 1, MOST); }
  int64_t gains_apart() const { return heads_inner ? gain_step : 0; }
  int64_t angles_apart() const { return heads_inner ? 0 : cos_t; }
  int64_t apart(const Tensor& x) const { return x.stride(heads_inner ? 1 : 2); }
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

template <typename T, int64_t D, bool MEAN, bool ONE>
void forward(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  const T* in = x.const_data_ptr<T>();
  T* out = y.mutable_data_ptr<T>();
  float* inv = r.defined() && r.numel() ? r.mutable_data_ptr<float>() : nullptr;
  const float* gains = w.gain.const_data_ptr<float>();
  const int64_t d = D ? D : w.d, heads = w.h, times = w.t, x_step = w.apart(x), y_step = w.apart(y);
  const int64_t inv_step = w.heads_inner ? times : 1;
  const int64_t x0 = x.stride(0), x1 = x.stride(1), x2 = x.stride(2), y0 = y.stride(0), y1 = y.stride(1), y2 = y.stride(2);
  at::parallel_for(0, w.outer(), std::max<int64_t>(1, GRAIN / (w.inner() * d)), [&](int64_t from, int64_t to) {
    alignas(64) float loaded[BLOCK], made[BLOCK], mean[MOST], inverse[MOST];
    w.blocks(from, to, ONE ? 1 : w.at_once(), [&](const Block& b) {
      const Rows v = load_rows(in + b.n * x0 + b.h * x1 + b.t * x2, x_step, b.rows, d, loaded, d);
      T* end = out + b.n * y0 + b.h * y1 + b.t * y2;
      measure<D, MEAN, ONE>(v, b.rows, d, kind, eps, mean, inverse);
      if (inv)
        for (int64_t i = 0; i < b.rows; ++i) inv[(b.n * heads + b.h) * times + b.t + i * inv_step] = inverse[i];
      const With with{gains + b.gain, b.cos, b.sin, ONE ? 1 : b.rows, d, w.half, w.gains_apart(), w.angles_apart()};
      const Rows o = target_rows(end, y_step, made, d);
      if constexpr (ONE) apply<D, MEAN>(v, o, with, mean, inverse);
      else apply_some<D, MEAN>(v, o, with, mean, inverse);
      store_rows(made, end, y_step, b.rows, d);
    });
  });
}

template <typename T, int64_t D, bool MEAN>
void forward_paced(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  if (x.numel() * int64_t(sizeof(T)) > CACHED) forward<T, D, MEAN, true>(x, y, r, w, kind, eps);
  else forward<T, D, MEAN, false>(x, y, r, w, kind, eps);
}

template <typename T, bool MEAN>
void forward_sized(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  if (w.d == 64 && w.half == 32) return forward_paced<T, 64, MEAN>(x, y, r, w, kind, eps);
  if (w.d == 128 && w.half == 64) return forward_paced<T, 128, MEAN>(x, y, r, w, kind, eps);
  forward_paced<T, 0, MEAN>(x, y, r, w, kind, eps);
}

template <typename T>
void forward_any(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  if (kind == LAYER) forward_sized<T, true>(x, y, r, w, kind, eps);
  else forward_sized<T, false>(x, y, r, w, kind, eps);
}

std::tuple<Tensor, Tensor> run(const Tensor& x_, const Maybe& gain, const Maybe& cos, const Maybe& sin, int64_t kind,
                               double eps, bool inverses) {
  check(x_, cos, sin);
  Tensor x = with_last_dense(x_);
  Walk w(x, gain, cos, sin);
  Tensor y = at::empty_like(x);
  auto floats = x.options().dtype(at::kFloat);
  Tensor r;
  if (inverses) r = kind == NONE ? at::empty({0}, floats) : at::empty({w.b, w.h, w.t}, floats);
  if (x.scalar_type() == at::kFloat) forward_any<float>(x, y, r, w, kind, float(eps));
  else if (x.scalar_type() == at::kBFloat16) forward_any<c10::BFloat16>(x, y, r, w, kind, float(eps));
  else if (x.scalar_type() == at::kHalf) forward_any<c10::Half>(x, y, r, w, kind, float(eps));
  else TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", x.scalar_type());
  return {y, r};
}

struct Options {
  int64_t kind;
  float eps;
  bool kept_x;
};

template <typename T, int64_t D>
void backward(const Tensor& dy, const Tensor& kept, const Tensor& r, Tensor& dx, float* dgain, const Walk& w,
              const Options& opt) {
  const T *up = dy.const_data_ptr<T>(), *was = kept.const_data_ptr<T>();
  T* out = dx.mutable_data_ptr<T>();
  const float *inv = r.const_data_ptr<float>(), *gains = w.gain.const_data_ptr<float>();
  Tensor over = w.gain.reciprocal();
  const float* over_gains = over.const_data_ptr<float>();
  const int64_t u0 = dy.stride(0), u1 = dy.stride(1), u2 = dy.stride(2), k0 = kept.stride(0), k1 = kept.stride(1),
                k2 = kept.stride(2), x0 = dx.stride(0), x1 = dx.stride(1), x2 = dx.stride(2);
  const int64_t d = D ? D : w.d, half = D ? D / 2 : w.half, outer = w.outer(), chunks = std::min(CHUNKS, outer);
  const int64_t heads = w.h, times = w.t, kind = opt.kind, numbers = w.gain.numel();
  const float clamped = 1.0f / opt.eps;
  const bool kept_x = opt.kept_x;
  at::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    alignas(64) float loaded[2][WIDEST], made[WIDEST], hat[WIDEST], dn[WIDEST], unread[WIDEST] = {};
    for (int64_t chunk = first; chunk < last; ++chunk)
      w.rows(outer * chunk / chunks, outer * (chunk + 1) / chunks, [&](int64_t n, int64_t h, int64_t t, int64_t gs,
                                                                      const float* c, const float* s) {
        const float* u = load(up + n * u0 + h * u1 + t * u2, loaded[0], d);
        const float* v = load(was + n * k0 + h * k1 + t * k2, loaded[1], d);
        const float k = inv[(n * heads + h) * times + t];
        float* sums = dgain ? dgain + chunk * numbers + gs : unread;
        Row row{v, u, gains + gs, over_gains + gs, c, s, 0.0f, k, hat, dn, sums, 0.0f, 0.0f};
        if (kept_x) {
          row.mean = mean_of(v, d, kind);
          restore<true, D>(row, d, half);
        } else {
          restore<false, D>(row, d, half);
        }
        const float along = kind == L2 ? (k < clamped ? row.dot : 0.0f) : row.dot / float(d);
        const float mean = kind == LAYER ? row.sum / float(d) : 0.0f;
        T* end = out + n * x0 + h * x1 + t * x2;
        float* __restrict to = target(end, made);
        for (int64_t i = 0; i < d; i += 8)
          put8(to + i, k * (at8(dn + i) - mean - at8(hat + i) * along));
        store(to, end, d);
      });
  });
}

template <typename T>
void backward_any(const Tensor& dy, const Tensor& kept, const Tensor& r, Tensor& dx, float* dgain, const Walk& w,
                  const Options& o) {
  if (w.d == 64 && w.half == 32) return backward<T, 64>(dy, kept, r, dx, dgain, w, o);
  if (w.d == 128 && w.half == 64) return backward<T, 128>(dy, kept, r, dx, dgain, w, o);
  backward<T, 0>(dy, kept, r, dx, dgain, w, o);
}

std::tuple<Tensor, Tensor> norm_rope(const Tensor& x, const Maybe& gain, const Maybe& cos, const Maybe& sin,
                                     int64_t kind, double eps, bool) {
  return run(x, gain, cos, sin, kind, eps, true);
}

Tensor norm_rope_alone(const Tensor& x, const Maybe& gain, const Maybe& cos, const Maybe& sin, int64_t kind,
                       double eps) {
  return std::get<0>(run(x, gain, cos, sin, kind, eps, false));
}

// q and k of a few tokens, turned alike, at the price of one call.
std::tuple<Tensor, Tensor> norm_rope_two(const Tensor& q, const Tensor& k, const Maybe& gain_q, const Maybe& gain_k,
                                         const Maybe& cos, const Maybe& sin, int64_t kind_q, int64_t kind_k,
                                         double eps) {
  return {norm_rope_alone(q, gain_q, cos, sin, kind_q, eps), norm_rope_alone(k, gain_k, cos, sin, kind_k, eps)};
}

std::tuple<Tensor, Tensor> norm_rope_backward(const Tensor& dy_, const Tensor& kept, const Tensor& r,
                                              const Maybe& gain, const Maybe& cos, const Maybe& sin, int64_t kind,
                                              double eps, bool kept_x) {
  check(kept, cos, sin);
  TORCH_CHECK(kind != NONE && dy_.sizes() == kept.sizes() && dy_.scalar_type() == kept.scalar_type(),
              "expected a norm, and gradient and kept tensor of one shape and dtype");
  Tensor dy = with_last_dense(dy_), base = with_last_dense(kept), dx = at::empty_like(base);
  Walk w(base, gain, cos, sin);
  Options o{kind, float(eps), kept_x};
  Tensor parts;
  if (gain) parts = at::zeros({std::min(CHUNKS, std::max<int64_t>(1, w.outer())), w.gain.numel() / w.d, w.d}, w.gain.options());
  float* sums = gain ? parts.mutable_data_ptr<float>() : nullptr;
  if (kept.scalar_type() == at::kFloat) backward_any<float>(dy, base, r, dx, sums, w, o);
  else if (kept.scalar_type() == at::kBFloat16) backward_any<c10::BFloat16>(dy, base, r, dx, sums, w, o);
  else backward_any<c10::Half>(dy, base, r, dx, sums, w, o);
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

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// The operator as the dispatcher knows it: what is called may be a compiler's stand-in.
template <typename F> c10::TypedOperatorHandle<F> known(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}
template <typename... Args> auto call_forward(Args&&... args) {
  static auto op = known<decltype(norm_rope)>("qkeel_native::norm_rope");
  return op.call(std::forward<Args>(args)...);
}
template <typename... Args> auto call_backward(Args&&... args) {
  static auto op = known<decltype(norm_rope_backward)>("qkeel_native::norm_rope_backward");
  return op.call(std::forward<Args>(args)...);
}
Maybe maybe(const Tensor& x) { return x.defined() ? Maybe(x) : std::nullopt; }

struct Forward : torch::autograd::Function<Forward> {
  static tensor_list forward(AutogradContext* ctx, const Tensor& x, const Maybe& gain, const Maybe& cos,
                             const Maybe& sin, int64_t kind, double eps, bool keep_x) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, r] = call_forward(x, gain, cos, sin, kind, eps, keep_x);
    Tensor none, kept = kind == NONE ? none : keep_x ? x : y;
    ctx->save_for_backward({kept, r, gain.value_or(none), cos.value_or(none), sin.value_or(none)});
    ctx->saved_data["kind"] = kind;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["keep_x"] = keep_x;
    ctx->mark_non_differentiable({r});
    ctx->set_materialize_grads(false);
    return {y, r};
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list grads) {
    tensor_list found(7);
    if (!grads[0].defined()) return found;
    auto saved = ctx->get_saved_variables();
    const Tensor& gain = saved[2];
    Maybe cos = maybe(saved[3]), sin = maybe(saved[4]);
    int64_t kind = ctx->saved_data["kind"].toInt();
    if (kind == NONE) {  // a rotation is undone by the one back, which is differentiable in its turn
      found[0] = std::get<0>(call_forward(grads[0], Maybe(), cos, sin ? Maybe(-*sin) : sin, kind, 0.0, false));
      return found;
    }
    auto [dx, over] = call_backward(grads[0], saved[0], saved[1], maybe(gain), cos, sin, kind,
                                    ctx->saved_data["eps"].toDouble(), ctx->saved_data["keep_x"].toBool());
    found[0] = dx;
    if (gain.defined()) found[1] = at::sum_to(over, gain.sizes()).to(gain.scalar_type());
    return found;
  }
};

struct Backward : torch::autograd::Function<Backward> {
  static tensor_list forward(AutogradContext*, const Tensor& dy, const Tensor& kept, const Tensor& r,
                             const Maybe& gain, const Maybe& cos, const Maybe& sin, int64_t kind, double eps,
                             bool kept_x) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [dx, over] = call_backward(dy, kept, r, gain, cos, sin, kind, eps, kept_x);
    return {dx, over};
  }
  static tensor_list backward(AutogradContext*, tensor_list) {
    TORCH_CHECK(false, "the fused norm and rotation can be differentiated once; QKEEL_NATIVE=0 does not fuse them");
  }
};

std::tuple<Tensor, Tensor> norm_rope_tracked(const Tensor& x, const Maybe& gain, const Maybe& cos, const Maybe& sin,
                                             int64_t kind, double eps, bool keep_x) {
  auto found = Forward::apply(x, gain, cos, sin, kind, eps, keep_x);
  return {found[0], found[1]};
}

std::tuple<Tensor, Tensor> norm_rope_backward_tracked(const Tensor& dy, const Tensor& kept, const Tensor& r,
                                                      const Maybe& gain, const Maybe& cos, const Maybe& sin,
                                                      int64_t kind, double eps, bool kept_x) {
  auto found = Backward::apply(dy, kept, r, gain, cos, sin, kind, eps, kept_x);
  return {found[0], found[1]};
}

} // namespace

TORCH_LIBRARY_FRAGMENT(qkeel_native, m) {
  m.def("norm_rope(Tensor x, Tensor? gain, Tensor? cos, Tensor? sin, int kind, float eps, bool keep_x)"
        " -> (Tensor, Tensor)");
  m.def("norm_rope_alone(Tensor x, Tensor? gain, Tensor? cos, Tensor? sin, int kind, float eps) -> Tensor");
  m.def("norm_rope_backward(Tensor dy, Tensor kept, Tensor inverse, Tensor? gain, Tensor? cos, Tensor? sin, int kind,"
        " float eps, bool kept_x) -> (Tensor, Tensor)");
  m.def("norm_rope_two(Tensor q, Tensor k, Tensor? gain_q, Tensor? gain_k, Tensor? cos, Tensor? sin, int kind_q,"
        " int kind_k, float eps) -> (Tensor, Tensor)");
  m.def("gain_spread(Tensor gain) -> float");
}

TORCH_LIBRARY_IMPL(qkeel_native, CPU, m) {
  m.impl("norm_rope", &norm_rope);
  m.impl("norm_rope_alone", &norm_rope_alone);
  m.impl("norm_rope_two", &norm_rope_two);
  m.impl("norm_rope_backward", &norm_rope_backward);
  m.impl("gain_spread", &gain_spread);
}

TORCH_LIBRARY_IMPL(qkeel_native, Autograd, m) {
  m.impl("norm_rope", &norm_rope_tracked);
  m.impl("norm_rope_backward", &norm_rope_backward_tracked);
}
