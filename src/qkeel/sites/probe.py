"""A probe: one forward pass under observation, after which the model is as it was."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkeel.errors import InvalidValueError, RefusedError
from qkeel.patching.checkpointing import checkpointing_off
from qkeel.patching.compiler_state import uncompiled
from qkeel.patching.forward_passes import extra_pass
from qkeel.patching.graph_nodes import version_of
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.module_tables import attributes_of, buffers_of, drop_hooks_after, hooks_after
from qkeel.patching.parallel_training import split_as_before
from qkeel.sites.calls.head_layout import key_heads
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.missed import Sites
from qkeel.sites.see.intercept import Interceptor, Sighting
from qkeel.sites.see.running_modules import tensors
from qkeel.sites.site import AttentionSite, LogitTerm, NormGain
from qkeel.sites.weights.autograd_walk import names_of
from qkeel.sites.weights.head_rows import UnknownRowsError, sum_terms
from qkeel.sites.weights.norm_gains import seen_gains
from qkeel.spec import AttentionCall


def probe(model: nn.Module, args: Args, kwargs: Kwargs, *, expected: bool) -> Sites:
    """The sites that a forward pass on this example shows; none is an error if they were `expected`."""
    model = uncompiled(model)
    check_devices(model, args, kwargs)
    with extra_pass(model), torch.inference_mode(False), torch.enable_grad(), undisturbed(model):
        seen, watcher = _watched(model, args, kwargs)
        names = names_of(model)
        sites = [_site(calls, names) for calls in grouped(seen)]
    if not sites and expected:
        raise RefusedError(unseen(model, watcher))
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


def _watched(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[dict[str, list[Sighting]], Interceptor]:
    """The sightings of one forward pass. Below torch's functions too, unless that is what fails."""
    for dispatch in (True, False):
        seen: dict[str, list[Sighting]] = {}
        watcher = Interceptor(model, functools.partial(_note, seen), probing=True, dispatch=dispatch)
        try:
            forward(model, watcher, copied(args), copied(kwargs))
        except Exception as error:
            failed = error
        else:
            return seen, watcher
    raise InvalidValueError(
        f"the forward pass of {type(model).__name__} on the example failed: {type(failed).__name__}: {failed}. "
        f"Give arguments with which model(...) runs; its forward takes {inspect.signature(model.forward)}"
    ) from failed


def _note(seen: dict[str, list[Sighting]], sighting: Sighting) -> None:
    seen.setdefault(sighting.name, []).append(sighting)


def forward(
    model: nn.Module, watcher: AbstractContextManager[object], args: Args, kwargs: Kwargs, *, graph: bool = True
) -> None:
    """One eager forward pass under the watcher, with gradients unless no `graph` is wanted."""
    # A script that is optimised runs as one node of the graph, which no walk can enter. (One that was, stays so.)
    eager, unoptimised = torch.compiler.set_stance("force_eager"), torch.jit.optimized_execution(False)
    grads = torch.inference_mode(False), torch.enable_grad() if graph else torch.no_grad()
    with eager, unoptimised, grads[0], grads[1], checkpointing_off(), watcher:
        model(*args, **kwargs)


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
    if q is None or k is None or not all(is_product(s.call) for s in calls):
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
        ends = (
            f" (they were followed to {', '.join(watcher.handwritten.lost.ends)})"
            if watcher.handwritten.lost.ends
            else ""
        )
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


def copied(value: Any) -> Any:
    """Arguments that a forward pass may change (caches) copied, tensors as they are."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_inference() else value  # a graph can't be built on such a one
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(copied(v) for v in value)
    if isinstance(value, Mapping) and type(value) is dict:
        return {k: copied(v) for k, v in value.items()}
    if type(value) is list:
        return [copied(v) for v in value]
    return copy.deepcopy(value)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever a forward pass changes is put back: random streams, buffers, attributes, who needs a gradient."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with ExitStack() as undo, torch.random.fork_rng(devices=devices), split_as_before(model):
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        for module in model.modules():
            undo.callback(_keep(module))
            undo.callback(_keep_contents(module))
        for p in model.parameters():
            if not p.requires_grad and (p.is_floating_point() or p.is_complex()):
                # The walk from q to its weights needs a graph, in frozen models too.
                p.requires_grad_(True)
                undo.callback(p.requires_grad_, False)
        yield


def _keep(module: nn.Module) -> Callable[[], None]:
    """A function that puts a module's own tensors and attributes back."""
    if isinstance(module, torch.jit.ScriptModule):
        return _keep_values(list(module.buffers(recurse=False)))
    attributes, buffers = attributes_of(module), dict(buffers_of(module))
    held = [v for v in (*attributes.values(), *buffers.values()) if isinstance(v, torch.Tensor)]
    values = _keep_values(held)
    hooks = set(hooks_after(module))

    def restore() -> None:
        state = vars(module)
        # A model may register hooks in its first pass, and note that in an attribute (transformers does, to record
        # hidden states): both go, else the next pass would register them a second time.
        drop_hooks_after(module, kept=hooks)
        for name in attributes_of(module).keys() - attributes.keys():
            del state[name]
        state.update(attributes)
        buffers_of(module).clear()
        buffers_of(module).update(buffers)
        values()

    return restore


def _keep_contents(module: nn.Module) -> Callable[[], None]:
    """A function that puts back what a module's lists, dicts, sets and generators held."""
    torchs_own = vars(nn.Module())  # its hooks, its parameters: sharded models exchange those in a pass
    held = [v for name, v in vars(module).items() if isinstance(v, (list, dict, set)) and name not in torchs_own]
    kept = [(x, x.copy()) for x in held if type(x) in _CONTAINERS]
    streams = [(g, g.get_state()) for g in vars(module).values() if isinstance(g, torch.Generator)]

    def restore() -> None:
        for x, before in kept:
            if [*map(id, x)] != [*map(id, before)] or (isinstance(x, dict) and _values(x) != _values(before)):
                x.clear()
                x.extend(before) if isinstance(x, list) else x.update(before)
        for generator, state in streams:
            generator.set_state(state)

    return restore


def _values(x: Any) -> list[int]:
    return [*map(id, x.values())]


_CONTAINERS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.Counter)


def _keep_values(tensors: list[Tensor]) -> Callable[[], None]:
    """A function that puts values back. Tensors on the meta device have none, and inference tensors can't change."""
    plain, others = [], []
    for x in tensors:
        if not (x.is_inference() or x.is_meta):
            comparable = x.layout is torch.strided and not x.is_nested and type(x) in (Tensor, nn.Parameter)
            (plain if comparable else others).append((x, x.detach().clone(), version_of(x)))

    @torch.no_grad()
    def restore() -> None:
        for x, value, _ in plain:
            # Compared, not by version: batch norm's kernels write their averages without raising it.
            if not torch.equal(x, value):
                x.copy_(value)
        for x, value, version in others:
            # Sparse, nested and other kinds of tensors can't be compared: what wrote to them raised their version.
            if version_of(x) != version:
                x.copy_(value)

    return restore
