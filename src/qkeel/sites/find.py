"""The search for a model's attention sites and the weights that make each head."""

from __future__ import annotations

import copy
import functools
import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from qkeel import dist
from qkeel.capture.trace import SEARCH, ModelTrace, spread, traced
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.heads.norms import spec_gains
from qkeel.heads.site import AttentionSite, HeadSlice, LogitTerm, Sites, rows
from qkeel.nn.attention import Attention
from qkeel.nn.gau import GAU
from qkeel.nn.mla import MLA
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.module_tables import buffers_of, parameters_of
from qkeel.patching.parallel_training import gathered
from qkeel.sites.named_models import bound

_OWN = (Attention, MLA, GAU)


def find_sites(model: nn.Module, *args: Any, **kwargs: Any) -> Sites:
    """Returns every attention of the model; a module used twice in a forward pass is one site.

    Without an example only qkeel's own modules are found, in module order. With one, `model(*args, **kwargs)` is
    run and every attention it computes is a site, in the order of the calls. An experiment on its operators then
    confirms the weights of each head (`site.verified`): on a few rows of a larger batch, where that shows the same.
    `missed` of the list are attentions that were seen but not understood. The model, its buffers and caches, gradients
    and random streams are left as they were.

    Where fully_shard has split the model, all processes must call this, and each holds all weights meanwhile. Find the
    sites of a larger model before that, and of one whose heads are to be split, whose weights are unknown afterwards;
    then give `sites=` to watch and apply. Of a model on the meta device a copy with random weights is searched on the
    CPU, with an example there, one whole model in memory meanwhile; the sites are those of the model that was given.

    Raises:
        InvalidTypeError: the model is no torch.nn.Module.
        RefusedError: there is no attention, or none that can be seen; the message says what was tried.
        InvalidValueError: the forward pass with this example fails, or the example is on another device.
        ApartError: the model is split, and another process has failed, or has not come to the search in the time that
            the process group waits in a collective; after 8 seconds a warning says who is waited for.

    >>> from torch import nn, rand
    >>> sites = find_sites(nn.MultiheadAttention(8, 2), *(rand(3, 8) for _ in "qkv"))
    >>> [(site.n_heads, site.query[0].parameter, site.query[0].index[1].tolist()) for site in sites]
    [(2, 'in_proj_weight', [4, 5, 6, 7])]
    """
    return found_sites(model, args, kwargs)[0]


def found_sites(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Sites, ModelTrace | None]:
    """The sites of a model, and the pass that showed them: None without an example, of a model that is split over
    processes, and of one without numbers."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"expected a torch.nn.Module to find attention in, got {type(model).__name__}")
    if args or kwargs:
        if spread(model):
            by_all = functools.partial(_searched_by_all, model, args, kwargs)
            return dist.done_by_all(SEARCH, by_all, _unverified, lambda _: None), None
        if on_meta(model):
            return bound(_searched(with_values(model), args, kwargs)[0], model), None
        return _searched(model, args, kwargs)
    own = _own_sites(model)
    if not own:
        takes = inspect.signature(model.forward)
        raise RefusedError(
            f"found no attention in this {type(model).__name__}: looked for qkeel.nn.Attention, MLA and GAU "
            f"in {sum(1 for _ in model.modules())} modules. Attention of any other kind is found by watching one "
            f"forward pass: give an example batch, find_sites(model, ...), as forward{takes} takes it."
        )
    return Sites(own), None


def _searched(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Sites, ModelTrace]:
    own = _own_sites(model)
    trace = traced(model, args, kwargs, expected=not own)
    return Sites([*own, *trace.sites], trace.sites.missed), trace


def _searched_by_all(model: nn.Module, args: Args, kwargs: Kwargs) -> Sites:
    dist.words_of_all(SEARCH, "begins")
    with ExitStack() as undo:
        with dist.agreed_collectives(SEARCH):
            undo.enter_context(gathered(model))
        if spread(model):  # by heads, which stay so
            undo.enter_context(dist.agreed_collectives(SEARCH))
        return _searched(model, args, kwargs)[0]


def _unverified(sites: Sites) -> str:
    names = ", ".join(site.name for site in sites if site.terms and not site.verified)
    return f"the weights of {names} are not verified" if names else "all known weights are verified"


def _own_sites(model: nn.Module) -> list[AttentionSite]:
    return [_site(name, module) for name, module in model.named_modules() if isinstance(module, _OWN)]


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
        query_gains=spec_gains(norm, prefix, "q", module.n_heads, module.head_dim),
        key_gains=spec_gains(norm, prefix, "k", module.n_kv_heads, module.head_dim),
    )


def _terms(name: str, module: Attention | MLA | GAU) -> tuple[LogitTerm, ...]:
    if isinstance(module, Attention):
        return _mha_terms(name, module)
    return _mla_terms(name, module) if isinstance(module, MLA) else _gau_terms(name, module)


def _slice(name: str, module: nn.Module, linear: str, n: int) -> HeadSlice:
    layer = module.get_submodule(linear)
    assert isinstance(layer, nn.Linear)
    head = f"{name}.{linear}" if name else linear
    # A parametrized layer keeps its trained weight under parametrizations.
    weight = "weight" if "weight" in parameters_of(layer) else "parametrizations.weight.original"
    bias = f"{head}.bias" if layer.bias is not None else None
    return rows(f"{head}.{weight}", n, layer.out_features // n, bias)


def _mha_terms(name: str, module: Attention) -> tuple[LogitTerm, ...]:
    query = _slice(name, module, "q_proj", module.n_heads)
    key = _slice(name, module, "k_proj", module.n_kv_heads)
    return (LogitTerm(query=(query,), key=(key,)),)


def _mla_terms(name: str, module: MLA) -> tuple[LogitTerm, ...]:
    h = module.n_heads
    up_q, rope_q = _slice(name, module, "q_up", h), _slice(name, module, "q_rope", h)
    up_k, rope_k = _slice(name, module, "k_up", h), _slice(name, module, "k_rope", 1)
    # With a norm on the latents the size of the down-projections never reaches the logit.
    direct = module.latent_norm or module.sizes.q_latent is None
    down_q = () if direct else (_slice(name, module, "q_down", 1),)
    down_k = () if module.latent_norm else (_slice(name, module, "kv_down", 1),)
    return (LogitTerm(query=(*down_q, up_q), key=(*down_k, up_k)), LogitTerm(query=(*down_q, rope_q), key=(rope_k,)))


def _gau_terms(name: str, module: GAU) -> tuple[LogitTerm, ...]:
    """(W_z, γ_q) and (W_z, γ_k): one projection on both logit paths, the SiLU behind it left out."""
    shared = _slice(name, module, "qk_proj.z_proj", 1)
    made = f"{name}.qk_proj" if name else "qk_proj"

    def gains(part: str) -> HeadSlice:
        bias = f"{made}.{part}_bias" if module.qk_proj.q_bias is not None else None
        return rows(f"{made}.{part}_gain", 1, module.head_dim, bias)

    return (LogitTerm(query=(shared, gains("q")), key=(shared, gains("k"))),)


def is_normed(site: AttentionSite) -> bool:
    """True if a norm on q or k lies between the weights and the logit."""
    return site.normed or site.spec.norm.kind != "none"


def on_meta(model: nn.Module) -> bool:
    """Returns whether weights of a model are on the meta device."""
    return any(p.is_meta for p in model.parameters())


def with_values(model: nn.Module) -> nn.Module:
    """A copy on the CPU: what is on the meta device is drawn at random, each tensor once, and no random stream moves.

    Matrices keep the size of what they multiply; gains and other vectors, and buffers, are near 1. Whole numbers are
    0, and truth values true, so that a mask among them hides nothing.
    """
    made = copy.deepcopy(model)
    source, drawn = torch.Generator().manual_seed(0), dict[int, Tensor]()
    for module in made.modules():
        own, buffers = parameters_of(module), buffers_of(module)
        for name, p in own.items():
            if p is not None and p.is_meta:
                value = drawn.setdefault(id(p), nn.Parameter(_drawn(p, source), p.requires_grad))
                assert isinstance(value, nn.Parameter)
                own[name] = value
        for name, x in buffers.items():
            if x is not None and x.is_meta:
                buffers[name] = drawn.setdefault(id(x), _drawn(x, source))
    return made


def _drawn(x: Tensor, source: torch.Generator) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        return torch.full(x.shape, x.dtype == torch.bool, dtype=x.dtype)
    normal = torch.randn(x.shape, generator=source)
    return (normal / x.shape[-1] ** 0.5 if x.ndim > 1 else 1 + normal / 8).to(x.dtype)
