// Statistics of the logits of every query row, in one pass over tiles of q·k, and the largest logits alone.
// Visible to row i are the keys from low to before high (none: all) that the mask does not hide. z = scale · q·k + mask;
// cap · tanh(z / cap) enters the weights (cap 0: z). Arithmetic in float.
// Every row is the work of one thread, key by key in order: results do not depend on the number of threads.
#include "operators.h"
#include "rows.h"
#include "visible_keys.h"

namespace qkeel {
namespace {

constexpr int64_t ROWS = 64;  // a block: one head's query rows whose q' is made at once
enum Row { TOP, LOW, SPREAD, CAPPED, TOTAL, ABOVE, ENTROPY, FIRST, GRADIENT, PRODUCT, ANGLE_TOP, ANGLE, QUERY, N_ROWS, EXTREMES = CAPPED };

// The work space of a thread.
struct Space {
  int64_t width;
  std::vector<float> q, k, z, capped, loaded;
  Shade shade;
  Panel panel[ROWS / WIDE];
  alignas(64) float scale[ROWS], norm[ROWS];
  alignas(64) int32_t low[ROWS], high[ROWS];

  explicit Space(int64_t d, bool caps, bool masks)
      : width(row_stride(d)), q(d * row_stride(ROWS)), k(KEYS * width), z(KEYS * WIDE), capped(caps ? KEYS * WIDE : 0),
        loaded(ROWS * width), shade(masks) {}
};

struct Work {
  const Array &q, &k, &scale;
  VisibleKeys visibility;
  float cap, threshold;
  const float* inverse;  // 1 / |k| [b g s]
  float* rows;           // [N_ROWS b h t], or [EXTREMES b h t]
  int64_t* counts;       // [b h t]
  int64_t b = q.size[0], h = q.size[1], g = k.size[1], t = q.size[2], s = k.size[2], d = q.size[3];
};

template <bool FULL>
void one_tile(const Work& w, Panel& p, const Tile& tile, bool hides, bool bias) {
  const bool cap = w.cap > 0;
  auto each = [&]<bool H, bool B, bool C>() {
    for (int64_t i = 0; i < WIDE; i += LANES) logits<H, B, C, FULL>(p, tile, i);
  };
  if (bias && cap) each.template operator()<true, true, true>();
  else if (bias) each.template operator()<true, true, false>();
  else if (hides && cap) each.template operator()<true, false, true>();
  else if (hides) each.template operator()<true, false, false>();
  else if (cap) each.template operator()<false, false, true>();
  else each.template operator()<false, false, false>();
}

// One panel of rows and the keys of a tile, from key j0 on, that it may see: its products, and what they add to its
// statistics.
template <bool FULL>
void panel_of(const Work& w, Space& sp, Rows k, int64_t j0, const Stretch& keys, Pairs at, int64_t col) {
  const int32_t *low = sp.low + col, *high = sp.high + col;
  const auto [low0, low1] = std::minmax_element(low, low + at.rows);
  const auto [high0, high1] = std::minmax_element(high, high + at.rows);
  const int64_t from = std::max<int64_t>(keys.from, *low0), to = std::min<int64_t>(keys.to, *high1);
  if (from >= to) return;
  Shade::Seen seen = Shade::SOME;
  if (keys.masked) {
    at.from = from, at.keys = to - from;
    sp.shade.hide(low, high, at);
    seen = sp.shade.hide_more(w.visibility, at);
    if (seen == Shade::NOTHING) return;
  }
  multiply<false>(to - from, WIDE, w.d, k.at + (from - j0) * k.stride, k.stride, sp.q.data() + col, row_stride(ROWS),
                  sp.z.data(), WIDE, false);
  const float* inverse = FULL ? w.inverse + (at.n * w.g + at.head / (w.h / w.g)) * w.s : nullptr;
  auto part = [&](int64_t first, int64_t last, bool hides, bool bias) {
    const Tile tile{last - first, sp.z.data() + (first - from) * WIDE, sp.capped.data(), FULL ? inverse + first : nullptr,
                    sp.shade.bias.data(), sp.scale + col, sp.shade.hidden.data(), w.cap, w.threshold};
    one_tile<FULL>(w, sp.panel[col / WIDE], tile, hides, bias);
  };
  if (keys.masked) return part(from, to, seen == Shade::SOME, w.visibility.added);
  const int64_t a = std::clamp<int64_t>(*low1, from, to), z = std::clamp<int64_t>(*high0, a, to);
  auto edge = [&](int64_t first, int64_t last) {  // some rows see these keys
    if (first >= last) return;
    at.from = first, at.keys = last - first;
    sp.shade.hide(low, high, at);
    part(first, last, true, false);
  };
  edge(from, a);
  if (a < z) part(a, z, false, false);  // all see these
  edge(z, to);
}

inline Lanes or_nan(Lanes x, Flags bad) { return nan_where(x, bad); }
inline Flags finite(Lanes x) { return x - x == 0.0f; }
inline Lanes logarithm(Lanes x) {
  for (int64_t i = 0; i < LANES; ++i) x[i] = std::log(x[i]);
  return x;
}

// The statistics of a panel as they are handed out, or the first of them. NaN among the products shows in the sum of
// their squares, NaN of the mask's in that of the logits'; a largest logit of ±∞ leaves no weights.
template <bool FULL>
void write_panel(const Work& w, Space& sp, const Panel& p, int64_t col, int64_t rows, int64_t to) {
  alignas(64) float found[N_ROWS][WIDE];
  for (int64_t i = 0; i < WIDE; i += LANES) {
    const Lanes squares = lanes(p.squares + i), z_squares = lanes(p.z_squares + i), angle = lanes(p.angle + i);
    const Lanes top = lanes(p.top + i), capped = w.cap > 0 ? softcap(top, w.cap) : top, n = lanes(sp.norm + col + i);
    const Flags none = flags(p.seen + i) == 0;
    const Flags nan = (squares != squares) | (z_squares != z_squares), bad = (nan | ~finite(lanes(sp.scale + col + i))) & ~none;
    const Flags unweighted = bad | ~finite(capped);
    const Lanes mass = lanes(p.mass + i), reference = lanes(p.reference + i);
    const Lanes along = Lanes(Flags(1.0f / n) & (n > 0.0f));
    const Lanes count = __builtin_convertvector(flags(p.seen + i), Lanes), peak = lanes(p.peak + i);
    const Lanes spread = (w.cap > 0 ? softcap(peak, w.cap) : peak) - lanes(p.level + i) / count;
    Lanes entropy = logarithm(mass) - lanes(p.spread + i) / mass, cosines = angle * along;
    entropy = entropy < 0.0f ? Lanes{} : entropy;
    cosines = cosines > count ? count : cosines < -count ? -count : cosines;
    Lanes cosine = lanes(p.angle_top + i) * along;
    cosine = cosine > 1.0f ? all(1.0f) : cosine < -1.0f ? all(-1.0f) : cosine;
    const Lanes first = exponential(larger(lanes(p.first + i) - reference, all(GONE))) / mass;
    // 1 - Σp² over that of uniform attention, 1 - 1 / count. Rows with fewer than two keys are left out by whoever reads.
    Lanes gradient = (1.0f - lanes(p.mass_squares + i) / (mass * mass)) * count / larger(count - 1.0f, all(1.0f));
    gradient = gradient < 0.0f ? Lanes{} : gradient;
    const struct { Row field; Lanes x; } fields[] = {
        {TOP, or_nan(top, bad)}, {LOW, or_nan(lanes(p.low + i), bad)},
        {SPREAD, none ? all(-INF) : spread},
        {CAPPED, or_nan(capped, bad)}, {TOTAL, or_nan(lanes(p.total + i), bad)},
        {ABOVE, __builtin_convertvector(flags(p.above + i), Lanes)},
        {ENTROPY, or_nan(entropy, unweighted)}, {FIRST, or_nan(first, unweighted)}, {GRADIENT, or_nan(gradient, unweighted)},
        {PRODUCT, root(squares)},
        {ANGLE_TOP, or_nan(cosine, angle != angle)}, {ANGLE, cosines},
    };
    for (auto& [field, x] : fields) put(found[field] + i, FULL ? where_off(x, none) : x);
    put(found[QUERY] + i, n);
  }
  for (int64_t field = 0; field < (FULL ? N_ROWS : EXTREMES); ++field)
    std::copy(found[field], found[field] + rows, w.rows + field * w.b * w.h * w.t + to);
  for (int64_t i = 0; FULL && i < rows; ++i) w.counts[to + i] = p.seen[i];
}

// A block of rows of one head: q' and the keys visible to each row.
void begin(const Work& w, Space& sp, int64_t n, int64_t head, int64_t row, int64_t rows) {
  const Rows from = load_rows(w.q.row(n, head, row), w.q.type, w.q.stride[2], rows, w.d, sp.loaded.data(), sp.width);
  transpose(rows, w.d, from.at, from.stride, 1.0f, sp.q.data(), row_stride(ROWS));
  const int64_t whole = round_up(rows, WIDE), done = round_up(rows, 8);
  for (int64_t c = 0; c < w.d && done < whole; ++c) std::fill_n(sp.q.data() + c * row_stride(ROWS) + done, whole - done, 0.0f);
  const float* scale = w.scale.as<float>();
  for (int64_t i = 0; i < whole; ++i) {
    const int64_t r = row + std::min(i, rows - 1);
    sp.scale[i] = scale[n * w.scale.stride[0] + head * w.scale.stride[1] + r * w.scale.stride[2]];
    sp.low[i] = int32_t(w.visibility.first(n, r)), sp.high[i] = int32_t(w.visibility.end(n, r));
  }
  for (int64_t i = 0; i < whole; i += LANES) {
    Lanes squares{};
    for (int64_t c = 0; c < w.d; ++c) {
      const Lanes x = lanes(sp.q.data() + c * row_stride(ROWS) + i);
      squares += x * x;
    }
    put(sp.norm + i, root(squares));
  }
}

template <bool FULL>
void block(const Work& w, Space& sp, int64_t n, int64_t head, int64_t row) {
  const int64_t rows = std::min(ROWS, w.t - row);
  begin(w, sp, n, head, row, rows);
  for (Panel& p : sp.panel) p.clear();
  const auto low = *std::min_element(sp.low, sp.low + rows), high = *std::max_element(sp.high, sp.high + rows);
  for (int64_t j = low; j < high; j += KEYS) {
    const int64_t end = std::min<int64_t>(j + KEYS, high);
    const Stretch some = w.visibility.stretch(n, head, j, end);
    if (some.from >= some.to) continue;
    const Rows tile = load_rows(w.k.row(n, head / (w.h / w.g), j), w.k.type, w.k.stride[2], end - j, w.d, sp.k.data(), sp.width);
    for (int64_t col = 0; col < rows; col += WIDE)
      panel_of<FULL>(w, sp, tile, j, some, {n, head, row + col, std::min(WIDE, rows - col), 0, 0}, col);
  }
  for (int64_t col = 0; col < rows; col += WIDE) {
    const int64_t to = (n * w.h + head) * w.t + row + col, some = std::min(WIDE, rows - col);
    write_panel<FULL>(w, sp, sp.panel[col / WIDE], col, some, to);
  }
}

template <bool FULL> void run(const Work& w) {
  const int64_t blocks = (w.t + ROWS - 1) / ROWS;
  parallel_for(0, w.b * w.h * blocks, 1, [&](int64_t first, int64_t last) {
    Space sp(w.d, w.cap > 0, w.visibility.masked);
    for (int64_t i = first; i < last; ++i) {
      // The first rows of a causal call see little and the last ones much: in turns, so that threads share evenly.
      const int64_t at = i % blocks, place = at % 2 ? blocks - 1 - at / 2 : at / 2, head = i / blocks;
      block<FULL>(w, sp, head / w.h, head % w.h, place * ROWS);
    }
  });
}

// |k| and 1 / |k| of every key: a key's heads one after the other, as they mostly lie.
void norms(const Array& k, float* to, float* inverse) {
  const int64_t g = k.size[1], s = k.size[2], d = k.size[3];
  parallel_for(0, k.size[0] * s, 64, [&](int64_t first, int64_t last) {
    float loaded[WIDEST];
    for (int64_t i = first; i < last; ++i)
      for (int64_t group = 0; group < g; ++group) {
        const float* x = load(k.row(i / s, group, i % s), k.type, loaded, d);
        const float norm = std::sqrt(sum8(d, [&](int64_t c) { return at8(x + c) * at8(x + c); }));
        const int64_t at = (i / s * g + group) * s + i % s;
        to[at] = norm;
        inverse[at] = norm > 0 ? 1.0f / norm : 0.0f;  // hidden keys may hold anything
      }
  });
}

} // namespace

void logit_rows(const Array& q, const Array& k, const Array& scale, const Array& low, const Array& high, const Array& mask,
                float cap, float threshold, const Array& rows, const Array& counts, const Array& key_norms) {
  const Floats inverse = floats(key_norms.numel());
  norms(k, key_norms.as<float>(), inverse.get());
  run<true>({q, k, scale, {q, k, low, high, mask}, cap, threshold, inverse.get(), rows.as<float>(), counts.as<int64_t>()});
}

void logit_extremes(const Array& q, const Array& k, const Array& scale, const Array& low, const Array& high,
                    const Array& mask, float cap, const Array& rows) {
  run<false>({q, k, scale, {q, k, low, high, mask}, cap, 0.0f, nullptr, rows.as<float>(), nullptr});
}

} // namespace qkeel
