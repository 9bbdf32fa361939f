// Attention of a few queries to many keys. Every block of keys and values is read once for all the query heads that
// share it. Keys are split into parts of a fixed size that threads take, so threads change no bit.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "rows.h"

namespace {

using namespace qkeel;
using at::Tensor;
using Maybe = std::optional<Tensor>;

constexpr int64_t PART = 512;    // keys that one thread takes together
constexpr int64_t BLOCK = 4096;  // numbers of keys, or of values, that are worked on at once: half an L1 cache
constexpr int64_t WIDEST = 1024; // numbers in a head
constexpr float NEVER = -std::numeric_limits<float>::infinity();

typedef int32_t I __attribute__((vector_size(32)));

// e^x for x <= 0, to two units in the last place; 0 under -87, NaN of NaN.
inline V exp8(V x) {
  const I low = x < -87.0f;
  x = low ? V{} - 87.0f : x;
  const V n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f; // to the nearest whole number
  V r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  V p = V{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const I power = (__builtin_convertvector(n, I) + 127) << 23;
  return low ? V{} : p * std::bit_cast<V>(power);
}

// The larger of each pair; NaN if one is.
inline V larger(V a, V b) { return (a > b) | (a != a) ? a : b; }
inline float largest(V a) {
  a = larger(a, __builtin_shufflevector(a, a, 4, 5, 6, 7, 0, 1, 2, 3));
  a = larger(a, __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5));
  return larger(a, __builtin_shufflevector(a, a, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}

// The sums of eight vectors, one beside the other.
inline V totals(const V* s) {
  auto two = [](V a, V b) {
    return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
           __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  };
  auto four = [](V a, V b) {
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  };
  const V a = four(two(s[0], s[1]), two(s[2], s[3])), b = four(two(s[4], s[5]), two(s[6], s[7]));
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

struct Call {
  Tensor q, k, v;
  Maybe mask;
  float scale;
  bool causal;
  int64_t window; // 0: none
  int64_t b, h, g, t, s, d, width, rows, parts, block;
  const bool* seen = nullptr;
  int64_t m0 = 0, m1 = 0, m2 = 0, m3 = 0;

  // The keys that the query at place i may see, by its place alone.
  int64_t first(int64_t i) const { return window ? std::max<int64_t>(0, s - t + i - window + 1) : 0; }
  int64_t end(int64_t i) const {
    const int64_t at = s - t + i;
    return std::clamp<int64_t>(causal ? at + 1 : window ? at + window : s, 0, s);
  }
};

// What is known of one query after some keys: the largest logit, the sum of weights, the weighted values.
struct State {
  float top, sum;
  float* values;
};

// Logits of one query with n keys; past n they are -inf.
inline void logits(const float* q, const float* const* keys, int64_t n, int64_t d, float* out) {
  for (int64_t j = 0; j < n; j += 8) {
    V s[8] = {};
    const float* const* k = keys + j;
    for (int64_t i = 0; i < d; i += 8) {
      const V x = at8(q + i);
      for (int64_t c = 0; c < 8; ++c) s[c] += x * at8(k[c] + i);
    }
    put8(out + j, totals(s));
  }
  for (int64_t j = n; j < (n + 7) / 8 * 8; ++j) out[j] = NEVER;
}

// values += weights · rows of v, eight vectors of it at a time in registers.
template <int64_t N> inline void weigh(float* values, const float* p, const float* const* v, int64_t n, int64_t at) {
  V sum[N];
  for (int64_t i = 0; i < N; ++i) sum[i] = at8(values + at + 8 * i);
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < N; ++i) sum[i] += p[j] * at8(v[j] + at + 8 * i);
  for (int64_t i = 0; i < N; ++i) put8(values + at + 8 * i, sum[i]);
}

inline void add(State& x, float* z, const float* const* v, int64_t n, int64_t width) {
  V most = at8(z);
  for (int64_t j = 8; j < n; j += 8) most = larger(at8(z + j), most);
  const float top = largest(most);
  if (top == NEVER) return;
  if (!(top <= x.top)) {
    const float down = x.top == NEVER ? 0.0f : std::exp(x.top - top);
    x.sum *= down;
    for (int64_t i = 0; i < width; i += 8) put8(x.values + i, at8(x.values + i) * down);
    x.top = top;
  }
  V sum{};
  for (int64_t j = 0; j < n; j += 8) {
    const V p = exp8(at8(z + j) - x.top);
    sum += p;
    put8(z + j, p);
  }
  x.sum += total(sum);
  int64_t i = 0;
  for (; i + 64 <= width; i += 64) weigh<8>(x.values, z, v, n, i);
  for (; i < width; i += 8) weigh<1>(x.values, z, v, n, i);
}

// Asks for rows of memory that will be read soon.
template <typename T> inline void fetch(const T* rows, int64_t step, int64_t width, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j)
    for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(rows + j * step + i);
}

// One part of the keys for the query heads of one key head: `states` of its rows.
template <typename T> void part_of(const Call& c, int64_t n, int64_t g, int64_t part, const float* q, State* states) {
  const T* keys = c.k.const_data_ptr<T>() + n * c.k.stride(0) + g * c.k.stride(1);
  const T* values = c.v.const_data_ptr<T>() + n * c.v.stride(0) + g * c.v.stride(1);
  const int64_t from = std::max(part * PART, c.first(0)), to = std::min({(part + 1) * PART, c.s, c.end(c.t - 1)});
  const int64_t per = c.h / c.g;
  const int64_t line = (c.block + 7) / 8 * 8;
  std::vector<float> room(2 * c.block * std::max(c.d, c.width)), z(c.rows * line);
  std::vector<const float*> k(line), v(line);
  for (int64_t start = from; start < to; start += c.block) {
    const int64_t many = std::min(c.block, to - start);
    for (int64_t j = 0; j < many; ++j) k[j] = load(keys + (start + j) * c.k.stride(2), room.data() + j * c.d, c.d);
    for (int64_t j = many; j < (many + 7) / 8 * 8; ++j) k[j] = k[0];
    for (int64_t r = 0; r < c.rows; ++r) {
      // While these are worked on, the next are on their way: the values of the block, then the keys of the one after.
      fetch(values + start * c.v.stride(2), c.v.stride(2), c.width, many * r / c.rows, many * (r + 1) / c.rows);
      const int64_t i = r % c.t, head = g * per + r / c.t;
      const int64_t first = std::max(c.first(i) - start, int64_t(0)), end = std::min(c.end(i) - start, many);
      float* own = z.data() + r * line;
      logits(q + r * c.d, k.data(), many, c.d, own);
      if (first > 0) std::fill(own, own + std::min(first, many), NEVER);
      if (end < many) std::fill(own + std::max(end, int64_t(0)), own + many, NEVER);
      if (c.seen) {
        const bool* seen = c.seen + n * c.m0 + head * c.m1 + i * c.m2 + start * c.m3;
        for (int64_t j = first; j < end; ++j)
          if (!seen[j * c.m3]) own[j] = NEVER;
      }
    }
    for (int64_t j = 0; j < many; ++j)
      v[j] = load(values + (start + j) * c.v.stride(2), room.data() + c.block * c.d + j * c.width, c.width);
    const int64_t next = std::min(c.block, to - start - many);
    for (int64_t r = 0; r < c.rows; ++r) {
      fetch(keys + (start + many) * c.k.stride(2), c.k.stride(2), c.d, next * r / c.rows, next * (r + 1) / c.rows);
      add(states[r], z.data() + r * line, v.data(), many, c.width);
    }
  }
}

template <typename T> void attend(const Call& c, Tensor& out) {
  const int64_t groups = c.b * c.g, per = c.h / c.g, size = c.rows * (c.width + 2);
  std::vector<float> queries(groups * c.rows * c.d), room(groups * c.parts * size);
  const T* q = c.q.const_data_ptr<T>();
  for (int64_t x = 0; x < groups; ++x)
    for (int64_t r = 0; r < c.rows; ++r) {
      const T* row = q + x / c.g * c.q.stride(0) + (x % c.g * per + r / c.t) * c.q.stride(1) + r % c.t * c.q.stride(2);
      float* to = queries.data() + (x * c.rows + r) * c.d;
      const float* from = load(row, to, c.d);
      for (int64_t i = 0; i < c.d; ++i) to[i] = from[i] * c.scale;
    }
  at::parallel_for(0, groups * c.parts, 1, [&](int64_t first, int64_t last) {
    std::vector<State> states(c.rows);
    for (int64_t task = first; task < last; ++task) {
      const int64_t x = task / c.parts;
      float* own = room.data() + task * size;
      for (int64_t r = 0; r < c.rows; ++r) states[r] = {NEVER, 0.0f, own + r * (c.width + 2)};
      part_of<T>(c, x / c.g, x % c.g, task % c.parts, queries.data() + x * c.rows * c.d, states.data());
      for (const State& state : states) state.values[c.width] = state.top, state.values[c.width + 1] = state.sum;
    }
  });
  T* end = out.mutable_data_ptr<T>();
  std::vector<float> made(c.width);
  for (int64_t x = 0; x < groups; ++x)
    for (int64_t r = 0; r < c.rows; ++r) {
      const float* parts = room.data() + x * c.parts * size + r * (c.width + 2);
      float top = NEVER, sum = 0;
      for (int64_t p = 0; p < c.parts; ++p) {
        const float y = parts[p * size + c.width];
        top = y > top || y != y ? y : top;
      }
      T* to = end + x / c.g * out.stride(0) + (x % c.g * per + r / c.t) * out.stride(1) + r % c.t * out.stride(2);
      float* row = target(to, made.data());
      std::fill(row, row + c.width, 0.0f);
      for (int64_t p = 0; p < c.parts && top != NEVER; ++p) {
        const float* one = parts + p * size;
        if (one[c.width] == NEVER) continue;
        const float down = std::exp(one[c.width] - top);
        sum += down * one[c.width + 1];
        for (int64_t i = 0; i < c.width; ++i) row[i] += down * one[i];
      }
      // A query that sees no key has weights 0.
      for (int64_t i = 0; i < c.width && top != NEVER; ++i) row[i] /= sum;
      store(row, to, c.width);
    }
}

Tensor decode(const Tensor& q, const Tensor& k, const Tensor& v, const Maybe& mask, double scale, bool causal,
              int64_t window) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(0) == k.size(0) && k.size(0) == v.size(0) &&
                  k.size(1) == v.size(1) && k.size(2) == v.size(2) && q.size(3) == k.size(3) && k.size(1) > 0 &&
                  q.size(1) % k.size(1) == 0,
              "expected q [b h t d], k [b g s d], v [b g s d'], h a multiple of g; got ", q.sizes(), ", ", k.sizes(),
              ", ", v.sizes());
  TORCH_CHECK(q.size(3) % 8 == 0 && v.size(3) % 8 == 0 && q.size(3) <= WIDEST && v.size(3) <= WIDEST && q.size(3) > 0 &&
                  v.size(3) > 0 && window >= 0,
              "expected head sizes that are multiples of 8, at most ", WIDEST, ", and no negative window");
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && k.scalar_type() == v.scalar_type(), "expected one dtype");
  Call c{with_last_dense(q), with_last_dense(k), with_last_dense(v), {}, float(scale), causal, window};
  c.b = q.size(0), c.h = q.size(1), c.g = k.size(1), c.t = q.size(2), c.s = k.size(2), c.d = q.size(3);
  c.width = v.size(3), c.rows = c.h / c.g * c.t, c.parts = std::max<int64_t>(1, (c.s + PART - 1) / PART);
  c.block = std::clamp<int64_t>(BLOCK / std::max(c.d, c.width) / 8 * 8, 8, PART);
  if (mask) {
    TORCH_CHECK(mask->scalar_type() == at::kBool && mask->dim() == 4 && mask->device().is_cpu(),
                "expected a boolean mask of four dimensions");
    c.mask = mask->expand({c.b, c.h, c.t, c.s});
    c.seen = c.mask->const_data_ptr<bool>();
    c.m0 = c.mask->stride(0), c.m1 = c.mask->stride(1), c.m2 = c.mask->stride(2), c.m3 = c.mask->stride(3);
  }
  Tensor out = at::empty({c.b, c.t, c.h, c.width}, q.options()).transpose(1, 2);
  if (!out.numel()) return out;
  if (q.scalar_type() == at::kFloat) attend<float>(c, out);
  else if (q.scalar_type() == at::kBFloat16) attend<c10::BFloat16>(c, out);
  else if (q.scalar_type() == at::kHalf) attend<c10::Half>(c, out);
  else TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", q.scalar_type());
  return out;
}

} // namespace

TORCH_LIBRARY_FRAGMENT(qkeel_native, m) {
  m.def("decode(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, int window) -> Tensor");
}

TORCH_LIBRARY_IMPL(qkeel_native, CPU, m) { m.impl("decode", &decode); }
