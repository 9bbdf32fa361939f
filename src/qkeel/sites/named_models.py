"""Several models that are given as one, such as the stages of a pipeline that one process has: each has a name."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn

from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError
from qkeel.heads.site import AttentionSite, HeadSlice, LogitTerm, NormGain, Sites
from qkeel.patching.forward_passes import unwrapped

T = TypeVar("T", HeadSlice, NormGain)
Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


def named_models(given: object, what: str) -> dict[str, nn.Module]:
    """Models by name: "" of one, the keys of a dict or ModuleDict, the places "0", "1", … of a list or ModuleList.

    Raises: InvalidTypeError if something is no module (`what` is done with it), InvalidValueError if there is none, a
    name cannot begin the name of a site, or one model is given twice, or is a part of another.
    """
    holder = isinstance(given, (nn.ModuleList, nn.ModuleDict)) and type(given).forward is nn.Module.forward
    if isinstance(given, nn.Module) and not holder:
        return {"": given}
    if not isinstance(given, (list, tuple, Mapping, nn.ModuleList, nn.ModuleDict)):
        raise InvalidTypeError(
            f"expected a torch.nn.Module to {what}, got {type(given).__name__}; give the model itself"
        )
    pairs = given.items() if isinstance(given, (Mapping, nn.ModuleDict)) else enumerate(given)
    models = {str(name): model for name, model in pairs}
    if not models:
        raise InvalidValueError(f"expected at least one model to {what}, got none")
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise InvalidTypeError(f"expected a torch.nn.Module to {what} as {name!r}, got {type(model).__name__}")
        if not re.fullmatch(r"[\w-]+", name) or name in dir(nn.ModuleDict):
            raise InvalidValueError(
                f"expected names of models of letters, digits, _ and -, other than those of methods, got {name!r}"
            )
    inside = {name: {id(m) for m in unwrapped(model).modules()} for name, model in models.items()}
    for part, model in itertools.permutations(models, 2):
        if id(unwrapped(models[part])) in inside[model]:
            raise InvalidValueError(
                f"expected models of which none is a part of another, got {part!r} inside {model!r}: give each once"
            )
    return models


def of_each(given: object, names: Sequence[str], what: str) -> dict[str, object]:
    """Takes what is given of one model, or of each of several, as a list or by their names; None stands for all.

    Raises: InvalidTypeError if it is neither, naming `what`.
    """
    if given is None or list(names) == [""]:
        return dict.fromkeys(names, given)
    if isinstance(given, Mapping) and given.keys() == set(names):
        return dict(given)
    if isinstance(given, (list, tuple)) and len(given) == len(names):
        return dict(zip(names, given))
    raise InvalidTypeError(
        f"expected the {what} of each of the models ({', '.join(names)}), as a list or as a dict by these names, got "
        f"{type(given).__name__}"
    )


def sites_of_each(given: object, models: Mapping[str, nn.Module]) -> dict[str, Sites | None]:
    """Takes the sites that were found earlier of each model, or those of a whole of which each model is a part.

    Raises: InvalidTypeError if they are no sites of each, RefusedError if they are those of other models.
    """
    whole = isinstance(given, Sequence) and all(isinstance(site, AttentionSite) for site in given)
    each = dict.fromkeys(models, given) if whole else of_each(given, [*models], "sites")
    return {n: None if x is None else bound(x, unwrapped(models[n])) for n, x in each.items()}  # type: ignore[arg-type]


def within(model: str, name: str) -> str:
    """The name that a site of a named model has among those of all.

    >>> within("", "layers.0"), within("decoder", "layers.0"), within("decoder", ""), within("decoder", "#1")
    ('layers.0', 'decoder.layers.0', 'decoder', 'decoder#1')
    """
    return f"{model}{'.' if model and name and name[0] != '#' else ''}{name}"


def site_label(name: str, root: str) -> str:
    """What to call a site in tables: its name, or, of attention that is the whole model, the model's class.

    >>> site_label("layers.0", "Net"), site_label("", "Net"), site_label("#1", "Net")
    ('layers.0', 'Net', 'Net#1')
    """
    return f"{root}{name}" if not name or name[0] == "#" else name


def all_sites(of: Mapping[str, Sites]) -> Sites:
    """The sites of named models as those of one: names, also of weights, begin with that of the model."""
    if [*of] == [""]:
        return of[""]
    missed = (
        dataclasses.replace(one, module=within(name, one.module)) for name, sites in of.items() for one in sites.missed
    )
    return Sites((_renamed(name, site) for name, sites in of.items() for site in sites), missed)


def _renamed(model: str, site: AttentionSite) -> AttentionSite:
    def named(parts: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(
            dataclasses.replace(x, parameter=x.parameter and inside(x.parameter), bias=x.bias and inside(x.bias))
            for x in parts
        )

    inside = functools.partial(within, model)
    return dataclasses.replace(
        site,
        name=inside(site.name),
        terms=tuple(LogitTerm(query=named(term.query), key=named(term.key)) for term in site.terms),
        query_gains=named(site.query_gains),
        key_gains=named(site.key_gains),
    )


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
