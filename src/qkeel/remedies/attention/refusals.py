"""Sites whose attention a remedy cannot change: each function returns the reason and the way out, or None."""

from __future__ import annotations

from typing import Literal

from qkeel.heads.site import AttentionSite
from qkeel.kernels.contract import Refusal
from qkeel.sites.find import is_normed
from qkeel.spec import AttentionSpec, InverseSqrt
from qkeel.spec.norm import Norm
from qkeel.spec.scale import Scale

_OTHER_REMEDIES = (
    "use kind=rms or l2 with over=head and gain=none or scalar where attention is one of torch's fused functions "
    "(attn_implementation='sdpa'), or qk_clip or lalr, which need no norm"
)
SlotName = Literal["cap", "normalizer", "scale"]


def refuse_unseen(site: AttentionSite) -> Refusal | None:
    """Attention whose call is known to be out of reach."""
    if site.description is not None or site.below:
        return Refusal(
            "its attention runs inside torch.jit.script, torch.func.vmap or a function of its own, where it can't be "
            "changed",
            "use a remedy of steps or weights (qk_clip, lalr), or build the model with qkeel.nn",
        )
    return None


def refuse_heads(reason: str) -> Refusal:
    """Queries or keys that no module makes as whole heads, as in foreign MLA, whose rotated key part is made apart."""
    return Refusal(reason, _OTHER_REMEDIES)


def refuse_norm(site: AttentionSite, norm: Norm) -> Refusal | None:
    """Queries and keys that are normed already, and norms that would come after the rotation."""
    if is_normed(site):
        return Refusal("q and k are normed already", "remove that norm first, or keep it")
    if not norm.commutes_with_rotation and site.spec.position.order == "rotate_then_norm":
        return Refusal(
            "its norm would come after the rotation, and a mean or a gain per dimension there makes scores depend on "
            "more than the distance",
            "use kind=rms or l2 with gain none, scalar or head, or build the model with order='norm_then_rotate'",
        )
    return None


def refuse_scale(remedy: str, scale: Scale) -> Refusal | None:
    """A scale that unit vectors cannot replace: one that is not 1/√d, with or without a factor of positions."""
    if scale.base == InverseSqrt():
        return None
    other = "qk_norm" if remedy == "cosine" else "kind=rms"
    return Refusal(
        f"unit vectors need a scale of their own in place of 1/√d, and this site's is {scale.base.formula()}",
        f"use {other}, which keeps the scale, or build the model with the spec you mean",
    )


def refuse_taken(site: AttentionSite, slot: SlotName) -> Refusal | None:
    """A slot in which something is already: a cap, a factor of positions, weights other than a softmax."""
    return _TAKEN[slot](site.spec)


def _capped(spec: AttentionSpec) -> Refusal | None:
    if spec.cap.kind == "none":
        return None
    return Refusal(f"logits are capped already ({spec.cap.formula()})", "remove that cap first")


def _scaled(spec: AttentionSpec) -> Refusal | None:
    if not spec.scale.follows_position:
        return None
    return Refusal(f"logits are scaled by position already ({spec.scale.formula()})", "remove that first")


def _normalised(spec: AttentionSpec) -> Refusal | None:
    if spec.normalizer.kind == "softmax":
        return None
    return Refusal(
        f"its weights are {spec.normalizer.formula()} already, not a softmax",
        "remove the remedy that made them so first, or keep them",
    )


_TAKEN = {"cap": _capped, "scale": _scaled, "normalizer": _normalised}
