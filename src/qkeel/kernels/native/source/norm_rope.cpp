// Norm, gain and rotation of q or k in one pass over memory, and the way back. Storage float, bfloat16 or half;
// arithmetic float. No -ffast-math: sums are reordered only where a pragma says so, in a way that depends on the
// shape alone, never on the number of threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "norm_rope_walk.h"
#include "norm_rope_whole.h"

namespace {

using namespace qkeel;

using at::Tensor;

constexpr int64_t CHUNKS = 64;     // partial sums of the gain's gradient: fixed, so threads change no bit
constexpr int64_t GRAIN = 1 << 15; // numbers a thread takes at least
// Bytes of x up to which the way back takes several rows at once; of more it waits for memory, and writes to many rows
// make it wait longer.
constexpr int64_t CACHED = 4 << 20;

template <typename T, int64_t D, bool MEAN, bool SHARED>
void forward(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  const T* in = x.const_data_ptr<T>();
  T* out = static_cast<T*>(y.mutable_data_ptr());
  float* inv = r.defined() && r.numel() ? r.mutable_data_ptr<float>() : nullptr;
  const int64_t d = D ? D : w.d, heads = w.h, times = w.t, x_step = w.apart(x), y_step = w.apart(y);
  const int64_t r0 = heads * times, r1 = w.heads_inner ? 1 : times, r2 = w.heads_inner ? heads : 1;
  const int64_t x0 = x.stride(0), x1 = x.stride(1), x2 = x.stride(2), y0 = y.stride(0), y1 = y.stride(1), y2 = y.stride(2);
  at::parallel_for(0, w.outer(), std::max<int64_t>(1, GRAIN / (w.inner() * d)), [&](int64_t from, int64_t to) {
    alignas(64) float loaded[BLOCK], made[BLOCK], mean[MOST], inverse[MOST];
    w.blocks(from, to, w.at_once(), [&](const Block& b) {
      const Rows v = load_rows(in + b.n * x0 + b.h * x1 + b.t * x2, x_step, b.rows, d, loaded, d);
      T* end = out + b.n * y0 + b.h * y1 + b.t * y2;
      const Rows o = target_rows(end, y_step, made, d);
      if constexpr (D) {
        measure_whole<D, MEAN>(v, b.rows, kind, eps, mean, inverse);
        apply_whole<D, MEAN, SHARED>(v, o, w.with(b), mean, inverse);
      } else {
        measure<MEAN>(v, b.rows, d, kind, eps, mean, inverse);
        apply<MEAN>(v, o, w.with(b), mean, inverse);
      }
      if (inv) {
        float* end = inv + b.n * r0 + b.h * r1 + b.t * r2;
        if (b.rows == 8) put8(end, at8(inverse));
        else std::copy_n(inverse, b.rows, end);
      }
      store_rows(made, end, y_step, b.rows, d);
    });
  });
}

template <typename T, int64_t D, bool MEAN>
void forward_shared(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  if (w.alike()) forward<T, D, MEAN, true>(x, y, r, w, kind, eps);
  else forward<T, D, MEAN, false>(x, y, r, w, kind, eps);
}

template <typename T, bool MEAN>
void forward_sized(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  if (w.d == 64 && w.half == 32) return forward_shared<T, 64, MEAN>(x, y, r, w, kind, eps);
  if (w.d == 128 && w.half == 64) return forward_shared<T, 128, MEAN>(x, y, r, w, kind, eps);
  forward<T, 0, MEAN, false>(x, y, r, w, kind, eps);
}

template <typename T>
void forward_any(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  if (kind == LAYER) forward_sized<T, true>(x, y, r, w, kind, eps);
  else forward_sized<T, false>(x, y, r, w, kind, eps);
}

// y, which may be x itself; r gets the inverse sizes of rows if it is defined.
void pass(const Tensor& x, Tensor& y, Tensor& r, const Walk& w, int64_t kind, float eps) {
  if (x.scalar_type() == at::kFloat) forward_any<float>(x, y, r, w, kind, eps);
  else if (x.scalar_type() == at::kBFloat16) forward_any<c10::BFloat16>(x, y, r, w, kind, eps);
  else if (x.scalar_type() == at::kHalf) forward_any<c10::Half>(x, y, r, w, kind, eps);
  else TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", x.scalar_type());
}

// [b h t] in the order of x, so that rows write next to each other.
Tensor room_for_inverses(const Walk& w, int64_t kind) {
  if (kind == NONE) return at::detail::empty_cpu({0}, at::kFloat);
  const int64_t b = w.h * w.t, h = w.heads_inner ? 1 : w.t, t = w.heads_inner ? w.h : 1;
  return at::detail::empty_strided_cpu({w.b, w.h, w.t}, {b, h, t}, at::kFloat);
}

std::tuple<Tensor, Tensor> run(const Tensor& x_, const Maybe& gain, const Maybe& cos, const Maybe& sin, int64_t kind,
                               double eps, bool inverses) {
  check(x_, cos, sin);
  Tensor x = with_last_dense(x_);
  Walk w(x, gain, cos, sin);
  Tensor y = room_for(x), r;
  if (inverses) r = room_for_inverses(w, kind);
  pass(x, y, r, w, kind, float(eps));
  return {y, r};
}

struct Options {
  int64_t kind;
  float eps;
  bool kept_x;
};

// Several rows of whole heads at once (MANY), or row by row.
template <typename T, int64_t D, bool MANY, bool SHARED>
void backward(const Tensor& dy, const Tensor& kept, const Tensor& r, Tensor& dx, float* dgain, const Walk& w,
              const Options& opt) {
  const T *up = dy.const_data_ptr<T>(), *was = kept.const_data_ptr<T>();
  T* out = dx.mutable_data_ptr<T>();
  const float* inv = r.const_data_ptr<float>();
  std::vector<float> over(w.gains * w.d);
  for (size_t i = 0; i < over.size(); ++i) over[i] = 1.0f / w.gain[i];
  const int64_t u0 = dy.stride(0), u1 = dy.stride(1), u2 = dy.stride(2), k0 = kept.stride(0), k1 = kept.stride(1),
                k2 = kept.stride(2), x0 = dx.stride(0), x1 = dx.stride(1), x2 = dx.stride(2);
  const int64_t d = D ? D : w.d, half = D ? D / 2 : w.half;
  const int64_t outer = w.outer(), chunks = std::min(CHUNKS, outer), up_step = w.apart(dy);
  const int64_t was_step = w.apart(kept), out_step = w.apart(dx), inv_step = w.apart(r);
  const int64_t r0 = r.stride(0), r1 = r.stride(1), r2 = r.stride(2), kind = opt.kind, numbers = w.gains * d, most = MANY ? w.at_once() : 1;
  const float clamped = 1.0f / opt.eps;
  std::vector<float> parts(chunks * numbers);
  const bool kept_x = opt.kept_x;
  at::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    alignas(64) float loaded[2][BLOCK], made[BLOCK], hat[WIDEST], dn[WIDEST], inverse[MOST];
    for (int64_t chunk = first; chunk < last; ++chunk)
      w.blocks(outer * chunk / chunks, outer * (chunk + 1) / chunks, most, [&](const Block& b) {
        const Rows u = load_rows(up + b.n * u0 + b.h * u1 + b.t * u2, up_step, b.rows, d, loaded[0], d);
        const Rows v = load_rows(was + b.n * k0 + b.h * k1 + b.t * k2, was_step, b.rows, d, loaded[1], d);
        T* end = out + b.n * x0 + b.h * x1 + b.t * x2;
        const Rows to = target_rows(end, out_step, made, d);
        const int64_t g = b.gain - w.gain;
        float* sums = parts.data() + chunk * numbers + g;
        for (int64_t i = 0; i < b.rows; ++i) inverse[i] = inv[b.n * r0 + b.h * r1 + b.t * r2 + i * inv_step];
        if constexpr (MANY) {
          back_whole<D, SHARED>(Back{v, u, to, over.data() + g, inverse, sums}, w.with(b), kind, clamped);
        } else {
          Row row{v.at, u.at, b.gain, over.data() + g, b.cos, b.sin, 0.0f, inverse[0], hat, dn, sums, 0.0f, 0.0f};
          if (kept_x) row.mean = mean_of(v.at, d, kind), restore<true>(row, d, half);
          else restore<false>(row, d, half);
          const float along = kind == L2 ? (row.inverse < clamped ? row.dot : 0.0f) : row.dot / float(d);
          const float mean = kind == LAYER ? row.sum / float(d) : 0.0f;
          float* o = const_cast<float*>(to.at);
          for (int64_t i = 0; i < d; i += 8)
            put8(o + i, row.inverse * (at8(dn + i) - mean - at8(hat + i) * along));
        }
        store_rows(made, end, out_step, b.rows, d);
      });
  });
  if (!dgain) return;
  for (int64_t i = 0; i < numbers; ++i) {
    float sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += parts[chunk * numbers + i];
    dgain[i] = MANY ? sum * over[i] : sum; // that of many rows has the gain in it
  }
}

template <typename T, int64_t D>
void backward_sized(const Tensor& dy, const Tensor& kept, const Tensor& r, Tensor& dx, float* dgain, const Walk& w,
                    const Options& o) {
  const bool many = dy.numel() * int64_t(sizeof(T)) <= CACHED && o.kind != LAYER && !o.kept_x;
  if (!many) return backward<T, D, false, false>(dy, kept, r, dx, dgain, w, o);
  if (w.alike()) return backward<T, D, true, true>(dy, kept, r, dx, dgain, w, o);
  backward<T, D, true, false>(dy, kept, r, dx, dgain, w, o);
}

template <typename T>
void backward_any(const Tensor& dy, const Tensor& kept, const Tensor& r, Tensor& dx, float* dgain, const Walk& w,
                  const Options& o) {
  if (w.d == 64 && w.half == 32) return backward_sized<T, 64>(dy, kept, r, dx, dgain, w, o);
  if (w.d == 128 && w.half == 64) return backward_sized<T, 128>(dy, kept, r, dx, dgain, w, o);
  backward<T, 0, false, false>(dy, kept, r, dx, dgain, w, o);
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
  Tensor dy = with_last_dense(dy_), base = with_last_dense(kept), dx = room_for(base);
  Walk w(base, gain, cos, sin);
  Options o{kind, float(eps), kept_x};
  Tensor dgain = gain ? at::empty({w.gains, w.d}, at::kFloat) : at::empty({0}, at::kFloat);
  float* sums = gain ? dgain.mutable_data_ptr<float>() : nullptr;
  if (kept.scalar_type() == at::kFloat) backward_any<float>(dy, base, r, dx, sums, w, o);
  else if (kept.scalar_type() == at::kBFloat16) backward_any<c10::BFloat16>(dy, base, r, dx, sums, w, o);
  else backward_any<c10::Half>(dy, base, r, dx, sums, w, o);
  return {dx, dgain};
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

// The operator as the dispatcher knows it: a compiler may have replaced it.
template <typename F> c10::TypedOperatorHandle<F> known(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}
template <typename... Args> auto call_forward(Args&&... args) {
  static auto op = known<decltype(norm_rope)>("qkeel_native::norm_rope");
  return op.call(std::forward<Args>(args)...);
}
template <typename... Args> auto call_backward(Args&&... args) {
  static auto op = known<decltype(norm_rope_backward)>("qkeel_native::norm_rope_backward");
  if (at::GradMode::is_enabled()) return op.call(std::forward<Args>(args)...);
  at::AutoDispatchBelowADInplaceOrView below; // nobody differentiates it again: no node is made
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

#if __has_include(<Python.h>)
#include "norm_rope_python.h"
#endif

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
