"""A probe: one forward pass under observation, after which the model is as it was."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.errors import InvalidValueError, NoAttentionError, caution
from qkeel.functional.norms import unrounded
from qkeel.patching.checkpointing import CheckpointedParts
from qkeel.patching.compiler_state import uncompiled
from qkeel.patching.forward_passes import extra_pass
from qkeel.patching.guard import Guarded, Postponed, unguarded
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.parallel_training import running_stage
from qkeel.sites.calls.head_layout import key_heads
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.kept_state import copied, undisturbed
from qkeel.sites.missed import Sites
from qkeel.sites.see.intercept import Interceptor, Sighting
from qkeel.sites.see.running_modules import Frame, tensors
from qkeel.sites.site import AttentionSite, LogitTerm, NormGain
from qkeel.sites.weights.autograd_walk import names_of
from qkeel.sites.weights.head_rows import UnknownRowsError, sum_terms
from qkeel.sites.weights.norm_gains import seen_gains
from qkeel.spec import AttentionCall

SEARCH = "the search for attention in a model that is split over processes"


def probe(model: nn.Module, args: Args, kwargs: Kwargs, *, expected: bool) -> Sites:
    """The sites that a forward pass on this example shows; none is an error if they were `expected`."""
    model = uncompiled(model)
    check_devices(model, args, kwargs)
    with extra_pass(model), torch.inference_mode(False), undisturbed(model):
        reading, lost = _watched(model, args, kwargs)
    if not reading.sites and expected:
        raise NoAttentionError(unseen(model, reading.watcher))
    if lost:
        caution(f"attention inside torch.jit.script and torch.func.vmap is not looked for: {lost}")
    return Sites([reading.sites[name] for name in reading.order if name in reading.sites], reading.watcher.missed)


def check_devices(model: nn.Module, *example: object) -> None:
    """Refuse an example on another device than the model before running it.

    Raises:
        InvalidValueError: with both devices.
    """
    homes = {x.device for x in (*model.parameters(), *model.buffers())}
    for x in tensors(example):
        # A number on the CPU goes with anything.
        if homes and x.device not in homes and (x.ndim or x.device.type != "cpu"):
            where = ", ".join(sorted(map(str, homes)))
            raise InvalidValueError(
                f"expected the example on the model's device, {where}; got a tensor of shape {tuple(x.shape)} on "
                f"{x.device}. Move one of them: inputs.to({where.split(', ')[0]!r})"
            )


@final
class _Reading:
    """The sites of a pass, read from the first call of each: at the end of every checkpointed part, of whose graph
    nothing is kept, those that are complete; the others at the end of the pass."""

    def __init__(self, model: nn.Module, *, dispatch: bool, keep: bool) -> None:
        self.watcher = Interceptor(model, self._note, probing=True, dispatch=dispatch, guard=_guard(model))
        self.parts = CheckpointedParts(self._at_end_of_part, keep=keep)
        self.sites: dict[str, AttentionSite] = {}
        self.order: dict[str, None] = {}  # of the names of all calls
        self._names = names_of(model)
        self._waiting: list[Sighting] = []

    def _note(self, sighting: Sighting) -> None:
        if sighting.name not in self.order:
            self.order[sighting.name] = None
            self._waiting.append(sighting)

    def _at_end_of_part(self) -> None:
        running = self.watcher.stack.top.line()
        self.watcher.guard(self.watcher.apart, functools.partial(self._read, running))

    def _read(self, running: Sequence[Frame]) -> None:
        left: list[Sighting] = []
        for calls in grouped(self._waiting):
            if calls[0].headless and any(calls[0].frame is frame for frame in running):
                left += calls  # more heads may come
                continue
            with unrounded(scored(calls[0])):
                self.sites[calls[0].name] = _site(calls, self._names)
        self._waiting = left

    def run(self, args: Args, kwargs: Kwargs) -> None:
        """Runs the pass."""
        forward(self.watcher.stack.root.module, self.watcher, args, kwargs, parts=self.parts)

    def finished(self) -> bool:
        """Reads what is left; False if something has asked for a part that is forgotten."""
        try:
            with torch.enable_grad():
                self._read([])
        except RuntimeError:
            if not self.parts.missed:
                raise
        return not self.parts.missed


def _watched(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[_Reading, str]:
    """One forward pass as it was read, and why it was not read below torch's functions, where that is what fails. Where
    weights and the logits that they make lie in two checkpointed parts, another pass keeps both, and a warning says so.
    """
    reading, failed, why = _passed(model, args, kwargs, keep=False)
    known = failed is None and reading.finished()
    if not known and reading.parts.any:
        reading, failed, why = _passed(model, args, kwargs, keep=True)
        known = failed is None and reading.finished()
        if known:
            caution(_KEPT.format(type(model).__name__))
    if known:
        return reading, why
    raise InvalidValueError(
        f"the forward pass of {type(model).__name__} on the example failed: {why}. "
        f"Give arguments with which model(...) runs; its forward takes {inspect.signature(model.forward)}"
    ) from failed


def _passed(model: nn.Module, args: Args, kwargs: Kwargs, *, keep: bool) -> tuple[_Reading, Exception | None, str]:
    """A pass below torch's functions, or without that where it fails; its error, and why the one below them failed."""
    why = ""
    for dispatch in (True, False):
        reading, failed = _Reading(model, dispatch=dispatch, keep=keep), None
        try:
            reading.run(copied(args), copied(kwargs))
            break
        except dist.ApartError:
            raise
        except Exception as error:
            failed, why = error, f"{type(error).__name__}: {error}"
    return reading, failed, why


def spread(model: nn.Module) -> bool:
    """Returns whether a pass of this model is one of all processes, and not in a pipeline, whose stages take turns."""
    return dist.world() > 1 and any(map(dist.is_split, model.parameters())) and running_stage() is None


def _guard(model: nn.Module) -> Guarded:
    """A guard for what reads a pass: a fault waits for its end where other processes take part in it."""
    return Postponed() if spread(model) else unguarded


def forward(
    model: nn.Module,
    watcher: AbstractContextManager[object],
    args: Args,
    kwargs: Kwargs,
    *,
    graph: bool = True,
    parts: CheckpointedParts | None = None,
) -> None:
    """One eager forward pass under the watcher, with gradients unless no `graph` is wanted.

    Args:
        model, args, kwargs: what is called.
        watcher: what is entered around it.
        graph: whether there are gradients.
        parts: its checkpointed parts; by default of their graphs nothing is kept.

    Raises: ApartError if it is one of all processes, and fails on some of them only.
    """
    # A script that is optimised runs as one node of the graph, which no walk can enter. (One that was, stays so.)
    eager, unoptimised = torch.compiler.set_stance("force_eager"), torch.jit.optimized_execution(False)
    grads = torch.inference_mode(False), torch.enable_grad() if graph else torch.no_grad()
    agreed = dist.agreed_collectives(SEARCH) if spread(model) else nullcontext()
    noticed = (parts or CheckpointedParts()).noticed()
    try:
        with agreed, eager, unoptimised, grads[0], grads[1], noticed, watcher:
            model(*args, **kwargs)
        if isinstance(watcher, Interceptor) and isinstance(watcher.guard, Postponed):
            watcher.guard.settle()
    except Exception as error:
        if spread(model) and not isinstance(error, dist.ApartError):
            dist.failed_on_all(SEARCH, error)
        raise


def grouped(firsts: Sequence[Sighting]) -> Iterator[list[Sighting]]:
    """The first call of each site; where a module computes its heads one by one, all of them as one group."""
    done: set[int] = set()
    for first in firsts:
        if id(first) in done:
            continue
        heads = [first]
        if first.headless:
            heads = [s for s in firsts if s.frame is first.frame and s.headless]
        done.update(id(s) for s in heads)
        yield heads


def _site(calls: list[Sighting], names: dict[int, str]) -> AttentionSite:
    first = calls[0]
    call = first.call
    q, k = (_stacked([getattr(s.call, side) for s in calls]) for side in ("q", "k"))
    products = [(q, k)]
    lost, layout = (), first.layout
    if isinstance(call, ScoresCall):
        lost = call.lost
        products = products if len(calls) > 1 else list(call.products)
    elif first.added is not None:
        lost = first.added.lost
        products += first.added.products
    used = next((found for _, b in products if b is not None and (found := key_heads(b)) is not None), None)
    if used is not None:
        k = None if k is None else _first_of_each(k, used)
        products = [(a, None if b is None else _first_of_each(b, used)) for a, b in products]
    terms, normed, why = _terms(products, lost, first, names)
    if layout is not None and layout.guess:
        # Other features for every head say as much as the experiment would have.
        shown = bool(terms) and all(s.n > 1 for t in terms for s in t.query[-1:])
        layout = dataclasses.replace(layout, guess="" if shown else layout.guess)
        why = why if shown else "; ".join(filter(None, (why, layout.guess)))
    query_gains, key_gains = _gains(calls, q, k, names)
    heads = scored(first).shape[1] * len(calls)
    return AttentionSite(
        name=first.name,
        module=first.frame.module,
        spec=call.spec,
        n_heads=heads,
        n_kv_heads=max((b.shape[1] for _, b in products if b is not None), default=heads),
        head_dim=sum(q.shape[-1] for q in _distinct([q for q, _ in products])),
        terms=terms,
        why=why,
        normed=normed,
        below=first.below,
        query_gains=query_gains,
        key_gains=key_gains,
        key_heads=used,
        layout=layout,
    )


def scored(sighting: Sighting) -> Tensor:
    """A tensor of a call whose second dimension are its heads: its logits, or q."""
    call = sighting.call
    return call.logits if isinstance(call, ScoresCall) else call.q


def _distinct(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Those that are there, each once, by their numbers."""
    found: list[Tensor] = []
    for x in tensors:
        if x is not None and not any(x.shape == y.shape and torch.equal(x, y) for y in found):
            found.append(x)
    return found


def _first_of_each(k: Tensor, used: Sequence[int]) -> Tensor:
    """[b g s d] of keys that were repeated for query heads: the first copy of each."""
    return k if k.shape[1] < len(used) else k[:, [used.index(j) for j in range(max(used) + 1)]]


def _terms(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    lost: Sequence[str],
    first: Sighting,
    names: dict[int, str],
) -> tuple[tuple[LogitTerm, ...], bool, str]:
    """The terms of a site, whether a norm lies between its weights and the logit, and why there are no terms."""
    if first.ordinal and isinstance(first.frame.module, torch.jit.ScriptModule):
        return (), False, "it is one of several in a scripted module, whose parts can't be distinguished"
    if any(side is None for pair in products for side in pair) and len(products) == 1 and not lost:
        return (), False, "the operands of the product could not be brought into the shape of the scores"
    try:
        terms, normed = sum_terms(products, first.frame, names)
    except UnknownRowsError as error:
        return (), False, "; ".join((*lost, str(error)))
    return ((), normed, "; ".join(lost)) if lost else (terms, normed, "")


Gains = tuple[NormGain, ...]


def _gains(calls: list[Sighting], q: Tensor | None, k: Tensor | None, names: dict[int, str]) -> tuple[Gains, Gains]:
    """The norms of q and k, where the logits are nothing but the spec's scale times their product."""
    if q is None or k is None or not all(s.added is None and is_product(s.call) for s in calls):
        return (), ()
    query = seen_gains(q, names)
    return query, seen_gains(k, names) if query else ()


@torch.no_grad()
def is_product(call: object) -> bool:
    """True if the logits of a call are nothing but its scale times q·k: no bias was added to it."""
    if not isinstance(call, ScoresCall):
        return isinstance(call, AttentionCall) and call.spec.norm.kind == "none"
    if call.q is None or call.k is None:
        return False
    scale = call.spec.scale.factor(torch.zeros(1, 1, device=call.q.device), call.q.shape[-1], {})
    products = call.q @ call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1).mT * scale
    seen = torch.isfinite(call.logits) if call.hidden is None else ~call.hidden & torch.isfinite(call.logits)
    rounding = 16 * torch.finfo(call.logits.dtype).eps * products.abs().max()
    return bool(((call.logits - products).abs() <= rounding)[seen.expand_as(products)].all())


def _stacked(parts: list[Tensor | None]) -> Tensor | None:
    known = [p for p in parts if p is not None]
    if len(known) != len(parts):
        return None
    return known[0] if len(known) == 1 else torch.cat(known, dim=1)


def unseen(model: nn.Module, watcher: Interceptor) -> str:
    """The message that no attention was seen: what was tried, why nothing was found, and a way out if there is one."""
    looked = (
        f"saw no attention in a forward pass of this {type(model).__name__}. Looked for "
        "F.scaled_dot_product_attention, F.multi_head_attention_forward, flex_attention, varlen_attn, flash-attn's "
        "functions, and a product of two activations that reaches a softmax through scaling, masks, caps, casts and "
        "views; also operator by operator, inside torch.jit.script and torch.func.vmap. "
    )
    if watcher.missed:
        found = "; ".join(map(str, dict.fromkeys(watcher.missed)))
        return (
            f"{looked}Seen but not understood: {found}. Where the logits are nothing but scaled products of queries "
            f"and keys, {_BY_HAND}"
        )
    if watcher.handwritten.multiplied:
        followed = ", ".join(watcher.handwritten.lost.ends)
        ends = f" (they were followed to {followed})" if followed else ""
        return (
            f"{looked}Activations are multiplied with each other, but none of the products reaches a softmax{ends}: "
            "linear attention, state-space models and attention through another function of the scores have no softmax "
            "over keys, and that is all that is watched here"
        )
    hidden = f"Hidden from view: {', '.join(watcher.hidden)}. " if watcher.hidden else ""
    return (
        f"{looked}Nothing of it was there: there was no product of two activations. {hidden}Inside custom C++, CUDA or "
        f"Triton operators nothing can be seen: if attention happens in one, {_BY_HAND}"
    )


_KEPT = (
    "the search for the attention of {} keeps what gradient checkpointing would not: weights and the logits that they "
    "make lie in two checkpointed parts, or a part can't be run so. It takes the memory of a pass without checkpoints; "
    "if that is too much, give find_sites an example of one short sequence, and its sites to watch(sites=...)"
)
_BY_HAND = (
    "describe it by hand, as in\n"
    "    from qkeel.sites import Reading, describe\n"
    '    site = describe(model, "name.of.its.module", query=Reading(module="q_proj"), '
    'key=Reading(module="k_proj"), heads=8)'
)
