"""The recipe that each attention of a model really applies, found by experiment."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn

from qkeel.audit.explain.config_differences import differences
from qkeel.audit.explain.controlled_model import Observation
from qkeel.audit.explain.experiment import Experiment, products, scale_of, seen, sinks_of
from qkeel.audit.explain.query_or_key import QueryOrKey
from qkeel.audit.explain.recipe import Explanation, NormRecipe, SiteRecipe
from qkeel.audit.explain.responses import Rotation
from qkeel.capture.example import Arguments, arguments, undisturbed
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.nn.spec_module import SpecModule
from qkeel.patching.forward_passes import owners, unwrapped
from qkeel.sites import AttentionSite, find_sites
from qkeel.sites.tap import Tap


def explain_model(model: nn.Module, batch: object = None) -> Explanation:
    """Returns what each attention of a model does to q, k and their product, as forward passes show it, not names.

    The projections of every site are made to give chosen numbers (twice as large, tiny, with one number larger, the
    same at every token, …), and the q and k that arrive at attention are compared. Parameters near it are changed
    one after the other to see what they do. That takes a few dozen forward passes; afterwards the model is bit for
    bit what it was.

    Args:
        model: any PyTorch model whose attention `find_sites` sees. Compiled ones are run eagerly.
        batch: what a forward pass takes: a tensor, a tuple of arguments, or a mapping of keyword arguments. It needs
            three tokens or more to show positions, and float32 to show what bfloat16 rounds away. Of a model that
            `qkeel.watch` has seen train: by default its last batch.

    Returns:
        An Explanation: print it, or read `sites` and `differences` (from `model.config`, where there is one).

    Raises:
        RefusedError: there is no attention that can be seen. InvalidValueError: the forward pass fails.

    >>> model = nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
    >>> print(explain_model(model, torch.randn(1, 5, 16)).sites[0].lines()[0])
    heads     2 heads of 8
    """
    model = unwrapped(model)
    args, kwargs = _last_batch(model) if batch is None else arguments(batch, "batch")
    with undisturbed(model):
        model.eval()
        sites = [s for s in find_sites(model, *args, **kwargs) if not isinstance(s.module, SpecModule)]
        if not sites:
            raise RefusedError(
                f"all attention of this {type(model).__name__} is qkeel's own, which does what its spec says: "
                "print(module.spec.explain())"
            )
        with torch.inference_mode(False), torch.no_grad():
            experiment = Experiment(model, args, kwargs, sites)
            recipes = [_recipe(experiment, site) for site in sites]
    return Explanation(model=type(model).__name__, sites=tuple(recipes), differences=differences(model, recipes))


def _last_batch(model: nn.Module) -> Arguments:
    """The arguments of the training pass that a watched model made last."""
    latest = next((tap.latest for tap in owners(model) if isinstance(tap, Tap) and tap.latest is not None), None)
    if latest is None:
        raise InvalidTypeError(
            "expected a batch, as the model takes it: qkeel.explain_model(model, batch). It is known without one only "
            "of a model that qkeel.watch has seen train"
        )
    return tuple(latest.args), dict(latest.kwargs)


def _recipe(experiment: Experiment, site: AttentionSite) -> SiteRecipe:
    name = site.name
    recipe = functools.partial(
        SiteRecipe,
        name=name,
        n_heads=site.n_heads,
        n_kv_heads=site.n_kv_heads,
        head_dim=site.head_dim,
        key_heads=site.key_heads,
    )
    if name not in experiment.base:
        return recipe(
            query=NormRecipe(kind="unknown", why="q was not seen"),
            key=NormRecipe(kind="unknown", why="k was not seen"),
            unknown=(site.why or "q and k of this attention could not be read off",),
        )
    base = experiment.base[name]
    visible, window = seen(base.visible)
    if not site.terms:
        why = NormRecipe(kind="unknown", why=f"its weights are not known: {site.why}")
        return recipe(query=why, key=why, visible=visible, window=window, softcap=base.cap)
    sides = {side: QueryOrKey(experiment, site, side) for side in ("q", "k")}
    query, key = sides["q"].norm(), sides["k"].norm()
    scale = scale_of(*(r[name] for r in experiment.tokens))
    effects = experiment.effects.get(name, [])
    turns = [sides[side].rotation() for side in ("q", "k")]
    return recipe(
        query=query,
        key=key,
        rotation=turns[0] or turns[1],
        latent=_latent(site, experiment.latents.get(name, {})),
        scale=scale or (),
        scale_parameter=", ".join(e.name for e in effects if "scale" in e.changes and not e.changes & {"q", "k"}),
        softcap=base.cap,
        sinks=sinks_of(base, [e.name for e in effects if "sinks" in e.changes and not e.changes & {"q", "k"}]),
        visible=visible,
        window=window,
        bias=_biased(experiment.tokens[0][name], scale),
        idle=experiment.idle.get(name, ()),
        unknown=_doubts(turns, scale),
    )


def _doubts(turns: list[Rotation | None], scale: tuple[float, ...] | None) -> tuple[str, ...]:
    found = []
    if (turns[0] is None) != (turns[1] is None):
        found.append("only one of q and k changes with the position")
    if scale is None:
        found.append("the scale: logits did not follow q·k times a constant, or no row sees two keys")
    return tuple(found)


def _biased(reading: Observation, scale: tuple[float, ...] | None) -> bool:
    """Returns whether something besides q·k makes one key more likely than another."""
    if reading.logits is None:
        return reading.bias is not None and bool((reading.bias[reading.visible] != 0).any())
    if scale is None:
        return False
    x, y = products(reading, reading.visible)
    z = torch.tensor(scale, dtype=torch.float64)[:, None, None] * x
    return float((y - z).abs().max()) > 1e-3 * float(z.abs().max())


def _latent(site: AttentionSite, norms: Mapping[str, str]) -> str:
    """MLA in words: which parts of a head come from which key weight, and what lies before it."""
    if len(site.terms) < 2 and not norms:
        return ""
    parts = []
    for term in site.terms if len(site.terms) > 1 else ():
        part = term.key[-1]
        dims, shared = part.index.shape[1], part.n == 1 and site.n_heads > 1
        parts.append(f"{dims} from {part.parameter.split('.')[-2]}{', one key for all heads' if shared else ''}")
    whole = [f"MLA-like, q·k = {' + '.join(parts)}"] if parts else []
    return "; ".join(whole + [f"{p.split('.')[-2]} reads a {text}" for p, text in sorted(norms.items())])
