"""Sites that were found before a model was split over processes, in the model as it is now."""

from __future__ import annotations

import dataclasses

from torch import nn

from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.sites.missed import Sites
from qkeel.sites.site import AttentionSite


def bound(sites: Sites, model: nn.Module) -> Sites:
    """The same sites with the modules that have their names in this model.

    Raises: RefusedError if the model has no module or no weight of such a name.
    """
    if not isinstance(sites, Sites):
        raise InvalidTypeError(f"expected what qkeel.find_sites returned as sites, got {type(sites).__name__}")
    return Sites([_bound(site, model) for site in sites], sites.missed)


def _bound(site: AttentionSite, model: nn.Module) -> AttentionSite:
    wanted = {s.parameter for s in (*site.query, *site.key)}
    try:
        module = model.get_submodule(site.name.partition("#")[0])
        for name in wanted:
            model.get_parameter(name)
    except AttributeError as error:
        raise RefusedError(
            f"the site {site.name} was found in a model that names its parts otherwise ({error}): find the sites in "
            "the module that is split itself, not in a wrapper of it"
        ) from error
    return dataclasses.replace(site, module=module)
