// Attention of a few queries to many keys. Every block of keys and values is read once for all the query heads that
// share it. Keys are split into parts, of a size that their number alone decides, and threads take parts: so threads
// change no bit.
#include "decode_few.h"
#include "decode_many.h"
#include "operators.h"

namespace {

using namespace qkeel;

constexpr int64_t PART = 512, PARTS = 32; // fewest keys that one thread takes together; most parts
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

// Queries [b g rows d] as float, times the scale.
void read(const Call& c, const Array& q, float* to) {
  for (int64_t x = 0; x < c.b * c.g; ++x)
    for (int64_t r = 0; r < c.rows; ++r, to += c.d) {
      const float* from = load(q.row(x / c.g, c.head(x % c.g, r), r % c.t), q.type, to, c.d);
      for (int64_t i = 0; i < c.d; ++i) to[i] = from[i] * c.scale;
    }
}

} // namespace

void qkeel::decode(const Array& q, const Array& k, const Array& v, const Array& mask, const Array& factors, float scale,
                   float cap, bool causal, int64_t window, const Array& out) {
  Call c{k, v, mask.broadcast(), factors.broadcast(), scale, cap, causal, window, q.size[0], q.size[1], k.size[1],
         q.size[2], k.size[2], q.size[3], v.size[3], 0, 0, 0};
  c.rows = c.h / c.g * c.t;
  c.part = std::max(PART, round_up((c.s + PARTS - 1) / PARTS, PART));
  c.parts = std::max<int64_t>(1, (c.s + c.part - 1) / c.part);
  const int64_t groups = c.b * c.g, size = c.width + 2;
  std::vector<float> queries(groups * c.rows * c.d), room(groups * c.parts * c.rows * size);
  read(c, q, queries.data());
  const auto dots = k.type == Type::FLOAT ? few<float> : k.type == Type::BFLOAT16 ? few<uint16_t> : few<_Float16>;
  const auto part_of = c.rows <= FEW ? dots : many;
  parallel_for(0, groups * c.parts, 1, [&](int64_t first, int64_t last) {
    std::vector<State> states(c.rows);
    for (int64_t task = first; task < last; ++task) {
      const int64_t x = task / c.parts, part = task % c.parts;
      float* own = room.data() + task * c.rows * size;
      for (int64_t r = 0; r < c.rows; ++r) states[r] = {NEVER, 0.0f, own + r * size};
      const int64_t from = std::max(part * c.part, c.first(0)), to = std::min({(part + 1) * c.part, c.s, c.end(c.t - 1)});
      if (from < to) part_of(c, x / c.g, x % c.g, from, to, queries.data() + x * c.rows * c.d, states.data());
      for (const State& state : states) state.values[c.width] = state.top, state.values[c.width + 1] = state.sum;
    }
  });
  parallel_for(0, groups * c.rows, std::max<int64_t>(1, 65536 / (c.parts * size)), [&](int64_t first, int64_t last) {
    std::vector<float> made(c.width);
    for (int64_t at = first; at < last; ++at) {
      const int64_t x = at / c.rows, r = at % c.rows;
      char* to = out.row(x / c.g, c.head(x % c.g, r), r % c.t);
      float* row = target(to, out.type, made.data());
      join(room.data() + (x * c.parts * c.rows + r) * size, c.rows * size, c.parts, c.width, row);
      store(row, to, out.type, c.width);
    }
  });
}
