// Attention over tiles that lie in cache, with the statistics of its logits in the same pass.
// q [b h t d]; k [b g s d]; v [b g s e]; h a multiple of g, d and e of 8; of one dtype. Query i is at position i + s - t.
// Key j is visible to it if j <= i + s - t (causal), and |i + s - t - j| < window, and the mask lets it. The logit is
//   z = scale · q·k + mask (a float one) - slopes[h] · |i + s - t - j|,  then  cap · tanh(z / cap)  (cap 0: none).
// A row without a visible key has out 0, lse -inf, top -inf, entropy 0. top: the largest z before the cap.
// The walk is that of Rabe and Staats 2021 (arXiv 2112.05682) and FlashAttention (Dao et al. 2022, arXiv 2205.14135).
// Beside L = Σ p, p = exp(z - M), M the running maximum, the entropy needs W = Σ p (z - M): on a new maximum M',
// W <- exp(M - M') (W + L (M - M')). H = log L - W / L, without cancellation.
#include "attention.h"
#include "operators.h"

namespace {

using namespace qkeel;

constexpr int64_t ROWS = 3 * WIDE, KEYS = 16 * STRIP;  // of a tile of logits
constexpr int64_t GRAIN = 1 << 18;  // products a thread takes at least

struct Options {
  float scale, cap;
  bool causal, stats;
  int64_t window;
};

// Rows of a block of queries of one head: what is known of them so far.
struct Block {
  int64_t rows, width;        // width: rows filled up to whole registers
  int64_t first;              // position of the first query among the keys
  float slope;
  alignas(64) float top[ROWS], base[ROWS], sum[ROWS], shift[ROWS], fade[ROWS];  // M before the cap, M, L, W, exp(M - M')

  // Keys from `from` on that the rows up to `row` can see, at most n of them.
  int64_t seen(int64_t row, int64_t from, int64_t n, bool causal) const {
    return causal ? std::clamp<int64_t>(first + std::min(row, rows - 1) + 1 - from, 0, n) : n;
  }
};

// What is added to logits z [n ROWS] of keys from `from` on, and what is hidden.
struct Adjust {
  const Options& o;
  const Mask& mask;
  int64_t b, h, start;  // of the block's first row
  float* room;          // [ROWS KEYS] and [KEYS ROWS]

  void operator()(const Block& k, int64_t from, int64_t n, float* z) const {
    const bool ahead = o.causal && from + n - 1 > k.first;
    const bool far = o.window && (k.first + k.rows - 1 - from >= o.window || from + n - 1 - k.first >= o.window);
    if (k.slope != 0.0f || ahead || far) by_distance(k, from, n, z);
    if (mask.data) by_mask(k, from, n, z);
  }
  void by_distance(const Block& k, int64_t from, int64_t n, float* z) const {
    Lanes lane;
    for (int64_t i = 0; i < LANES; ++i) lane[i] = float(i);
    const float most = o.window ? float(o.window - 1) : -HIDDEN;
    for (int64_t j = 0; j < n; ++j)
      for (int64_t c = 0; c < k.width; c += LANES) {
        float* at = z + j * ROWS + c;
        Lanes ahead = float(from + j - k.first - c) - lane, away = ahead < 0.0f ? -ahead : ahead;
        Lanes found = lanes(at) - k.slope * away;
        found = away > most ? Lanes{} + HIDDEN : found;
        if (o.causal) found = ahead > 0.0f ? Lanes{} + HIDDEN : found;
        put(at, found);
      }
  }
  void by_mask(const Block& k, int64_t from, int64_t n, float* z) const {
    float *across = room, *down = room + ROWS * KEYS;
    if (mask.step[2] == 0) {
      mask.read(b, h, 0, from, n, across);
      for (int64_t j = 0; j < n; ++j)
        for (int64_t c = 0; c < k.width; c += LANES) add(z + j * ROWS + c, Lanes{} + across[j]);
      return;
    }
    const int64_t whole = round_up(n, 8);
    for (int64_t r = 0; r < k.rows; ++r) {
      mask.read(b, h, start + r, from, n, across + r * KEYS);
      std::fill(across + r * KEYS + n, across + r * KEYS + whole, 0.0f);
    }
    transpose(k.rows, whole, across, KEYS, 1.0f, down, ROWS);
    for (int64_t j = 0; j < n; ++j)
      for (int64_t c = 0; c < k.width; c += LANES) add(z + j * ROWS + c, lanes(down + j * ROWS + c));
  }
  static void add(float* at, Lanes bias) {
    Lanes z = lanes(at);
    put(at, hidden_as(z, hidden_as(bias, z + bias)));
  }
};

// Logits z [n ROWS] of N registers of rows become p; the rows' sums go on.
template <int64_t N, bool STATS, bool CAP>
inline void soften(Block& k, int64_t c, int64_t n, float cap, float* z) {
  Lanes top[N], base[N], sum[N] = {}, shift[N] = {};
  for (int64_t i = 0; i < N; ++i) top[i] = lanes(k.top + c + i * LANES);
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < N; ++i) top[i] = larger(lanes(z + j * ROWS + c + i * LANES), top[i]);
  for (int64_t i = 0; i < N; ++i) {
    base[i] = CAP ? cap * hyperbolic_tangent(top[i] / cap) : top[i];
    base[i] = top[i] <= HIDDEN ? Lanes{} : base[i];  // no visible key yet
  }
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < N; ++i) {
      float* at = z + j * ROWS + c + i * LANES;
      Lanes x = lanes(at);
      if (CAP) x = hidden_as(x, cap * hyperbolic_tangent(x / cap));
      x -= base[i];
      Lanes p = exponential(x);
      put(at, p);
      sum[i] += p;
      if (STATS) shift[i] += p * x;
    }
  for (int64_t i = 0; i < N; ++i) {
    const int64_t at = c + i * LANES;
    Lanes step = lanes(k.base + at) - base[i], old = lanes(k.sum + at);
    Lanes fade = lanes(k.top + at) <= HIDDEN ? Lanes{} : exponential(step);
    put(k.sum + at, old * fade + sum[i]);
    if (STATS) put(k.shift + at, (lanes(k.shift + at) + old * step) * fade + shift[i]);
    put(k.fade + at, fade), put(k.top + at, top[i]), put(k.base + at, base[i]);
  }
}

template <bool STATS, bool CAP>
inline void soften_all(Block& k, int64_t from, int64_t n, const Options& o, float* z) {
  int64_t c = 0;
  const int64_t all = k.seen(k.rows - 1, from, n, o.causal);
  auto over = [&](int64_t wide, auto&& f) {
    const int64_t m = k.seen(c + wide - 1, from, n, o.causal);
    f(m);
    for (int64_t j = m; j < all; ++j)
      for (int64_t i = 0; i < wide; i += LANES) put(z + j * ROWS + c + i, Lanes{});
  };
  for (; c + WIDE <= k.width; c += WIDE) over(WIDE, [&](int64_t m) { soften<2, STATS, CAP>(k, c, m, o.cap, z); });
  for (; c < k.width; c += LANES) over(LANES, [&](int64_t m) { soften<1, STATS, CAP>(k, c, m, o.cap, z); });
}

// What one thread works with. Keys and values of one (b, g) are copied once, block by block as they are wanted.
struct Worker {
  const Sizes& n;
  const Options& o;
  const int64_t ldk = row_stride(n.d), ldv = row_stride(n.e), blocks = (n.s + KEYS - 1) / KEYS;
  Floats keys = floats(blocks * KEYS * ldk), values = floats(blocks * KEYS * ldv), query = floats(ROWS * ldk),
         turned = floats(ROWS * n.d), logits = floats(KEYS * ROWS), out = floats(ROWS * ldv),
         room = floats(2 * ROWS * KEYS);
  std::vector<int64_t> copied = std::vector<int64_t>(blocks, -1);
  Block block;

  void copy(const Array& k, const Array& v, int64_t group, int64_t which) {
    if (copied[which] == group) return;
    copied[which] = group;
    const int64_t b = group / n.g, g = group % n.g;
    const int64_t from = which * KEYS, many = std::min(n.s - from, KEYS);
    fetch(k, b, g, from, many, 1.0f, keys.get() + from * ldk, ldk);
    fetch(v, b, g, from, many, 1.0f, values.get() + from * ldv, ldv);
  }
  // The rows of queries from row `start` on of head (b, h).
  void begin(const Array& q, int64_t b, int64_t h, int64_t start, float slope) {
    block.rows = std::min(ROWS, n.t - start);
    block.width = round_up(block.rows, std::max<int64_t>(8, LANES));
    block.first = start + n.s - n.t, block.slope = slope;
    fetch(q, b, h, start, block.rows, 1.0f, query.get(), ldk);
    for (int64_t i = 0; i < n.d; ++i)
      std::fill(turned.get() + i * ROWS + block.rows, turned.get() + i * ROWS + block.width, 0.0f);
    transpose(block.rows, n.d, query.get(), ldk, o.scale, turned.get(), ROWS);
    std::fill_n(block.top, ROWS, HIDDEN);
    std::fill_n(block.base, ROWS, 0.0f), std::fill_n(block.sum, ROWS, 0.0f), std::fill_n(block.shift, ROWS, 0.0f);
    for (int64_t r = 0; r < block.rows; ++r) std::fill_n(out.get() + r * ldv, n.e, 0.0f);
  }

  void go_on(int64_t which, const Adjust& adjust) {
    const int64_t from = which * KEYS, m = std::min(KEYS, n.s - from);
    float* z = logits.get();
    const int64_t all = block.seen(block.rows - 1, from, m, o.causal);
    // What is read again and again, queries here and a panel of values below, stays in the first cache.
    for (int64_t j = 0; j < all; j += STRIP)
      for (int64_t c = 0; c < block.width; c += WIDE) {
        const int64_t wide = std::min(WIDE, block.width - c);
        const int64_t some = std::min(STRIP, block.seen(c + wide - 1, from, m, o.causal) - j);
        multiply<false>(some, wide, n.d, keys.get() + (from + j) * ldk, ldk, turned.get() + c, ROWS, z + j * ROWS + c,
                        ROWS, false);
      }
    adjust(block, from, all, z);
    if (o.cap > 0) o.stats ? soften_all<true, true>(block, from, m, o, z) : soften_all<false, true>(block, from, m, o, z);
    else o.stats ? soften_all<true, false>(block, from, m, o, z) : soften_all<false, false>(block, from, m, o, z);
    for (int64_t r = 0; r < block.rows; ++r)
      if (block.fade[r] != 1.0f)
        for (int64_t i = 0; i < n.e; i += 8) put8(out.get() + r * ldv + i, at8(out.get() + r * ldv + i) * block.fade[r]);
    for (int64_t c = 0; c < n.e; c += WIDE)
      for (int64_t r = 0; r < block.rows; r += STRIP) {
        const int64_t some = std::min(STRIP, block.rows - r), wide = std::min(WIDE, n.e - c);
        multiply<true>(some, wide, block.seen(r + some - 1, from, m, o.causal), z + r, ROWS,
                       values.get() + from * ldv + c, ldv, out.get() + r * ldv + c, ldv, true);
      }
  }

  void end(int64_t b, int64_t h, int64_t start, const Array& to, float* lse, float* top, float* entropy) {
    for (int64_t r = 0; r < block.rows; ++r) {
      const float sum = block.sum[r], over = sum == 0.0f ? 0.0f : 1.0f / sum, size = std::log(sum);
      float* row = out.get() + r * ldv;
      char* end = to.row(b, h, start + r);
      float* made = target(end, to.type, row);
      for (int64_t i = 0; i < n.e; i += 8) put8(made + i, at8(row + i) * over);
      store(made, end, to.type, n.e);
      const int64_t at = (b * n.h + h) * n.t + start + r;
      lse[at] = block.base[r] + size;
      if (!o.stats) continue;
      top[at] = sum == 0.0f ? -INFINITY : block.top[r];
      entropy[at] = sum == 0.0f ? 0.0f : std::max(size - block.shift[r] * over, 0.0f);
    }
  }
};

} // namespace

void qkeel::attention(const Array& q, const Array& k, const Array& v, const Array& mask_, const Array& slopes_,
                      float scale, bool causal, int64_t window, float cap, const AttentionResult& result) {
  const Sizes n = sizes_of(q, k, v);
  const bool stats = result.top.given;
  const Options o{scale, cap, causal, stats, window};
  const Mask mask(mask_);
  const Visibility visibility{causal, window, n.s - n.t, n.t, n.s};
  const float* slopes = slopes_.as<float>();
  const int64_t many = (n.t + ROWS - 1) / ROWS, share = n.h / n.g, tasks = n.b * n.h * many;
  float *lse = result.lse.as<float>(), *top = result.top.as<float>(), *entropy = result.entropy.as<float>();
  const int64_t work = std::max<int64_t>(1, std::min(n.t, ROWS) * n.s * (n.d + n.e));
  const int64_t grain = std::max<int64_t>(1, GRAIN / work);
  parallel_for(0, tasks, grain, [&](int64_t from, int64_t to) {
    Worker worker{n, o};
    for (int64_t task = from; task < to; ++task) {
      // A short causal block follows a long one, so that threads' shares are of one size.
      const int64_t i = task % many, start = ROWS * (i % 2 ? many - 1 - i / 2 : i / 2);
      const int64_t b = task / many / n.h, h = task / many % n.h, group = b * n.g + h / share;
      worker.begin(q, b, h, start, slopes ? slopes[h] : 0.0f);
      const Adjust adjust{o, mask, b, h, start, worker.room.get()};
      const Range seen = visibility.keys(start, start + worker.block.rows - 1);
      for (int64_t which = seen.from / KEYS; which * KEYS < seen.to; ++which) {
        worker.copy(k, v, group, which);
        worker.go_on(which, adjust);
      }
      worker.end(b, h, start, result.out, lse, top, entropy);
    }
  });
}
