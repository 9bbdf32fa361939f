"""Numbers by site and name other than the statistics of calls, and those that each pass adds to the numbers of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from qkeel.functional.statistics import LogitStats

StatsBySite = Mapping[str, LogitStats]
Reduction = Literal["mean", "root_mean", "root", "max", "min", "total"]
# A site, "" for the whole model, and the name of a number; or several sites, one row of the number for each.
NumberKey = tuple[str | tuple[str, ...], str]


class Number(NamedTuple):
    """What one process knows about a number: its value over some of the data, or over its part of a weight.

    Args:
        value: the number.
        weight: how much it weighs, in its shape or as one count for all of it. A process with weight 0 contributes
            nothing. None for a maximum over everything.
        how: how it is combined with others, as the rules of `distributed.reduce.Column`; a total is added up over the
            passes of a step, and is a mean over processes.
        of: "data" combines all processes; "weights" combines the processes that hold different parts of the weights.
        own: True if the values cover only the heads that this process computes, rather than all heads.
    """

    value: Tensor
    weight: Tensor | int | None = None
    how: Reduction = "mean"
    of: Literal["data", "weights"] = "data"
    own: bool = False


# A plain tensor is a number that all processes with the same weights know.
Numbers = Mapping[NumberKey, Number | Tensor]


def joined(old: Number, new: Number) -> Number:
    """Combines the numbers of two sets of data.

    >>> value = joined(Number(torch.tensor(1.0), 3, "root_mean"), Number(torch.tensor(7.0), 3, "root_mean"))
    >>> value.value, value.weight
    (tensor(5.), 6)
    """
    # Another number of heads.
    if old.value.shape != new.value.shape:
        return new
    if old.weight is None or new.weight is None:
        return old._replace(value=torch.maximum(old.value, new.value))
    weight = old.weight + new.weight
    if new.how == "total":
        return old._replace(value=old.value + new.value)
    if new.how in ("max", "min"):
        extreme = torch.maximum if new.how == "max" else torch.minimum
        return old._replace(value=extreme(old.value, new.value), weight=weight)
    # Without data on either side both weigh 0, and the share must not be NaN.
    share = new.weight / (
        weight.clamp_min(1) if isinstance(weight, Tensor) else max(weight, 1)
    )
    if new.how == "root_mean":
        value = torch.lerp(old.value.square(), new.value.square(), share).sqrt()
    else:
        value = torch.lerp(old.value, new.value, share)
    return old._replace(value=value, weight=weight)


@final
class PassNumbers:
    """Collects numbers on their device, without waiting for it."""

    def __init__(self) -> None:
        self._of_pass: dict[NumberKey, Number] = {}
        self._of_step: dict[NumberKey, Number] = {}

    def begin(self) -> None:
        """Begins a pass; the numbers of a pass that has not ended are dropped."""
        self._of_pass = {}

    def add(self, key: NumberKey, number: Number) -> None:
        """Adds a number to those of the running pass."""
        _join(self._of_pass, key, number)

    def add_flags(
        self, sites: tuple[str, ...], name: str, numbers: Sequence[tuple[str, Tensor]]
    ) -> None:
        """Adds whether any of a site's numbers [] is not finite, 1 or 0, and -1 for a site without one, as one number of
        all sites.

        sites: always the same ones for a name. numbers: each with its site.
        """
        by_site: dict[str, Tensor] = {}
        for site, number in numbers:
            # Of a site that is called again, the sum is not finite either.
            by_site[site] = by_site[site] + number if site in by_site else number
        if not numbers:
            return
        like, parts = numbers[0][1], []
        for site in sites:
            part = by_site.get(site, like)
            # A call that copies nothing costs the host as much as a small operator.
            is_here = part.device == like.device
            parts.append(part if is_here else part.to(like.device))
        flags = (~torch.stack(parts).isfinite()).float()
        for i, site in enumerate(sites):
            if site not in by_site:
                # A fill, as a copy from the host would wait.
                flags[i] = -1.0
        self.add((sites, name), Number(flags[:, None]))

    def end(self) -> dict[NumberKey, Number]:
        """Ends a pass and returns its numbers."""
        numbers, self._of_pass = self._of_pass, {}
        return numbers

    def keep(self, numbers: Mapping[NumberKey, Number]) -> None:
        """Adds the numbers of a pass that was trained to those of the step."""
        for key, number in numbers.items():
            _join(self._of_step, key, number)

    def read(self) -> dict[NumberKey, Number]:
        """Returns the numbers of the step so far, and forgets them."""
        numbers, self._of_step = self._of_step, {}
        return numbers


def _join(numbers: dict[NumberKey, Number], key: NumberKey, number: Number) -> None:
    numbers[key] = joined(numbers[key], number) if key in numbers else number
