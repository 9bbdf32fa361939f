"""What qkeel sees of a model against what its attention computed: sites, heads, statistics, rows, and ten steps."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

import qkeel
from qkeel.capture.example import ForwardArguments
from qkeel.sites import AttentionSite, Tap
from tools.foreign.work import MODEL, Answers, Work, changed, loss, short

MOVED, STILL = (
    1e-9,
    1e-6,
)  # a change of a logit, against the largest one, that counts, and one that does not


def count(work: Work) -> Answers:
    """Every call of the reference belongs to a site, or is said to be missed."""
    empty = [name for name, places in work.places.items() if not places]
    if empty:
        yield "wrong", f"sites where nothing was computed: {empty}", None
    lost = [work.calls[i].module for i in work.unclaimed]
    # One module may have sites and lose a call.
    for module in {site.name.partition("#")[0] for site in work.sites}:
        mine = [s.name for s in work.sites if s.name.partition("#")[0] == module]
        if len({len(work.places[name]) for name in mine}) > 1:
            lost.append(module)
    if lost and not work.missed:
        yield (
            "wrong",
            f"attention in {sorted(set(lost))} is neither a site nor missed",
            MODEL,
        )
    elif lost:
        yield "reported", f"missed: {short(ValueError(str(work.missed[0])))}", MODEL
    elif not empty:
        yield "right", "", None


def heads(work: Work) -> Answers:
    """n_heads is the reference's; what is uncertain about a site is said."""
    for site in work.sites:
        for call in work.of(work.calls, site)[:1]:
            if site.n_heads == call.heads:
                yield "right", "", site.name
            elif site.why:
                yield "reported", site.why, site.name
            else:
                yield (
                    "wrong",
                    f"{site.n_heads} heads, there are {call.heads}",
                    site.name,
                )


def statistics(work: Work) -> Answers:
    """max_logit and entropy, by head, of all calls of a site."""
    with torch.no_grad(), Tap(work.exact) as tap:
        tap.sites = work.sites
        torch.manual_seed(11)
        work.exact(*work.example[0], **work.example[1])
        stats = tap.read()
    for site in work.sites:
        calls = work.of(work.calls, site)
        if not calls:
            continue
        if site.name not in stats:
            yield "wrong", "the tap saw nothing", site.name
            continue
        top = torch.stack([c.max_logit() for c in calls]).amax(0)
        seen = torch.stack(
            [c.visible.any(-1).expand(c.z.shape[:3]).sum((0, 2)) for c in calls]
        ).double()
        entropy = (torch.stack([c.entropy() for c in calls]) * seen).sum(0) / seen.sum(
            0
        ).clamp_min(1)
        got = stats[site.name]
        if got.max_logit.shape != top.shape:
            # Said to be uncertain, or said wrongly under `heads`.
            yield (
                ("reported", site.why, site.name)
                if site.why
                else ("wrong", "statistics of other heads", site.name)
            )
            continue
        for what, mine, theirs in (
            ("max_logit", got.max_logit, top),
            ("entropy", got.entropy, entropy),
        ):
            error = float(
                (mine.double() - theirs).abs().max() / (1 + theirs.abs().max())
            )
            if error < 1e-5:
                yield "right", "", site.name
            else:
                yield (
                    "wrong",
                    f"{what} {numbers(mine)}, true {numbers(theirs)}",
                    site.name,
                )


def maps(work: Work) -> Answers:
    """The weights of the first call of each site are the softmax of what the reference saw."""
    torch.manual_seed(11)
    args, kwargs = work.example
    weights = qkeel.attention_maps(work.exact, ForwardArguments(args, kwargs))
    for site in work.sites:
        calls = work.of(work.calls, site)[:1]
        if site.name not in weights or not calls:
            yield "reported", site.why, site.name
            continue
        # A row that sees no key has weights of 0 in maps; here it may have any.
        visible = calls[0].visible
        seen = visible.any(-1, keepdim=True)
        logits = calls[0].capped.masked_fill(~visible, -torch.inf)
        expected = logits.softmax(-1).where(seen, 0.0)
        mine = weights[site.name].double()
        if mine.shape != expected.shape:
            yield (
                ("reported", site.why, site.name)
                if site.why
                else ("wrong", f"maps {list(mine.shape)}", site.name)
            )
            continue
        error = float((mine.where(seen, 0.0) - expected).abs().max())
        yield (
            ("right", "", site.name)
            if error < 1e-6
            else ("wrong", f"maps are off by {error:.2g}", site.name)
        )


def numbers(x: Tensor) -> str:
    """The first few of them."""
    return " ".join(f"{v:.4g}" for v in x.flatten()[:6].tolist())


def rows(work: Work) -> Answers:
    """Perturbing the rows told for a head moves its logits and no other's; zeroing all leaves nothing of the input."""
    for site in work.sites:
        if not site.terms:
            yield "reported", site.why, site.name
        elif not site.verified:
            yield "reported", site.unverified, site.name
        elif work.of(work.calls, site):
            yield from _rows(work, site)


def _rows(work: Work, site: AttentionSite) -> Answers:
    before = work.of(work.calls, site)[0]
    size = float(before.z[before.visible.expand_as(before.z)].abs().max())
    if site.n_heads != before.heads:
        return
    shared = work.shared(site)
    for side, slices, n in (
        ("query", site.query, site.n_heads),
        ("key", site.key, site.n_kv_heads),
    ):
        own = [s for s in slices if s.n == n and n > 1 and s.parameter not in shared]
        for head in range(n) if own else ():
            with changed(
                work.exact, own, head, lambda x: x + 0.5 * torch.randn_like(x)
            ):
                after = work.of(work.truth(), site)[0]
            apart = (
                (after.z - before.z)
                .masked_fill(~before.visible, 0.0)
                .abs()
                .amax((0, 2, 3))
            )
            mine = site.used(n) == head
            if float(apart[mine].min()) < MOVED * size:
                yield (
                    "wrong",
                    f"the {side} rows of head {head} do not move its logits",
                    site.name,
                )
                return
            if (
                bool((~mine).any())
                and float(apart[~mine].max()) > STILL * size
                and not site.normed
            ):
                yield (
                    "wrong",
                    f"the {side} rows of head {head} move logits of other heads",
                    site.name,
                )
                return
    yield "right", "", site.name
    yield from _nobodys(work, site, size)


def _nobodys(work: Work, site: AttentionSite, size: float) -> Answers:
    """With the last matrices of a side at zero, logits are what was added to them, whatever the input."""
    sides = {
        "query": [term.query[-1] for term in site.terms],
        "key": [term.key[-1] for term in site.terms],
    }
    if site.normed:  # what a norm adds is left of that side, times the other one
        sides = {"query and key": [*sides["query"], *sides["key"]]}
    for side, last in sides.items():
        with changed(work.exact, last, None, torch.zeros_like):
            one, two = (
                work.of(work.truth(example), site)[0]
                for example in (work.example, work.other)
            )
        if one.z.shape == two.z.shape:
            both = one.visible & two.visible
            left = float((one.z - two.z).masked_fill(~both, 0.0).abs().max())
            if left > STILL * size:
                yield (
                    "wrong",
                    f"{side} rows told to nobody make logits: {left:.3g} of {size:.3g} is left",
                    site.name,
                )


def watched(work: Work) -> Answers:
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
    equal = all(
        torch.equal(a, b) or bool((a.isnan() == b.isnan()).all() and a.isnan().any())
        for a, b in zip(*ends)
    )
    yield (
        ("right", "", None)
        if equal
        else ("wrong", "watching changed the weights", None)
    )
