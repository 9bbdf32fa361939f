"""`qkeel.sites.describe`: sites described by hand, for attention with a new layout or that cannot be observed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkeel.capture.described import Description, Reading, arranged
from qkeel.errors import InvalidTypeError, InvalidValueError, unknown
from qkeel.patching.module_tables import parameters_of
from qkeel.sites.site import AttentionSite, HeadSlice, QKProduct
from qkeel.spec import AttentionSpec


def describe(
    model: nn.Module,
    name: str,
    *,
    query: Reading | Callable[..., Tensor],
    key: Reading | Callable[..., Tensor],
    heads: int | tuple[int, int],
    spec: AttentionSpec | None = None,
    causal: bool = True,
    mask: Callable[..., Tensor | None] | None = None,
) -> AttentionSite:
    """Describes a site whose attention cannot be observed: where its q and k come from, and what is computed from them.

    The statistics of the site are those of the attention as described, in which every query sees every key that
    `causal` and `mask` allow, even where the module itself skips some of these keys.

    Args:
        model: the model that contains the site.
        name: the qualified name of the attention module, as in `model.get_submodule(name)`.
        query, key: a `Reading` of a submodule's output, or a function that is called as `f(module, *args, **kwargs)`
            with the arguments of the module's forward and returns q [b h t d] or k [b g s d].
        heads: the number of heads, or (query heads, key heads).
        spec: what is computed from q and k; by default the softmax of q·k/√d. If the module applies a norm or RoPE, it
            belongs here or in `then` of a Reading. The spec cannot have learned parameters.
        causal: whether later keys are hidden from a query; queries are aligned to the end of the keys.
        mask: a function that is called like those for `query` and `key` and returns a mask as accepted by
            `qkeel.attention`, or None.

    Returns:
        The site. The rows of each head are known if q and k are outputs of an nn.Linear.

    >>> model = nn.ModuleDict({"attn": nn.ModuleDict({"qkv": nn.Linear(8, 24)})})
    >>> q, k = (Reading(module="qkv", layout="b t (n h d)", part=part, parts=3) for part in (0, 1))
    >>> site = describe(model, "attn", query=q, key=k, heads=2)
    >>> site.key[0].parameter, site.key[0].index[1].tolist()
    ('attn.qkv.weight', [12, 13, 14, 15])

    Raises:
        UnknownNameError: there is no such module.
        InvalidValueError: heads, layouts or sizes don't fit.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"expected a torch.nn.Module that contains the site, got {type(model).__name__}"
        )
    h, g = (heads, heads) if isinstance(heads, int) else heads
    if h < 1 or g < 1 or h % g:
        raise InvalidValueError(
            f"expected heads >= 1 and query heads a multiple of key heads, got {h} and {g}"
        )
    spec = AttentionSpec() if spec is None else spec
    module = _submodule(model, name)
    parts = [_slice(name, module, reading, n) for reading, n in ((query, h), (key, g))]
    pieces = [p for p in parts if isinstance(p, HeadSlice)]
    sizes = {p.index.shape[1] for p in pieces}
    if len(sizes) > 1:
        raise InvalidValueError(
            f"q and k of {name!r} have heads of unequal sizes, {sorted(sizes)}"
        )
    if needed := spec.init_params(h, g, sizes.pop() if sizes else 1):
        raise InvalidValueError(
            f"this spec has parameters, which a description cannot contain: {', '.join(needed)}"
        )
    return AttentionSite(
        name=name,
        module=module,
        spec=spec,
        n_heads=h,
        n_kv_heads=g,
        head_dim=pieces[0].index.shape[1] if pieces else 0,
        terms=(QKProduct(query=(pieces[0],), key=(pieces[1],)),)
        if len(pieces) == 2
        else (),
        why="; ".join(p for p in parts if isinstance(p, str)),
        normed=any(isinstance(p, Reading) and p.normed for p in (query, key)),
        description=Description(query=query, key=key, causal=causal, mask=mask),
    )


def _submodule(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name not in modules:
        raise unknown(
            f"module of this {type(model).__name__}", name, [n for n in modules if n]
        )
    return modules[name]


def _slice(
    name: str, module: nn.Module, reading: Reading | Callable[..., Tensor], heads: int
) -> HeadSlice | str:
    """The rows of each head, or the reason why they are unknown."""
    if not isinstance(reading, Reading):
        return f"{getattr(reading, '__name__', 'a function')} computes it"
    layer = _submodule(module, reading.module)
    if not isinstance(layer, nn.Linear) or "weight" not in parameters_of(layer):
        return f"{reading.module} is a {type(layer).__name__}, not an nn.Linear with a weight of its own"
    # Features whose layout contains no h are shared by all heads.
    heads = heads if "h" in reading.groups[-1] else 1
    features = torch.arange(layer.out_features).expand([1] * (reading.dims - 1) + [-1])
    home = ".".join(filter(None, (name, reading.module)))
    return HeadSlice(
        parameter=f"{home}.weight",
        axis=0,
        index=arranged(features, reading, heads)[0, :, 0],
        bias=f"{home}.bias" if layer.bias is not None else None,
    )
