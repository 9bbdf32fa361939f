"""One traced run of a module: its attention calls, and the sites that they belong to.

A copy of the module runs alone and with gradients. What is computed from which weights is read from the graph of the
run, and reruns of the copy with other weights verify it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import (
    Iterable,
    Iterator,
    Sequence,
)
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.calls import ScoresCall, fewest_keys, key_heads
from qkeel.capture.example import Caller, ModuleCall
from qkeel.capture.hand_written import is_projected, reached
from qkeel.capture.intercept import CapturedCall, CaptureMode
from qkeel.capture.known_sites import INDEX, layer_of
from qkeel.capture.visible_pattern import KeyOrigin
from qkeel.patching.autograd import nodes_of
from qkeel.sites.graph import names_of
from qkeel.sites.module_copy import LoneCall, PartOfArguments
from qkeel.sites.norms import seen_gains
from qkeel.sites.rows import (
    QKPair,
    UnknownRowsError,
    layout_of,
    side,
    sides,
    sum_terms,
)
from qkeel.sites.site import (
    AttentionSite,
    HeadSlice,
    NormGain,
    QKProduct,
    Sites,
)
from qkeel.sites.verify import CallPlace, Verification, products_of_call
from qkeel.spec import AttentionCall

Gains = tuple[NormGain, ...]


@final
@dataclasses.dataclass(kw_only=True, eq=False)
class ModuleTrace:
    """The attention calls of a copy of a module that has run alone, and what was computed on the way to them.

    A trace holds every tensor of the run and should be released as soon as it has been used.

    Attributes:
        module: the module of the model.
        is_whole: whether it is the model.
        arguments: which part of its arguments the copy was called with.
        lone: the copy, in which modules and weights have the names that they have in the model.
        sites: the attention sites, in the order of the calls.
        calls: the first call of each site, or one call for each head if the heads are computed one by one.
        places: where these calls are among those of a run, by their names.
        values: the tensors by which the softmax weights of each site were multiplied.
    """

    module: nn.Module
    is_whole: bool
    arguments: PartOfArguments
    lone: LoneCall
    sites: Sites
    calls: dict[str, list[CapturedCall]]
    places: dict[str, CallPlace]
    values: dict[str, Tensor]

    @property
    def has_plain_layouts(self) -> bool:
        """True if heads have a dimension of their own in the scores of all of its sites."""
        layouts = [site.layout for site in self.sites if site.layout is not None]
        return all(layout.groups == tuple("bhts") for layout in layouts)

    def module_of(self, site: AttentionSite) -> nn.Module:
        """The module of the model that makes the calls of a site."""
        return self.original(self.calls[site.name][0].frame.module)

    def original(self, module: nn.Module) -> nn.Module:
        """The module of the model of which this module is a copy."""
        originals = zip(self.lone.copied.modules(), self.module.modules())
        # What stands for the model, in which nothing else runs, is a copy of none.
        return dict(originals).get(module, self.module)

    def verify(self, verification: Verification, *, waits: bool = False) -> None:
        """Gives each site whose weights a rerun of the copy does not confirm the reason."""
        with self.lone.opened(waits=waits):
            self.set_sites(
                verification.site(
                    self.lone,
                    site,
                    self.calls[site.name],
                    [self.places[call.name] for call in self.calls[site.name]],
                )
                for site in self.sites
            )

    def set_sites(self, sites: Iterable[AttentionSite]) -> None:
        """Takes other sites in the place of those that were read."""
        self.sites = Sites(sites, self.sites.missed, self.sites.indexers)


def read_module(
    frame: ModuleCall,
    arguments: PartOfArguments,
    lone: LoneCall,
    *,
    waits: bool = False,
) -> ModuleTrace:
    """Runs the copy of a module with gradients, and returns the trace with the sites that it shows, not verified yet.

    Args:
        frame: the call of the module.
        arguments: which part of its arguments the copy is called with.
        lone: the copy.
        waits: whether other processes run their copies too.
    """
    with lone.opened(waits=waits):
        reading = _Reading(lone)
        watcher, sites = reading.watcher, reading.sites_in_order()
        trace = ModuleTrace(
            module=frame.module,
            is_whole=frame.is_outermost,
            arguments=arguments,
            lone=lone,
            sites=Sites(sites, watcher.missed, _indexers(watcher, sites)),
            calls={calls[0].name: calls for calls in grouped(reading.order.values())},
            places=reading.places,
            values=watcher.values or {},
        )
        # It and its watcher hold each other, and would keep the tensors of the pass until a garbage collection.
        reading.order = {}
        trace.set_sites(
            dataclasses.replace(site, value_weights=_value_weights(trace, site))
            for site in sites
        )
    return trace


def _value_weights(trace: ModuleTrace, site: AttentionSite) -> tuple[HeadSlice, ...]:
    """The last weights on the path of a site's values [b g s d]; none if they are unknown."""
    v = trace.values.get(site.name)
    if v is None or v.ndim != 4:
        return ()
    names, first = names_of(trace.lone.part), trace.calls[site.name][0]
    # A view made here belongs to the graph of the pass, regardless of the caller's mode.
    with torch.inference_mode(False), torch.enable_grad():
        try:
            values = side(fewest_keys(v), first.frame, names, "v")
            return tuple(values.slices(*path)[-1] for path in values.paths())
        except UnknownRowsError:
            return ()


@final
class _Reading:
    """The sites of a pass with gradients, read from the first call of each site at the end of the pass."""

    def __init__(self, lone: LoneCall) -> None:
        self._part = part = lone.part
        self._parameters = dict(part.named_parameters(remove_duplicate=False))
        self._names = names_of(part)
        self.watcher = CaptureMode(
            part, self._note, by_graph=functools.partial(layout_of, self._names)
        )
        self.watcher.values = {}
        self.sites: dict[str, AttentionSite] = {}
        # The first call for each name, and where it is among all calls.
        self.order: dict[str, CapturedCall] = {}
        self.places: dict[str, CallPlace] = {}
        self._calls = 0
        # For each call by its first name: the sets of weights with which it was made, and the names of their sites.
        self._weights: dict[str, dict[frozenset[tuple[str, str]] | None, str]] = {}
        # By the name of a site whose module is called with several sets.
        self._callers: dict[str, list[Caller]] = {}
        lone.run(self.watcher, graph=True)
        with torch.enable_grad():
            for calls in grouped(self.order.values()):
                self._read_site(calls)

    def _note(self, captured: CapturedCall) -> None:
        place = CallPlace(self._calls, captured.name)
        self._calls += 1
        captured = self._named_by_caller(captured)
        if captured.name not in self.order:
            self.order[captured.name] = captured
            self.places[captured.name] = place

    def _named_by_caller(self, captured: CapturedCall) -> CapturedCall:
        """The call, under another name if its module was called with other weights before."""
        frame, name = captured.frame, captured.name
        if name not in self.order:
            return captured
        if name not in self._weights:
            first = self._weights_behind(self.order[name])
            self._weights[name] = {first: name}
        by_weights, weights = self._weights[name], self._weights_behind(captured)
        if weights is None or None in by_weights or frame.caller is None:
            return captured
        if weights not in by_weights:
            # Named by the module that owns the projections, and the one that is called.
            owner = common_module([parameter for _, parameter in weights])
            new = f"{owner}#{frame.name}"
            taken = new in self.order
            by_weights[weights] = f"{new}{len(by_weights) + 1}" if taken else new
        site = by_weights[weights]
        if site == name:
            return captured
        self._callers.setdefault(site, []).append(frame.caller)
        frame = dataclasses.replace(frame, name=site)
        return dataclasses.replace(captured, frame=frame, ordinal=0)

    def _weights_behind(
        self, captured: CapturedCall
    ) -> frozenset[tuple[str, str]] | None:
        """The sides and names of the nearest weights behind a call, or None if they are unknown."""
        products = products_of_call(captured.call)
        behind = sides(products, captured.frame, self._names)
        return (
            frozenset((s.name, p.parameter) for s in behind for p in s.walk.nearest)
            or None
        )

    def _read_site(self, calls: list[CapturedCall]) -> None:
        device = calls[0].call.query_device
        with torch.autocast(device.type, enabled=False):
            site = _site(calls, self._names)
        if self._parts_share_weights(site, calls[0].frame):
            why = "one weight is applied to several parts of its input, so heads that share it cannot be counted"
            site = dataclasses.replace(site, terms=(), why=why)
        module, origin = site.module, self._origin(site, calls[0])
        if site.name in self._callers:
            module = self._part.get_submodule(site.name.partition("#")[0])
        self.sites[site.name] = dataclasses.replace(site, module=module, origin=origin)

    def _parts_share_weights(self, site: AttentionSite, frame: ModuleCall) -> bool:
        """True if scores without a dimension of heads have several dimensions of batches, and the query's weight is as
        wide as a part of the module's input: then one of these dimensions may hold heads that share all weights."""
        batches = 0 if site.layout is None else site.layout.groups.count("b")
        if not site.terms or site.n_heads > 1 or batches < 2:
            return False
        first = site.terms[0].query[0]
        width = self._parameters[first.parameter].flatten(1).shape[1 - first.axis]
        widths = [x.shape[-1] for x in frame.inputs if x.is_floating_point()]
        return any(n > width and n % width == 0 for n in widths)

    def _origin(self, site: AttentionSite, captured: CapturedCall) -> KeyOrigin:
        """What the keys are computed from: other tokens than the queries, latents if each head's rows act on a vector
        that is narrower than the input of the widest weight on the path, or the tokens."""
        if _of_other_source(captured):
            return "other"

        def width(s: HeadSlice) -> int:
            weight = self._parameters[s.parameter]
            return weight.shape[1 - s.axis] if weight.ndim == 2 else 0

        widths = [width(s) for s in (*site.query, *site.key)]
        last = [width(t.key[-1]) for t in site.terms if t.key[-1].n > 1]
        # The low-rank vector of an adapter that is added to a full weight does not count.
        return (
            "latent" if last and min(last) > 0 and max(last) < max(widths) else "tokens"
        )

    def sites_in_order(self) -> list[AttentionSite]:
        """The sites in the order of their calls, with the calls of shared modules."""
        sites = [self.sites[name] for name in self.order if name in self.sites]
        return [
            dataclasses.replace(site, callers=tuple(self._callers.get(site.name, ())))
            for site in sites
        ]


def common_module(parameters: Sequence[str]) -> str:
    """The name of the innermost module that holds all of these parameters."""
    common = []
    for names in zip(*(name.split(".")[:-1] for name in parameters)):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


def grouped(firsts: Iterable[CapturedCall]) -> Iterator[list[CapturedCall]]:
    """Groups the first calls of sites: a single call for each site, or the calls of all heads if a module computes them
    one by one."""
    groups: dict[int, list[CapturedCall]] = {}
    for first in firsts:
        key = id(first.frame) if first.headless else id(first)
        groups.setdefault(key, []).append(first)
    yield from groups.values()


# --- The site of a call


def _site(calls: list[CapturedCall], names: dict[int, str]) -> AttentionSite:
    """The site of a call, or of the calls of its heads."""
    first = calls[0]
    call, layout = first.call, first.layout
    products: list[QKPair] = []
    if isinstance(call, ScoresCall) and len(calls) == 1:
        products += call.products
    else:
        pair: list[Tensor | None] = []
        for operands in zip(*((s.call.q, s.call.k) for s in calls)):
            known = [x for x in operands if x is not None]
            pair.append(torch.cat(known, 1) if len(known) == len(calls) else None)
        q, k = pair
        products = [(q, k), *(first.added.products if first.added is not None else ())]
    repeats = (key_heads(b) for _, b in products if b is not None)
    heads_of_keys = next((heads for heads in repeats if heads is not None), None)
    if heads_of_keys is not None:
        # The first copy of each key head among keys that were repeated for query heads.
        firsts = [heads_of_keys.index(j) for j in range(max(heads_of_keys) + 1)]
        products = [
            (a, b if b is None or b.shape[1] < len(heads_of_keys) else b[:, firsts])
            for a, b in products
        ]
    terms: tuple[QKProduct, ...] = ()
    between: tuple[HeadSlice, ...] = ()
    why = ""
    try:
        terms, factors, between = sum_terms(products, first.frame, names)
    except UnknownRowsError as error:
        factors = sides(products, first.frame, names)
        why = str(error)
    if layout is not None and layout.guess:
        # Different features for every head are as conclusive as the experiment would have been.
        if terms and all(term.query[-1].n > 1 for term in terms):
            layout = dataclasses.replace(layout, guess="")
        else:
            why = "; ".join(filter(None, (why, layout.guess)))
    query_gains: Gains = ()
    key_gains: Gains = ()
    is_plain = all(s.added is None and is_product(s.call) for s in calls)
    if len(factors) == 2 and is_plain:
        slices = itertools.chain(*((*t.query, *t.key) for t in terms))
        projections = {x for s in slices for x in (s.parameter, s.bias) if x}
        query_gains, key_gains = (
            seen_gains(factor, projections) if factor.normed else ()
            for factor in factors
        )
    heads = call.scores_shape[1] * len(calls)
    # Each query vector counts once, and products of the same weights, of which a mask chooses one for each pair
    # (ReRoPE), are one term.
    queries: list[Tensor] = []
    for a, _ in products[: 1 if len(terms) == 1 else None]:
        if a is not None and not any(
            a.shape == b.shape and torch.equal(a, b) for b in queries
        ):
            queries.append(a)
    return AttentionSite(
        name=first.name,
        module=first.frame.module,
        spec=call.spec,
        n_heads=heads,
        n_kv_heads=max([b.shape[1] for _, b in products if b is not None] or [heads]),
        head_dim=sum(a.shape[-1] for a in queries),
        terms=terms,
        why=why,
        normed=any(factor.normed for factor in factors),
        query_gains=query_gains,
        key_gains=key_gains,
        between=between,
        key_heads=heads_of_keys,
        layout=layout,
        is_sum=isinstance(call, ScoresCall) and not is_plain,
    )


def _indexers(
    watcher: CaptureMode, sites: Sequence[AttentionSite]
) -> list[AttentionSite]:
    """The indexers that choose keys for the sites, one for each layer that has any."""
    indexers: dict[str, AttentionSite] = {}
    for frame, call in watcher.chosen:
        layer = layer_of(frame.name, [site.name for site in sites])
        if layer is not None and layer not in indexers:
            heads = call.logits.shape[1]
            indexers[layer] = AttentionSite(
                name=f"{layer}{INDEX}",
                module=frame.module,
                spec=call.spec,
                n_heads=heads,
                n_kv_heads=heads,
                head_dim=0,
                why="its scores choose keys and do not weight values",
                layout=call.layout,
                chooses=True,
            )
    return list(indexers.values())


def _of_other_source(captured: CapturedCall) -> bool:
    """True if queries and keys come from different inputs of the module that projects them.

    That module is the one of the call, or one that contains it. A module that receives queries and keys as arguments
    only multiplies them, and there two projections of the same hidden state are two different inputs.
    """
    q, k = products_of_call(captured.call)[0]
    if q is None or k is None or q.grad_fn is None or k.grad_fn is None:
        return False
    query, key = [q.grad_fn], [k.grad_fn]
    for frame in captured.frame.line():
        stops = nodes_of(frame.inputs)
        of_query, of_key = reached(query, stops), reached(key, stops)
        projects = is_projected(query, stops) or is_projected(key, stops)
        if of_query and of_key and projects:
            return of_query.isdisjoint(of_key)
    return False


@torch.no_grad()
def is_product(call: object) -> bool:
    """True if the logits of a call are exactly its scale times q·k, without a bias."""
    if not isinstance(call, ScoresCall):
        return isinstance(call, AttentionCall) and call.spec.norm.kind == "none"
    if call.q is None or call.k is None:
        return False
    if not call.logits.numel():
        return True
    q, z = call.q, call.logits
    scale = call.spec.scale.factor(q.new_zeros(1, 1), q.shape[-1], {})
    k = call.k.repeat_interleave(q.shape[1] // call.k.shape[1], 1)
    products = q @ k.mT * scale
    visible = z.isfinite() if call.mask is None else call.mask & z.isfinite()
    rounding = 16 * torch.finfo(z.dtype).eps * products.abs().max()
    return not bool((((z - products).abs() > rounding) & visible).any())
