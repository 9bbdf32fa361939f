"""Finds by experiment which QK-norm, scale and cap a model really applies, and compares them with its config."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, final

import torch
from torch import Tensor, nn

from qkeel.audit.explain_experiment import (
    Observation,
    Observations,
    ParameterEffect,
    SiteExperiments,
    products,
    random_vector,
    scale_of,
    scaled,
    seen,
    sinks_of,
)
from qkeel.audit.explain_responses import (
    Answers,
    Explanation,
    NormRecipe,
    Rotation,
    SiteRecipe,
    close,
    compress,
    eps_of,
    even,
    gains,
    moving,
    odd_part,
    reach,
    response,
    rotation,
    scale_text,
    shape_of,
    subtracts_mean,
)
from qkeel.audit.tensor_heads import ConfigMapping, section
from qkeel.capture.example import Arguments, arguments, undisturbed
from qkeel.errors import InvalidTypeError, RefusedError
from qkeel.nn.attention import SpecModule
from qkeel.patching.forward import owners, unwrapped
from qkeel.sites import AttentionSite, HeadSlice
from qkeel.sites.find import found_sites
from qkeel.sites.tap import Tap

# One side of one site: its norm and rotation, read from its responses to the experiments.


@final
class QueryOrKey:
    """The queries or the keys of one site, with their responses and the norm and rotation that explain these."""

    def __init__(self, experiment: SiteExperiments, site: AttentionSite, side: Literal["q", "k"]) -> None:
        self.site, self.side = site, side
        self.slices = [(t.query if side == "q" else t.key)[-1] for t in site.terms]
        self.effects = [e for e in experiment.effects.get(site.name, []) if side in e.changes]
        self.model = experiment.model
        name = site.name

        def of(readings: Observations) -> Tensor:
            return self._of(readings[name])

        alone = len(self.slices) == 1 and self.slices[0].index.shape == of(experiment.base).shape[::2]
        self.answers = Answers(
            base=of(experiment.base),
            **{key: of(readings) for key, readings in experiment.passes.items()},
            small=tuple(of(readings) for readings in experiment.small),
            x=self._given(self.slices[0], 0) if alone else None,
            other=self._given(self.slices[0], 1) if alone else None,
            tolerance=max(2e-4, 8 * experiment.base[name].rounding),
        )
        self.fine = experiment.base[name].rounding < 1e-5

    def _of(self, reading: Observation) -> Tensor:
        return reading.q if self.side == "q" else reading.k

    def _given(self, part: HeadSlice, salt: int) -> Tensor:
        size = self.model.get_parameter(part.parameter).shape[part.axis]
        like = torch.empty(1, size, dtype=torch.float64)
        return scaled(1.0, salt)(random_vector(part.parameter, size), like)[0][part.index.cpu()]

    def norm(self) -> NormRecipe:
        """Returns the norm that is applied, or the factor if q or k is not normed."""
        a = self.answers
        how = response(a)
        if how == "linear":
            return self._linear()
        if how != "normed":
            why = {"partly normed": f"only some of the {a.base.shape[-1]} dimensions are normed"}.get(
                how, "it neither grows with its projection nor stays the same"
            )
            return NormRecipe(kind="unknown", why=why)
        over = reach(a)
        if over in ("", "some tokens"):
            why = "one token affects others through a convolution or pooling"
            return NormRecipe(kind="unknown", why=why if over else "its projection does not affect it")
        if over not in ("head", "layer"):
            return NormRecipe(kind="RMS" if not subtracts_mean(a) else "layer", over=over, gain="unknown")
        kind = "layer" if subtracts_mean(a) else "RMS"
        gain = gains(a, kind, over)
        eps, floor = eps_of(a, kind, over)
        shape, bias, names = self._gain(gain, kind, over)
        width = a.base.shape[-1] * (len(a.base) if over == "layer" else 1)
        scalar = float(gain.median()) if gain is not None and shape.startswith("scalar") else math.nan
        if kind == "RMS" and abs(scalar * math.sqrt(width) - 1) < 1e-3:  # every vector has length 1
            kind, shape = "L2", "none"
        elif floor and kind == "RMS":
            kind = "L2"
            shape = shape_of(gain * width**0.5, a.tolerance) if gain is not None else shape
        order = "" if self.rotation() is None else self._order(gain, shape, kind)
        return NormRecipe(kind=kind, over=over, eps=eps, gain=shape, bias=bias, parameters=names, order=order)

    def _linear(self) -> NormRecipe:
        first = odd_part(self.answers)[:, 0]
        given = sum(self._given(s, 0).square().sum(-1).expand(len(first)) for s in self.slices)
        ratio = first.norm(dim=-1) / torch.as_tensor(given).sqrt()
        if not close(ratio, ratio[:1].expand_as(ratio), 1e-2):
            return NormRecipe(why="its factor differs by head")
        if reach(self.answers) == "some tokens":
            return NormRecipe(why="one token affects others through a convolution or pooling")
        value = float(ratio.median())
        return NormRecipe(factor=1.0 if abs(value - 1) < 1e-3 else value)

    def _gain(self, gain: Tensor | None, kind: str, over: str) -> tuple[str, bool, tuple[str, ...]]:
        """Returns the gain's shape, whether a bias follows it, and the parameters of both."""
        a = self.answers
        tolerance = a.tolerance
        bias = not close(even(a)[:, 0] + a.base[:, 0], a.base[:, 0], 10 * tolerance)
        shape = "unknown" if gain is None else shape_of(gain, tolerance)
        names = []
        for effect in self.effects:
            names.append(effect.name)
            odd = (self._of(effect.plus) - self._of(effect.minus)) / 2
            old = odd_part(a)
            if close(odd, old, tolerance):
                bias = True
            elif gain is not None:
                now = gain * (odd[:, 0] / old[:, 0])
                shape = shape_of(now, tolerance)
                shape += ", 1 + w" if _one_plus(effect, now / gain) else ""
        return shape, bias, tuple(names)

    def rotation(self) -> Rotation | None:
        """Returns how the vectors rotate with the position; None if they do not."""
        a = self.answers
        if a.base.shape[1] < 3:
            return Rotation(dims=0, of=a.base.shape[-1], why="the example has fewer than three tokens")
        y = odd_part(a) if response(a) != "other" else a.base
        found = rotation(y, a.tolerance if self.fine else 0.5)
        if found is None or found.pairing or response(a) != "normed":
            return found
        gain = gains(a, "layer" if subtracts_mean(a) else "RMS", reach(a))
        return found if gain is None else rotation(y / gain[:, None], a.tolerance)

    def _order(self, gain: Tensor | None, shape: str, kind: str) -> str:
        """Returns whether the norm precedes the rotation, judged by the lengths of pairs under a varying gain."""
        y = odd_part(self.answers)
        if gain is not None:
            for effect in self.effects:
                odd = (self._of(effect.plus) - self._of(effect.minus)) / 2
                if not close(odd, y, self.answers.tolerance):
                    gain, y = gain * (odd[:, 0] / y[:, 0]), odd
                    break
        among = moving(odd_part(self.answers), self.answers.tolerance)
        turned = rotation(y, self.answers.tolerance, among)
        before = turned is not None and bool(turned.pairing)
        if gain is None:
            return "before RoPE" if before and shape != "none" else "order with RoPE unknown"
        divided = rotation(y / gain[:, None], self.answers.tolerance, among)
        after = divided is not None and bool(divided.pairing)
        if before and after:
            return "before RoPE" if kind == "layer" else "before or after RoPE (equivalent without a gain per dim)"
        return "before RoPE" if before else "after RoPE" if after else "order with RoPE unknown"


def _one_plus(effect: ParameterEffect, ratio: Tensor) -> bool:
    """True if the gain is 1 + w of the parameter, judged by its response to a change."""
    old, new = effect.before.double().cpu().flatten(), effect.after.double().cpu().flatten()
    if old.numel() not in (ratio.shape[-1], ratio.numel()):
        return False
    expected = ((1 + new) / (1 + old)).view(-1, ratio.shape[-1]).expand_as(ratio)
    return close(expected, ratio, 1e-3)


# Contradictions between a model's config and its observed behaviour.

_NORM = ("use_qk_norm", "qk_layernorm", "qk_norm", "use_qk_layernorm", "query_key_norm")
_CAP = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")

Check = Callable[[ConfigMapping, SiteRecipe], str]


def differences(model: nn.Module, recipes: Sequence[SiteRecipe]) -> tuple[str, ...]:
    """Returns one sentence per contradiction, with the attention layers it concerns; empty if there is no config."""
    where: dict[str, list[str]] = {}
    for recipe in recipes:
        part = _config(model, recipe.name)
        for check in _CHECKS:
            text = check(part, recipe)
            if text:
                where.setdefault(text, []).append(recipe.name)
    whole = len(recipes)
    return tuple(f"{text} ({'everywhere' if len(n) == whole else compress(n)})" for text, n in where.items())


def _config(model: nn.Module, name: str) -> ConfigMapping:
    """Returns the config of the innermost module around a site that has one, as a mapping."""
    path = name.split("#")[0].split(".")
    for end in range(len(path), -1, -1):
        config = getattr(model.get_submodule(".".join(path[:end])), "config", None)
        to_dict = getattr(config, "to_dict", None)
        values = to_dict() if callable(to_dict) else config
        if isinstance(values, Mapping):
            return section(values, name)
    return {}


def _named(config: ConfigMapping, word: str) -> list[float]:
    """Returns all numbers of a config, at any depth, whose key contains the word."""
    found = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _named(value, word)
        elif word in str(key) and isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(float(value))
    return found


def _norm(config: ConfigMapping, recipe: SiteRecipe) -> str:
    key = next((k for k in _NORM if isinstance(config.get(k), bool)), None)
    if key is None or "unknown" in (recipe.query.kind, recipe.key.kind):
        return ""
    acting = [side for side, norm in (("q", recipe.query), ("k", recipe.key)) if norm.acts]
    if config[key] and len(acting) < 2:
        return (
            f"config.{key} is true, but no norm is applied to "
            f"{'q or k' if not acting else 'q' if 'k' in acting else 'k'}"
        )
    if not config[key] and acting:
        return f"config.{key} is false, but a norm is applied to {' and '.join(acting)}"
    return ""


def _scale(config: ConfigMapping, recipe: SiteRecipe) -> str:
    value = config.get("query_pre_attn_scalar")
    if value is not None:
        said, name = float(value) ** -0.5, f"config.query_pre_attn_scalar {value:g}"
    elif isinstance(value := config.get("attention_multiplier"), (int, float)):
        said, name = float(value), f"config.attention_multiplier {value:g}"
    else:
        return ""
    got = recipe.total_scale
    if math.isnan(got) or abs(got / said - 1) < 2e-3:
        return ""
    return f"{name} means logits {said:.4g} · q·k, but the observed scale is {scale_text((got,), recipe.head_dim)}"


def _cap(config: ConfigMapping, recipe: SiteRecipe) -> str:
    key = next((k for k in _CAP if k in config), None)
    if key is None:
        return ""
    said, got = config[key], recipe.softcap
    if (said or None) == got or (said and got and abs(got / said - 1) < 1e-3):
        return ""
    return f"config.{key} is {said}, but the observed cap is {'none' if got is None else f'{got:g}'}"


def _window(config: ConfigMapping, recipe: SiteRecipe) -> str:
    said = config.get("sliding_window")
    if recipe.window is None or config.get("use_sliding_window") is False:
        used = recipe.window is not None
        return f"config says no sliding window, but queries see only {recipe.window} keys" if used else ""
    if said is None:
        return f"config.sliding_window is none, but queries see only {recipe.window} keys"
    near = isinstance(said, int) and abs(said - recipe.window) <= 1
    return "" if near else f"config.sliding_window is {said}, but queries see only {recipe.window} keys"


def _heads(config: ConfigMapping, recipe: SiteRecipe) -> str:
    if recipe.latent:
        return ""
    for key, word, got in (
        ("num_attention_heads", "attention_heads", recipe.n_heads),
        ("head_dim", "head_dim", recipe.head_dim),
    ):
        said = config.get(key)
        if isinstance(said, int) and got not in _named(config, word):
            return f"config.{key} is {said}, observed: {got}"
    return ""


def _base(config: ConfigMapping, recipe: SiteRecipe) -> str:
    got = None if recipe.rotation is None else recipe.rotation.base
    whole = None if recipe.rotation is None else recipe.rotation.whole_base
    said = [*_named(config, "theta"), *_named(config, "base_freq")]
    if not said or got is None or whole is None:
        return ""
    if any(abs(g / value - 1) < 0.05 for value in said for g in (got, whole)):
        return ""
    return f"the rotary base is {', '.join(f'{v:,.6g}' for v in said)} in config, but the observed one is {got:,.6g}"


_CHECKS: tuple[Check, ...] = (_norm, _scale, _cap, _window, _heads, _base)


# Assembling the recipe of each attention layer.


def explain(model: nn.Module, batch: object = None) -> Explanation:
    """Determines by forward passes what each attention layer of a model does to q, k and their product.

    Names and types are not trusted. Instead, the projections of every site are made to output chosen values (twice as
    large, tiny, with one value larger, equal at every token, …), and the q and k that arrive at attention are compared.
    Nearby parameters are changed one by one to see their effect. This takes a few dozen forward passes and leaves the
    model bit for bit unchanged.

    Args:
        model: any PyTorch model whose attention `find_sites` finds. Compiled models run eagerly.
        batch: input of a forward pass: a tensor, a tuple of arguments, or a mapping of keyword arguments. Finding
            positions requires three tokens or more, and details that bfloat16 rounds away require float32. The default
            is the last training batch, if `qkeel.watch` has watched the model during training.

    Returns:
        An Explanation, which can be printed; its fields include `sites` and `differences` (contradictions to
        `model.config`, if there is one).

    Raises:
        RefusedError: no attention can be analysed.
        InvalidValueError: the forward pass fails.

    Example:
        >>> model = nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
        >>> print(explain(model, torch.randn(1, 5, 16)).sites[0].lines()[0])
        heads     2 heads of 8
    """
    model = unwrapped(model)
    args, kwargs = _last_batch(model) if batch is None else arguments(batch, "batch")
    with undisturbed(model):
        model.eval()
        found, _ = found_sites(model, args, kwargs)
        sites = [s for s in found if not isinstance(s.module, SpecModule)]
        if not sites:
            raise RefusedError(
                f"all attention in this {type(model).__name__} is qkeel's own and follows its spec; to see it, call "
                "print(module.spec.explain()) on an attention module"
            )
        with torch.inference_mode(False), torch.no_grad():
            experiment = SiteExperiments(model, args, kwargs, sites)
            recipes = [_recipe(experiment, site) for site in sites]
    return Explanation(
        model=type(model).__name__,
        sites=tuple(recipes),
        differences=differences(model, recipes),
        linear=found.linear,
    )


def _last_batch(model: nn.Module) -> Arguments:
    """Returns the arguments of a watched model's last training pass."""
    latest = next((tap.latest for tap in owners(model) if isinstance(tap, Tap) and tap.latest is not None), None)
    if latest is None:
        raise InvalidTypeError(
            "expected a batch that the model accepts: qkeel.explain(model, batch). The batch may be left out "
            "only for a model that qkeel.watch has watched during training"
        )
    return tuple(latest.args), dict(latest.kwargs)


def _recipe(experiment: SiteExperiments, site: AttentionSite) -> SiteRecipe:
    name = site.name
    recipe = functools.partial(
        SiteRecipe,
        name=name,
        n_heads=site.n_heads,
        n_kv_heads=site.n_kv_heads,
        head_dim=site.head_dim,
        key_heads=site.key_heads,
        layer_type=site.layer_type,
    )
    if name not in experiment.base:
        return recipe(
            query=NormRecipe(kind="unknown", why="q was not seen"),
            key=NormRecipe(kind="unknown", why="k was not seen"),
            unknown=(site.why or "q and k of this attention could not be read",),
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
        found.append("only one of q and k changes with position")
    if scale is None:
        found.append("the scale: logits were not q·k times a constant, or no row sees two keys")
    return tuple(found)


def _biased(reading: Observation, scale: tuple[float, ...] | None) -> bool:
    """True if something other than q·k makes some keys more likely than others."""
    if reading.logits is None:
        return reading.bias is not None and bool((reading.bias[reading.visible] != 0).any())
    if scale is None:
        return False
    x, y = products(reading, reading.visible)
    z = torch.tensor(scale, dtype=torch.float64)[:, None, None] * x
    return float((y - z).abs().max()) > 1e-3 * float(z.abs().max())


def _latent(site: AttentionSite, norms: Mapping[str, str]) -> str:
    """Describes MLA: which parts of a head come from which key weight, and what precedes that weight."""
    if len(site.terms) < 2 and not norms:
        return ""
    parts = []
    for term in site.terms if len(site.terms) > 1 else ():
        part = term.key[-1]
        dims, shared = part.index.shape[1], part.n == 1 and site.n_heads > 1
        parts.append(f"{dims} from {part.parameter.split('.')[-2]}{', one key for all heads' if shared else ''}")
    whole = [f"MLA-like, q·k = {' + '.join(parts)}"] if parts else []
    return "; ".join(whole + [f"{p.split('.')[-2]} reads a {text}" for p, text in sorted(norms.items())])
