"""One harness for kernels of attention: any call against the oracle in float64, with its rows and its gradients.

A kernel's error may be twice that of torch's own way in the same dtype, and a rounding of the largest number.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from tests.conformance.cases import allowed_error, truth_of
from tests.contract.conformance.cases import Geometry, masking, random_params, tensors

from qkeel import reference
from qkeel.kernels.choose import KERNELS
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = {
    "heads beside each other": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads apart": lambda x: x.contiguous(),
    "part of a fused projection": lambda x: (
        torch.cat([x, x], -1)
        .transpose(1, 2)
        .contiguous()
        .transpose(1, 2)[..., : x.shape[-1]]
    ),
    "dimensions apart": lambda x: x.mT.contiguous().mT,
    "every other number": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "with room behind": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], 2)[
        :, :, : x.shape[2]
    ],
}


def laid(x, layout):
    """The tensor in one of the layouts by number."""
    return list(LAYOUTS.values())[layout % len(LAYOUTS)](x)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One call of a kernel; `mask` is a kind of the contract's `masking`, or one of additive masks below."""

    spec: AttentionSpec = dataclasses.field(default_factory=AttentionSpec)
    t: int = 129  #: queries
    s: int | None = None  #: keys; None: as many
    b: int = 2
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (64, 64)  #: of q and k, and of v
    causal: bool = True
    mask: str = ""
    size: float = 1.0  #: of q

    def call(self, dtype, layout=0):
        """The call with its tensors in layouts that follow from a number."""
        (h, g), (d, e), t, s = self.heads, self.widths, self.t, self.s or self.t
        x, rng = (
            Geometry(self.b, h, g, t, s, d),
            torch.Generator().manual_seed(t + layout),
        )
        q, k, _ = tensors(x, dtype, rng)
        v = torch.randn(self.b, g, s, e, generator=rng).to(dtype)
        given = [laid(y, layout + i) for i, y in enumerate((q * self.size, k, v))]
        seen = {"causal": self.causal}
        if self.mask == "additive, hiding":  # as transformers hides keys
            kept = torch.rand(self.b, 1, t, s, generator=rng) > 0.3
            seen["mask"] = (
                torch.randn(self.b, 1, t, s)
                .masked_fill(~kept, torch.finfo(dtype).min)
                .to(dtype)
            )
        elif self.mask:
            seen |= {
                name: x
                for name, x in masking(self.mask, x, dtype, rng).items()
                if name != "causal"
            }
        params = random_params(self.spec, x, dtype, rng)
        return make_call(self.spec, *given, params=params, **seen)


def gradients(call, forward, above):
    """Gradients of q, k and v in the dtype of the gradient from above."""
    leaves = [
        x.detach().to(above.dtype).requires_grad_() for x in (call.q, call.k, call.v)
    ]
    params = {n: p.to(above.dtype) for n, p in call.params.items()}
    mask = (
        call.mask
        if call.mask is None or call.mask.dtype == torch.bool
        else call.mask.to(above.dtype)
    )
    wanting = dataclasses.replace(
        call, q=leaves[0], k=leaves[1], v=leaves[2], params=params, mask=mask
    )
    return torch.autograd.grad(forward(wanting), leaves, above)


def check(call, told, kernel):
    """Compares a kernel's output with the oracle's, and returns it."""
    truth = truth_of(call)
    assert kernel.supports(call) is None, told
    out = kernel(call)
    assert out.dtype == call.q.dtype, told
    assert out.shape == truth.out.shape, told
    assert (out.double() - truth.out).abs().max() <= allowed_error(call, truth), told
    return out


def rows_of(call, wide):
    """Largest and smallest logit before the cap, logsumexp and entropy of each row of the oracle, in float64 or not."""
    found = truth_of(call) if wide else reference.attend_call(call)
    hidden = found.logits == -torch.inf
    low = call.spec.cap.apply(found.logits).masked_fill(hidden, -torch.inf)
    entropy = torch.special.entr(found.weights.double()).sum(-1)
    smallest = found.logits.masked_fill(hidden, torch.inf).amin(-1)
    return {
        "largest": found.logits.amax(-1),
        "smallest": smallest,
        "lse": low.logsumexp(-1),
        "entropy": entropy,
    }


def check_rows(call, told, rows):
    """Compares the statistics of each row of a float32 call with those of the oracle's logits."""
    truth, theirs = rows_of(call, True), rows_of(call, False)
    size = (
        5
        + truth["largest"].masked_fill(truth["largest"] == -torch.inf, 0.0).abs().max()
    )
    for name, ours in rows._asdict().items():
        true = truth[name]
        mine, other = (
            torch.where(x == true, 0.0, (x - true).abs()) for x in (ours, theirs[name])
        )
        assert mine.max() <= 2 * (
            other.max() + torch.finfo(torch.float32).eps * size
        ), f"{told}: {name}"


def check_gradients(call, told, kernel):
    """Compares a kernel's gradients with the oracle's."""
    dtype, eps = call.q.dtype, torch.finfo(call.q.dtype).eps
    above = laid(
        torch.randn(*call.q.shape[:3], call.v.shape[-1]).to(dtype), call.q.shape[2]
    )
    other = KERNELS["sdpa" if KERNELS["sdpa"].supports(call) is None else "chunked"]
    dense = dataclasses.replace(
        call, q=call.q.contiguous(), k=call.k.contiguous(), v=call.v.contiguous()
    )
    truth = gradients(call, lambda c: reference.attend_call(c).out, above.double())
    theirs, ours = (
        gradients(dense, other, above.contiguous()),
        gradients(call, kernel, above),
    )
    # What encodes q and k sums terms of both signs, each rounded as the largest number anywhere.
    bare = call.spec.norm.kind == "none" and call.spec.position.unwindowed.kind in (
        "none",
        "alibi",
    )
    largest = max(float(x.abs().max()) for x in truth)
    for name, mine, their, true in zip("qkv", ours, theirs, truth):
        assert mine.dtype == dtype, told
        assert mine.isfinite().all(), told
        # The weights exp(z - lse) carry the rounding of lse, a logarithm and a sum of about ln s.
        size = (
            max(1.0, math.log(max(2, call.k.shape[2]))) * float(true.abs().max())
            if bare
            else 4 * largest
        )
        allowed = 2 * ((their.double() - true).abs().max() + eps * size)
        assert (mine.double() - true).abs().max() <= allowed, (
            f"{told}: gradient of {name}"
        )
