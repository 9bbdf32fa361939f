"""Reads the arguments of attention functions: SDPA, FlexAttention, flash-attn, and functions of other packages."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from qkeel.capture.calls import HeadLayout, flex_call, hides
from qkeel.errors import QkeelError
from qkeel.patching.function_code import ObservedCall, exchange, give_back
from qkeel.patching.modes import Args, Kwargs, ReadingMode, without_modes
from qkeel.patching.torch_state import recomputing
from qkeel.spec import AttentionCall, AttentionSpec, Fixed, NoCap, Softcap
from qkeel.spec.call import band_call, make_call

# Attention functions that are not torch functions, observed by exchanging their code while there is an observer.
#
# flex_attention and flash-attn's functions are pure Python functions, whose calls a torch function mode does not see.

_FLEX = "flex_attention"
# The names under which flash-attn, its Hopper version, the versions on the hub and wrappers around them provide it.
FLASH = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)
_HOMES: dict[str, tuple[str, ...]] = {
    "torch.nn.attention.flex_attention": (_FLEX,),
    "torch.nn.attention.varlen": ("varlen_attn",),
    # Attention called by a module that is not one of qkeel's, or with which a remedy replaced a model's own.
    "qkeel.ops": ("run", "run_with_maxima", "run_with_weights"),
}


# A CaptureMode, which is defined above this file.
CallObserver = Any
# Per thread. Empty while an observed function runs, because the calls that it makes are part of it.
_OBSERVERS: contextvars.ContextVar[tuple[CallObserver, ...]] = contextvars.ContextVar(
    "qkeel_observers", default=()
)


observers: Callable[[], tuple[CallObserver, ...]] = _OBSERVERS.get


@contextmanager
def observed_by(observer: CallObserver, *, exchanges: bool) -> Iterator[None]:
    """A context in which `observer` receives this thread's calls, those of functions that are not torch's only if
    `exchanges` is True. Functions of modules that are not imported yet are missed."""
    taken: list[types.FunctionType] = []
    try:
        # Models call flash-attn where they have no mask, and torch's function elsewhere.
        has_flash = bool(_flash_modules(len(sys.modules)))
        for function in _functions() if exchanges or has_flash else ():
            exchange(function, _begin)
            taken.append(function)
        _OBSERVERS.set((*_OBSERVERS.get(), observer))
        yield
    finally:
        # Not by a token: observers may end in another order than that in which they began.
        _OBSERVERS.set(tuple([o for o in _OBSERVERS.get() if o is not observer]))
        for function in reversed(taken):
            give_back(function)


@contextmanager
def unobserved() -> Iterator[None]:
    """A context in which no observer of this thread sees any call."""
    token = _OBSERVERS.set(())
    try:
        with without_modes(ReadingMode):
            yield
    finally:
        _OBSERVERS.reset(token)


@functools.lru_cache(maxsize=1)
def _flash_modules(count: int) -> list[str]:
    """The names of flash-attn's modules among the `count` that are loaded. A verification asks eight times a layer."""
    return [home for home in list(sys.modules) if "flash_att" in home]


def _functions() -> list[types.FunctionType]:
    """The attention functions of loaded modules, each once; functions of other modules cannot be called."""
    functions: dict[int, types.FunctionType] = {}
    flash = [(home, FLASH) for home in _flash_modules(len(sys.modules))]
    for home, names in (*_HOMES.items(), *flash):
        held = vars(sys.modules[home]) if home in sys.modules else {}
        for name in names:
            function = held.get(name)
            if isinstance(function, types.FunctionType):
                functions[id(function)] = function
    return list(functions.values())


def _begin(
    function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]
) -> ObservedCall | None:
    observers = _OBSERVERS.get()
    if not observers or recomputing():
        return None
    outside = ExitStack()
    # flex_attention compiles itself, and the compiler refuses such modes.
    outside.enter_context(unobserved())
    call = ObservedCall(
        args,
        kwargs,
        outside.close,
        functools.partial(_report, function, observers, args, kwargs),
    )
    if any(o.probing for o in observers):
        # No gradients are traced through attention, and on a CPU flex_attention refuses inputs that require one.
        call.args = [_detached(x) for x in args]
        call.kwargs = {name: _detached(x) for name, x in kwargs.items()}
    return call


def _report(
    function: Callable[..., Any],
    observers: tuple[CallObserver, ...],
    args: list[Any],
    kwargs: dict[str, Any],
    out: object,
) -> object:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    with unobserved():
        for observer in observers:
            observer.guard(observer.called, function.__name__, bound.arguments)
    return out


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


# The readers of fused attention functions. They turn the arguments into AttentionCalls, with q, k and mask as passed.
#
# flash-attn's layouts are q [b t h d], or [total h d] with the cumulative lengths of the sequences, and qkv [... 3 h d]
# and kv [... 2 h d] if packed. Arguments are read by name, so their order may differ between versions.


SDPA = F.scaled_dot_product_attention
_MHA = inspect.signature(inspect.unwrap(F.multi_head_attention_forward))


def sdpa(arguments: Kwargs) -> AttentionCall:
    """Reads a call of F.scaled_dot_product_attention with q and k [b h t d]."""
    q, k, scale = arguments["query"], arguments["key"], arguments["scale"]
    if q.is_nested:
        raise UnreadError("nested tensors")
    scale = 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else float(scale)
    causal = bool(arguments["is_causal"])
    return _call(q, k, scale, arguments["attn_mask"], causal=causal)


def arranged(arguments: Kwargs, layout: HeadLayout) -> dict[str, Any]:
    """The arguments of a call of SDPA with q, k and mask as [b h t d] and [b h t s]; `layout` is that of its scores."""
    q, k, mask = arguments["query"], arguments["key"], arguments["attn_mask"]
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    if mask is not None:
        mask = layout.apply(mask.expand(*lead, q.shape[-2], k.shape[-2]))
    q, k = (layout.apply(x.expand(*lead, -1, -1)) for x in (q, k))
    return {**arguments, "query": q, "key": k, "attn_mask": mask}


def _call(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, *, causal: bool
) -> AttentionCall:
    """The call of q and k [b h t d]. `causal` has the meaning it has in SDPA: query i sees the keys up to i, regardless
    of their number."""
    t, s = q.shape[-2], k.shape[-2]
    # Either batch may be 1, as that of learned queries.
    b = k.shape[0] if q.shape[0] == 1 else q.shape[0]
    q, k = (x if len(x) == b else x.expand(b, -1, -1, -1) for x in (q, k))
    pos_q = pos_k = None
    # SDPA aligns its causal mask at the first key, and calls here are aligned at the last one unless positions say
    # more.
    if causal and t != s:
        pos_q, pos_k = (torch.arange(n, device=q.device) for n in (t, s))
    written = with_four_dimensions(mask if mask is None else mask.detach())
    # k stands in for the values, which no statistic reads.
    call = make_call(
        _plain(scale),
        *(q, k, k),
        causal=causal,
        mask=hiding(written),
        pos_q=pos_q,
        pos_k=pos_k,
    )
    if written is None or written.dtype == torch.bool:
        return call
    return dataclasses.replace(call, written_mask=written)


@functools.lru_cache(maxsize=256)
def _plain(scale: float) -> AttentionSpec:
    """A softmax of q·k times this scale."""
    return AttentionSpec(scale=Fixed(scale))


def with_four_dimensions(
    mask: Shaped[Tensor, ...] | None,
) -> Shaped[Tensor, "#b #h #t #s"] | None:
    """The mask as [b|1 h|1 t|1 s]."""
    while mask is not None and mask.ndim < 4:
        mask = mask[None]
    return mask


def hiding(mask: Shaped[Tensor, ...] | None) -> Shaped[Tensor, "#b #h #t #s"] | None:
    """The mask as [b|1 h|1 t|1 s]; an additive mask is set to -inf where it hides a pair."""
    mask = with_four_dimensions(mask)
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask.masked_fill(hides(mask), -torch.inf)


def mha_arguments(args: Args, kwargs: Kwargs) -> Kwargs:
    """Every argument of a call of F.multi_head_attention_forward."""
    bound = _MHA.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def mha(arguments: Kwargs) -> AttentionCall:
    """Reads a call of F.multi_head_attention_forward. Its internals cannot be observed, so q and k are recomputed from
    its arguments."""
    for name in ("bias_k", "static_k", "add_zero_attn"):
        if arguments[name] is not None and arguments[name] is not False:
            raise UnreadError(name)
    query, key, bias = arguments["query"], arguments["key"], arguments["in_proj_bias"]
    if query.ndim == 2:
        query, key = query[:, None], key[:, None]
    (t, b, m), h = query.shape, arguments["num_heads"]
    if arguments["use_separate_proj_weight"]:
        of_q, of_k = (None, None) if bias is None else (bias[:m], bias[m : 2 * m])
        q = F.linear(query, arguments["q_proj_weight"], of_q)
        k = F.linear(key, arguments["k_proj_weight"], of_k)
    else:
        # The complete packed matrix is used, so that gradients show its rows.
        weight = arguments["in_proj_weight"]
        q = F.linear(query, weight, bias)[..., :m]
        k = F.linear(key, weight, bias)[..., m : 2 * m]
    q, k = (x.unflatten(2, (h, -1)).permute(1, 2, 0, 3) for x in (q, k))
    mask = mha_mask(arguments, (b, h, t, k.shape[2]))
    # For torch, is_causal is a hint about attn_mask, which then hides the same pairs.
    causal = bool(arguments["is_causal"]) and mask is None
    return _call(q, k, 1 / math.sqrt(q.shape[-1]), mask, causal=causal)


def mha_mask(
    arguments: Kwargs, shape: tuple[int, int, int, int]
) -> Float[Tensor, "#b #h t s"] | None:
    """The attn_mask and key_padding_mask as one additive mask."""
    b, h, t, s = shape
    of_pairs, of_keys = arguments["attn_mask"], arguments["key_padding_mask"]
    if of_pairs is not None:
        has_heads = of_pairs.ndim == 3 and len(of_pairs) == b * h
        of_pairs = (
            of_pairs.view(b, h, t, s) if has_heads else of_pairs.expand(1, 1, t, s)
        )
    total = None
    for mask in (of_pairs, None if of_keys is None else of_keys.view(b, 1, 1, s)):
        if mask is not None:
            if mask.dtype == torch.bool:
                zeros = torch.zeros_like(mask, dtype=torch.float32)
                mask = zeros.masked_fill(mask, -torch.inf)
            total = mask if total is None else total + mask
    return total


_BY_PLACE = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


def is_mask_object(mask: object) -> bool:
    """True for the masks of torch.nn.attention.bias, whose own storage holds nothing."""
    objects = sys.modules.get("torch.nn.attention.bias")
    return objects is not None and isinstance(mask, objects.CausalBias)


def sdpa_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of a call, with torch's defaults for those that the call leaves out.

    A mask object of `torch.nn.attention.bias` becomes a mask.

    >>> sdpa_arguments((1, 2, 3), {"is_causal": True})["is_causal"]
    True
    """
    arguments = {**_DEFAULTS, **dict(zip(_BY_PLACE, args)), **kwargs}
    mask: Any = arguments["attn_mask"]
    if mask is not None and is_mask_object(mask):
        t, s = mask.seq_len_q, mask.seq_len_kv
        if t == s or mask.variant.name == "UPPER_LEFT":
            arguments |= {"attn_mask": None, "is_causal": True}
        else:
            arguments["attn_mask"] = torch.ones(
                t, s, dtype=torch.bool, device=arguments["query"].device
            ).tril(s - t)
    return arguments


def unpacked(arguments: Mapping[str, Any], heads: int) -> dict[str, Any] | None:
    """The arguments of a call of SDPA with q [b h 1 d], if its query heads lie in the token dimension; None otherwise.

    Where transformers decodes one token and doesn't use enable_gqa, it passes q as [b g h/g d] and keys that are not
    repeated. With as many tokens as a group has heads, it repeats the keys, so q then has all `heads`.
    """
    q, k, mask = arguments["query"], arguments["key"], arguments["attn_mask"]
    if q.ndim != 4 or k.ndim != 4 or q.is_nested or k.is_nested:
        return None
    b, groups, each, d = q.shape
    if (
        groups == heads
        or groups * each != heads
        or k.shape[1] != groups
        or arguments["is_causal"]
        or arguments["enable_gqa"]
    ):
        return None
    if mask is not None and {*mask.shape[-3:-1]} - {1}:
        # Rows that differ between queries, but not between groups of heads, are those of tokens.
        if mask.shape[-2] != 1 and mask.shape[-3:-2] != (groups,):
            return None
        mask = mask.expand(b, groups, each, -1).reshape(b, heads, 1, -1)
    return {**arguments, "query": q.reshape(b, heads, 1, d), "attn_mask": mask}


# --- The readers of flex_attention, flash-attn's functions and torch's varlen_attn, which turn their arguments into
# AttentionCalls

# Arguments that change what is computed, and the values at which they have no effect.
_UNREAD: dict[str, tuple[object, ...]] = {"attention_chunk": (None, 0)}
_UNREAD |= dict.fromkeys(
    ("block_table", "k_descale", "learnable_sink", "mask_mod", "num_heads_q"), (None,)
)
_UNREAD |= dict.fromkeys(
    ("page_table", "q_descale", "qv", "score_mod", "seqused_k", "seqused_q"), (None,)
)


class UnreadError(QkeelError, NotImplementedError):
    """The call has an option that cannot be accounted for exactly."""


def qkeel_call(arguments: Kwargs) -> AttentionCall:
    """Reads qkeel.ops.run(call, impl) and similar functions."""
    return arguments["call"]


def flex(arguments: Kwargs) -> AttentionCall:
    """Reads flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, ...)."""
    q, k = arguments["query"], arguments["key"]
    return flex_call(
        _spec(q, arguments["scale"], 0.0),
        q,
        k.expand(q.shape[0], *k.shape[1:]),
        arguments["score_mod"],
        arguments["block_mask"],
    )


def flash(arguments: Kwargs) -> AttentionCall:
    """Reads flash_attn_func and its relatives, and torch.nn.attention.varlen.varlen_attn."""
    for name, harmless in _UNREAD.items():
        value = arguments.get(name)
        if isinstance(value, Tensor) or value not in harmless:
            raise UnreadError(name)
    q, k = _q_and_k(arguments)
    spec = _spec(
        q,
        arguments.get("softmax_scale", arguments.get("scale")),
        arguments.get("softcap") or 0.0,
    )
    slopes = arguments.get("alibi_slopes")
    if slopes is not None and spec.cap != NoCap():
        raise UnreadError("alibi_slopes with softcap: a bias after the cap")
    band = {"window": _window(arguments.get("window_size")), "slopes": slopes}
    ends = _first(arguments, ("cu_seqlens_q", "cu_seqlens", "cu_seq_q"))
    if ends is None:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    elif not (len(q) and len(k)):
        raise UnreadError("packed sequences without any tokens")
    else:
        of_keys = _first(arguments, ("cu_seqlens_k", "cu_seq_k"))
        longest = arguments.get(
            "max_seqlen", arguments.get("max_seqlen_k", arguments.get("max_k"))
        )
        band["longest"] = longest if isinstance(longest, int) else None
        band["cu_seqlens"] = ends if of_keys is None else (ends, of_keys)
        q, k = (x.transpose(0, 1)[None] for x in (q, k))
    return band_call(
        make_call(spec, q, k, k, causal=bool(arguments.get("causal", False))), **band
    )


def _first(arguments: Kwargs, names: tuple[str, ...]) -> Tensor | None:
    return next((arguments[n] for n in names if arguments.get(n) is not None), None)


def _spec(q: Tensor, scale: float | None, softcap: float) -> AttentionSpec:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return AttentionSpec(
        scale=Fixed(factor), cap=Softcap(float(softcap)) if softcap > 0 else NoCap()
    )


def _q_and_k(arguments: Kwargs) -> tuple[Tensor, Tensor]:
    if "qkv" in arguments:
        q, k, _ = arguments["qkv"].unbind(-3)
        return q, k
    q = _first(arguments, ("q", "query"))
    k = (
        arguments["kv"].unbind(-3)[0]
        if "kv" in arguments
        else _first(arguments, ("k", "key"))
    )
    if torch.is_tensor(q) and torch.is_tensor(k) and q.is_floating_point():
        return q, k
    raise UnreadError("arguments q and k of an unexpected form")


def _window(size: object) -> tuple[int, int]:
    """Returns (left, right), with -1 for no bound, from a pair in which None or -1 means no bound."""
    if size is None:
        return -1, -1
    if isinstance(size, int):
        return size, size
    left, right = (-1 if x is None else int(x) for x in size)  # type: ignore[attr-defined]
    return left, right


Reader = Callable[[Kwargs], AttentionCall]
# Torch's fused functions, with what returns all arguments of a call by name.
FUSED: Mapping[str, Callable[[Args, Kwargs], Kwargs]] = {
    "scaled_dot_product_attention": sdpa_arguments,
    "multi_head_attention_forward": mha_arguments,
}
# The reader of each function of torch, and of each whose code is exchanged.
READERS: Mapping[str, Reader] = {
    "scaled_dot_product_attention": sdpa,
    "multi_head_attention_forward": mha,
    **dict.fromkeys(_HOMES["qkeel.ops"], qkeel_call),
    "flex_attention": flex,
    "varlen_attn": flash,
    **dict.fromkeys(FLASH, flash),
}
