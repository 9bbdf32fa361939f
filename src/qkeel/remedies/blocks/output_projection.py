"""The output projection of somebody else's attention module, found by trying."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.remedies.base import Args, Kwargs, Target, where
from qkeel.sites.see.intercept import Interceptor, Sighting
from qkeel.sites.site import AttentionSite, HeadSlice

Seen = list[tuple[nn.Module, Tensor]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Output:
    """The output projection of an attention, its number of input features, and the width of the attention's input."""

    module: nn.Module
    features: int
    width: int


def first_tensor(args: Args, kwargs: Mapping[str, object]) -> Tensor | None:
    """The first floating point tensor of a call's arguments: the hidden states."""
    given = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
    return next(given, None)


def output_of(target: Target, site: AttentionSite, *, per_head: bool) -> Output:
    """The first weight that a module multiplies by after the attention call, if what it gets is what attention returns.

    One head's query weights are turned around on the example: its features of that input must change, and with
    `per_head` those of no other head, nor lie apart.

    Raises: RefusedError where no such module is seen.
    """
    place = where(site)
    if not site.terms:
        raise RefusedError(f"output_gate at {place}: it is not known which weights make its heads ({site.why})")
    query, head = site.terms[0].query[-1], site.n_heads - 1
    x, before = _after_attention(target, site)
    with _turned(target, query, head):
        after = _after_attention(target, site)[1]
    pairs = [(m, a, b) for (m, a), (n, b) in zip(before, after) if m is n and a.shape == b.shape]
    module, a, b = next((p for p in pairs if not torch.equal(p[1], p[2])), (None, None, None))
    if module is None or a is None or b is None or x is None or a.shape[:-1] != x.shape[:-1]:
        raise RefusedError(
            f"output_gate at {place}: no module inside it multiplies what attention returns by a weight, token by "
            "token; the gate belongs before that output projection"
        )
    changed = (a != b).flatten(0, -2).any(0)
    size = a.shape[-1] // site.n_heads
    if per_head and (not changed[head * size :].any() or changed[: head * size].any()):
        raise RefusedError(
            f"output_gate at {place}: the features of a head do not lie side by side before the output projection, "
            "so there is no gate per head; use per=feature"
        )
    return Output(module=module, features=a.shape[-1], width=x.shape[-1])


@contextmanager
def _turned(target: Target, query: HeadSlice, head: int) -> Iterator[None]:
    """The query weights of a head with the other sign: exact both ways, and no norm of queries undoes it."""
    weight = target.parameter(query.parameter)
    signs = torch.ones(query.n, device=weight.device, dtype=weight.dtype)
    signs[head % query.n] = -1
    signs = query.expand(signs, weight)
    with torch.no_grad():
        weight.mul_(signs)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.mul_(signs)


def _after_attention(target: Target, site: AttentionSite) -> tuple[Tensor | None, Seen]:
    """The input of the site's module, and inputs of modules with a matrix that it called after its attention."""
    seen: Seen = []
    inputs: list[Tensor | None] = []

    def note(module: nn.Module, args: Args) -> None:
        if args and isinstance(args[0], Tensor):
            seen.append((module, args[0].detach().clone()))

    def begin(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        inputs.append(first_tensor(args, kwargs))

    def call(sighting: Sighting) -> None:
        if sighting.name == site.name:
            seen.clear()

    matrices = [m for m in site.module.modules() if not any(m.children()) and any(p.ndim == 2 for p in m.parameters())]
    with ExitStack() as stack:
        for module in matrices:
            stack.callback(module.register_forward_pre_hook(note).remove)
        stack.callback(site.module.register_forward_pre_hook(begin, with_kwargs=True).remove)
        stack.enter_context(Interceptor(target.model, call))
        target.returned()
    return (inputs[0] if len(inputs) == 1 else None), seen
