"""Remedies by their effect on what attention computes, and refusals by experiments that show them to be right."""

from __future__ import annotations

import abc
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import qkeel
from qkeel.errors import QkeelError, RefusedError
from qkeel.handle import Handle
from qkeel.remedies.apply import parse
from qkeel.remedies.base import Target
from qkeel.remedies.head_weights import check_weights
from qkeel.sites import AttentionSite
from qkeel.sites.site import HeadSlice
from tools.foreign.reference import Call, tensors
from tools.foreign.sight import numbers
from tools.foreign.work import (
    MODEL,
    Answer,
    Answers,
    Work,
    changed,
    loss,
    rows_of,
    short,
)

Sites = list[AttentionSite]


class Effect(abc.ABC):
    """A remedy, what is right where it is accepted, and the experiment by which a refusal of it is right."""

    remedy: ClassVar[str]

    @abc.abstractmethod
    def check(self, work: Work, sites: Sites, *, alone: bool) -> Answers:
        """Applies the remedy to these sites alone, or to the whole model, and looks at its effect on each."""

    @abc.abstractmethod
    def needless(self, work: Work, site: AttentionSite) -> bool:
        """True if the reference shows that the remedy would have nothing to do at this site."""


def asked(effect: Effect) -> Callable[[Work], Answers]:
    """The question what a remedy does: to the whole model, and where that is refused to each attention alone."""

    def ask(work: Work) -> Answers:
        seen = [site for site in work.sites if work.places[site.name]]
        try:
            yield from list(effect.check(work, seen, alone=False))
        except QkeelError as error:
            said, right = short(error), True
            for group in _by_module(seen):
                answers = list(_alone(effect, work, group))
                right = right and all(
                    verdict == "right" and refused
                    for (verdict, _, _), refused in answers
                )
                yield from (answer for answer, _ in answers)
            yield "right" if right and not work.missed else "reported", said, MODEL

    return ask


def _alone(effect: Effect, work: Work, group: Sites) -> Iterator[tuple[Answer, bool]]:
    """What the remedy does to the attentions of one module, and whether it was refused."""
    try:
        yield from [(answer, False) for answer in effect.check(work, group, alone=True)]
    except QkeelError as error:
        for site in group:
            shown = site.verified and effect.needless(work, site)
            yield ("right" if shown else "reported", short(error), site.name), True


def _by_module(sites: Sites) -> list[Sites]:
    groups: dict[str, Sites] = {}
    for site in sites:
        groups.setdefault(site.name.partition("#")[0], []).append(site)
    return list(groups.values())


def _apply(
    work: Work, remedy: str, sites: Sites, *, alone: bool, lr: float
) -> tuple[nn.Module, Handle, Optimizer]:
    """A copy of the model with the remedy on it, how to undo it, and an optimizer."""
    model = copy.deepcopy(work.exact)
    optimizer = SGD(model.parameters(), lr=lr)
    args, kwargs = work.example
    if not alone:
        return (
            model,
            qkeel.apply(model, remedy, optimizer, batch=kwargs or args),
            optimizer,
        )
    (one,) = parse(remedy)
    own = [
        dataclasses.replace(s, module=model.get_submodule(s.name.partition("#")[0]))
        for s in sites
    ]
    for site in own:
        if (refusal := one.supports(site)) is not None:
            raise RefusedError(f"{one.name}: {refusal}")
    target = Target(model=model, optimizer=optimizer, sites=own, batch=work.example)
    check_weights(target, one.name, per_head=one.on_steps)
    return model, one.apply(target), optimizer


def _step(work: Work, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    torch.manual_seed(11)
    optimizer.zero_grad()
    loss(model(*work.example[0], **work.example[1])).backward()
    optimizer.step()
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}


def _out(model: nn.Module, work: Work) -> list[Tensor]:
    with torch.no_grad():
        torch.manual_seed(11)
        return tensors(model(*work.example[0], **work.example[1]))


def _last(site: AttentionSite) -> dict[str, list[HeadSlice]]:
    """The last weights before the score, on each side."""
    return {
        "query": [term.query[-1] for term in site.terms],
        "key": [term.key[-1] for term in site.terms],
    }


def _grown(
    work: Work, model: nn.Module, site: AttentionSite, side: str, factor: float
) -> Call:
    """A site's first call with the weights of one side times a factor."""
    # A table is shared by all heads and stands in a later term; so may the keys be, but they stand in the first.
    last = [
        s
        for i, s in enumerate(_last(site)[side])
        if s.n > 1 or (site.n_kv_heads == 1 and i == 0)
    ]
    with changed(model, last, None, lambda x: factor * x):
        return work.subject.truth(model, work.example)[work.places[site.name][0]]


def growth(work: Work, model: nn.Module, site: AttentionSite) -> float:
    """How far logits move, against their size, when the weights of queries or those of keys are three times as large.
    Tables of relative positions, which all heads share, stay as they are, like biases."""
    before = work.subject.truth(model, work.example)[work.places[site.name][0]]
    moved = 0.0
    for side in ("query", "key"):
        after = _grown(work, model, site, side, 3.0)
        seen = before.visible & after.visible
        size = float(before.z.masked_fill(~seen, 0.0).abs().max())
        moved = max(
            moved,
            float((after.z - before.z).masked_fill(~seen, 0.0).abs().max())
            / (size + 1e-12),
        )
    return moved


BOUNDED = 1e-3  # logits that move by less than this, against their size, do not grow with the weights


class OfGrowth(Effect):
    """A remedy against logits that grow with the weights: there is nothing to do where they don't, under a norm."""

    def needless(self, work: Work, site: AttentionSite) -> bool:
        return growth(work, work.exact, site) < BOUNDED


@final
class Lalr(OfGrowth):
    """At the first step told rows move by τ times what they would, everything else by as much as without."""

    remedy = "lalr:tau=0.1"

    def check(self, work: Work, sites: Sites, *, alone: bool) -> Answers:
        model, handle, optimizer = _apply(
            work, self.remedy, sites, alone=alone, lr=1e-2
        )
        slowed = _step(work, model, optimizer)
        handle.remove()
        plain = copy.deepcopy(work.exact)
        full = _step(work, plain, SGD(plain.parameters(), lr=1e-2))
        factors = {n: torch.ones_like(x) for n, x in full.items()}
        for s in (
            s for site in sites for term in site.terms for s in (*term.query, *term.key)
        ):
            rows_of(factors[s.parameter], s.axis)[s.index.flatten()] = 0.1
        for name, x in full.items():
            error = float((slowed[name] - factors[name] * x).abs().max())
            if error > 1e-9 + (1e-6 if work.subject.double else 1e-4) * float(
                x.abs().max()
            ):
                yield (
                    "wrong",
                    f"the step of {name} is off by {error:.3g} of {float(x.abs().max()):.3g}",
                    None,
                )
                return
        yield from (("right", "", site.name) for site in sites)


@final
class QKClip(OfGrowth):
    """After a step of rate 0 the variable part of a site's logits is min(1, τ / S_h) times what it was: of the first
    site under the whole model's clip, of each other one under its own, since its input is the same then."""

    remedy = "qk_clip"

    def check(self, work: Work, sites: Sites, *, alone: bool) -> Answers:
        order = sorted(sites, key=lambda s: work.places[s.name][0])
        yield from self._clipped(work, order[0], sites, alone=alone)
        for group in _by_module(order[1:]) if not alone else ():
            for site in group:
                yield from self._clipped(work, site, group, alone=True)

    def _clipped(
        self, work: Work, site: AttentionSite, sites: Sites, *, alone: bool
    ) -> Answers:
        before = work.of(work.calls, site)[0]
        top = torch.stack(
            [call.max_logit() for call in work.of(work.calls, site)]
        ).amax(0)
        threshold = float(top.max()) / 2
        if threshold <= 0:
            return
        model, handle, optimizer = _apply(
            work, f"qk_clip:threshold={threshold}", sites, alone=alone, lr=0.0
        )
        model.training = True  # maxima count in training; the parts keep the mode that the example was told in
        _step(work, model, optimizer)
        handle.remove()
        gamma = (threshold / top).clamp_max(1.0).where(top > 0, 1.0)
        if alone and work.shared(site):
            # An earlier site has these weights too, so the clip moves the input of this one: no logits to compare.
            yield from self._scaled(work, model, site, gamma)
            return
        with changed(work.exact, _last(site)["query"], None, torch.zeros_like):
            added = work.of(work.truth(), site)[0].z
        after = work.subject.truth(model, work.example)[work.places[site.name][0]].z
        hidden = ~before.visible
        apart = after - added - gamma[:, None, None] * (before.z - added)
        error = float(
            apart.masked_fill(hidden, 0.0).abs().max()
            / before.z.masked_fill(hidden, 0).abs().max()
        )
        if work.shared(site):  # scaled by the smallest factor of all that use them
            error = float(
                (after.masked_fill(hidden, -torch.inf).amax() - threshold).clamp_min(0)
            )
        if error < 1e-5 or site.n_heads != before.heads:
            yield "right", "", site.name
        else:
            clipped = after.masked_fill(hidden, -torch.inf).amax((0, 2, 3))
            yield (
                "wrong",
                f"maxima {numbers(top)} clipped at {threshold:.4g} to {numbers(clipped)}",
                site.name,
            )

    def _scaled(
        self, work: Work, model: nn.Module, site: AttentionSite, gamma: Tensor
    ) -> Answers:
        """The last weights of every product, on both sides together, are scaled by γ of each head."""
        for term in site.terms:
            both = torch.ones_like(gamma)
            for s in (term.query[-1], term.key[-1]):
                sizes = [
                    s.heads(m.get_parameter(s.parameter).detach())
                    .flatten(1)
                    .norm(dim=1)
                    for m in (model, work.exact)
                ]
                both = both * (sizes[0] / sizes[1])[site.used(s.n)]
            if float((both - gamma).abs().max()) > 1e-5:
                yield (
                    "wrong",
                    f"weights scaled by {numbers(both)}, expected {numbers(gamma)}",
                    site.name,
                )
                return
        yield "right", "", site.name


@final
class QKNorm(OfGrowth):
    """Logits no longer grow with the weights of queries or keys; removal restores output and names."""

    remedy = "qk_norm"

    def check(self, work: Work, sites: Sites, *, alone: bool) -> Answers:
        names, untouched = list(work.exact.state_dict()), _out(work.exact, work)
        model, handle, _ = _apply(work, self.remedy, sites, alone=alone, lr=0.0)
        moved = {site.name: growth(work, model, site) for site in sites}
        handle.remove()
        if not _same(_out(model, work), untouched) or list(model.state_dict()) != names:
            yield "wrong", "removal does not restore the model", None
        for name, far in moved.items():
            grows = f"logits still grow with the weights, by {far:.3g} of their size"
            yield ("right", "", name) if far < BOUNDED else ("wrong", grows, name)


@final
class Softcap(Effect):
    """The output is that of the model whose visible scores are bent before their softmax; removal restores it."""

    remedy = "softcap:cap=2.0"

    def check(self, work: Work, sites: Sites, *, alone: bool) -> Answers:
        untouched = _out(work.exact, work)
        places = {place for site in sites for place in work.places[site.name]}
        expected = work.subject.capped(
            copy.deepcopy(work.exact), work.example, 2.0, places
        )
        model, handle, _ = _apply(work, self.remedy, sites, alone=alone, lr=0.0)
        got = _out(model, work)
        handle.remove()
        if not _same(_out(model, work), untouched):
            yield "wrong", "removal does not restore the model", None
        error = max(
            float((a - b).abs().max() / (1e-12 + b.abs().max()))
            for a, b in zip(got, expected)
        )
        far = f"outputs are {error:.3g} from those of capped scores"
        yield from (
            ("right", "", site.name) if error < 1e-5 else ("wrong", far, site.name)
            for site in sites
        )

    def needless(self, work: Work, site: AttentionSite) -> bool:
        """Scores that grow with the weights of the queries at first, and at last no longer: a cap bends them."""
        one, more, most = (
            _grown(work, work.exact, site, "query", factor)
            for factor in (1.0, 1e5, 1e6)
        )
        seen = one.visible & more.visible & most.visible
        tops = [c.capped.masked_fill(~seen, 0.0) for c in (one, more, most)]
        size = float(tops[2].abs().max())
        apart, last = (float((a - tops[2]).abs().max()) for a in tops[:2])
        return last < BOUNDED * size < apart


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other))
