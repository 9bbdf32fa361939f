"""A probe: one forward pass under observation, after which the model is as it was."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.errors import InvalidValueError, RefusedError, caution
from qkeel.patching.checkpointing import checkpointing_off
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
    with extra_pass(model), torch.inference_mode(False), torch.enable_grad(), undisturbed(model):
        seen, watcher, lost = _watched(model, args, kwargs)
        names = names_of(model)
        sites = [_site(calls, names) for calls in grouped(seen)]
    if not sites and expected:
        raise RefusedError(unseen(model, watcher))
    if lost:
        caution(f"attention inside torch.jit.script and torch.func.vmap is not looked for: {lost}")
    return Sites(sites, watcher.missed)


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


def _watched(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[dict[str, list[Sighting]], Interceptor, str]:
    """The sightings of one forward pass. Below torch's functions too, unless that is what fails, and then why."""
    failed, why = None, ""
    for dispatch in (True, False):
        seen: dict[str, list[Sighting]] = {}
        note = functools.partial(_note, seen)
        watcher = Interceptor(model, note, probing=True, dispatch=dispatch, guard=_guard(model))
        try:
            forward(model, watcher, copied(args), copied(kwargs))
        except Exception as error:
            if isinstance(error, dist.ApartError):
                raise
            failed, why = error, f"{type(error).__name__}: {error}"
        else:
            return seen, watcher, why
    raise InvalidValueError(
        f"the forward pass of {type(model).__name__} on the example failed: {why}. "
        f"Give arguments with which model(...) runs; its forward takes {inspect.signature(model.forward)}"
    ) from failed


def spread(model: nn.Module) -> bool:
    """Returns whether a pass of this model is one of all processes, and not in a pipeline, whose stages take turns."""
    return dist.world() > 1 and any(map(dist.is_split, model.parameters())) and running_stage() is None


def _guard(model: nn.Module) -> Guarded:
    """A guard for what reads a pass: a fault waits for its end where other processes take part in it."""
    return Postponed() if spread(model) else unguarded


def _note(seen: dict[str, list[Sighting]], sighting: Sighting) -> None:
    seen.setdefault(sighting.name, []).append(sighting)


def forward(
    model: nn.Module, watcher: AbstractContextManager[object], args: Args, kwargs: Kwargs, *, graph: bool = True
) -> None:
    """One eager forward pass under the watcher, with gradients unless no `graph` is wanted.

    Raises: ApartError if it is one of all processes, and fails on some of them only.
    """
    # A script that is optimised runs as one node of the graph, which no walk can enter. (One that was, stays so.)
    eager, unoptimised = torch.compiler.set_stance("force_eager"), torch.jit.optimized_execution(False)
    grads = torch.inference_mode(False), torch.enable_grad() if graph else torch.no_grad()
    agreed = dist.agreed_collectives(SEARCH) if spread(model) else nullcontext()
    try:
        with agreed, eager, unoptimised, grads[0], grads[1], checkpointing_off(), watcher:
            model(*args, **kwargs)
        if isinstance(watcher, Interceptor) and isinstance(watcher.guard, Postponed):
            watcher.guard.settle()
    except Exception as error:
        if spread(model) and not isinstance(error, dist.ApartError):
            dist.failed_on_all(SEARCH, error)
        raise


def grouped(seen: Mapping[str, list[Sighting]]) -> Iterator[list[Sighting]]:
    """The first call of each site; where a module computes its heads one by one, all of them as one group."""
    firsts = [calls[0] for calls in seen.values()]
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
    heads = (call.logits if isinstance(call, ScoresCall) else call.q).shape[1] * len(calls)
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


def heads_seen(model: nn.Module, args: Args, kwargs: Kwargs, sites: Sites) -> dict[str, int] | None:
    """The number of heads of each site that a pass without a graph shows, of which nothing is kept. None if it
    misses something else than these sites did."""
    found: dict[str, int] = {}
    names: set[str] = set()
    groups: dict[int, tuple[str, Frame]] = {}  # the frame is kept so that no other gets its number

    def note(sighting: Sighting) -> None:
        call, name = sighting.call, sighting.name
        if name in names:
            return
        names.add(name)
        if sighting.headless:
            name, _ = groups.setdefault(id(sighting.frame), (name, sighting.frame))
        found[name] = found.get(name, 0) + (call.logits if isinstance(call, ScoresCall) else call.q).shape[1]

    layouts = {site.name: site.layout for site in sites if site.layout is not None}
    watcher = Interceptor(model, note, dispatch=True, layouts=layouts)
    with extra_pass(model), undisturbed(model):
        forward(model, watcher, copied(args), copied(kwargs), graph=False)
    same = {str(m) for m in watcher.missed} == {str(m) for m in sites.missed}
    return found if same else None


def modules_called(model: nn.Module, modules: Iterable[nn.Module], args: Args, kwargs: Kwargs) -> set[int]:
    """The ids of those of these modules that run in a forward pass on this example."""
    called: set[int] = set()
    with ExitStack() as hooks, extra_pass(model), undisturbed(model):
        for module in modules:
            hook = module.register_forward_pre_hook(lambda module, _: called.add(id(module)))
            hooks.callback(hook.remove)
        forward(model, nullcontext(), copied(args), copied(kwargs), graph=False)
    return called


def biased(model: nn.Module, args: Args, kwargs: Kwargs) -> set[str]:
    """Names of sites written out by hand whose logits are something else than a scale times q·k: with a bias, say."""
    found: set[str] = set()

    def note(sighting: Sighting) -> None:
        call = sighting.call
        if isinstance(call, ScoresCall) and not is_product(call):
            found.add(sighting.name)

    with extra_pass(model), undisturbed(model):
        forward(model, Interceptor(model, note, probing=True), copied(args), copied(kwargs))
    return found


def visible_minima(model: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, float]:
    """The smallest finite logit that no mask hides, of every site written out by hand, by name."""
    found: dict[str, float] = {}

    def note(sighting: Sighting) -> None:
        call = sighting.call
        if isinstance(call, ScoresCall):
            seen = torch.isfinite(call.logits) if call.hidden is None else ~call.hidden & torch.isfinite(call.logits)
            least = float(call.logits.detach().masked_fill(~seen, torch.inf).amin())
            found[sighting.name] = min(found.get(sighting.name, least), least)

    with extra_pass(model), undisturbed(model):
        forward(model, Interceptor(model, note, probing=True), copied(args), copied(kwargs))
    return found


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


_BY_HAND = (
    "describe it by hand, as in\n"
    "    from qkeel.sites import Reading, describe\n"
    '    site = describe(model, "name.of.its.module", query=Reading(module="q_proj"), '
    'key=Reading(module="k_proj"), heads=8)'
)
