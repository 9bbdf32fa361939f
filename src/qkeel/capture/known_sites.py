"""What is known of attention sites, by which the calls of a pass are read and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qkeel.capture.calls import HeadLayout
from qkeel.capture.example import Caller

# The suffix of the name of an indexer.
INDEX = "#index"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownSites:
    """What observing the calls of some sites needs.

    Attributes:
        sites: the sites, each an `AttentionSite`.
        layouts: the dimensions of their scores, by name.
        key_heads: the numbers of query and key heads in their calls, by name. At other sites, keys are compared to find
            repeated heads, which waits for the device.
        indexers: the dimensions of the scores by which keys are chosen, by the name of the layer.
        by_caller: the names of sites by the calls of modules that several sites share, or None if there are none.
    """

    sites: Sequence[Any] = ()
    layouts: Mapping[str, HeadLayout] = dataclasses.field(default_factory=dict)
    key_heads: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    indexers: Mapping[str, HeadLayout | None] = dataclasses.field(default_factory=dict)
    by_caller: Mapping[Caller, str] | None = None

    @classmethod
    def of(cls, sites: Sequence[Any]) -> KnownSites:
        """Takes `Sites`, or a list of sites, which has no indexers."""
        indexers = getattr(sites, "indexers", ())
        return cls(
            sites=[*sites],
            layouts={s.name: s.layout for s in sites if s.layout is not None},
            key_heads={
                # Keys that are repeated in an order other than blocks stay repeated.
                s.name: (s.n_heads, s.n_kv_heads if s.key_heads is None else s.n_heads)
                for s in sites
                if s.verified
            },
            indexers={s.name.removesuffix(INDEX): s.layout for s in indexers},
            by_caller={caller: s.name for s in sites for caller in s.callers} or None,
        )

    def indexed_layer(self, module: str) -> str | None:
        """The layer whose keys a module chooses; None if it is not known as an indexer."""
        if not self.indexers:
            return None
        layer = layer_of(module, [site.name for site in self.sites])
        return layer if layer in self.indexers else None


def layer_of(module: str, sites: Iterable[str]) -> str | None:
    """Returns the first site of the layer to which a module belongs, or None if there is none.

    The layer is the innermost module around the given one that contains sites, searching up to the numbered entry of a
    list. If the model itself is the attention module, the layer is the full model.

    >>> layer_of("h.1.attn.indexer", ["h.0.attn", "h.1.attn", "h.1.attn#2"]), layer_of("h.1.index", ["h.0.attn"])
    ('h.1.attn', None)
    >>> layer_of("h.1.index", ["h.0.attn", "h.1.attn"]), layer_of("index", [""])
    ('h.1.attn', '')
    """
    around = module.split(".") if module else []
    homes = {site: site.partition("#")[0].split(".") for site in sites}
    for n in range(len(around), 0, -1):
        for site, home in homes.items():
            if home[:n] == around[:n]:
                return site
        if around[n - 1].isdigit():
            break
    return next((site for site, home in homes.items() if home == [""]), None)
