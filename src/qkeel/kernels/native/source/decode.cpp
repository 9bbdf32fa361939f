// Attention of a few queries to many keys. Every block of keys and values is read once for all the query heads that
// share it. Keys are split into parts, of a size that their number alone decides, and threads take parts: so threads
// change no bit.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "decode_few.h"
#include "decode_many.h"

namespace {

using namespace qkeel;
using at::Tensor;

constexpr int64_t PART = 512, PARTS = 32; // fewest keys that one thread takes together; most parts
constexpr int64_t WIDEST = 1024;          // numbers in a head
constexpr int64_t FEW = 8;                // queries per key head; for more, products of matrices are faster

// One query, its parts put together.
void join(const float* parts, int64_t size, int64_t n, int64_t width, float* row) {
  float top = NEVER, sum = 0;
  for (int64_t p = 0; p < n; ++p) {
    const float y = parts[p * size + width];
    top = y > top || y != y ? y : top;
  }
  const float from = top == NEVER ? 0.0f : top;
  std::fill(row, row + width, 0.0f);
  for (int64_t p = 0; p < n; ++p) {
    const float* one = parts + p * size;
    if (one[width + 1] == 0.0f) continue;
    const float down = one[width] == NEVER ? 1.0f : std::exp(one[width] - from); // 1: only what is no number
    sum += down * one[width + 1];
    for (int64_t i = 0; i < width; ++i) row[i] += down * one[i];
  }
  // A query without a visible key has weights 0.
  for (int64_t i = 0; i < width && sum != 0.0f; ++i) row[i] /= sum;
}

template <typename Q> void read(const Call& c, const Tensor& q, float* to) {
  for (int64_t x = 0; x < c.b * c.g; ++x)
    for (int64_t r = 0; r < c.rows; ++r, to += c.d) {
      const Q* row = q.const_data_ptr<Q>() + x / c.g * q.stride(0) + c.head(x % c.g, r) * q.stride(1) + r % c.t * q.stride(2);
      const float* from = load(row, to, c.d);
      for (int64_t i = 0; i < c.d; ++i) to[i] = from[i] * c.scale;
    }
}

template <typename T, typename Q> void attend(const Call& c, const Tensor& q, Tensor& out) {
  const int64_t groups = c.b * c.g, size = c.width + 2;
  std::vector<float> queries(groups * c.rows * c.d), room(groups * c.parts * c.rows * size);
  read<Q>(c, q, queries.data());
  const bool dots = c.rows <= FEW;
  at::parallel_for(0, groups * c.parts, 1, [&](int64_t first, int64_t last) {
    std::vector<State> states(c.rows);
    for (int64_t task = first; task < last; ++task) {
      const int64_t x = task / c.parts, part = task % c.parts;
      float* own = room.data() + task * c.rows * size;
      for (int64_t r = 0; r < c.rows; ++r) states[r] = {NEVER, 0.0f, own + r * size};
      const int64_t from = std::max(part * c.part, c.first(0)), to = std::min({(part + 1) * c.part, c.s, c.end(c.t - 1)});
      if (from < to)
        (dots ? few<T> : many<T>)(c, x / c.g, x % c.g, from, to, queries.data() + x * c.rows * c.d, states.data());
      for (const State& state : states) state.values[c.width] = state.top, state.values[c.width + 1] = state.sum;
    }
  });
  Q* end = out.mutable_data_ptr<Q>();
  at::parallel_for(0, groups * c.rows, std::max<int64_t>(1, 65536 / (c.parts * size)), [&](int64_t first, int64_t last) {
    std::vector<float> made(c.width);
    for (int64_t at = first; at < last; ++at) {
      const int64_t x = at / c.rows, r = at % c.rows;
      Q* to = end + x / c.g * out.stride(0) + c.head(x % c.g, r) * out.stride(1) + r % c.t * out.stride(2);
      float* row = target(to, made.data());
      join(room.data() + (x * c.parts * c.rows + r) * size, c.rows * size, c.parts, c.width, row);
      store(row, to, c.width);
    }
  });
}

void check(const Tensor& q, const Tensor& k, const Tensor& v, double cap, int64_t window) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(0) == k.size(0) && k.size(0) == v.size(0) &&
                  k.size(1) == v.size(1) && k.size(2) == v.size(2) && q.size(3) == k.size(3) && k.size(1) > 0 &&
                  q.size(1) % k.size(1) == 0,
              "expected q [b h t d], k [b g s d], v [b g s d'], h a multiple of g; got ", q.sizes(), ", ", k.sizes(),
              ", ", v.sizes());
  TORCH_CHECK(q.size(3) % 8 == 0 && v.size(3) % 8 == 0 && q.size(3) <= WIDEST && v.size(3) <= WIDEST && q.size(3) > 0 &&
                  v.size(3) > 0 && window >= 0 && cap >= 0,
              "expected head sizes that are multiples of 8, at most ", WIDEST, ", and no negative window or cap");
  TORCH_CHECK(k.scalar_type() == v.scalar_type() && (q.scalar_type() == k.scalar_type() || q.scalar_type() == at::kFloat),
              "expected one dtype, or q of float32");
}

Tensor decode(const Tensor& q_, const Tensor& k, const Tensor& v, const Maybe& mask, const Maybe& inverse, double scale,
              double cap, bool causal, int64_t window) {
  check(q_, k, v, cap, window);
  const Tensor q = with_last_dense(q_);
  Call c{with_last_dense(k), with_last_dense(v), float(scale), float(cap), causal, window, q.size(0), q.size(1), k.size(1),
         q.size(2), k.size(2), q.size(3), v.size(3)};
  c.rows = c.h / c.g * c.t;
  c.part = std::max(PART, round_up((c.s + PARTS - 1) / PARTS, PART));
  c.parts = std::max<int64_t>(1, (c.s + c.part - 1) / c.part);
  if (mask) {
    TORCH_CHECK(mask->scalar_type() == at::kBool && mask->dim() == 4 && mask->device().is_cpu(),
                "expected a boolean mask of four dimensions");
    c.mask = mask->expand({c.b, c.h, c.t, c.s});
    c.seen = c.mask->const_data_ptr<bool>();
    c.m0 = c.mask->stride(0), c.m1 = c.mask->stride(1), c.m2 = c.mask->stride(2), c.m3 = c.mask->stride(3);
  }
  if (inverse) {
    TORCH_CHECK(inverse->scalar_type() == at::kFloat && inverse->dim() == 3 && inverse->device().is_cpu(),
                "expected float32 factors of the logits, [b h s] or [b 1 s]");
    c.inverse = with_last_dense(*inverse).expand({c.b, c.h, c.s});
    c.factors = c.inverse->const_data_ptr<float>(), c.f0 = c.inverse->stride(0), c.f1 = c.inverse->stride(1);
  }
  Tensor out = at::empty({c.b, c.t, c.h, c.width}, q.options()).transpose(1, 2);
  if (!out.numel()) return out;
  const auto type = k.scalar_type();
  const bool mixed = q.scalar_type() != type;
  if (type == at::kFloat) attend<float, float>(c, q, out);
  else if (type == at::kBFloat16) (mixed ? attend<c10::BFloat16, float> : attend<c10::BFloat16, c10::BFloat16>)(c, q, out);
  else if (type == at::kHalf) (mixed ? attend<c10::Half, float> : attend<c10::Half, c10::Half>)(c, q, out);
  else TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", type);
  return out;
}

} // namespace

TORCH_LIBRARY_FRAGMENT(qkeel_native, m) {
  m.def("decode(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? inverse, float scale, float cap, bool causal, "
        "int window) -> Tensor");
}

TORCH_LIBRARY_IMPL(qkeel_native, CPU, m) { m.impl("decode", &decode); }
