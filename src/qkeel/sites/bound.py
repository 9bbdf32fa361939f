"""Sites that were found before a model was split over processes, in the model as it is now."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.sites.missed import Sites
from qkeel.sites.site import AttentionSite


def bound(sites: Sequence[AttentionSite], model: nn.Module) -> Sites:
    """The sites with the modules that have their names in this model; a stage of a pipeline has some of them.

    Their heads and rows are numbered as in the whole model.

    Raises:
        InvalidTypeError: they are no sites.
        RefusedError: the model has no module of such a name, or lacks rows of a weight that a site names.
    """
    if not all(isinstance(site, AttentionSite) for site in sites):
        raise InvalidTypeError("expected what qkeel.find_sites returned as sites")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    found = []
    for site in sites:
        module = modules.get(site.name.partition("#")[0])
        if module is None:
            continue
        for part in (*site.query, *site.key):
            p, n = parameters.get(part.parameter), int(part.index.max()) + 1
            rows = 0 if p is None else p.shape[1:].numel() if part.axis and p.ndim > 1 else p.shape[0]
            if rows < n:
                raise RefusedError(
                    f"the site {site.name} was found in a model with other weights: expected {part.parameter} with at "
                    f"least {n} rows, got {rows if rows else 'none of this name'}"
                )
        found.append(dataclasses.replace(site, module=module))
    if not found:
        raise RefusedError(
            f"none of the sites ({', '.join(site.name for site in sites)}) has a module of its name in this "
            f"{type(model).__name__}: find the sites in the module that is split itself, not in a wrapper of it"
        )
    return Sites(found, sites.missed if isinstance(sites, Sites) else ())
