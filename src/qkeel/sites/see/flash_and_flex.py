"""The readers of flex_attention, flash-attn's functions and torch's varlen_attn: their arguments as AttentionCalls.

flash-attn's layouts: q [b t h d], or [total h d] with the cumulative lengths of the sequences; qkv [... 3 h d] and
kv [... 2 h d] where they come packed. Arguments are read by name, so versions may differ in their order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from qkeel.errors import QkeelError
from qkeel.patching.modes import Kwargs
from qkeel.sites.calls.head_layout import fewest_keys
from qkeel.sites.calls.mask_functions import flex_call
from qkeel.sites.see.foreign_functions import FLASH
from qkeel.spec import AttentionCall, AttentionSpec, Fixed, NoCap, Softcap
from qkeel.spec.band_call import band_call
from qkeel.spec.call import make_call
from qkeel.spec.shapes import PerRow

# Arguments that change what is computed, and at which values they don't.
_UNREAD: dict[str, tuple[object, ...]] = {"attention_chunk": (None, 0)}
_UNREAD |= dict.fromkeys(("block_table", "k_descale", "learnable_sink", "mask_mod", "num_heads_q"), (None,))
_UNREAD |= dict.fromkeys(("page_table", "q_descale", "qv", "score_mod", "seqused_k", "seqused_q"), (None,))


class UnreadError(QkeelError, NotImplementedError):
    """A call with an option that can't be accounted for exactly."""


def qkeel_call(given: Kwargs) -> AttentionCall:
    """Reads qkeel.ops.run(call, impl) and its like: the call as it is, its keys as few as differ."""
    call = given["call"]
    return dataclasses.replace(call, k=fewest_keys(call.k))


def flex(given: Kwargs) -> AttentionCall:
    """Reads flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, ...)."""
    q, k = given["query"], given["key"]
    k = fewest_keys(k.expand(q.shape[0], *k.shape[1:]))
    return flex_call(_spec(q, given["scale"], 0.0), q, k, given["score_mod"], given["block_mask"])


def returned_rows(out: object) -> tuple[PerRow | None, PerRow | None]:
    """Each row's logsumexp and largest logit [b h t] in what flex_attention returned; None where it was not asked.

    Both are of the scores that come out of score_mod, over the keys that the block mask shows; -inf of rows
    that see none.
    """
    more = out[1] if isinstance(out, tuple) else None
    return (more, None) if more is None or isinstance(more, Tensor) else (more.lse, more.max_scores)


def flash(given: Kwargs) -> AttentionCall:
    """Reads flash_attn_func and its relatives, and torch.nn.attention.varlen.varlen_attn."""
    for name, harmless in _UNREAD.items():
        value = given.get(name)
        if isinstance(value, Tensor) or value not in harmless:
            raise UnreadError(name)
    q, k = _q_and_k(given)
    spec = _spec(q, given.get("softmax_scale", given.get("scale")), given.get("softcap") or 0.0)
    slopes = given.get("alibi_slopes")
    if slopes is not None and spec.cap != NoCap():
        raise UnreadError("alibi_slopes with softcap: a bias after the cap")
    band = {"window": _window(given.get("window_size")), "slopes": slopes}
    ends = _first(given, ("cu_seqlens_q", "cu_seqlens", "cu_seq_q"))
    if ends is None:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    elif not (len(q) and len(k)):
        raise UnreadError("no sequence with a token in it")
    else:
        of_keys = _first(given, ("cu_seqlens_k", "cu_seq_k"))
        longest = given.get("max_seqlen", given.get("max_seqlen_k", given.get("max_k")))
        band["longest"] = longest if isinstance(longest, int) else None
        band["cu_seqlens"] = ends if of_keys is None else (ends, of_keys)
        q, k = (x.transpose(0, 1)[None] for x in (q, k))
    return band_call(make_call(spec, q, k, k, causal=bool(given.get("causal", False))), **band)


def _first(given: Kwargs, names: tuple[str, ...]) -> Tensor | None:
    return next((given[n] for n in names if given.get(n) is not None), None)


def _spec(q: Tensor, scale: float | None, softcap: float) -> AttentionSpec:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return AttentionSpec(scale=Fixed(factor), cap=Softcap(float(softcap)) if softcap > 0 else NoCap())


def _q_and_k(given: Kwargs) -> tuple[Tensor, Tensor]:
    if "qkv" in given:
        q, k, _ = given["qkv"].unbind(-3)
        return q, k
    q = _first(given, ("q", "query"))
    k = given["kv"].unbind(-3)[0] if "kv" in given else _first(given, ("k", "key"))
    if torch.is_tensor(q) and torch.is_tensor(k) and q.is_floating_point():
        return q, k
    raise UnreadError("q and k of its arguments")


def _window(size: object) -> tuple[int, int]:
    """(left, right), -1 for no bound, of a pair with None or -1 for none."""
    if size is None:
        return -1, -1
    if isinstance(size, int):
        return size, size
    left, right = (-1 if x is None else int(x) for x in size)  # type: ignore[attr-defined]
    return left, right


# The reader of each function that foreign_functions observes.
FLASH_AND_FLEX: Mapping[str, Callable[[Kwargs], AttentionCall]] = {
    "run": qkeel_call,
    "run_with_weights": qkeel_call,
    "flex_attention": flex,
    "varlen_attn": flash,
    **dict.fromkeys(FLASH, flash),
}
