// Attention over tiles that lie in cache, with the statistics of its logits in the same pass.
//
//   attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? slopes, float scale, bool causal, int window,
//             float cap, bool stats) -> (Tensor out, Tensor lse, Tensor top, Tensor entropy)
//   attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask,
//             Tensor? slopes, float scale, bool causal, int window, float cap) -> (Tensor dq, Tensor dk, Tensor dv)
//
// q [b h t d]; k [b g s d]; v [b g s e]; h a multiple of g, d and e of 8; float, bfloat16 or half, all alike; any
// strides. out and grad_out [b h t e] in q's dtype; lse, top, entropy float [b h t] (top and entropy empty without
// `stats`). Query i stands at i + s - t. It sees key j if j <= i + s - t (causal), |i + s - t - j| < window
// (window 0: no window) and the mask lets it. The logit is
//   z = scale · q·k + mask (a float one) - slopes[h] · |i + s - t - j|,  then  cap · tanh(z / cap)  (cap 0: none).
// mask: bool (True: may attend) or float (added; -inf and its most negative number hide), of four dimensions that
// broadcast to [b h t s]; slopes: float [h]. A row that sees no key has out 0, lse -inf, top -inf, entropy 0.
// top: the largest z before the cap. lse = log Σ exp(capped z), entropy in nats.
