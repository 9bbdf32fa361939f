// The gradient of attention in q, k and v (see attention.cpp for what is meant by each argument) from the logsumexp of
// its rows; T×T is never stored. A block of keys stays, blocks of rows pass by it:
//   S = scale·Q K'   P = exp(cap(S + mask) - lse)   dV += P' dO   dP = dO V'   dS = P ∘ (dP - D) ∘ cap'(S)
//   dQ += dS K       dK += dS' Q                     D = Σ dO ∘ O
// (FlashAttention, Dao et al. 2022, arXiv 2205.14135, algorithm 4). q is scaled before the product, as on the way
// there, so S has the bits it had. Every sum has one order, which the shape decides: threads change no bit.
#include "attention.h"
#include "operators.h"

namespace {

using namespace qkeel;

constexpr int64_t ROWS = 96, KEYS = 96;         // of a tile
constexpr int64_t LOGITS = row_stride(KEYS);    // floats from row to row of one
constexpr int64_t PART = 16;                    // keys or rows whose hidden part is left out of a product, at once
constexpr int64_t TASKS = 16, LEAST_BLOCKS = 4; // work is cut to so many pieces, of so many key blocks at least
constexpr float INF = std::numeric_limits<float>::infinity();

// Of a tile: the rows that see any of some keys, and whether all see all.
struct Tiles : Visibility {
  Range rows(int64_t first, int64_t last) const {
    int64_t low = causal ? first - offset : window ? first - offset - window + 1 : 0;
    return Range{low, window ? last - offset + window : t}.within(0, t);
  }
  bool whole(Range i, Range j) const {
    Range a = keys(i.from), b = keys(i.to - 1);
    return std::max(a.from, b.from) <= j.from && std::min(a.to, b.to) >= j.to;
  }
};

struct Problem {
  Sizes n;
  const Array &up, &q, &k, &v, &out, &dq, &dk, &dv;
  const float *lse, *slopes;
  Mask mask;
  Tiles visibility;
  float scale, cap;
  int64_t pieces = 1;  // parts of the key blocks, each with a dq of its own
  const int64_t ld = row_stride(n.d), le = row_stride(n.e), blocks = (n.s + KEYS - 1) / KEYS, shared = n.h / n.g;
  const int64_t kept = (shared > 1 ? blocks : 1) * KEYS;  // rows of dk and dv that wait for more heads
};

void deliver(const float* from, int64_t stride, float by, const Array& x, int64_t b, int64_t h, int64_t first, int64_t n,
             float* room) {
  const int64_t d = x.size[3];
  for (int64_t i = 0; i < n; ++i, from += stride) {
    if (i + AHEAD < n) soon(x, x.row(b, h, first + i + AHEAD));
    char* end = x.row(b, h, first + i);
    float* to = target(end, x.type, room);
    for (int64_t j = 0; j < d; j += 8) put8(to + j, at8(from + j) * by);
    store(to, end, x.type, d);
  }
}

// What one thread works in.
struct Room {
  float *q, *up, *dq, *lse, *dot;                // of a query head: scale·q, dO and dq [t], lse and D
  float *k, *kt, *vt, *dk, *dv, *p, *ds, *bias, *row, *turned, *cross;  // of a tile; dk and dv of all keys where heads share them
  int64_t size = 0;
  Room(const Problem& w, float* at) {
    auto take = [&](int64_t n) { return at + std::exchange(size, size + round_up(n, 16)); };
    q = take(w.n.t * w.ld), dq = take(w.n.t * w.ld), up = take(w.n.t * w.le), lse = take(w.n.t), dot = take(w.n.t);
    k = take(KEYS * std::max(w.ld, w.le)), kt = take(w.n.d * LOGITS), vt = take(w.n.e * LOGITS);
    dk = take(w.kept * w.ld), dv = take(w.kept * w.le);
    p = take(ROWS * LOGITS), ds = take(ROWS * LOGITS), bias = take(LOGITS), row = take(std::max(w.n.d, 8 * w.n.e));
    turned = take(8 * w.n.e), cross = take(64);
  }
};

// P and dS of a tile, in place of S and dP: rows i, keys j.
template <bool CAPPED, bool BIASED>
void weigh(const Problem& w, const Room& room, int64_t b, int64_t h, Range i, Range j) {
  const int64_t wide = round_up(j.to - j.from, LANES);
  const float slope = BIASED && w.slopes ? w.slopes[h] : 0.0f;
  Lanes lane;
  for (int64_t l = 0; l < LANES; ++l) lane[l] = float(l);
  for (int64_t r = i.from; r < i.to; ++r) {
    float *p = room.p + (r - i.from) * LOGITS, *ds = room.ds + (r - i.from) * LOGITS;
    const Range seen = w.visibility.keys(r).within(j.from, j.to);
    const int64_t low = seen.from - j.from, high = seen.to - j.from;
    if (BIASED && w.mask.data) w.mask.read(b, h, r, seen.from, high - low, room.bias + low);
    const float lse = room.lse[r], dot = room.dot[r];
    for (int64_t c = low / LANES * LANES; c < high; c += LANES) {
      Lanes z = lanes(p + c), up = lanes(ds + c) - dot;
      if constexpr (BIASED) {
        Lanes ahead = float(j.from + c - r - w.visibility.offset) + lane;
        z = z - slope * (ahead < 0.0f ? -ahead : ahead);
        if (w.mask.data) z = hidden_as(lanes(room.bias + c), z + lanes(room.bias + c));
      }
      if constexpr (CAPPED) {
        Lanes capped = hyperbolic_tangent(z / w.cap);
        up *= (1.0f - capped) * (1.0f + capped);
        z = hidden_as(z, w.cap * capped);
      }
      Lanes weight = exponential(z - lse);
      put(p + c, weight), put(ds + c, weight * up);
    }
    for (int64_t c = 0; c < low; ++c) p[c] = ds[c] = 0;  // what was there may be anything
    for (int64_t c = high; c < wide; ++c) p[c] = ds[c] = 0;
  }
}

// One tile: its share of dq, dk and dv.
void tile(const Problem& w, const Room& room, float* dq, float* dk, float* dv, int64_t b, int64_t h, Range i, Range j) {
  const int64_t ld = w.ld, le = w.le, d = w.n.d, e = w.n.e, rows = i.to - i.from, keys = j.to - j.from;
  const float *q = room.q + i.from * ld, *up = room.up + i.from * le;
  const bool whole = w.visibility.whole(i, j);
  // f(first of some keys, their number, first of the rows that see any of them, their number)
  auto by_keys = [&](auto&& f) {
    for (int64_t c = 0, part = whole ? keys : PART; c < keys; c += part) {
      const int64_t some = std::min(part, keys - c);
      const Range r = w.visibility.rows(j.from + c, j.from + c + some - 1).within(i.from, i.to);
      f(c, some, r.from - i.from, r.to - r.from);
    }
  };
  by_keys([&](int64_t c, int64_t n, int64_t r, int64_t m) {
    const int64_t at = r * LOGITS + c, wide = round_up(n, 8);
    multiply<false>(m, wide, d, q + r * ld, ld, room.kt + c, LOGITS, room.p + at, LOGITS, false);
    multiply<false>(m, wide, e, up + r * le, le, room.vt + c, LOGITS, room.ds + at, LOGITS, false);
  });
  const bool biased = w.mask.data || w.slopes;
  if (w.cap > 0) biased ? weigh<true, true>(w, room, b, h, i, j) : weigh<true, false>(w, room, b, h, i, j);
  else biased ? weigh<false, true>(w, room, b, h, i, j) : weigh<false, false>(w, room, b, h, i, j);
  by_keys([&](int64_t c, int64_t n, int64_t r, int64_t m) {
    const int64_t at = r * LOGITS + c;
    multiply<true>(n, e, m, room.p + at, LOGITS, up + r * le, le, dv + c * le, le, true);
    multiply<true>(n, d, m, room.ds + at, LOGITS, q + r * ld, ld, dk + c * ld, ld, true);
  });
  for (int64_t r = 0, part = whole ? rows : PART; r < rows; r += part) {
    const int64_t m = std::min(part, rows - r);
    const Range c = w.visibility.keys(i.from + r, i.from + r + m - 1).within(j.from, j.to);
    const int64_t from = c.from - j.from;
    multiply<false>(m, d, c.to - c.from, room.ds + r * LOGITS + from, LOGITS, room.k + from * ld, ld,
                    dq + (i.from + r) * ld, ld, true);
  }
}

// The rows of a query head, once for all key blocks.
void open(const Problem& w, const Room& room, float* dq, int64_t b, int64_t h) {
  const auto [t, e] = std::pair(w.n.t, w.n.e);
  fetch(w.q, b, h, 0, t, w.scale, room.q, w.ld);
  fetch(w.up, b, h, 0, t, 1.0f, room.up, w.le);
  const float* lse = w.lse + (b * w.n.h + h) * t;
  for (int64_t i = 0; i < t; ++i) room.lse[i] = lse[i] == -INF ? INF : lse[i];  // no visible key: weights of e^-inf
  // D by the product that gives dP, eight rows against each other: the same sums in the same order, so that a row with
  // all its weight on one key has dP - D = 0 there.
  for (int64_t i = 0; i < t; i += 8) {
    const int64_t m = std::min<int64_t>(8, t - i);
    fetch(w.out, b, h, i, m, 1.0f, room.row, e);
    transpose(m, e, room.row, e, 1.0f, room.turned, 8);
    multiply<false>(m, 8, e, room.up + i * w.le, w.le, room.turned, 8, room.cross, 8, false);
    for (int64_t r = 0; r < m; ++r) room.dot[i + r] = room.cross[9 * r];
  }
  std::memset(dq, 0, t * w.ld * sizeof(float));
}

// The heads that share a key head, against every w.pieces-th block of keys.
void task(const Problem& w, const Room& room, float* parts, int64_t b, int64_t g, int64_t piece) {
  const int64_t ld = w.ld, le = w.le, first = g * w.shared, last = first + w.shared - 1;
  for (int64_t h = first; h <= last; ++h) {
    float* dq = w.pieces > 1 ? parts + ((b * w.n.h + h) * w.pieces + piece) * w.n.t * ld : room.dq;
    open(w, room, dq, b, h);
    for (int64_t block = piece; block < w.blocks; block += w.pieces) {
      const Range j{block * KEYS, std::min(w.n.s, (block + 1) * KEYS)};
      const int64_t n = j.to - j.from, at = w.shared > 1 ? j.from : 0;
      float *dk = room.dk + at * ld, *dv = room.dv + at * le;
      if (h == first) std::memset(dk, 0, n * ld * sizeof(float)), std::memset(dv, 0, n * le * sizeof(float));
      fetch(w.v, b, g, j.from, n, 1.0f, room.k, le);
      transpose(n, w.n.e, room.k, le, 1.0f, room.vt, LOGITS);
      fetch(w.k, b, g, j.from, n, 1.0f, room.k, ld);
      transpose(n, w.n.d, room.k, ld, 1.0f, room.kt, LOGITS);
      const Range seen = w.visibility.rows(j.from, j.to - 1);
      for (int64_t i = seen.from; i < seen.to; i += ROWS)
        tile(w, room, dq, dk, dv, b, h, {i, std::min(i + ROWS, seen.to)}, j);
      if (h < last) continue;
      deliver(dk, ld, 1.0f, w.dk, b, g, j.from, n, room.row);
      deliver(dv, le, 1.0f, w.dv, b, g, j.from, n, room.row);
    }
    if (w.pieces == 1) deliver(dq, ld, w.scale, w.dq, b, h, 0, w.n.t, room.row);
  }
}

} // namespace

void qkeel::attention_backward(const Array& up, const Array& q, const Array& k, const Array& v, const Array& out,
                               const Array& lse, const Array& mask, const Array& slopes, float scale, bool causal,
                               int64_t window, float cap, const AttentionGradient& to) {
  const Sizes n = sizes_of(q, k, v);
  Problem w{n, up, q, k, v, out, to.dq, to.dk, to.dv, lse.as<float>(), slopes.as<float>(), Mask(mask),
            {{causal, window, n.s - n.t, n.t, n.s}}, scale, cap};
  const int64_t heads = n.b * n.g;
  w.pieces = std::clamp<int64_t>(std::min((TASKS + heads - 1) / heads, w.blocks / LEAST_BLOCKS), 1, TASKS);
  const int64_t one = w.n.t * w.ld, room = Room(w, nullptr).size;
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  const Floats rooms = floats(threads * room);
  const Floats parts = floats(w.pieces > 1 ? w.n.b * w.n.h * w.pieces * one : 0);
  auto own_room = [&] {
    uint32_t thread = 0;
    torch_get_thread_idx(&thread);
    return Room(w, rooms.get() + thread * room);
  };
  parallel_for(0, w.n.b * w.n.g * w.pieces, 1, [&](int64_t from, int64_t to) {
    const Room own = own_room();
    for (int64_t i = from; i < to; ++i)
      task(w, own, parts.get(), i / w.pieces / w.n.g, i / w.pieces % w.n.g, i % w.pieces);
  });
  if (w.pieces == 1) return;
  parallel_for(0, w.n.b * w.n.h, 1, [&](int64_t from, int64_t to) {
    const Room own = own_room();
    for (int64_t i = from; i < to; ++i) {
      float* first = parts.get() + i * w.pieces * one;
      for (int64_t piece = 1; piece < w.pieces; ++piece)
        for (int64_t j = 0; j < one; j += 8) put8(first + j, at8(first + j) + at8(first + piece * one + j));
      deliver(first, w.ld, w.scale, w.dq, i / w.n.h, i % w.n.h, 0, w.n.t, own.row);
    }
  });
}
