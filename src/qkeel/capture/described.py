"""Sites described by hand, for a new layout or attention that nothing can see: custom operators, sparse kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from qkeel.capture.calls import fewest_keys
from qkeel.errors import InvalidTypeError, InvalidValueError, ShapeError, unknown
from qkeel.heads.site import AttentionSite, Description, HeadSlice, LogitTerm, Reading
from qkeel.patching.compiler_state import recomputing
from qkeel.patching.guard import Guarded, in_this_thread, unguarded
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.module_tables import parameters_of
from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.call import make_call


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
    """A site for an attention that can't be seen, from where its q and k are and what is computed of them.

    Its statistics are those of the attention that is described: every query against every key that `causal` and
    `mask` let it see, even where the module itself skips some of them.

    Args:
        model: the whole model.
        name: qualified name of the attention's module, as in `model.get_submodule(name)`.
        query, key: a `Reading` of a submodule's output; or a function that is called as `f(module, *args, **kwargs)`
            with the arguments of the module's forward and returns q [b h t d] or k [b g s d].
        heads: the number of heads, or (query heads, key heads).
        spec: what is computed from q and k; by default softmax of q·k/√d. A norm or RoPE that the module applies
            belongs here, or in `then` of a Reading. No learned parameters.
        causal: whether a query sees no later key; queries are aligned to the end of the keys.
        mask: called like a function for q; returns a mask as `qkeel.attention` takes it, or None.

    Returns:
        The site. Its rows per head are known where q and k are read from an nn.Linear.

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
        raise InvalidTypeError(f"expected a torch.nn.Module to describe a site of, got {type(model).__name__}")
    h, g = (heads, heads) if isinstance(heads, int) else heads
    if h < 1 or g < 1 or h % g:
        raise InvalidValueError(f"expected heads >= 1 and query heads a multiple of key heads, got {h} and {g}")
    spec = AttentionSpec() if spec is None else spec
    module = _submodule(model, name)
    parts = [_slice(name, module, part, n) for part, n in ((query, h), (key, g))]
    pieces = [p for p in parts if isinstance(p, HeadSlice)]
    sizes = {p.index.shape[1] for p in pieces}
    if len(sizes) > 1:
        raise InvalidValueError(f"q and k of {name!r} have heads of unequal sizes, {sorted(sizes)}")
    if needed := spec.init_params(h, g, sizes.pop() if sizes else 1):
        raise InvalidValueError(f"this spec has parameters, which a description does not hold: {', '.join(needed)}")
    return AttentionSite(
        name=name,
        module=module,
        spec=spec,
        n_heads=h,
        n_kv_heads=g,
        head_dim=pieces[0].index.shape[1] if pieces else 0,
        terms=(LogitTerm(query=(pieces[0],), key=(pieces[1],)),) if len(pieces) == 2 else (),
        why="; ".join(p for p in parts if isinstance(p, str)),
        normed=any(isinstance(p, Reading) and p.normed for p in (query, key)),
        description=Description(query=query, key=key, causal=causal, mask=mask),
    )


def _submodule(model: nn.Module, name: str) -> nn.Module:
    modules = dict(model.named_modules())
    if name not in modules:
        raise unknown(f"module of this {type(model).__name__}", name, [n for n in modules if n])
    return modules[name]


def _slice(name: str, module: nn.Module, part: Reading | Callable[..., Tensor], n: int) -> HeadSlice | str:
    """The rows of each head, or why they are unknown."""
    if not isinstance(part, Reading):
        return f"{getattr(part, '__name__', 'a function')} computes it"
    layer = _submodule(module, part.module)
    if not isinstance(layer, nn.Linear) or "weight" not in parameters_of(layer):
        return f"{part.module} is a {type(layer).__name__}, not an nn.Linear with a weight of its own"
    # Features that hold no h are those of every head.
    n = n if "h" in part.groups[-1] else 1
    numbers = torch.arange(layer.out_features)
    index = arranged(numbers.expand([1] * (part.dims - 1) + [-1]), part, n)[0, :, 0]
    home = ".".join(filter(None, (name, part.module)))
    bias = f"{home}.bias" if layer.bias is not None else None
    return HeadSlice(parameter=f"{home}.weight", axis=0, index=index, bias=bias)


def arranged(x: Shaped[Tensor, ...], reading: Reading, heads: int) -> Shaped[Tensor, "b h t d"]:
    """[b h t d] of a module's output that is laid out as the reading says.

    Raises:
        ShapeError: it is not.
    """
    sizes = {"h": heads, "n": reading.parts}
    names: list[str] = []
    if x.ndim != reading.dims:
        raise ShapeError(f"expected {reading.module}'s output as [{reading.layout}], got shape {tuple(x.shape)}")
    for group in reversed(reading.groups):
        names[:0] = group
        if len(group) > 1:
            known = [sizes.get(letter, -1) for letter in group]
            place = reading.groups.index(group)
            total, fixed = x.shape[place], 1
            for size in known:
                fixed *= max(size, 1)
            if total % fixed:
                raise ShapeError(f"{reading.module}'s output has {total} features, no multiple of {fixed} = {group}")
            x = x.unflatten(place, known)
    if "n" in names:
        x = x.select(names.index("n"), reading.part)
        names.remove("n")
    for letter in "bh":
        if letter not in names:
            x, names = x.unsqueeze(0), [letter, *names]
    if x.shape[names.index("h")] != heads:
        raise ShapeError(f"expected {heads} heads in {reading.module}'s output as [{reading.layout}], got {x.shape}")
    return x.permute([names.index(letter) for letter in "bhtd"])


class DescribedSiteHooks:
    """Hooks on a described site's modules, from `attach` on. After each call of the site's module
    they give the site, and a function that returns the call, to `report`."""

    def __init__(
        self,
        site: AttentionSite,
        report: Callable[[AttentionSite, Callable[[], AttentionCall]], None],
        guard: Guarded = unguarded,
    ) -> None:
        assert site.description is not None
        self.site, self.description, self._report, self._guard = site, site.description, report, guard
        self._outputs: dict[str, Tensor] = {}

    def attach(self, undo: ExitStack) -> None:
        """Hooks onto the modules until `undo` is closed."""
        undo.callback(self._outputs.clear)
        for part in (self.description.query, self.description.key):
            if isinstance(part, Reading):
                layer = self.site.module.get_submodule(part.module)
                keep = in_this_thread(functools.partial(self._guard, self._keep, part.module))
                undo.callback(layer.register_forward_hook(keep).remove)
        done = in_this_thread(functools.partial(self._guard, self._done))
        undo.callback(self.site.module.register_forward_hook(done, with_kwargs=True).remove)

    def _keep(self, name: str, module: nn.Module, args: object, output: Tensor) -> None:
        if not torch.compiler.is_compiling() and not recomputing():
            self._outputs[name] = output

    def _done(self, module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
        if torch.compiler.is_compiling() or recomputing():
            return
        outputs = dict(self._outputs)
        self._outputs.clear()
        self._report(self.site, lambda: self._call(outputs, module, args, kwargs))

    def _call(self, outputs: dict[str, Tensor], module: nn.Module, args: Args, kwargs: Kwargs) -> AttentionCall:
        given, site = self.description, self.site

        def value(part: Reading | Callable[..., Tensor], heads: int) -> Tensor:
            if not isinstance(part, Reading):
                return part(module, *args, **kwargs)
            if part.module not in outputs:
                raise InvalidValueError(
                    f"{part.module} did not run in this call of {site.name!r}; describe it otherwise"
                )
            x = arranged(outputs[part.module], part, heads)
            return x if part.then is None else part.then(x)

        q, k = value(given.query, site.n_heads), value(given.key, site.n_kv_heads)
        mask = None if given.mask is None else given.mask(module, *args, **kwargs)
        return make_call(site.spec, q, fewest_keys(k), k, causal=given.causal, mask=mask)
