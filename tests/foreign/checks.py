"""qkeel on one model against what its attention really computed: right, told, or wrong, question by question."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from tests.foreign.reference import Call, Example, tensors
from torch import Tensor, nn

import qkeel
from qkeel.errors import QkeelError, RefusedError
from qkeel.sites import AttentionSite, Tap
from qkeel.sites.site import HeadSlice

Verdict = Literal["right", "told", "wrong"]
Truth = Callable[[nn.Module, Example], list[Call]]  # every attention call of a forward pass
MOVED, STILL = 1e-9, 1e-6  # a change of a logit, against the largest one, that counts, and one that does not


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one question about one model, and what was said or what was wrong."""

    question: str
    verdict: Verdict
    said: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model, an example of its input, another one of the same shapes and masks, and what its attention computed.

    `double` says that the model runs in float64, which all questions but that for the bits are asked in.
    """

    model: nn.Module
    example: Example
    other: Example
    truth: Truth
    double: bool = True
    capped: Callable[[nn.Module, Example, float], list[Tensor]] | None = None


def findings(subject: Subject, questions: Iterable[str] | None = None) -> list[Finding]:
    """These questions (all of them), in order. Without sites there are no more questions."""
    found: list[Finding] = []
    try:
        work = _Work(subject)
    except RefusedError as error:
        return [Finding(question="sites", verdict="told", said=_short(error))]
    for question, ask in QUESTIONS.items():
        if questions is not None and question not in questions:
            continue
        with warnings.catch_warnings(record=True) as cautions:
            warnings.simplefilter("always")
            try:
                found += [Finding(question=question, verdict=v, said=s) for v, s in ask(work)]
            except QkeelError as error:
                found.append(Finding(question=question, verdict="told", said=_short(error)))
            except Exception as error:
                found.append(
                    Finding(question=question, verdict="wrong", said=f"{type(error).__name__}: {_short(error)}")
                )
        del cautions
    return found


Answers = Iterator[tuple[Verdict, str]]


class _Work:
    """What the questions share: the model in float64, its sites, the calls of the reference, and which is whose."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.exact = copy.deepcopy(subject.model)
        self.example, self.other = subject.example, subject.other
        if subject.double:
            self.exact.double()
            self.example, self.other = doubled(subject.example), doubled(subject.other)
        self.calls = subject.truth(self.exact, self.example)
        self.sites = qkeel.find_sites(self.exact, *self.example[0], **self.example[1])
        self.missed = list(getattr(self.sites, "missed", ()))
        self.places, self.unclaimed = claimed(self.sites, self.calls)

    def of(self, calls: list[Call], site: AttentionSite) -> list[Call]:
        """The calls of a site among those of a pass."""
        return [calls[i] for i in self.places[site.name]]

    def shared(self, site: AttentionSite) -> set[str]:
        """Weights of this site that are on logit paths of other sites too: they move the input of later ones."""
        others = {s.parameter for other in self.sites if other is not site for s in (*other.query, *other.key)}
        return others & {s.parameter for s in (*site.query, *site.key)}

    def truth(self, example: Example | None = None) -> list[Call]:
        """The calls of one more pass of the exact model."""
        return self.subject.truth(self.exact, self.example if example is None else example)


def claimed(sites: list[AttentionSite], calls: list[Call]) -> tuple[dict[str, list[int]], list[int]]:
    """Which calls are whose, by the module that ran: the innermost site's module around it; and the rest.

    A module with n sites makes n calls each time that it runs, in the order of their names.
    """
    modules: dict[str, list[str]] = {}
    for site in sites:
        modules.setdefault(site.name.partition("#")[0], []).append(site.name)
    places: dict[str, list[int]] = {site.name: [] for site in sites}
    counts = dict.fromkeys(modules, 0)
    rest = []
    for i, call in enumerate(calls):
        around = [m for m in modules if m in ("", call.module) or call.module.startswith(f"{m}.")]
        if not around:
            rest.append(i)
            continue
        module = max(around, key=len)
        places[modules[module][counts[module] % len(modules[module])]].append(i)
        counts[module] += 1
    return places, rest


def doubled(example: Example) -> Example:
    """The example with its floating-point tensors in float64."""

    def wide(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.double() if x.is_floating_point() else x
        if isinstance(x, (tuple, list)):
            return type(x)(wide(y) for y in x)
        return {k: wide(v) for k, v in x.items()} if isinstance(x, dict) else x

    return wide(example[0]), wide(example[1])


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# --- which attentions there are


def count(work: _Work) -> Answers:
    """Every call of the reference belongs to a site, or is said to be missed."""
    empty = [name for name, places in work.places.items() if not places]
    if empty:
        yield "wrong", f"sites where nothing was computed: {empty}"
    lost = [work.calls[i].module for i in work.unclaimed]
    # One module may have sites and lose a call.
    for module in {site.name.partition("#")[0] for site in work.sites}:
        mine = [s.name for s in work.sites if s.name.partition("#")[0] == module]
        if len({len(work.places[name]) for name in mine}) > 1:
            lost.append(module)
    if lost and not work.missed:
        yield "wrong", f"attention in {sorted(set(lost))} is neither a site nor missed"
    elif lost:
        yield "told", f"missed: {_short(ValueError(str(work.missed[0])))}"
    elif not empty:
        yield "right", ""


def heads(work: _Work) -> Answers:
    """n_heads is the reference's; what is uncertain about a site is said."""
    for site in work.sites:
        for call in work.of(work.calls, site)[:1]:
            if site.n_heads == call.heads:
                yield "right", ""
            elif site.why:
                yield "told", f"{site.name}: {site.why}"
            else:
                yield "wrong", f"{site.name}: {site.n_heads} heads, there are {call.heads}"


# --- statistics


def statistics(work: _Work) -> Answers:
    """max_logit and entropy, by head, of all calls of a site."""
    with torch.no_grad(), Tap(work.exact) as tap:
        tap.sites = list(work.sites)
        torch.manual_seed(11)
        work.exact(*work.example[0], **work.example[1])
        stats = tap.read()
    for site in work.sites:
        calls = work.of(work.calls, site)
        if not calls:
            continue
        if site.name not in stats:
            yield "wrong", f"{site.name}: the tap saw nothing"
            continue
        top = torch.stack([c.max_logit() for c in calls]).amax(0)
        seen = torch.stack([c.visible.any(-1).expand(c.z.shape[:3]).sum((0, 2)) for c in calls]).double()
        entropy = (torch.stack([c.entropy() for c in calls]) * seen).sum(0) / seen.sum(0).clamp_min(1)
        got = stats[site.name]
        if got.max_logit.shape != top.shape:
            # Said to be uncertain, or said wrongly under `heads`.
            yield ("told", f"{site.name}: {site.why}") if site.why else ("wrong", f"{site.name}: of other heads")
            continue
        for what, mine, theirs in (("max_logit", got.max_logit, top), ("entropy", got.entropy, entropy)):
            error = float((mine.double() - theirs).abs().max() / (1 + theirs.abs().max()))
            if error < 1e-5:
                yield "right", ""
            else:
                yield "wrong", f"{site.name}: {what} {_numbers(mine)}, true {_numbers(theirs)}"


def _numbers(x: Tensor) -> str:
    return " ".join(f"{v:.4g}" for v in x.flatten()[:6].tolist())


# --- which weights make which head


def rows(work: _Work) -> Answers:
    """Perturbing the rows told for a head moves its logits and no other's; zeroing all leaves nothing of the input."""
    for site in work.sites:
        if not site.terms:
            yield "told", f"{site.name}: {site.why}"
        elif not site.verified:
            yield "told", f"{site.name}: {site.unverified}"
        elif work.of(work.calls, site):
            yield from _rows(work, site)


def _rows(work: _Work, site: AttentionSite) -> Answers:
    before = work.of(work.calls, site)[0]
    size = float(before.z[before.visible.expand_as(before.z)].abs().max())
    if site.n_heads != before.heads:
        return
    shared = work.shared(site)
    for side, slices, n in (("query", site.query, site.n_heads), ("key", site.key, site.n_kv_heads)):
        own = [s for s in slices if s.n == n and n > 1 and s.parameter not in shared]
        for head in range(n) if own else ():
            with changed(work.exact, own, head, lambda x: x + 0.5 * torch.randn_like(x)):
                after = work.of(work.truth(), site)[0]
            apart = (after.z - before.z).masked_fill(~before.visible, 0.0).abs().amax((0, 2, 3))
            mine = site.used(n) == head
            if float(apart[mine].min()) < MOVED * size:
                yield "wrong", f"{site.name}: the {side} rows of head {head} do not move its logits"
                return
            if bool((~mine).any()) and float(apart[~mine].max()) > STILL * size and not site.normed:
                yield "wrong", f"{site.name}: the {side} rows of head {head} move logits of other heads"
                return
    yield "right", ""
    yield from _nobodys(work, site, size)


def _nobodys(work: _Work, site: AttentionSite, size: float) -> Answers:
    """With the last matrices of a side at zero, logits are what was added to them, whatever the input."""
    sides = {"query": [term.query[-1] for term in site.terms], "key": [term.key[-1] for term in site.terms]}
    if site.normed:  # what a norm adds is left of that side, times the other one
        sides = {"query and key": [*sides["query"], *sides["key"]]}
    for side, last in sides.items():
        with changed(work.exact, last, None, torch.zeros_like):
            one, two = (work.of(work.truth(example), site)[0] for example in (work.example, work.other))
        if one.z.shape == two.z.shape:
            both = one.visible & two.visible
            left = float((one.z - two.z).masked_fill(~both, 0.0).abs().max())
            if left > STILL * size:
                yield "wrong", f"{site.name}: {side} rows told to nobody make logits: {left:.3g} of {size:.3g} is left"


class changed:
    """While it is entered the rows of one head (or of all) of some slices are what `change` makes of them."""

    def __init__(
        self, model: nn.Module, slices: list[HeadSlice], head: int | None, change: Callable[[Tensor], Tensor]
    ) -> None:
        self.model, self.slices, self.head, self.change = model, slices, head, change
        self.kept: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        torch.manual_seed(7)
        done: set[tuple[str, int]] = set()
        for s in self.slices:
            for name, axis, shift in ((s.parameter, s.axis, 0), (s.bias, 0, s.bias_shift)):
                if name is None:
                    continue
                index = (s.index if self.head is None else s.index[self.head]).flatten() + shift
                p = self.model.get_parameter(name).data
                fresh = torch.tensor([i for i in index.tolist() if (name, i) not in done], dtype=torch.long)
                done.update((name, i) for i in fresh.tolist())
                self.kept.setdefault(name, p.clone())
                rows = p.movedim(axis, 0) if p.ndim > 1 else p
                if len(fresh):
                    rows[fresh] = self.change(rows[fresh])

    def __exit__(self, *exc: object) -> None:
        for name, value in self.kept.items():
            self.model.get_parameter(name).data.copy_(value)


# --- watching


def watched(work: _Work) -> Answers:
    """Ten steps under watch leave the same bits as ten without."""
    ends = []
    for watching in (False, True):
        model = copy.deepcopy(work.subject.model)
        torch.manual_seed(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        monitor = qkeel.watch(model, optimizer) if watching else None
        for _ in range(10):
            optimizer.zero_grad()
            loss(model(*work.subject.example[0], **work.subject.example[1])).backward()
            optimizer.step()
        if monitor is not None:
            monitor.remove()
        ends.append([p.detach() for p in model.parameters()])
    equal = all(torch.equal(a, b) or bool((a.isnan() == b.isnan()).all() and a.isnan().any()) for a, b in zip(*ends))
    yield ("right", "") if equal else ("wrong", "watching changed the weights")


def loss(output: object) -> Tensor:
    """A number that everything floating in the output has a part in."""
    return torch.stack([x.float().square().mean() for x in tensors(output) if x.requires_grad]).sum()


# --- remedies by their effect


def _applied(work: _Work, remedy: str) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = copy.deepcopy(work.exact)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return model, qkeel.apply(remedy, model, optimizer, example=_given(work)), optimizer


def _given(work: _Work) -> object:
    args, kwargs = work.example
    return kwargs or args


def _step(work: _Work, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    torch.manual_seed(11)
    optimizer.zero_grad()
    loss(model(*work.example[0], **work.example[1])).backward()
    optimizer.step()
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}


def lalr(work: _Work) -> Answers:
    """At the first step told rows move by τ times what they would, everything else by as much as without."""
    model, handle, optimizer = _applied(work, "lalr:tau=0.1")
    slowed = _step(work, model, optimizer)
    handle.remove()
    plain = copy.deepcopy(work.exact)
    full = _step(work, plain, torch.optim.SGD(plain.parameters(), lr=1e-2))
    factors = {n: torch.ones_like(x) for n, x in full.items()}
    for s in (s for site in work.sites for term in site.terms for s in (*term.query, *term.key)):
        place = factors[s.parameter]
        (place.movedim(s.axis, 0) if place.ndim > 1 else place)[s.index.flatten()] = 0.1
    for name, x in full.items():
        error = float((slowed[name] - factors[name] * x).abs().max())
        if error > 1e-9 + (1e-6 if work.subject.double else 1e-4) * float(x.abs().max()):
            yield "wrong", f"the step of {name} is off by {error:.3g} of {float(x.abs().max()):.3g}"
            return
    yield "right", ""


def qk_clip(work: _Work) -> Answers:
    """After a step of rate 0 the variable part of the first site's logits is min(1, τ / S_h) times what it was."""
    first = min((s for s in work.sites if work.places[s.name]), key=lambda s: work.places[s.name][0])
    before = work.of(work.calls, first)[0]
    top = torch.stack([call.max_logit() for call in work.of(work.calls, first)]).amax(0)
    threshold = float(top.max()) / 2
    if threshold <= 0:
        return
    model = copy.deepcopy(work.exact)
    model.training = True  # maxima count in training; the parts keep the mode that the example was told in
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = qkeel.apply(f"qk_clip:threshold={threshold}", model, optimizer, example=_given(work))
    _step(work, model, optimizer)
    handle.remove()
    last = [term.query[-1] for term in first.terms]
    with changed(work.exact, last, None, torch.zeros_like):
        added = work.of(work.truth(), first)[0].z
    after = work.subject.truth(model, work.example)[work.places[first.name][0]].z
    gamma = (threshold / top).clamp_max(1.0).where(top > 0, 1.0)
    moving = before.visible
    expected = added + gamma[:, None, None] * (before.z - added)
    error = float(
        (after - expected).masked_fill(~moving, 0.0).abs().max() / before.z.masked_fill(~moving, 0).abs().max()
    )
    if work.shared(first):  # scaled by the smallest factor of all that use them
        error = float((after.masked_fill(~moving, -torch.inf).amax() - threshold).clamp_min(0))
    if error < 1e-5 or first.n_heads != before.heads:
        yield "right", ""
    else:
        clipped = after.masked_fill(~moving, -torch.inf).amax((0, 2, 3))
        yield "wrong", f"{first.name}: maxima {_numbers(top)} clipped at {threshold:.4g} to {_numbers(clipped)}"


def qk_norm(work: _Work) -> Answers:
    """Logits of the first site no longer grow with its weights; removal restores output and names."""
    model = copy.deepcopy(work.exact)
    names = list(model.state_dict())
    untouched = tensors(_out(model, work))
    handle = qkeel.apply("qk_norm", model, torch.optim.SGD(model.parameters(), lr=0.0), example=_given(work))
    first = min((s for s in work.sites if work.places[s.name]), key=lambda s: work.places[s.name][0])
    place = work.places[first.name][0]
    normed = work.subject.truth(model, work.example)[place]
    last = [term.query[-1] for term in first.terms]
    with changed(model, last, None, lambda x: 3 * x):
        grown = work.subject.truth(model, work.example)[place]
    seen = normed.visible & grown.visible
    apart = float((grown.z - normed.z).masked_fill(~seen, 0.0).abs().max())
    size = float(normed.z.masked_fill(~seen, 0.0).abs().max())
    handle.remove()
    same = all(torch.equal(a, b) for a, b in zip(tensors(_out(model, work)), untouched))
    if not same or list(model.state_dict()) != names:
        yield "wrong", "removal does not restore the model"
    elif apart > 1e-3 * (size + 1e-12):
        yield "wrong", f"{first.name}: logits still grow with the weights: by {apart:.3g} of {size:.3g}"
    else:
        yield "right", ""


def softcap(work: _Work) -> Answers:
    """The output is that of the model whose visible scores are bent before their softmax; removal restores it."""
    if work.subject.capped is None:
        return
    cap = 2.0
    model = copy.deepcopy(work.exact).eval()
    expected = work.subject.capped(model, work.example, cap)
    untouched = tensors(_out(model, work))
    handle = qkeel.apply(f"softcap:cap={cap}", model, example=_given(work))
    got = tensors(_out(model, work))
    handle.remove()
    same = all(torch.equal(a, b) for a, b in zip(tensors(_out(model, work)), untouched))
    if not same:
        yield "wrong", "removal does not restore the model"
    elif work.unclaimed:
        return  # those that are no sites stay as they are
    else:
        error = max(float((a - b).abs().max() / (1e-12 + b.abs().max())) for a, b in zip(got, expected))
        yield ("right", "") if error < 1e-5 else ("wrong", f"outputs are {error:.3g} from those of capped scores")


def _out(model: nn.Module, work: _Work) -> object:
    with torch.no_grad():
        torch.manual_seed(11)
        return model(*work.example[0], **work.example[1])


QUESTIONS: dict[str, Callable[[_Work], Answers]] = {
    "sites": count,
    "heads": heads,
    "statistics": statistics,
    "rows": rows,
    "watch": watched,
    "lalr": lalr,
    "qk_clip": qk_clip,
    "qk_norm": qk_norm,
    "softcap": softcap,
}


def overall(found: list[Finding]) -> Verdict:
    """wrong if anything is, else told if anything is, else right."""
    verdicts = {f.verdict for f in found}
    return "wrong" if "wrong" in verdicts else "told" if "told" in verdicts else "right"
