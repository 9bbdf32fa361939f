// The gradient of attention in q, k and v from the logsumexp of its rows, T×T never stored. Storage float, bfloat16 or
// half; arithmetic float. A key block stays, row blocks pass by it:
//   S = scale·Q K'   P = exp(cap(S + mask) - lse)   dV += P' dO   dP = dO V'   dS = P ∘ (dP - D) ∘ cap'(S)
//   dQ += dS K       dK += dS' Q                     D = Σ dO ∘ O
// Every sum has one order, which the shape decides: threads change no bit.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "rows.h"
#include "tile.h"

namespace {

using namespace qkeel;

using at::Tensor;
using Maybe = std::optional<Tensor>;

#ifndef QK_ROWS
#define QK_ROWS 96
#define QK_KEYS 96
#endif
constexpr int64_t ROWS = QK_ROWS, KEYS = QK_KEYS;         // of a tile
constexpr int64_t LOGITS = row_stride(KEYS);    // floats from row to row of one
constexpr int64_t PART = 16;                    // rows or keys whose hidden part is left out of a product, at once
constexpr int64_t TASKS = 16, LEAST_BLOCKS = 4; // work is cut to this many pieces, of this many key blocks or more
constexpr float INF = std::numeric_limits<float>::infinity();

struct Range {
  int64_t from, to;
  Range within(int64_t low, int64_t high) const {
    int64_t a = std::clamp(from, low, high);
    return {a, std::max(a, std::min(to, high))};
  }
};

// Who sees whom, masks aside: row i stands at i + offset among the keys.
struct Sight {
  bool causal;
  int64_t window, offset, t, s;  // window 0: none

  Range keys(int64_t i) const {
    int64_t at = i + offset;
    return Range{window ? at - window + 1 : 0, causal ? at + 1 : window ? at + window : s}.within(0, s);
  }
  Range keys(int64_t first, int64_t last) const { return {keys(first).from, keys(last).to}; }
  Range rows(int64_t first, int64_t last) const {  // that see any of the keys first .. last
    int64_t low = causal ? first - offset : window ? first - offset - window + 1 : 0;
    return Range{low, window ? last - offset + window : t}.within(0, t);
  }
  bool whole(Range i, Range j) const {
    Range a = keys(i.from), b = keys(i.to - 1);
    return std::max(a.from, b.from) <= j.from && std::min(a.to, b.to) >= j.to;
  }
};

struct Rows {  // a tensor [b h t d], the last dimension dense
  const void* data;
  int64_t at[3], d;
  Rows(const Tensor& x) : data(x.const_data_ptr()), at{x.stride(0), x.stride(1), x.stride(2)}, d(x.size(3)) {}
  template <typename T> T* row(int64_t b, int64_t h, int64_t t) const {
    return static_cast<T*>(const_cast<void*>(data)) + b * at[0] + h * at[1] + t * at[2];
  }
};

struct Mask {  // [b h t s] broadcast; nothing, boolean or additive
  const bool* keep = nullptr;
  const float* add = nullptr;
  int64_t at[4] = {};
  float hidden = -INF;  // what is at most this hides
  explicit operator bool() const { return keep || add; }
};

struct Problem {
  Rows up, q, k, v, out, dq, dk, dv;
  const float* lse;
  Mask mask;
  Sight sight;
  int64_t b, h, g, t, s, d, e, pieces;  // e: width of v; pieces: parts of the key blocks, each with a dq of its own
  float scale, cap;
  int64_t ld() const { return row_stride(round_up(d, 8)); }
  int64_t le() const { return row_stride(round_up(e, 8)); }
  int64_t blocks() const { return (s + KEYS - 1) / KEYS; }
  bool grouped() const { return h > g; }
};

// n rows as float, `stride` apart, times `by`, zeros up to the next 8.
template <typename T>
void fetch(const Rows& x, int64_t b, int64_t h, int64_t from, int64_t n, float by, float* to, int64_t stride) {
  const int64_t wide = round_up(x.d, 8);
  for (int64_t i = 0; i < n; ++i, to += stride) {
    const float* row = load(x.row<const T>(b, h, from + i), to, x.d);
    for (int64_t j = 0; j < x.d; ++j) to[j] = row[j] * by;
    for (int64_t j = x.d; j < wide; ++j) to[j] = 0;
  }
}

template <typename T>
void deliver(const float* from, int64_t stride, float by, const Rows& x, int64_t b, int64_t h, int64_t first, int64_t n) {
  alignas(64) float made[1024];
  for (int64_t i = 0; i < n; ++i, from += stride) {
    T* end = x.row<T>(b, h, first + i);
    float* to = target(end, made);
    for (int64_t j = 0; j < x.d; ++j) to[j] = from[j] * by;
    store(to, end, x.d);
  }
}

// What one thread works in.
struct Room {
  float *q, *up, *dq, *lse, *dot;               // of a query head: scale·q, dO and dq [t], lse and D
  float *k, *kt, *vt, *dk, *dv, *p, *ds, *raw;  // of a tile; dk and dv of all keys where heads share them
  static int64_t size(const Problem& w) {
    int64_t kept = (w.grouped() ? w.blocks() : 1) * KEYS, wide = round_up(w.d, 8) + round_up(w.e, 8);
    return w.t * (2 * w.ld() + w.le()) + 2 * round_up(w.t, 16) + KEYS * std::max(w.ld(), w.le()) + wide * LOGITS +
           kept * (w.ld() + w.le()) + 3 * ROWS * LOGITS + 1024;
  }
  Room(const Problem& w, float* at) {
    auto take = [&at](int64_t n) { return std::exchange(at, at + n); };
    int64_t kept = (w.grouped() ? w.blocks() : 1) * KEYS;
    q = take(w.t * w.ld()), dq = take(w.t * w.ld()), up = take(w.t * w.le());
    lse = take(round_up(w.t, 16)), dot = take(round_up(w.t, 16));
    k = take(KEYS * std::max(w.ld(), w.le())), kt = take(round_up(w.d, 8) * LOGITS), vt = take(round_up(w.e, 8) * LOGITS);
    dk = take(kept * w.ld()), dv = take(kept * w.le());
    p = take(ROWS * LOGITS), ds = take(ROWS * LOGITS), raw = take(1024);
  }
};

inline float visible(const Mask& m, const bool* keep, const float* add, int64_t j, float z) {
  if (keep) return keep[j * m.at[3]] ? z : -INF;
  float bias = add[j * m.at[3]];
  return bias <= m.hidden ? -INF : z + bias;
}

// P and dS of a tile, in place of S and dP: rows i, keys j.
template <bool CAPPED>
void weigh(const Problem& w, const Room& room, int64_t b, int64_t h, Range i, Range j) {
  const int64_t n = j.to - j.from, wide = round_up(n, LANES);
  for (int64_t r = i.from; r < i.to; ++r) {
    float *p = room.p + (r - i.from) * LOGITS, *ds = room.ds + (r - i.from) * LOGITS;
    Range seen = w.sight.keys(r).within(j.from, j.to);
    const int64_t low = seen.from - j.from, high = seen.to - j.from;
    if (w.mask) {
      int64_t at = b * w.mask.at[0] + h * w.mask.at[1] + r * w.mask.at[2] + j.from * w.mask.at[3];
      const bool* keep = w.mask.keep ? w.mask.keep + at : nullptr;
      const float* add = w.mask.add ? w.mask.add + at : nullptr;
      for (int64_t c = low; c < high; ++c) p[c] = visible(w.mask, keep, add, c, p[c]);
    }
    const float lse = room.lse[r], dot = room.dot[r];
    for (int64_t c = low / LANES * LANES; c < high; c += LANES) {
      Lanes z = lanes(p + c), slope = lanes(ds + c) - dot;
      if constexpr (CAPPED) {
        Lanes capped = hyperbolic_tangent(z / w.cap);
        slope *= (1.0f - capped) * (1.0f + capped);
        z = z == -INF ? z : capped * w.cap;
      }
      Lanes weight = exponential(z - lse);
      put(p + c, weight), put(ds + c, weight * slope);
    }
    for (int64_t c = 0; c < low; ++c) p[c] = ds[c] = 0;  // what was there may be anything
    for (int64_t c = high; c < wide; ++c) p[c] = ds[c] = 0;
  }
}

// One tile: its share of dq, dk and dv.
void tile(const Problem& w, const Room& room, float* dq, float* dk, float* dv, int64_t b, int64_t h, Range i, Range j) {
  const int64_t ld = w.ld(), le = w.le(), d = round_up(w.d, 8), e = round_up(w.e, 8);
  const int64_t m = i.to - i.from, n = j.to - j.from;
  const float *q = room.q + i.from * ld, *up = room.up + i.from * le;
  const bool whole = w.sight.whole(i, j);
  const int64_t part = whole ? KEYS : PART, strip = whole ? ROWS : PART;
  auto rows = [&](int64_t c, int64_t to) {  // of the tile, that see any of its keys c .. to
    Range r = w.sight.rows(j.from + c, j.from + to - 1).within(i.from, i.to);
    return Range{r.from - i.from, r.to - i.from};
  };
  for (int64_t c = 0; c < n; c += part) {
    Range r = rows(c, std::min(c + part, n));
    const int64_t high = r.to - r.from, width = round_up(std::min(part, n - c), 8), to = r.from * LOGITS + c;
    multiply<false>(high, width, d, q + r.from * ld, ld, room.kt + c, LOGITS, room.p + to, LOGITS, false);
    multiply<false>(high, width, e, up + r.from * le, le, room.vt + c, LOGITS, room.ds + to, LOGITS, false);
  }
  if (w.cap > 0) weigh<true>(w, room, b, h, i, j);
  else weigh<false>(w, room, b, h, i, j);
  for (int64_t c = 0; c < n; c += part) {
    Range r = rows(c, std::min(c + part, n));
    const int64_t high = r.to - r.from, width = std::min(part, n - c), from = r.from * LOGITS + c;
    multiply<true>(width, e, high, room.p + from, LOGITS, up + r.from * le, le, dv + c * le, le, true);
    multiply<true>(width, d, high, room.ds + from, LOGITS, q + r.from * ld, ld, dk + c * ld, ld, true);
  }
  for (int64_t r = 0; r < m; r += strip) {
    const int64_t last = std::min(r + strip, m);
    Range c = w.sight.keys(i.from + r, i.from + last - 1).within(j.from, j.to);
    const int64_t from = c.from - j.from;
    multiply<false>(last - r, d, c.to - c.from, room.ds + r * LOGITS + from, LOGITS, room.k + from * ld, ld,
                    dq + (i.from + r) * ld, ld, true);
  }
}

// The rows of a query head, once for all key blocks.
template <typename T> void open(const Problem& w, const Room& room, float* dq, int64_t b, int64_t h) {
  fetch<T>(w.q, b, h, 0, w.t, w.scale, room.q, w.ld());
  fetch<T>(w.up, b, h, 0, w.t, 1.0f, room.up, w.le());
  const float* lse = w.lse + (b * w.h + h) * w.t;
  for (int64_t i = 0; i < w.t; ++i) {
    const float* out = load(w.out.row<const T>(b, h, i), room.raw, w.e);
    const float* up = room.up + i * w.le();
    float dot[8] = {};
    int64_t j = 0;
    for (; j + 8 <= w.e; j += 8)
      for (int64_t l = 0; l < 8; ++l) dot[l] += out[j + l] * up[j + l];
    for (; j < w.e; ++j) dot[0] += out[j] * up[j];
    room.dot[i] = ((dot[0] + dot[4]) + (dot[1] + dot[5])) + ((dot[2] + dot[6]) + (dot[3] + dot[7]));
    room.lse[i] = lse[i] == -INF ? INF : lse[i];  // sees nothing: every weight e^-inf
  }
  std::memset(dq, 0, w.t * w.ld() * sizeof(float));
}

// The heads that share a key head, against every w.pieces-th key block.
template <typename T>
void task(const Problem& w, const Room& room, float* parts, int64_t b, int64_t g, int64_t piece) {
  const int64_t ld = w.ld(), le = w.le(), heads = w.h / w.g;
  for (int64_t h = g * heads; h < (g + 1) * heads; ++h) {
    float* dq = w.pieces > 1 ? parts + ((b * w.h + h) * w.pieces + piece) * w.t * ld : room.dq;
    open<T>(w, room, dq, b, h);
    for (int64_t block = piece; block < w.blocks(); block += w.pieces) {
      const Range j{block * KEYS, std::min(w.s, (block + 1) * KEYS)};
      const int64_t n = j.to - j.from;
      float *dk = room.dk + (w.grouped() ? j.from * ld : 0), *dv = room.dv + (w.grouped() ? j.from * le : 0);
      if (h == g * heads) std::memset(dk, 0, n * ld * sizeof(float)), std::memset(dv, 0, n * le * sizeof(float));
      fetch<T>(w.v, b, g, j.from, n, 1.0f, room.k, le);
      transpose(n, round_up(w.e, 8), room.k, le, 1.0f, room.vt, LOGITS);
      fetch<T>(w.k, b, g, j.from, n, 1.0f, room.k, ld);
      transpose(n, round_up(w.d, 8), room.k, ld, 1.0f, room.kt, LOGITS);
      const Range seen = w.sight.rows(j.from, j.to - 1);
      for (int64_t i = seen.from; i < seen.to; i += ROWS)
        tile(w, room, dq, dk, dv, b, h, {i, std::min(i + ROWS, seen.to)}, j);
      if (h + 1 < (g + 1) * heads) continue;
      deliver<T>(dk, ld, 1.0f, w.dk, b, g, j.from, n);
      deliver<T>(dv, le, 1.0f, w.dv, b, g, j.from, n);
    }
    if (w.pieces == 1) deliver<T>(dq, ld, w.scale, w.dq, b, h, 0, w.t);
  }
}

template <typename T> void solve(const Problem& w, const at::TensorOptions& floats) {
  const int64_t ld = w.ld(), one = w.t * ld, room = Room::size(w);
  Tensor rooms = at::empty({at::get_num_threads(), room}, floats);
  Tensor parts = at::empty({w.pieces > 1 ? w.b * w.h * w.pieces * one : 0}, floats);
  float *space = rooms.mutable_data_ptr<float>(), *sums = parts.mutable_data_ptr<float>();
  at::parallel_for(0, w.b * w.g * w.pieces, 1, [&](int64_t from, int64_t to) {
    const Room own(w, space + at::get_thread_num() * room);
    for (int64_t n = from; n < to; ++n)
      task<T>(w, own, sums, n / w.pieces / w.g, n / w.pieces % w.g, n % w.pieces);
  });
  if (w.pieces == 1) return;
  at::parallel_for(0, w.b * w.h, 1, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; ++n) {
      float* first = sums + n * w.pieces * one;
      for (int64_t piece = 1; piece < w.pieces; ++piece)
        for (int64_t i = 0; i < one; ++i) first[i] += first[piece * one + i];
      deliver<T>(first, ld, w.scale, w.dq, n / w.h, n % w.h, 0, w.t);
    }
  });
}

Tensor with_last_dense(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

void check(const Tensor& up, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
           const Maybe& mask, int64_t window, double cap) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(0) == k.size(0) && q.size(3) == k.size(3) &&
                  k.size(0) == v.size(0) && k.size(1) == v.size(1) && k.size(2) == v.size(2) &&
                  (k.size(1) ? q.size(1) % k.size(1) == 0 : q.size(1) == 0),
              "expected q [b h t d], k [b g s d] and v [b g s e] with h a multiple of g; got ", q.sizes(), ", ",
              k.sizes(), ", ", v.sizes());
  TORCH_CHECK(q.size(3) && q.size(3) <= 1024 && v.size(3) && v.size(3) <= 1024,
              "expected heads of 1 to 1024 numbers, got ", q.size(3), " and ", v.size(3));
  const auto dtype = q.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
              "expected float32, bfloat16 or float16, got ", dtype);
  const bool widths = up.sizes() == out.sizes() && out.dim() == 4 && out.size(3) == v.size(3);
  TORCH_CHECK(widths && out.sizes().slice(0, 3) == q.sizes().slice(0, 3) && lse.sizes() == q.sizes().slice(0, 3),
              "expected the output and its gradient [b h t e] and lse [b h t] of this q and v; got ", out.sizes(), ", ",
              up.sizes(), ", ", lse.sizes());
  for (const Tensor& x : {up, k, v, out})
    TORCH_CHECK(x.scalar_type() == dtype && x.device() == q.device(), "expected ", dtype, " on ", q.device(),
                " throughout, got ", x.scalar_type(), " on ", x.device());
  TORCH_CHECK(lse.scalar_type() == at::kFloat, "expected lse in float32, got ", lse.scalar_type());
  TORCH_CHECK(window >= 0 && cap >= 0, "expected a window and a cap of 0 (none) or more, got ", window, " and ", cap);
  if (!mask) return;
  bool fits = mask->dim() == 4;
  const int64_t full[4] = {q.size(0), q.size(1), q.size(2), k.size(2)};
  for (int64_t i = 0; fits && i < 4; ++i) fits = mask->size(i) == 1 || mask->size(i) == full[i];
  TORCH_CHECK(fits && (mask->scalar_type() == at::kBool || mask->is_floating_point()),
              "expected a boolean or float mask that broadcasts to [b h t s], got ", mask->scalar_type(), " ",
              mask->sizes());
}

double lowest(const Tensor& mask) {
  if (mask.scalar_type() == at::kHalf) return -65504.0;
  return mask.scalar_type() == at::kBFloat16 ? -3.3895313892515355e38 : -3.4028234663852886e38;
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& up_, const Tensor& q_, const Tensor& k_,
                                                      const Tensor& v_, const Tensor& out_, const Tensor& lse_,
                                                      const Maybe& mask_, double scale, bool causal, int64_t window,
                                                      double cap) {
  check(up_, q_, k_, v_, out_, lse_, mask_, window, cap);
  Tensor up = with_last_dense(up_), q = with_last_dense(q_), k = with_last_dense(k_), v = with_last_dense(v_);
  Tensor out = with_last_dense(out_), lse = lse_.contiguous(), mask = mask_ ? *mask_ : Tensor();
  Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  if (!q.numel() || !k.numel()) return {dq.zero_(), dk.zero_(), dv.zero_()};
  const int64_t b = q.size(0), h = q.size(1), g = k.size(1), t = q.size(2), s = k.size(2);
  Problem w{up, q, k, v, out, dq, dk, dv, lse.const_data_ptr<float>(), {}, {causal, window, s - t, t, s},
            b, h, g, t, s, q.size(3), v.size(3), 1, float(scale), float(cap)};
  w.pieces = std::clamp<int64_t>(std::min((TASKS + b * g - 1) / (b * g), w.blocks() / LEAST_BLOCKS), 1, TASKS);
  if (mask.defined()) {
    if (mask.scalar_type() == at::kBool) {
      w.mask.keep = mask.const_data_ptr<bool>();
    } else {
      w.mask.hidden = float(lowest(mask));
      mask = mask.to(at::kFloat);
      w.mask.add = mask.const_data_ptr<float>();
    }
    for (int64_t i = 0; i < 4; ++i) w.mask.at[i] = mask.size(i) == 1 ? 0 : mask.stride(i);
  }
  const auto floats = q.options().dtype(at::kFloat);
  if (q.scalar_type() == at::kFloat) solve<float>(w, floats);
  else if (q.scalar_type() == at::kBFloat16) solve<c10::BFloat16>(w, floats);
  else solve<c10::Half>(w, floats);
  return {dq, dk, dv};
}

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct Once : torch::autograd::Function<Once> {
  static tensor_list forward(AutogradContext*, const Tensor& up, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& lse, const Maybe& mask, double scale, bool causal,
                             int64_t window, double cap) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("qkeel_native::attention_backward", "")
                         .typed<decltype(attention_backward)>();
    auto [dq, dk, dv] = op.call(up, q, k, v, out, lse, mask, scale, causal, window, cap);
    return {dq, dk, dv};
  }
  static tensor_list backward(AutogradContext*, tensor_list) {
    TORCH_CHECK(false, "the fused attention can be differentiated once; QKEEL_NATIVE=0 does not fuse it");
  }
};

std::tuple<Tensor, Tensor, Tensor> attention_backward_tracked(const Tensor& up, const Tensor& q, const Tensor& k,
                                                              const Tensor& v, const Tensor& out, const Tensor& lse,
                                                              const Maybe& mask, double scale, bool causal,
                                                              int64_t window, double cap) {
  auto found = Once::apply(up, q, k, v, out, lse, mask, scale, causal, window, cap);
  return {found[0], found[1], found[2]};
}

} // namespace

TORCH_LIBRARY_FRAGMENT(qkeel_native, m) {
  m.def("attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask,"
        " float scale, bool causal, int window, float softcap) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(qkeel_native, CPU, m) { m.impl("attention_backward", &attention_backward); }

TORCH_LIBRARY_IMPL(qkeel_native, Autograd, m) { m.impl("attention_backward", &attention_backward_tracked); }
