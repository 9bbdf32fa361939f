"""The statistics of a pass by site, those of a site whose heads are computed one by one put together."""

from __future__ import annotations

from typing import final

from qkeel.functional.statistics.logit_stats import LogitStats, merge
from qkeel.sites.calls.scores import cat_heads


@final
class SiteStatistics:
    """Statistics by site name, and which of them are single heads of one site."""

    def __init__(self) -> None:
        self.stats: dict[str, LogitStats] = {}
        self.heads: dict[str, list[str]] = {}

    def add(self, name: str, new: LogitStats, part_of: str | None) -> None:
        """Adds the statistics of a call; `part_of` names the site of which it is a single head."""
        old = self.stats.get(name)
        self.stats[name] = new if old is None else merge(old, new)
        if part_of is not None and name not in self.heads.setdefault(part_of, []):
            self.heads[part_of].append(name)

    def update(self, other: SiteStatistics) -> None:
        """Adds the statistics of another pass."""
        parts = {name: whole for whole, names in other.heads.items() for name in names}
        for name, stats in other.stats.items():
            self.add(name, stats, parts.get(name))

    def joined(self) -> dict[str, LogitStats]:
        """Per site; heads that were computed one by one as one site."""
        for name, parts in self.heads.items():
            whole = cat_heads([self.stats.pop(part) for part in parts])
            self.stats[name if name not in self.stats else parts[0]] = whole
        return self.stats
