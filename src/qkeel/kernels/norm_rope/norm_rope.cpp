// Norm, gain and rotation of q or k in one pass over memory, and the way back. Storage float, bfloat16 or half;
// arithmetic float. No -ffast-math: sums are reordered only where a pragma says so, in a way that depends on the
// shape alone, never on the number of threads.
#include "norm_rope_walk.h"
#include "norm_rope_whole.h"
#include "operators.h"

namespace {

using namespace qkeel;

constexpr int64_t CHUNKS = 64;     // partial sums of the gain's gradient: fixed, so threads change no bit
constexpr int64_t GRAIN = 1 << 15; // numbers a thread takes at least
// Bytes of x up to which the way back takes several rows at once; of more it waits for memory, and writes to many rows
// make it wait longer.
constexpr int64_t CACHED = 4 << 20;

template <int64_t D, bool MEAN, bool SHARED>
void forward(const Array& x, const Array& y, const Array& r, const Walk& w, int64_t kind, float eps) {
  float* inv = r.as<float>();
  const int64_t d = D ? D : w.d, x_step = w.apart(x), y_step = w.apart(y);
  parallel_for(0, w.outer(), std::max<int64_t>(1, GRAIN / (w.inner() * d)), [&](int64_t from, int64_t to) {
    alignas(64) float loaded[BLOCK], made[BLOCK], mean[MOST], inverse[MOST];
    w.blocks(from, to, w.at_once(), [&](const Block& b) {
      const Rows v = load_rows(x.row(b.n, b.h, b.t), x.type, x_step, b.rows, d, loaded, d);
      char* end = y.row(b.n, b.h, b.t);
      const Rows o = target_rows(end, y.type, y_step, made, d);
      if constexpr (D) {
        measure_whole<D, MEAN>(v, b.rows, kind, eps, mean, inverse);
        apply_whole<D, MEAN, SHARED>(v, o, w.with(b), mean, inverse);
      } else {
        measure<MEAN>(v, b.rows, d, kind, eps, mean, inverse);
        apply<MEAN>(v, o, w.with(b), mean, inverse);
      }
      if (inv) {
        float* end = inv + b.n * r.stride[0] + b.h * r.stride[1] + b.t * r.stride[2];
        if (b.rows == 8) put8(end, at8(inverse));
        else std::copy_n(inverse, b.rows, end);
      }
      store_rows(made, end, y.type, y_step, b.rows, d);
    });
  });
}

template <int64_t D, bool MEAN>
void forward_shared(const Array& x, const Array& y, const Array& r, const Walk& w, int64_t kind, float eps) {
  if (w.alike()) forward<D, MEAN, true>(x, y, r, w, kind, eps);
  else forward<D, MEAN, false>(x, y, r, w, kind, eps);
}

template <bool MEAN>
void forward_sized(const Array& x, const Array& y, const Array& r, const Walk& w, int64_t kind, float eps) {
  if (w.d == 64 && w.half == 32) return forward_shared<64, MEAN>(x, y, r, w, kind, eps);
  if (w.d == 128 && w.half == 64) return forward_shared<128, MEAN>(x, y, r, w, kind, eps);
  forward<0, MEAN, false>(x, y, r, w, kind, eps);
}

struct Options {
  int64_t kind;
  float eps;
  bool kept_x;
};

// Several rows of whole heads at once (MANY), or row by row.
template <int64_t D, bool MANY, bool SHARED>
void backward(const Array& dy, const Array& kept, const Array& r, const Array& dx, float* dgain, const Walk& w,
              const Options& opt) {
  const float* inv = r.as<float>();
  std::vector<float> over(w.gain.numbers.size());
  for (size_t i = 0; i < over.size(); ++i) over[i] = 1.0f / w.gain.numbers[i];
  const int64_t d = D ? D : w.d;
  const int64_t outer = w.outer(), chunks = std::min(CHUNKS, outer), up_step = w.apart(dy);
  const int64_t was_step = w.apart(kept), out_step = w.apart(dx), inv_step = w.apart(r);
  const int64_t r0 = r.stride[0], r1 = r.stride[1], r2 = r.stride[2], kind = opt.kind, numbers = w.gain.rows * d, most = MANY ? w.at_once() : 1;
  const float clamped = 1.0f / opt.eps;
  std::vector<float> parts(chunks * numbers);
  const bool kept_x = opt.kept_x;
  parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    alignas(64) float loaded[2][BLOCK], made[BLOCK], hat[WIDEST], dn[WIDEST], inverse[MOST];
    for (int64_t chunk = first; chunk < last; ++chunk)
      w.blocks(outer * chunk / chunks, outer * (chunk + 1) / chunks, most, [&](const Block& b) {
        const Rows u = load_rows(dy.row(b.n, b.h, b.t), dy.type, up_step, b.rows, d, loaded[0], d);
        const Rows v = load_rows(kept.row(b.n, b.h, b.t), kept.type, was_step, b.rows, d, loaded[1], d);
        char* end = dx.row(b.n, b.h, b.t);
        const Rows to = target_rows(end, dx.type, out_step, made, d);
        const int64_t g = b.gain - w.gain.numbers.data();
        float* sums = parts.data() + chunk * numbers + g;
        for (int64_t i = 0; i < b.rows; ++i) inverse[i] = inv[b.n * r0 + b.h * r1 + b.t * r2 + i * inv_step];
        if constexpr (MANY) {
          back_whole<D, SHARED>(Back{v, u, to, over.data() + g, inverse, sums}, w.with(b), kind, clamped);
        } else {
          const auto way = kept_x ? restore<true> : restore<false>;
          const float middle = kept_x ? mean_of(v.at, d, kind) : 0.0f, k = inverse[0];
          const auto [dot, sum] = way(v.at, u.at, w.with(b), over.data() + g, middle, k, hat, dn, sums);
          const float along = kind == L2 ? (k < clamped ? dot : 0.0f) : dot / float(d);
          const float mean = kind == LAYER ? sum / float(d) : 0.0f;
          float* o = const_cast<float*>(to.at);
          for (int64_t i = 0; i < d; i += 8)
            put8(o + i, k * (at8(dn + i) - mean - at8(hat + i) * along));
        }
        store_rows(made, end, dx.type, out_step, b.rows, d);
      });
  });
  if (!dgain) return;
  for (int64_t i = 0; i < numbers; ++i) {
    float sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += parts[chunk * numbers + i];
    dgain[i] = MANY ? sum * over[i] : sum; // that of many rows has the gain in it
  }
}

template <int64_t D>
void backward_sized(const Array& dy, const Array& kept, const Array& r, const Array& dx, float* dgain, const Walk& w,
                    const Options& o) {
  const bool many = dy.numel() * bytes(dy.type) <= CACHED && o.kind != LAYER && !o.kept_x;
  if (!many) return backward<D, false, false>(dy, kept, r, dx, dgain, w, o);
  if (w.alike()) return backward<D, true, true>(dy, kept, r, dx, dgain, w, o);
  backward<D, true, false>(dy, kept, r, dx, dgain, w, o);
}

} // namespace

void qkeel::norm_rope(const Array& x, const Array& gain, const Array& cos, const Array& sin, int64_t kind, float eps,
                      const Array& y, const Array& inverse) {
  const Walk w(x, gain, cos, sin);
  if (kind == LAYER) forward_sized<true>(x, y, inverse, w, kind, eps);
  else forward_sized<false>(x, y, inverse, w, kind, eps);
}

void qkeel::norm_rope_backward(const Array& dy, const Array& kept, const Array& inverse, const Array& gain,
                               const Array& cos, const Array& sin, int64_t kind, float eps, bool kept_x, const Array& dx,
                               const Array& dgain) {
  const Walk w(kept, gain, cos, sin);
  const Options o{kind, eps, kept_x};
  if (w.d == 64 && w.half == 32) return backward_sized<64>(dy, kept, inverse, dx, dgain.as<float>(), w, o);
  if (w.d == 128 && w.half == 64) return backward_sized<128>(dy, kept, inverse, dx, dgain.as<float>(), w, o);
  backward<0, false, false>(dy, kept, inverse, dx, dgain.as<float>(), w, o);
}

double qkeel::gain_spread(const Array& gain) {
  float low = std::numeric_limits<float>::infinity(), high = 0;
  const int64_t rows = gain.dims == 2 ? gain.size[0] : 1, d = gain.dims ? gain.size[gain.dims - 1] : 1;
  for (const float number : Gain(gain, rows, d).numbers) {
    const float size = std::abs(number);
    if (!(size > 0)) return 0.0;  // NaN too
    low = std::min(low, size), high = std::max(high, size);
  }
  return low / high;
}
