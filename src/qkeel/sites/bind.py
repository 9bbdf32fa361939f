"""Sites that were found on a model before it was sharded or split, bound again by name to what became of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.sites.missed import Sites
from qkeel.sites.site import AttentionSite


def bound(model: nn.Module, sites: Sequence[AttentionSite]) -> Sites:
    """Returns those of the sites whose modules this model has, as sites of this model.

    A stage of a pipeline has some of them. Their heads and rows are numbered as in the whole model.

    Raises:
        InvalidTypeError: they are no AttentionSites.
        InvalidValueError: the model has none of them, or lacks a weight that one of them names, or has one of another
            shape.

    >>> from qkeel.nn import Attention
    >>> from qkeel.sites.find import find_sites
    >>> bound(Attention(8, 2), find_sites(Attention(8, 2)))[0].n_heads
    2
    """
    if not all(isinstance(site, AttentionSite) for site in sites):
        raise InvalidTypeError("expected sites as find_sites(model, example) returns them")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    found = []
    for site in sites:
        module = modules.get(site.name.partition("#")[0])
        if module is None:
            continue
        for part in (*site.query, *site.key):
            p = parameters.get(part.parameter)
            axis = 0 if p is None or p.ndim == 1 else part.axis
            if p is None or p.shape[axis] <= int(part.index.max()):
                raise InvalidValueError(
                    f"the site {site.name} was found in a model with other weights: expected {part.parameter} with at "
                    f"least {int(part.index.max()) + 1} rows, got {'none' if p is None else tuple(p.shape)}"
                )
        found.append(dataclasses.replace(site, module=module))
    if not found:
        names = ", ".join(site.name for site in sites) or "none"
        raise InvalidValueError(f"expected sites of this model; it has no modules of their names ({names})")
    return Sites(found)
