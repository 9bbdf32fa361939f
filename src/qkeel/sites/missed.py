"""Attention that was seen and not understood, and the list of sites that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import final

import numpy as np

from qkeel.frames import Frame
from qkeel.frames.markup import join, tag
from qkeel.sites.site import AttentionSite


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """An attention that was seen but not understood: no statistics are taken of it, and no remedy changes it.

    `module` is the name of the module in which it happens, `operation` what its logits could not be followed through,
    `reason` a clause that says why.
    """

    module: str
    operation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'}: {self.reason}"


@final
class Sites(list[AttentionSite]):
    """The attention sites of a model; `missed` are those that were seen but not understood."""

    def __init__(self, sites: Iterable[AttentionSite] = (), missed: Iterable[Missed] = ()) -> None:
        super().__init__(sites)
        self.missed = tuple(dict.fromkeys(missed))

    @property
    def share(self) -> str:
        """Returns in words how many of those that were seen are understood.

        >>> Sites([], [Missed(module="attn", operation="relu", reason="…")]).share
        '0 of 1 attentions'
        """
        return share(len(self), len(self.missed))

    def _repr_html_(self) -> str:
        """One row per site, and a line for each attention that was not understood."""
        rows = [(s.name, s.n_heads, s.n_kv_heads, s.head_dim, "known" if s.verified else "not confirmed") for s in self]
        names = ("site", "heads", "key heads", "head_dim", "weights")
        columns = {name: np.array([row[i] for row in rows], dtype=object) for i, name in enumerate(names)}
        return Frame(columns)._repr_html_() + join(tag("p", {}, f"not understood: {one}") for one in self.missed)


def share(known: int, missed: int) -> str:
    """Returns in words how many attentions of a model are understood.

    >>> share(4, 2), share(4, 0)
    ('4 of 6 attentions', '4 attentions')
    """
    return f"{known} of {known + missed} attentions" if missed else f"{known} attention{'s' if known != 1 else ''}"
