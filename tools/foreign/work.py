"""Work: one model, its sites, and what its attention really computed; what every question starts from."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qkeel.sites import AttentionSite
from qkeel.sites.find import found_sites
from qkeel.sites.site import HeadSlice
from tools.foreign.reference import Call, Example, tensors

Verdict = Literal["right", "reported", "wrong"]
Truth = Callable[
    [nn.Module, Example], list[Call]
]  # every attention call of a forward pass
Capped = Callable[
    [nn.Module, Example, float, set[int]], list[Tensor]
]  # the output under a cap on calls of a pass
MODEL = "(the model)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one question, and what was said or what was wrong: about the site of this name, about every one
    (None), or about the model as a whole alone (MODEL)."""

    question: str
    verdict: Verdict
    said: str = ""
    site: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model, an example of its input, another one of the same shapes and masks, and what its attention computed.

    `double` says that the model runs in float64, which all questions but that for the bits are asked in.
    """

    model: nn.Module
    example: Example
    other: Example
    truth: Truth
    capped: Capped
    double: bool = True


Answer = tuple[
    Verdict, str, str | None
]  # the verdict, what was said, the site (see Finding)
Answers = Iterator[Answer]


class Work:
    """What the questions share: the model in float64, its sites, the calls of the reference, and which is whose."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.exact = copy.deepcopy(subject.model)
        self.example, self.other = subject.example, subject.other
        if subject.double:
            self.exact.double()
            self.example, self.other = doubled(subject.example), doubled(subject.other)
        self.calls = subject.truth(self.exact, self.example)
        self.sites = found_sites(self.exact, *self.example)
        self.missed = list(getattr(self.sites, "missed", ()))
        self.places, self.unclaimed = claimed(self.sites, self.calls)

    def of(self, calls: list[Call], site: AttentionSite) -> list[Call]:
        """The calls of a site among those of a pass."""
        return [calls[i] for i in self.places[site.name]]

    def shared(self, site: AttentionSite) -> set[str]:
        """Weights of this site that are on logit paths of other sites too: they move the input of later ones."""
        others = {
            s.parameter
            for other in self.sites
            if other is not site
            for s in (*other.query, *other.key)
        }
        return others & {s.parameter for s in (*site.query, *site.key)}

    def truth(self, example: Example | None = None) -> list[Call]:
        """The calls of one more pass of the exact model."""
        return self.subject.truth(
            self.exact, self.example if example is None else example
        )


def claimed(
    sites: list[AttentionSite], calls: list[Call]
) -> tuple[dict[str, list[int]], list[int]]:
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
        around = [
            m
            for m in modules
            if m in ("", call.module) or call.module.startswith(f"{m}.")
        ]
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


def short(error: BaseException) -> str:
    """What an exception says, on one line."""
    return " ".join(str(error).split())[:300]


def loss(output: object) -> Tensor:
    """A number that everything floating in the output has a part in."""
    return torch.stack(
        [x.float().square().mean() for x in tensors(output) if x.requires_grad]
    ).sum()


def rows_of(p: Tensor, axis: int) -> Tensor:
    """A view of a weight whose first dimension is the rows of a slice: of one with three dimensions, of its matrix
    [n, …] with the others as one."""
    return p.flatten(1).movedim(axis, 0) if p.ndim > 1 else p


class changed:
    """While it is entered the rows of one head (or of all) of some slices are what `change` makes of them."""

    def __init__(
        self,
        model: nn.Module,
        slices: list[HeadSlice],
        head: int | None,
        change: Callable[[Tensor], Tensor],
    ) -> None:
        self.model, self.slices, self.head, self.change = model, slices, head, change
        self.kept: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        torch.manual_seed(7)
        done: set[tuple[str, int]] = set()
        for s in self.slices:
            for name, axis, shift in (
                (s.parameter, s.axis, 0),
                (s.bias, 0, s.bias_shift),
            ):
                if name is None:
                    continue
                index = (
                    s.index if self.head is None else s.index[self.head]
                ).flatten() + shift
                p = self.model.get_parameter(name).data
                fresh = torch.tensor(
                    [i for i in index.tolist() if (name, i) not in done],
                    dtype=torch.long,
                )
                done.update((name, i) for i in fresh.tolist())
                self.kept.setdefault(name, p.clone())
                rows = rows_of(p, axis)
                if len(fresh):
                    rows[fresh] = self.change(rows[fresh])

    def __exit__(self, *exc: object) -> None:
        for name, value in self.kept.items():
            self.model.get_parameter(name).data.copy_(value)
