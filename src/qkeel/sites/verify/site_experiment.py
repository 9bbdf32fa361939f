"""Do the weights known for a site make its logits, head by head? Found out by changing them.

One more pass is made without a graph and every operator of it kept. Then the operators between a site's projections and
its logits are repeated with other weights. Nothing of the model is changed or run again, and what else depends on the
same weights (later layers, other calls of the module) stays as it was.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.patching.compiler_state import uncompiled
from qkeel.patching.forward_passes import extra_pass
from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.calls.head_layout import Layout
from qkeel.sites.kept_state import copied, undisturbed
from qkeel.sites.probe import forward, grouped
from qkeel.sites.see.intercept import Interceptor, Sighting
from qkeel.sites.see.running_modules import tensors
from qkeel.sites.site import AttentionSite, HeadSlice
from qkeel.sites.verify.changed_weights import ChangedWeights, Chosen
from qkeel.sites.verify.paths import Path, RecordedCall, dynamic_memory
from qkeel.sites.verify.recorded_operators import Record, memory
from qkeel.sites.verify.repeated_operators import Lookup, RepeatedLogits, Repetition, difference


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pass:
    """A recorded pass: its operators, the memory of all that depends on its input, and the calls of each site."""

    record: Record
    dynamic: set[int]
    calls: Mapping[str, Sequence[RecordedCall]]


def verified(model: nn.Module, sites: Sequence[AttentionSite], args: Args, kwargs: Kwargs) -> list[AttentionSite]:
    """The sites of a pass on this example; where the experiment does not confirm their weights, with the reason."""
    model = uncompiled(model)
    if not any(site.terms for site in sites):
        return list(sites)
    with extra_pass(model), undisturbed(model), torch.no_grad():
        try:
            layouts = {site.name: site.layout for site in sites if site.layout is not None}
            seen = _recorded(model, layouts, copied(args), copied(kwargs))
        except dist.ApartError:
            raise
        except Exception as error:
            why = f"a pass in which operators are recorded failed: {type(error).__name__}: {error}"
            return [dataclasses.replace(s, unverified=why) if s.terms else s for s in sites]
        return [_Experiment(model, seen, site).site() if site.terms else site for site in sites]


def _recorded(model: nn.Module, layouts: Mapping[str, Layout], args: Args, kwargs: Kwargs) -> _Pass:
    """Runs one pass without a graph and keeps its operators."""
    record, begun = Record(), dict[int, int]()
    firsts: dict[str, RecordedCall] = {}

    def note(sighting: Sighting) -> None:
        starts = {id(f): begun[id(f.module)] for f in sighting.frame.line() if id(f.module) in begun}
        call = RecordedCall(sighting=sighting, until=len(record.operations), begun=starts)
        firsts.setdefault(sighting.name, call)

    def begin(module: nn.Module, _: object) -> None:
        begun[id(module)] = len(record.operations)

    torch.clear_autocast_cache()  # else a weight's cast may be one of an earlier pass
    with ExitStack() as undo:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                undo.callback(module.register_forward_pre_hook(begin).remove)
        undo.enter_context(record)
        watcher = Interceptor(model, note, probing=True, dispatch=True, layouts=layouts)
        forward(model, watcher, args, kwargs, graph=False)
    groups = grouped([call.sighting for call in firsts.values()])
    calls = {group[0].name: [firsts[sighting.name] for sighting in group] for group in groups}
    return _Pass(record=record, dynamic=dynamic_memory(record, args, kwargs), calls=calls)


@final
class _Experiment:
    """The experiment on one site."""

    def __init__(self, model: nn.Module, seen: _Pass, site: AttentionSite) -> None:
        self._model, self._pass, self._site = model, seen, site

    def site(self) -> AttentionSite:
        """The site, with the reason where its weights are not confirmed."""
        try:
            why = next(self._doubts(), "")
        except Exception as error:
            why = (
                "the operators between its weights and its logits could not be repeated: "
                f"{type(error).__name__}: {error}"
            )
        return dataclasses.replace(self._site, unverified=why) if why else self._site

    def _doubts(self) -> Iterator[str]:
        """The reasons not to trust the weights that are known, the simplest first."""
        site, calls = self._site, self._pass.calls.get(self._site.name, [])
        if not calls:
            yield "a second pass did not show it again"
            return
        self._logits = RepeatedLogits([call.sighting.call for call in calls])
        self._seen = self._logits()
        if any(z.shape[1] != site.n_heads for z in self._seen):
            yield f"a second pass showed {self._seen[0].shape[1]} heads in the place of {site.n_heads}"
            return
        if not any(bool(z.isfinite().any()) for z in self._seen):
            yield "every key is hidden from its queries in this example"
            return
        self._weights = ChangedWeights(
            self._model, [*site.query, *site.key], [side for term in site.terms for side in (term.query, term.key)]
        )
        path = Path(self._pass.record, self._pass.dynamic, site, self._weights.parameters, self._logits, calls)
        narrow = Repetition(path.own, set(map(memory, self._weights.parameters.values())))
        again = self._logits(narrow({}))
        if any(self._heads_that_change(self._seen, again)):
            yield "the operators between its weights and its logits gave other logits when they were repeated"
            return
        yield from self._heads(narrow)
        yield from self._rest(Repetition(path.wide, path.changed), path)

    def _heads(self, narrow: Repetition) -> Iterator[str]:
        """Rows that move the logits of other heads than theirs, or none."""
        now = narrow(self._weights.base())
        self._base = base = self._logits(now)
        for side, slices in (("query", self._site.query), ("key", self._site.key)):
            for chosen, expected in _patterns(slices, side, self._site):
                after = narrow(self._weights.rotated(chosen))
                moved = self._heads_that_change(base, self._logits(after))
                if moved != expected and not (
                    sum(moved) == 0 and len(slices) > 1 and self._idle(narrow, chosen, now, after)
                ):
                    yield _words(chosen, moved, expected)
                    return

    def _idle(self, narrow: Repetition, chosen: Sequence[Chosen], before: Lookup, after: Lookup) -> bool:
        """True if these weights are multiplied, but with nothing but zeros: one of several on this side."""
        made = {memory(self._weights.parameters[s.parameter]) for s, _ in chosen}
        outputs = [x for operation in narrow.products(made) for x in tensors((operation.out,))]
        return bool(outputs) and all(torch.equal(before(x), after(x)) for x in outputs)

    def _rest(self, wide: Repetition, path: Path) -> Iterator[str]:
        """A part of the logits that comes from weights that are not known."""
        site, w = self._site, self._weights
        one, other = path.inputs()
        scale = [float(difference(a, b).max()) for a, b in zip(self._base, self._logits(wide(w.base(), other)))]
        both = ("", "with all the rows that are known at zero its logits still change", site.query + site.key, None)
        query, key = (
            (
                f" from {side} to {side}",
                f"with the {side} rows that are known at zero its logits still change",
                own,
                dim,
            )
            for side, own, dim in (("query", site.query, 2), ("key", site.key, 3))
        )
        # What a norm adds to zero is no weight's: behind one, only all of them at zero leave nothing.
        for where, words, slices, dim in (both,) if site.normed else (query, key):
            zero = w.zeroed(slices)
            before, after = self._logits(wide(zero, one)), self._logits(wide(zero, other))
            if dim is not None:
                # A constant in the place of a query makes one number per key, which is no product.
                before, after = ([z - z.nanmean(dim, keepdim=True) for z in parts] for parts in (before, after))
            if self._varies(before, after, scale):
                yield f"{words}{where} with its input: a part of them comes from other weights"

    def _varies(self, a: list[Tensor], b: list[Tensor], scale: list[float]) -> bool:
        noise = 4 * self._rounding()
        return any(float(difference(x, y).max()) > max(1e-3 * s, noise) for x, y, s in zip(a, b, scale))

    def _rounding(self) -> float:
        """The most that rounding may change of a logit."""
        least = min(self._weights.parameters.values(), key=lambda p: torch.finfo(p.dtype).bits).dtype
        steps = 4 if torch.finfo(least).bits < 32 else 64
        return steps * torch.finfo(least).eps * max(float(z.abs().nan_to_num(0.0).max()) for z in self._seen)

    def _heads_that_change(self, before: list[Tensor], after: list[Tensor]) -> list[bool]:
        """Of each head, whether its logits changed by more than rounding."""
        change = torch.stack([difference(a, b).amax((0, 2, 3)) for a, b in zip(before, after)]).amax(0)
        return (change > self._rounding()).tolist()


def _patterns(slices: Sequence[HeadSlice], side: str, site: AttentionSite) -> Iterator[tuple[list[Chosen], list[bool]]]:
    """Rows to change and the heads whose logits must move then, and each weight as a whole.

    Each head is in half of the changes, no two in the same half: whichever heads a row makes besides its own, some
    change of that row is without a change of theirs.
    """
    per_head = [s for s in slices if s.n > 1]
    for n in sorted({s.n for s in per_head}):
        own = [s for s in per_head if s.n == n]
        changes = next(m for m in itertools.count(2) if math.comb(m, m // 2) >= n)
        codes = list(itertools.islice(itertools.combinations(range(changes), changes // 2), n))
        for change in range(changes):
            heads = [h for h in range(n) if change in codes[h]]
            if heads:
                yield [(s, heads) for s in own], _expected(site, n, set(heads))
    alone = [s for s in slices if s.n == 1 or len(slices) > 1]
    for s in alone:
        yield [(s, None)], [True] * site.n_heads


def _expected(site: AttentionSite, n: int, chosen: set[int]) -> list[bool]:
    """The query heads that use one of the chosen n parts of a weight."""
    return [h in chosen for h in site.used(n).tolist()]


def _words(chosen: Sequence[Chosen], moved: Sequence[bool], expected: Sequence[bool]) -> str:
    names = ", ".join(dict.fromkeys(s.parameter for s, _ in chosen))
    heads, should = ([h for h, yes in enumerate(given) if yes] for given in (moved, expected))
    return (
        f"changing the rows of {names} known for the logits of {_heads(should)} changed the logits of {_heads(heads)}"
    )


def _heads(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")
    return f"{'heads' if len(numbers) > 1 else 'head'} {shown}" if numbers else "no head"
