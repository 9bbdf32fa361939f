// The operators as torch knows them, by its stable C interface: a library of one version of torch serves all later
// ones. Arguments are checked and results made here; the kernels are in files without a header of torch.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#include "operators.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <tuple>

namespace {

using namespace qkeel;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void ok(AOTITorchError error) { expect(!error, "memory, and a tensor with storage"); }

int32_t code_of(const Tensor& x) {
  int32_t code;
  ok(aoti_torch_get_dtype(x.get(), &code));
  return code;
}
Type type_of(int32_t code) {
  // Each is a call into torch, and a call of decoding asks a dozen times.
  static const int32_t codes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16(),
                                  aoti_torch_dtype_float64(), aoti_torch_dtype_bool(), aoti_torch_dtype_int64()};
  return Type(std::find(codes, codes + 6, code) - codes);
}

Array array(const Tensor& x) {
  expect(x.is_cpu(), "tensors on the CPU");
  Array found;
  found.type = type_of(code_of(x)), found.given = true, found.dims = x.dim();
  const void* data;
  int64_t *sizes, *strides;
  ok(torch_get_const_data_ptr(x.get(), &data));
  ok(aoti_torch_get_sizes(x.get(), &sizes));
  ok(aoti_torch_get_strides(x.get(), &strides));
  found.data = const_cast<void*>(data);
  std::copy_n(sizes, std::min<int64_t>(found.dims, 4), found.size);
  std::copy_n(strides, std::min<int64_t>(found.dims, 4), found.stride);
  return found;
}
Array array(const Maybe& x) { return x ? array(*x) : Array{}; }

// Torch's own operators. Its header of them all would take as long as this file.
Tensor contiguous(const Tensor& x) {
  StableIValue stack[] = {torch::stable::detail::from(x), torch::stable::detail::from(torch::headeronly::MemoryFormat::Contiguous)};
  ok(torch_call_dispatcher("aten::contiguous", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}
Tensor empty_like(const Tensor& x) {
  StableIValue stack[6] = {torch::stable::detail::from(x)};
  for (int64_t i = 1; i < 6; ++i) stack[i] = torch::stable::detail::from(std::nullopt);
  ok(torch_call_dispatcher("aten::empty_like", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// x, or a copy in its place whose last dimension, or with `whole` every one, has its numbers next to each other.
Array dense(Tensor& x, bool whole = false) {
  const Array found = array(x);
  int64_t next = 1;
  bool as_wanted = true;
  for (int64_t i = std::min<int64_t>(found.dims, 4) - 1; i >= 0 && as_wanted; --i) {
    as_wanted = found.size[i] == 1 || found.stride[i] == next;
    if (!whole) break;
    next *= found.size[i];
  }
  if (as_wanted) return found;
  x = contiguous(x);
  return array(x);
}
Array dense(Maybe& x, bool whole = false) { return x ? dense(*x, whole) : Array{}; }

using Few = std::initializer_list<int64_t>;  // of up to four dimensions
Tensor empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t type) {
  AtenTensorHandle made;
  ok(aoti_torch_empty_strided(dims, sizes, strides, type, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}
Tensor dense_tensor(Few sizes, int32_t type = aoti_torch_dtype_float32()) {
  int64_t strides[4] = {1, 1, 1, 1};
  for (size_t i = sizes.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * sizes.begin()[i];
  return empty_strided(sizes.size(), sizes.begin(), strides, type);
}
// [b h t e] in q's dtype, a token's heads next to each other.
Tensor room_for_output(const Tensor& like, const Array& q, int64_t e) {
  const int64_t h = q.size[1], t = q.size[2], sizes[] = {q.size[0], h, t, e}, strides[] = {t * h * e, e, h * e, 1};
  return empty_strided(4, sizes, strides, code_of(like));
}
// As x lies, where x has no gaps; else as torch chooses.
Tensor room_like(const Tensor& x, const Array& a) {
  int64_t order[4] = {0, 1, 2, 3}, next = 1;
  std::sort(order, order + 4, [&](int64_t i, int64_t j) { return a.stride[i] < a.stride[j]; });
  bool gapless = true;
  for (int64_t i : order) {
    if (a.size[i] == 1) continue;
    gapless &= a.stride[i] == next;
    next *= a.size[i];
  }
  if (!gapless) return empty_like(x);
  return empty_strided(4, a.size, a.stride, code_of(x));
}

bool stored(const Array& x) { return x.type == Type::FLOAT || x.type == Type::BFLOAT16 || x.type == Type::HALF; }
bool floating(const Array& x, int64_t dims) { return x.type == Type::FLOAT && x.dims == dims; }
bool is_size(const Array& x, Few sizes) { return std::equal(sizes.begin(), sizes.end(), x.size); }
bool broadcasts(const Array& x, Few sizes) {
  return std::equal(sizes.begin(), sizes.end(), x.size, [](int64_t all, int64_t size) { return size == all || size == 1; });
}

void check_heads(const Array& q, const Array& k) {
  expect(q.dims == 4 && k.dims == 4 && q.size[0] == k.size[0] && q.size[3] == k.size[3] && k.size[1] > 0 &&
             q.size[1] % k.size[1] == 0 && q.size[3] % 8 == 0,
         "q [b h t d] and k [b g s d], h a multiple of g, d a multiple of 8");
  expect(stored(q) && stored(k), "q and k of float32, bfloat16 or float16");
}
void check_values(const Array& q, const Array& k, const Array& v) {
  check_heads(q, k);
  expect(v.dims == 4 && v.size[0] == k.size[0] && v.size[1] == k.size[1] && v.size[2] == k.size[2] && v.size[3] % 8 == 0,
         "v [b g s e] of as many keys as k, e a multiple of 8");
  expect(v.type == k.type, "k and v of one dtype");
}
void check_mask(const Array& mask, const Array& q, const Array& k, bool floats) {
  if (!mask.given) return;
  expect(mask.dims == 4 && broadcasts(mask, {q.size[0], q.size[1], q.size[2], k.size[2]}),
         "a mask of four dimensions that broadcasts to [b h t s]");
  expect(mask.type == Type::BOOL || (floats && stored(mask)), "a mask of a dtype that the kernel reads");
}
void check_narrow(const Array& x) { expect(x.size[3] > 0 && x.size[3] <= WIDEST, "a head size of 1 to 1024"); }
void check_attention(const Array& q, const Array& k, const Array& v, const Array& mask, const Array& slopes,
                     int64_t window, double cap) {
  check_values(q, k, v);
  expect(q.type == k.type, "q, k and v of one dtype");
  check_mask(mask, q, k, true);
  expect(!slopes.given || (floating(slopes, 1) && is_size(slopes, {q.size[1]})), "one slope of float32 for every head");
  expect(window >= 0 && cap >= 0, "no negative window and no negative cap");
}

Four attention_(Tensor q, Tensor k, Tensor v, Maybe mask, Maybe slopes, double scale, bool causal, int64_t window,
                double cap, bool stats) {
  const Array queries = dense(q), keys = dense(k), values = dense(v), shown = array(mask), by_head = dense(slopes);
  check_attention(queries, keys, values, shown, by_head, window, cap);
  const int64_t b = queries.size[0], h = queries.size[1], t = queries.size[2];
  Tensor out = room_for_output(q, queries, values.size[3]), lse = dense_tensor({b, h, t});
  Tensor top = stats ? dense_tensor({b, h, t}) : dense_tensor({0}), entropy = stats ? dense_tensor({b, h, t}) : dense_tensor({0});
  attention(queries, keys, values, shown, by_head, float(scale), causal, window, float(cap),
            {array(out), array(lse), stats ? array(top) : Array{}, stats ? array(entropy) : Array{}});
  return {out, lse, top, entropy};
}

Three attention_backward_(Tensor up, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Maybe mask, Maybe slopes,
                          double scale, bool causal, int64_t window, double cap) {
  const Array grad = dense(up), queries = dense(q), keys = dense(k), values = dense(v), output = dense(out);
  const Array rows = dense(lse, true), shown = array(mask), by_head = dense(slopes);
  check_attention(queries, keys, values, shown, by_head, window, cap);
  for (const Array& x : {grad, output})
    expect(x.dims == 4 && is_size(x, {queries.size[0], queries.size[1], queries.size[2], values.size[3]}) && x.type == queries.type,
           "the output and its gradient [b h t e] in the dtype of q");
  expect(floating(rows, 3) && is_size(rows, {queries.size[0], queries.size[1], queries.size[2]}), "lse [b h t] in float32");
  Tensor dq = room_like(q, queries), dk = room_like(k, keys), dv = room_like(v, values);
  const AttentionGradient to{array(dq), array(dk), array(dv)};
  if (queries.numel() && values.numel())
    attention_backward(grad, queries, keys, values, output, rows, shown, by_head, float(scale), causal, window, float(cap), to);
  else
    for (const Array& x : {to.dq, to.dk, to.dv}) std::memset(x.data, 0, x.numel() * bytes(x.type));
  return {dq, dk, dv};
}

Tensor decode_(Tensor q, Tensor k, Tensor v, Maybe mask, Maybe inverse, double scale, double cap, bool causal,
               int64_t window) {
  const Array queries = dense(q), keys = dense(k), values = dense(v), shown = array(mask), factors = dense(inverse);
  check_values(queries, keys, values);
  check_narrow(queries), check_narrow(values);
  check_mask(shown, queries, keys, false);
  expect(window >= 0 && cap >= 0, "no negative window and no negative cap");
  expect(queries.type == keys.type || queries.type == Type::FLOAT, "one dtype, or q of float32");
  expect(!factors.given || (floating(factors, 3) && broadcasts(factors, {queries.size[0], queries.size[1], keys.size[2]}) &&
                            factors.size[2] == keys.size[2]),
         "float32 factors of the logits, [b h s] or [b 1 s]");
  Tensor out = room_for_output(q, queries, values.size[3]);
  const Array to = array(out);
  if (to.numel()) decode(queries, keys, values, shown, factors, float(scale), float(cap), causal, window, to);
  return out;
}

void check_encoding(const Array& x, const Array& gain, const Array& cos, const Array& sin) {
  expect(x.dims == 4 && x.size[3] % 8 == 0 && stored(x), "x [b h t d] of float32, bfloat16 or float16, d a multiple of 8");
  check_narrow(x);
  const int64_t h = x.size[1], d = x.size[3];
  expect(!gain.given || gain.dims == 0 || (gain.dims == 1 && broadcasts(gain, {d})) ||
             (gain.dims == 2 && broadcasts(gain, {h, d})),
         "a gain of shape [], [d], [h 1] or [h d]");
  expect(!gain.given || stored(gain) || gain.type == Type::DOUBLE, "a gain of a floating dtype");
  expect(cos.given == sin.given, "both cos and sin, or neither");
  if (!cos.given) return;
  expect(floating(cos, 4) && floating(sin, 4) && std::equal(cos.size, cos.size + 4, sin.size) &&
             broadcasts(cos, {x.size[0], 1, x.size[2], cos.size[3]}) && 2 * cos.size[3] <= d && cos.size[3] % 8 == 0,
         "float32 cos and sin of shape [1|b 1 1|t half], half a multiple of 8");
}

Pair encode(Tensor x, const Array& gain, const Array& cos, const Array& sin, int64_t kind, double eps, bool inverses) {
  const Array rows = dense(x);
  check_encoding(rows, gain, cos, sin);
  Tensor y = room_like(x, rows), inverse = dense_tensor({0});
  if (inverses && kind) {  // [b h t] in the order of x, so that rows write next to each other
    const int64_t h = rows.size[1], t = rows.size[2];
    const bool heads_inner = rows.stride[1] < rows.stride[2];
    const int64_t strides[] = {h * t, heads_inner ? 1 : t, heads_inner ? h : 1};
    inverse = empty_strided(3, rows.size, strides, aoti_torch_dtype_float32());
  }
  norm_rope(rows, gain, cos, sin, kind, float(eps), array(y), inverses && kind ? array(inverse) : Array{});
  return {y, inverse};
}
Pair norm_rope_(Tensor x, Maybe gain, Maybe cos, Maybe sin, int64_t kind, double eps, bool) {
  return encode(x, array(gain), dense(cos, true), dense(sin, true), kind, eps, true);
}
// q and k of a few tokens, turned alike, at the price of one call.
Pair norm_rope_two(Tensor q, Tensor k, Maybe gain_q, Maybe gain_k, Maybe cos, Maybe sin, int64_t kind_q, int64_t kind_k,
                   double eps) {
  const Array cosines = dense(cos, true), sines = dense(sin, true);
  return {std::get<0>(encode(q, array(gain_q), cosines, sines, kind_q, eps, false)),
          std::get<0>(encode(k, array(gain_k), cosines, sines, kind_k, eps, false))};
}

Pair norm_rope_backward_(Tensor up, Tensor kept, Tensor inverse, Maybe gain, Maybe cos, Maybe sin, int64_t kind,
                         double eps, bool kept_x) {
  const Array grad = dense(up), rows = dense(kept), of_rows = array(inverse), gains = array(gain);
  const Array cosines = dense(cos, true), sines = dense(sin, true);
  check_encoding(rows, gains, cosines, sines);
  expect(kind > 0 && grad.dims == 4 && grad.type == rows.type && std::equal(rows.size, rows.size + 4, grad.size),
         "a norm, and a gradient and a kept tensor of one shape and dtype");
  expect(floating(of_rows, 3) && is_size(of_rows, {rows.size[0], rows.size[1], rows.size[2]}), "inverses [b h t]");
  Tensor dx = room_like(kept, rows);
  Tensor dgain = gain ? dense_tensor({gains.dims == 2 ? rows.size[1] : 1, rows.size[3]}) : dense_tensor({0});
  norm_rope_backward(grad, rows, of_rows, gains, cosines, sines, kind, float(eps), kept_x, array(dx), gain ? array(dgain) : Array{});
  return {dx, dgain};
}

double gain_spread_(Tensor gain) {
  const Array numbers = array(gain);
  expect(numbers.dims <= 2 && (stored(numbers) || numbers.type == Type::DOUBLE), "a gain of up to two dimensions");
  return gain_spread(numbers);
}

void check_rows(const Array& q, const Array& k, const Array& scale, const Array& low, const Array& high, const Array& mask) {
  check_heads(q, k), check_narrow(q);
  expect(q.type == k.type && k.size[2] < (int64_t(1) << 30), "q and k of one dtype, and fewer than 2^30 keys");
  expect(floating(scale, 3) && is_size(scale, {q.size[0], q.size[1], q.size[2]}), "a scale for every row, float32 [b h t]");
  expect(low.given == high.given, "both ends of what rows see, or none");
  for (const Array& x : {low, high})
    expect(!x.given || (x.dims == 2 && x.type == Type::LONG && x.size[1] == q.size[2] && broadcasts(x, {q.size[0], q.size[2]})),
           "the ends of what rows see as int64 [b|1 t]");
  check_mask(mask, q, k, true);
}

Three logit_rows_(Tensor q, Tensor k, Tensor scale, Maybe low, Maybe high, Maybe mask, double cap, double threshold) {
  const Array queries = dense(q), keys = dense(k), by_row = array(scale), from = array(low), to = array(high), shown = array(mask);
  check_rows(queries, keys, by_row, from, to, shown);
  const int64_t b = queries.size[0], h = queries.size[1], t = queries.size[2];
  Tensor rows = dense_tensor({13, b, h, t}), norms = dense_tensor({b, keys.size[1], keys.size[2]});
  Tensor counts = dense_tensor({b, h, t}, aoti_torch_dtype_int64());
  logit_rows(queries, keys, by_row, from, to, shown, float(cap), float(threshold), array(rows), array(counts), array(norms));
  return {rows, counts, norms};
}

Tensor logit_extremes_(Tensor q, Tensor k, Tensor scale, Maybe low, Maybe high, Maybe mask, double cap) {
  const Array queries = dense(q), keys = dense(k), by_row = array(scale), from = array(low), to = array(high), shown = array(mask);
  check_rows(queries, keys, by_row, from, to, shown);
  Tensor rows = dense_tensor({3, queries.size[0], queries.size[1], queries.size[2]});
  logit_extremes(queries, keys, by_row, from, to, shown, float(cap), array(rows));
  return rows;
}

} // namespace

STABLE_TORCH_LIBRARY(qkeel_native, m) {
  m.def("attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? slopes, float scale, bool causal, int window,"
        " float cap, bool stats) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask,"
        " Tensor? slopes, float scale, bool causal, int window, float cap) -> (Tensor, Tensor, Tensor)");
  m.def("decode(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? inverse, float scale, float cap, bool causal,"
        " int window) -> Tensor");
  m.def("norm_rope(Tensor x, Tensor? gain, Tensor? cos, Tensor? sin, int kind, float eps, bool keep_x)"
        " -> (Tensor, Tensor)");
  m.def("norm_rope_two(Tensor q, Tensor k, Tensor? gain_q, Tensor? gain_k, Tensor? cos, Tensor? sin, int kind_q,"
        " int kind_k, float eps) -> (Tensor, Tensor)");
  m.def("norm_rope_backward(Tensor dy, Tensor kept, Tensor inverse, Tensor? gain, Tensor? cos, Tensor? sin, int kind,"
        " float eps, bool kept_x) -> (Tensor, Tensor)");
  m.def("gain_spread(Tensor gain) -> float");
  m.def("logit_rows(Tensor q, Tensor k, Tensor scale, Tensor? low, Tensor? high, Tensor? mask, float cap,"
        " float threshold) -> (Tensor, Tensor, Tensor)");
  m.def("logit_extremes(Tensor q, Tensor k, Tensor scale, Tensor? low, Tensor? high, Tensor? mask, float cap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(qkeel_native, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention_));
  m.impl("attention_backward", TORCH_BOX(&attention_backward_));
  m.impl("decode", TORCH_BOX(&decode_));
  m.impl("norm_rope", TORCH_BOX(&norm_rope_));
  m.impl("norm_rope_two", TORCH_BOX(&norm_rope_two));
  m.impl("norm_rope_backward", TORCH_BOX(&norm_rope_backward_));
  m.impl("gain_spread", TORCH_BOX(&gain_spread_));
  m.impl("logit_rows", TORCH_BOX(&logit_rows_));
  m.impl("logit_extremes", TORCH_BOX(&logit_extremes_));
}
