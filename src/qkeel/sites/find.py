"""`qkeel.find_sites`: the example, the names of modules, and the sites found in one pass. The search is in `site_search`, the
reading of one module in `trace`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from qkeel import distributed as dist
from qkeel.capture.example import ForwardArguments, arguments
from qkeel.deprecation import Call, accepts_earlier_calls
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError
from qkeel.nn.attention import GAU, Attention
from qkeel.nn.mla import MLA
from qkeel.patching.forward import unwrapped
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.module_tables import (
    WRAPPED_AS,
    buffers_of,
    modules_of,
    parameters_of,
)
from qkeel.sites.norms import spec_gains
from qkeel.sites.search_passes import SEARCH, spread, whole_weights
from qkeel.sites.site import (
    AttentionSite,
    HeadSlice,
    QKProduct,
    Sites,
    renamed,
    rows,
    within,
)
from qkeel.sites.site_search import sites_in_pass

# Several models that are watched as one, such as the pipeline stages of one process. Each of them has a name.


def named_models(given: object) -> dict[str, nn.Module]:
    """Returns models to be watched by name. The name is "" for a single model, the key in a dict or ModuleDict, and the
    index "0", "1", … in a list or ModuleList.

    Raises:
        InvalidTypeError: something is not a module.
        InvalidValueError: there is no model, a name cannot begin the name of a site, or a model is given twice or is a
            part of another model.
    """
    holds_models = (
        isinstance(given, (nn.ModuleList, nn.ModuleDict))
        and type(given).forward is nn.Module.forward
    )
    if isinstance(given, nn.Module) and not holds_models:
        return {"": given}
    models: dict[str, Any]
    if isinstance(given, (Mapping, nn.ModuleDict)):
        models = {str(name): model for name, model in given.items()}
    elif isinstance(given, (list, tuple, nn.ModuleList)):
        models = {str(i): model for i, model in enumerate(given)}
    else:
        models = {"": given}
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            among = f" as {name!r}" if name else ""
            raise InvalidTypeError(
                f"expected a torch.nn.Module to watch{among}, got {type(model).__name__}; give the model itself"
            )
    if not models:
        raise InvalidValueError("expected at least one model to watch, got none")
    taken = dir(nn.ModuleDict)
    if any(
        name in taken or not re.fullmatch(r"[\w-]+", name) for name in models if name
    ):
        raise InvalidValueError(
            f"expected model names made of letters, digits, _ and -, and not the name of a method, got {[*models]}"
        )
    for name, other in itertools.permutations(models, 2):
        if unwrapped(models[name]) in [*unwrapped(models[other]).modules()]:
            raise InvalidValueError(
                f"expected models that do not contain each other, got {name!r} inside {other!r}: give each only once"
            )
    return models


def sites_of_each(
    given: object, models: Mapping[str, nn.Module]
) -> dict[str, Sites | None]:
    """Takes the sites that were found earlier for each model, as a list or by the models' names, or those of a larger model
    of which each model is a part; None if there are none.

    Raises: InvalidTypeError if they are not sites for each model, RefusedError if they belong to other models.
    """
    names = [*models]
    is_of_all = isinstance(given, Sequence) and all(
        isinstance(site, AttentionSite) for site in given
    )
    if given is None or is_of_all or names == [""]:
        by_name = dict.fromkeys(names, given)
    elif isinstance(given, Mapping) and given.keys() == models.keys():
        by_name = {**given}
    elif isinstance(given, (list, tuple)) and len(given) == len(names):
        by_name = dict(zip(names, given))
    else:
        raise InvalidTypeError(
            f"expected the sites of each of the models ({', '.join(names)}), as a list or as a dict with these keys, got "
            f"{type(given).__name__}"
        )
    return {
        n: None if x is None else bound(x, unwrapped(models[n]))  # type: ignore[arg-type]
        for n, x in by_name.items()
    }


def site_label(name: str, root: str) -> str:
    """The label of a site in tables: its name or, if the attention module is the model itself, the model's class.

    >>> site_label("layers.0", "Net"), site_label("", "Net"), site_label("#1", "Net")
    ('layers.0', 'Net', 'Net#1')
    """
    return f"{root}{name}" if not name or name[0] == "#" else name


def all_sites(of: Mapping[str, Sites]) -> Sites:
    """Joins the sites of named models. The names of sites and weights begin with the name of the model."""
    if [*of] == [""]:
        return of[""]
    missed = (
        dataclasses.replace(unread, module=within(name, unread.module))
        for name, sites in of.items()
        for unread in sites.missed
    )
    named = ((functools.partial(within, name), sites) for name, sites in of.items())
    pairs = [(inside, sites) for inside, sites in named]
    indexers = (
        renamed(site, inside) for inside, sites in pairs for site in sites.indexers
    )
    return Sites(
        (renamed(site, inside) for inside, sites in pairs for site in sites),
        missed,
        indexers,
    )


def bound(sites: Sequence[AttentionSite], model: nn.Module) -> Sites:
    """Binds sites to the modules of this model that have the sites' names; a pipeline stage has only some of them.

    The heads and rows of the sites are numbered as in the full model. If activation checkpointing or torch.compile has
    wrapped modules in the meantime, the sites get the current names of modules and weights.

    Raises:
        InvalidTypeError: the arguments are not sites.
        RefusedError: the model has no module with the name of a site, or a weight that a site names has too few rows.
    """
    if not all(isinstance(site, AttentionSite) for site in sites):
        raise InvalidTypeError("expected sites as qkeel.find_sites returned them")
    # A wrapper comes before the module inside it, which has the same bare name.
    modules = {_bare(name): (name, m) for name, m in model.named_modules()}
    parameters = {_bare(name): (name, p) for name, p in model.named_parameters()}

    def in_model(others: Sequence[AttentionSite]) -> Iterator[AttentionSite]:
        for site in others:
            home, mark, ordinal = site.name.partition("#")
            if _bare(home) in modules:
                name, module = modules[_bare(home)]
                in_this_model = renamed(
                    site, lambda weight: parameters.get(_bare(weight), (weight,))[0]
                )
                yield dataclasses.replace(
                    in_this_model, name=f"{name}{mark}{ordinal}", module=module
                )

    located = [*in_model(sites)]
    # Pieces of weights have other rows.
    for site in () if dist.hides_weights(model) else located:
        for s in (*site.query, *site.key):
            weight = parameters.get(_bare(s.parameter), (None, None))[1]
            n_rows = 0 if weight is None else len(s.rows_of(weight))
            if n_rows <= int(s.index.max()):
                raise RefusedError(
                    f"the site {site.name} was found in a model with other weights: expected {s.parameter} with at "
                    f"least {int(s.index.max()) + 1} rows, got {n_rows or 'no weight of this name'}"
                )
    if not located:
        raise RefusedError(
            f"this {type(model).__name__} has no module with the name of any site "
            f"({', '.join(site.name for site in sites)}): find the sites in the module that is itself split, "
            "not in a wrapper of it"
        )
    if not isinstance(sites, Sites):
        return Sites(located)
    return Sites(located, sites.missed, in_model(sites.indexers))


def _bare(name: str) -> str:
    """The name without the parts that activation checkpointing and torch.compile add."""
    return ".".join(key for key in name.split(".") if key not in WRAPPED_AS)


# The search for a model's attention sites and for the weights from which each head is computed.


def _in_one_batch(*args: Any, **kwargs: Any) -> Call | None:
    """Returns the arguments of `find_sites` with those of the forward pass as one batch, or None if they are so."""
    if len(args) + len(kwargs) <= 2 and kwargs.keys() <= {"model", "batch"}:
        return None
    return (args[0], ForwardArguments(args[1:], kwargs)), {}


@accepts_earlier_calls(_in_one_batch)
def find_sites(model: nn.Module, batch: object = None) -> Sites:
    """Returns every attention layer of the model; a module that is used twice in a forward pass is one site.

    Without a batch, only qkeel's own modules are found, in module order. With a batch, one forward pass is run, and
    every attention call it makes becomes a site, in call order. Copies of the modules with attention run alone, with a few
    samples and tokens of their input where these suffice: their gradients show the weights of each head, and runs with
    other weights confirm them (`site.verified`). A module that does not run alone is a site whose weights are unknown
    (`site.why`). The `missed` attribute of the result lists the attention layers that were detected but
    not recognised. The model, its buffers and caches, gradients and random number generators are left unchanged.

    If fully_shard has split the model, all processes must call this function, and each process holds all weights during
    the search. If the model does not fit into the memory of one process, or if its heads will be split, which hides its
    weights, find the sites before splitting the model and pass them as `sites=` to watch and apply. Of a
    model on the meta device, a copy with random weights is searched on the CPU.

    Args:
        model: any module with attention.
        batch: the input of the pass: a tensor, a tuple of the forward's arguments or a dict of its keyword arguments.

    Raises:
        InvalidTypeError: the model is not a torch.nn.Module.
        RefusedError: there is no attention, or none that can be observed; the message says what was tried.
        InvalidValueError: the forward pass with this batch fails.
        ApartError: the model is split, and another process has failed, or has not reached the search within the process
            group's timeout; after 8 seconds, a warning names the missing processes.

    >>> from torch import nn, rand
    >>> sites = find_sites(nn.MultiheadAttention(8, 2), tuple(rand(3, 8) for _ in "qkv"))
    >>> [(site.n_heads, site.query[0].parameter, site.query[0].index[1].tolist()) for site in sites]
    [(2, 'in_proj_weight', [4, 5, 6, 7])]
    """
    return found_sites(model, *(((), {}) if batch is None else arguments(batch)))


def found_sites(model: nn.Module, args: Args, kwargs: Kwargs) -> Sites:
    """The sites of a model that is called with these arguments; without any, those of qkeel's own modules."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"expected a torch.nn.Module to find attention in, got {type(model).__name__}"
        )
    if args or kwargs:
        if spread(model):
            by_all = functools.partial(_searched_by_all, model, args, kwargs)
            return dist.agree(SEARCH, by_all, _unverified)
        if any(p.is_meta for p in model.parameters()):
            return bound(_searched(_with_values(model), args, kwargs), model)
        with whole_weights(model):
            return _searched(model, args, kwargs)
    own = own_sites(model)
    if not own:
        takes = inspect.signature(model.forward)
        raise RefusedError(
            f"found no attention in this {type(model).__name__}: looked for qkeel.nn.Attention, MLA and GAU "
            f"in {sum(1 for _ in model.modules())} modules. Attention of any other kind is found by observing one "
            f"forward pass: qkeel.find_sites(model, batch), with a batch of the arguments of forward{takes}."
        )
    return Sites(own)


def _searched(model: nn.Module, args: Args, kwargs: Kwargs) -> Sites:
    own = own_sites(model)
    sites = sites_in_pass(model, args, kwargs, expected=not own)
    return Sites([*own, *sites], sites.missed, sites.indexers)


def _searched_by_all(model: nn.Module, args: Args, kwargs: Kwargs) -> Sites:
    dist.gather_messages(SEARCH, "begins")
    with whole_weights(model):
        return _searched(model, args, kwargs)


def _unverified(sites: Sites) -> str:
    names = ", ".join(site.name for site in sites if site.terms and not site.verified)
    return (
        f"the weights of {names} are not verified"
        if names
        else "all known weights are verified"
    )


def _with_values(model: nn.Module) -> nn.Module:
    """A copy on the CPU in which tensors on the meta device are replaced by random ones. Integers become 0 and booleans
    True, so that a mask among them hides nothing."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for module in copied.modules():
        tables: list[dict[str, Any]] = [parameters_of(module), buffers_of(module)]
        for table in tables:
            for name, x in table.items():
                if x is None or not x.is_meta:
                    continue
                value = torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)
                if x.is_floating_point():
                    noise = torch.randn(x.shape, generator=generator)
                    # Matrices keep the size of their input; vectors are near 1, as gains are.
                    is_matrix = x.ndim > 1
                    value += noise / x.shape[-1] ** 0.5 if is_matrix else 1 + noise / 8
                is_weight = isinstance(x, nn.Parameter)
                table[name] = (
                    nn.Parameter(value, x.requires_grad) if is_weight else value
                )
    return copied


# --- Sites of qkeel's own modules

_OWN = (Attention, MLA, GAU)


def own_sites(model: nn.Module) -> list[AttentionSite]:
    return [
        _site(name, module)
        for name, module in modules_of(model).items()
        if isinstance(module, _OWN)
    ]


def _site(name: str, module: Attention | MLA | GAU) -> AttentionSite:
    norm, prefix = module.spec.norm, f"{name}." if name else ""
    return AttentionSite(
        name=name,
        module=module,
        spec=module.spec,
        n_heads=module.n_heads,
        n_kv_heads=module.n_kv_heads,
        head_dim=module.head_dim,
        terms=_terms(name, module),
        value_weights=(_slice(name, module, "v_proj", module.n_kv_heads),)
        if isinstance(module, Attention)
        else (),
        query_gains=spec_gains(norm, prefix, "q", module.n_heads, module.head_dim),
        key_gains=spec_gains(norm, prefix, "k", module.n_kv_heads, module.head_dim),
        visible="full" if module.spec.position.reach is None else "window",
        origin="latent" if isinstance(module, MLA) else "tokens",
    )


def _terms(name: str, module: Attention | MLA | GAU) -> tuple[QKProduct, ...]:
    if isinstance(module, Attention):
        return _mha_terms(name, module)
    return (
        _mla_terms(name, module)
        if isinstance(module, MLA)
        else _gau_terms(name, module)
    )


def _slice(name: str, module: nn.Module, linear: str, n: int) -> HeadSlice:
    layer = module.get_submodule(linear)
    assert isinstance(layer, nn.Linear)
    head = f"{name}.{linear}" if name else linear
    # A parametrized layer keeps its trained weight among its parametrizations.
    weight = (
        "weight"
        if "weight" in parameters_of(layer)
        else "parametrizations.weight.original"
    )
    bias = f"{head}.bias" if layer.bias is not None else None
    return rows(f"{head}.{weight}", n, layer.out_features // n, bias)


def _mha_terms(name: str, module: Attention) -> tuple[QKProduct, ...]:
    query = _slice(name, module, "q_proj", module.n_heads)
    key = _slice(name, module, "k_proj", module.n_kv_heads)
    return (QKProduct(query=(query,), key=(key,)),)


def _mla_terms(name: str, module: MLA) -> tuple[QKProduct, ...]:
    h = module.n_heads
    up_q, rope_q = _slice(name, module, "q_up", h), _slice(name, module, "q_rope", h)
    up_k, rope_k = _slice(name, module, "k_up", h), _slice(name, module, "k_rope", 1)
    # With a norm on the latents, the scale of the down-projections does not affect the logit.
    direct = module.latent_norm or module.sizes.q_latent is None
    down_q = () if direct else (_slice(name, module, "q_down", 1),)
    down_k = () if module.latent_norm else (_slice(name, module, "kv_down", 1),)
    return (
        QKProduct(query=(*down_q, up_q), key=(*down_k, up_k)),
        QKProduct(query=(*down_q, rope_q), key=(rope_k,)),
    )


def _gau_terms(name: str, module: GAU) -> tuple[QKProduct, ...]:
    """(W_z, γ_q) and (W_z, γ_k): a single projection on both logit paths, without the SiLU that follows it."""
    shared = _slice(name, module, "qk_proj.z_proj", 1)
    home = f"{name}.qk_proj" if name else "qk_proj"

    def gains(part: str) -> HeadSlice:
        bias = f"{home}.{part}_bias" if module.qk_proj.q_bias is not None else None
        return rows(f"{home}.{part}_gain", 1, module.head_dim, bias)

    return (QKProduct(query=(shared, gains("q")), key=(shared, gains("k"))),)
