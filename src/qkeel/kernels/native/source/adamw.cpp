// One step of Adam or AdamW over many weights, each line of a weight (a row, or a column) at a rate of its own, with
// the sum of squares of every line's new numbers taken on the way. Memory is the limit: each number is read and written
// once. The arithmetic is that of torch's optimizers, operation by operation.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>


#include "rows.h"

namespace {

using namespace qkeel;
using at::Tensor;
using at::TensorList;

constexpr int64_t BLOCK = 1 << 15; // numbers in a piece of work: fixed, so threads change no bit
constexpr int64_t TILE = 256;      // numbers whose squares are summed as floats, before they join a double

// The product as a number of its own: not drawn into the sum that follows.
inline V rounded(V x) {
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(x);
#else
  return x; // other compilers fuse within one expression only
#endif
}

// Where to go between two numbers, made ready outside the loop.
struct Way {
  V part;
  decltype(V{} < V{}) near;

  explicit Way(V c) : near((c < 0.5f) & (c > -0.5f)) { part = near ? c : c - 1.0f; }
  // a + c · (b - a), from the nearer end, as torch.lerp has it: exactly b at c = 1.
  V operator()(V a, V b) const { return part * (b - a) + (near ? a : b); }
};

// Where weight decay enters: in the gradient, or apart from the step and scaled with it, or apart at full size.
enum Decay { COUPLED, SCALED, PLAIN };

// The numbers of one weight's step.
struct Rule {
  Decay how;
  float sign, coupled, keep, toward, beta2, grown, root2, eps, size;
};

// One step of eight numbers. All its own, so that no store is taken to change it.
template <Decay HOW, bool TOP> struct Stepper {
  const float sign, coupled, keep, beta2, grown, root2, eps, size;
  const Way toward;

  explicit Stepper(const Rule& r)
      : sign(r.sign), coupled(r.coupled), keep(r.keep), beta2(r.beta2), grown(r.grown), root2(r.root2), eps(r.eps),
        size(r.size), toward(V{} + r.toward) {}

  inline __attribute__((always_inline)) V operator()(V w, V g, V& m, V& v, V& top, const Way& rate) const {
    g = rounded(g * sign);
    if (HOW == COUPLED) g += w * coupled;
    const V kept = HOW == COUPLED ? w : rounded(w * keep);
    m = toward(m, g);
    v = rounded(v * beta2) + (grown * g) * g;
    if (TOP) top = (v > top) | (v != v) ? v : top;
    const V now = kept + (size * m) / (root(TOP ? top : v) / root2 + eps);
    return rate(HOW == PLAIN ? kept : w, now);
  }
};

// A weight as it lies in memory: `rows` of `columns` numbers; its lines are the rows, or the columns.
struct Weight {
  float *w, *m, *v, *top, *step;
  const float *g, *rate;
  double* squares;
  int64_t rows, columns;
  bool across; // lines are columns
  Rule rule;
};

inline V some(const float* p, int64_t n) {
  V x{};
  std::memcpy(&x, p, n * sizeof(float));
  return x;
}
inline void put(float* p, V x, int64_t n) { std::memcpy(p, &x, n * sizeof(float)); }

// n < 9 numbers from `at` on, and their squares; 0 where there is no number.
template <bool WHOLE, bool TOP, typename S>
inline __attribute__((always_inline)) V eight(const Weight& x, const S& step, int64_t at, const Way& rate, int64_t n) {
  auto get = [n](const float* p) { return WHOLE ? at8(p) : some(p, n); };
  auto set = [n](float* p, V y) { WHOLE ? put8(p, y) : put(p, y, n); };
  V m = get(x.m + at), v = get(x.v + at), top{};
  if (TOP) top = get(x.top + at);
  V y = step(get(x.w + at), get(x.g + at), m, v, top, rate);
  set(x.w + at, y), set(x.m + at, m), set(x.v + at, v);
  if (TOP) set(x.top + at, top);
  if (!WHOLE) y = some(x.w + at, n);
  return y * y;
}

template <Decay HOW, bool TOP> void along(const Weight x, int64_t from, int64_t to) {
  const Stepper<HOW, TOP> step(x.rule);
  for (int64_t i = from; i < to; ++i) {
    const Way rate(V{} + x.rate[i]);
    const int64_t start = i * x.columns;
    double sum = 0;
    for (int64_t j = 0; j < x.columns;) {
      V s{};
      const int64_t end = std::min(x.columns, j + TILE);
      for (; j + 8 <= end; j += 8) s += eight<true, TOP>(x, step, start + j, rate, 8);
      if (j < end) s += eight<false, TOP>(x, step, start + j, rate, end - j), j = end;
      sum += double(total(s));
    }
    x.squares[i] = sum;
  }
}

template <Decay HOW, bool TOP> void crosswise(const Weight x, int64_t from, int64_t to, float* sums) {
  const Stepper<HOW, TOP> step(x.rule);
  for (int64_t i = from; i < to; ++i) {
    const int64_t start = i * x.columns;
    int64_t j = 0;
    for (; j + 8 <= x.columns; j += 8)
      put8(sums + j, at8(sums + j) + eight<true, TOP>(x, step, start + j, Way(at8(x.rate + j)), 8));
    if (const int64_t n = x.columns - j)
      put(sums + j, some(sums + j, n) + eight<false, TOP>(x, step, start + j, Way(some(x.rate + j, n)), n), n);
  }
}

template <Decay HOW, bool TOP> void some_rows(const Weight& x, int64_t from, int64_t to, float* sums) {
  x.across ? crosswise<HOW, TOP>(x, from, to, sums) : along<HOW, TOP>(x, from, to);
}

template <Decay HOW> void rows_of(const Weight& x, int64_t from, int64_t to, float* sums) {
  x.top ? some_rows<HOW, true>(x, from, to, sums) : some_rows<HOW, false>(x, from, to, sums);
}

void any_rows(const Weight& x, int64_t from, int64_t to, float* sums) {
  if (x.rule.how == COUPLED) rows_of<COUPLED>(x, from, to, sums);
  else if (x.rule.how == SCALED) rows_of<SCALED>(x, from, to, sums);
  else rows_of<PLAIN>(x, from, to, sums);
}

struct Work {
  const Weight* weight;
  int64_t from, to;
  std::vector<float> sums; // of columns
};

void run(const std::vector<Weight>& weights) {
  std::vector<Work> all;
  for (const Weight& x : weights) {
    const int64_t rows = std::max<int64_t>(1, BLOCK / std::max<int64_t>(1, x.columns));
    for (int64_t i = 0; i < x.rows; i += rows) all.push_back({&x, i, std::min(x.rows, i + rows), {}});
  }
  at::parallel_for(0, int64_t(all.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      Work& work = all[i];
      if (work.weight->across) work.sums.assign(work.weight->columns, 0.0f);
      any_rows(*work.weight, work.from, work.to, work.sums.data());
    }
  });
  for (const Weight& x : weights)
    if (x.across) std::fill(x.squares, x.squares + x.columns, 0.0);
  for (const Work& work : all)
    for (size_t j = 0; j < work.sums.size(); ++j) work.weight->squares[j] += double(work.sums[j]);
}

struct Options {
  double lr, beta1, beta2, eps, decay;
  bool decoupled, plain, maximize;
};

Rule rule_of(double step, const Options& o) {
  const double part1 = 1 - std::pow(o.beta1, step), part2 = 1 - std::pow(o.beta2, step);
  // Without decay nothing is added to the gradient, not even 0 · w.
  return {!o.decoupled && o.decay != 0 ? COUPLED : o.plain ? PLAIN : SCALED,
          o.maximize ? -1.0f : 1.0f,
          float(o.decay),
          o.decoupled ? float(1 - o.lr * o.decay) : 1.0f,
          float(1 - o.beta1),
          float(o.beta2),
          float(1 - o.beta2),
          float(std::sqrt(part2)),
          float(o.eps),
          float(-(o.lr / part1))};
}

bool dense(const Tensor& x) { return x.device().is_cpu() && x.scalar_type() == at::kFloat; }

// Checks one weight and what belongs to it, and says how it lies.
Weight weight_of(const Tensor& w, const Tensor& g, const Tensor& m, const Tensor& v, const Tensor* top,
                 const Tensor& step, const Tensor& rate, const Tensor& squares, int64_t axis) {
  const bool lying = w.dim() == 1 || w.is_contiguous();
  TORCH_CHECK(dense(w) && (w.dim() == 1 || w.dim() == 2) && (lying ? w.is_contiguous() : w.t().is_contiguous()),
              "expected dense float32 matrices or vectors on the CPU, got ", w.sizes(), " of ", w.scalar_type());
  for (const Tensor* x : {&g, &m, &v, top ? top : &w})
    TORCH_CHECK(dense(*x) && x->sizes() == w.sizes() && x->strides() == w.strides(),
                "expected gradient and state of the shape, strides and dtype of their weight ", w.sizes(), ", got ",
                x->sizes(), " of ", x->scalar_type());
  TORCH_CHECK(dense(step) && step.numel() == 1, "expected the number of steps as one float32 number");
  TORCH_CHECK(axis == 0 || axis == 1, "expected lines along axis 0 or 1, got ", axis);
  const int64_t lines = w.dim() == 1 ? w.numel() : w.size(axis);
  TORCH_CHECK(dense(rate) && rate.is_contiguous() && rate.numel() == lines && squares.device().is_cpu() &&
                  squares.scalar_type() == at::kDouble && squares.is_contiguous() && squares.numel() == lines,
              "expected ", lines, " float32 rates and float64 squares, got ", rate.sizes(), " and ", squares.sizes());
  const int64_t rows = w.dim() == 1 ? 1 : w.size(lying ? 0 : 1);
  return {w.mutable_data_ptr<float>(), m.mutable_data_ptr<float>(), v.mutable_data_ptr<float>(),
          top ? top->mutable_data_ptr<float>() : nullptr, step.mutable_data_ptr<float>(), g.const_data_ptr<float>(),
          rate.const_data_ptr<float>(), squares.mutable_data_ptr<double>(), rows, w.numel() / std::max<int64_t>(1, rows),
          w.dim() == 1 || (axis == 1) == lying, {}};
}

// The dispatcher leaves counting changes to who makes them.
void changed(TensorList all) {
  for (const Tensor& x : all)
    if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

void adam_lines(TensorList w, TensorList g, TensorList m, TensorList v, TensorList top, TensorList step,
                TensorList rates, TensorList squares, at::IntArrayRef axes, double lr, double beta1, double beta2,
                double eps, double decay, bool decoupled, bool plain, bool maximize) {
  const size_t n = w.size();
  for (TensorList x : {g, m, v, step, rates, squares}) TORCH_CHECK(x.size() == n, "expected ", n, " of each tensor");
  TORCH_CHECK(axes.size() == n && (top.empty() || top.size() == n), "expected ", n, " axes, and as many maxima or none");
  const Options o{lr, beta1, beta2, eps, decay, decoupled, plain, maximize};
  std::vector<Weight> weights;
  for (size_t i = 0; i < n; ++i)
    weights.push_back(weight_of(w[i], g[i], m[i], v[i], top.empty() ? nullptr : &top[i], step[i], rates[i], squares[i],
                                axes[i]));
  for (Weight& x : weights) x.rule = rule_of(++*x.step, o);
  run(weights);
  for (TensorList x : {w, m, v, top, step, squares}) changed(x);
}

// Heads [n r m] times a factor [n] each. Those at 1 are not even read.
void scale_heads(TensorList heads, TensorList factors) {
  TORCH_CHECK(heads.size() == factors.size(), "expected factors for each of ", heads.size(), " tensors");
  struct Head {
    float* from;
    int64_t rows, columns, row, column;
    float factor;
  };
  std::vector<Head> over;
  for (size_t i = 0; i < heads.size(); ++i) {
    const Tensor &x = heads[i], &f = factors[i];
    TORCH_CHECK(dense(x) && x.dim() == 3 && dense(f) && f.dim() == 1 && f.size(0) == x.size(0),
                "expected float32 heads [n r m] and factors [n] on the CPU, got ", x.sizes(), " and ", f.sizes());
    const bool lying = x.stride(2) <= x.stride(1);
    const int64_t across = lying ? 1 : 2, along = lying ? 2 : 1;
    for (int64_t h = 0; h < x.size(0); ++h) {
      const float factor = f.const_data_ptr<float>()[h * f.stride(0)];
      if (factor != 1.0f)
        over.push_back({x.mutable_data_ptr<float>() + h * x.stride(0), x.size(across), x.size(along), x.stride(across),
                        x.stride(along), factor});
    }
  }
  at::parallel_for(0, int64_t(over.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k)
      for (int64_t i = 0; i < over[k].rows; ++i) {
        const float factor = over[k].factor;
        const int64_t n = over[k].columns, step = over[k].column;
        float* p = over[k].from + i * over[k].row;
        if (step == 1)
          for (int64_t j = 0; j < n; ++j) p[j] *= factor;
        else
          for (int64_t j = 0; j < n; ++j) p[j * step] *= factor;
      }
  });
  changed(heads);
}

} // namespace

TORCH_LIBRARY_FRAGMENT(qkeel_native, m) {
  m.def("adam_lines(Tensor(a!)[] w, Tensor[] g, Tensor(b!)[] m, Tensor(c!)[] v, Tensor(d!)[] top, Tensor(e!)[] step,"
        " Tensor[] rates, Tensor(f!)[] squares, int[] axes, float lr, float beta1, float beta2, float eps, float decay,"
        " bool decoupled, bool plain, bool maximize) -> ()");
  m.def("scale_heads(Tensor(a!)[] heads, Tensor[] factors) -> ()");
}

TORCH_LIBRARY_IMPL(qkeel_native, CPU, m) {
  m.impl("adam_lines", &adam_lines);
  m.impl("scale_heads", &scale_heads);
}
