// What operators.cpp calls for the operators: it has checked the arguments and made room for the results.
#pragma once
#include "array.h"

namespace qkeel {

struct AttentionResult {
  Array out, lse, top, entropy;
};
struct AttentionGradient {
  Array dq, dk, dv;
};

// attention.cpp, attention_backward.cpp
void attention(const Array& q, const Array& k, const Array& v, const Array& mask, const Array& slopes, float scale,
               bool causal, int64_t window, float cap, const AttentionResult& result);
void attention_backward(const Array& up, const Array& q, const Array& k, const Array& v, const Array& out,
                        const Array& lse, const Array& mask, const Array& slopes, float scale, bool causal,
                        int64_t window, float cap, const AttentionGradient& to);
// decode.cpp
void decode(const Array& q, const Array& k, const Array& v, const Array& mask, const Array& factors, float scale,
            float cap, bool causal, int64_t window, const Array& out);
// norm_rope.cpp
void norm_rope(const Array& x, const Array& gain, const Array& cos, const Array& sin, int64_t kind, float eps,
               const Array& y, const Array& inverse);
void norm_rope_backward(const Array& dy, const Array& kept, const Array& inverse, const Array& gain, const Array& cos,
                        const Array& sin, int64_t kind, float eps, bool kept_x, const Array& dx, const Array& dgain);
double gain_spread(const Array& gain);  // min |g| / max |g|: how much dividing a rotated pair by its gains magnifies rounding, at most, as its inverse
// logit_pass.cpp
void logit_rows(const Array& q, const Array& k, const Array& scale, const Array& low, const Array& high, const Array& mask,
                float cap, float threshold, const Array& rows, const Array& counts, const Array& key_norms);
void logit_extremes(const Array& q, const Array& k, const Array& scale, const Array& low, const Array& high,
                    const Array& mask, float cap, const Array& rows);

} // namespace qkeel
