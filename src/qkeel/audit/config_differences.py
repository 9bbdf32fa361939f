"""Contradictions between a model's config and what its attention was seen to do."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from qkeel.audit.checkpoint_config import NORMED, ConfigMapping, section
from qkeel.audit.recipes import NormRecipe, SiteRecipe, compress, scale_text
from qkeel.audit.visibility import SeenKeys
from qkeel.sites.site import AttentionSite

_CAP = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")
_ALIBI = ("alibi", "use_alibi")
_WINDOW = ("sliding_window", "sliding_window_size", "attention_window", "local_window")


class Comparison(NamedTuple):
    """A setting of a config beside what attention was seen to do."""

    setting: str  #: the name in the config
    says: str  #: what the config says
    does: str  #: what the model does
    agrees: bool  #: whether that is the same


# The layers that a comparison concerns.
Comparisons = dict[Comparison, list[str]]


def comparisons(model: nn.Module, recipes: Sequence[SiteRecipe]) -> Comparisons:
    """Compares what each attention layer does with its config: that of the innermost module around it that has one, a
    mapping, a dataclass, or any object with `to_dict` or plain attributes."""
    windowed = any(recipe.window is not None for recipe in recipes)
    layers: Comparisons = {}
    for recipe in recipes:
        config = _config_of(model, recipe.name)
        for comparison in _compared(config, recipe, windowed):
            layers.setdefault(comparison, []).append(recipe.name)
    return layers


def differences(
    compared: Comparisons, recipes: Sequence[SiteRecipe]
) -> tuple[str, ...]:
    """Returns one sentence for each contradiction, with the attention layers that it concerns."""
    return tuple(
        f"config.{setting} is {says}, but {does} "
        f"({'everywhere' if len(names) == len(recipes) else compress(names)})"
        for (setting, says, does, agrees), names in compared.items()
        if not agrees
    )


def call_differences(
    model: nn.Module, layers: Mapping[str, SeenKeys], sites: Iterable[AttentionSite]
) -> list[str]:
    """Like `differences`, of what the calls alone show: window, softcap and scale."""
    recipes = []
    for site in sites:
        layer = layers.get(site.name)
        # The keys of another sequence have no distance.
        if layer is None or layer.first_keys is None or layer.length < 2:
            continue
        queries, first_keys = layer.first_keys
        length = layer.length
        reach = int((queries - first_keys).max()) + 1
        is_windowed = torch.equal(first_keys, (queries - reach + 1).clamp_min(0))
        # Models may multiply q by the scale themselves, which leaves a factor of 1.
        scale = layer.scale / site.head_dim**0.5
        is_known = not math.isnan(scale) and scale != 1
        # What a call does not show is given as something that no config contradicts.
        unread = NormRecipe(kind="unknown")
        recipe = SiteRecipe(
            name=site.name,
            n_heads=site.n_heads,
            n_kv_heads=site.n_kv_heads,
            head_dim=site.head_dim,
            query=unread,
            key=unread,
            layer_type="latent",
            bias=True,
            window=reach if is_windowed and reach < length else None,
            keys=length if is_windowed and reach == length else None,
            softcap=layer.softcap,
            scale=(scale,) if is_known else (),
        )
        recipes.append(recipe)
    return list(differences(comparisons(model, recipes), recipes))


def _config_of(model: nn.Module, site: str) -> ConfigMapping:
    """Returns the config of the innermost module around a site that has one, as a mapping; empty if there is none."""
    path = site.split("#")[0].split(".")
    for end in range(len(path), -1, -1):
        config = getattr(model.get_submodule(".".join(path[:end])), "config", None)
        to_dict = getattr(config, "to_dict", None)
        if callable(to_dict):
            config = to_dict()
        if dataclasses.is_dataclass(config) and not isinstance(config, type):
            names = [field.name for field in dataclasses.fields(config)]
            config = {name: getattr(config, name, None) for name in names}
        # Keys that nothing here asks for are harmless, so any object with attributes counts.
        values = (
            config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
        )
        if values is not None:
            return section(values, site)
    return {}


def _first(config: ConfigMapping, keys: Sequence[str]) -> tuple[str, Any]:
    """Returns the first of the keys that a config has, with its value; an empty key if it has none."""
    return next(((key, config[key]) for key in keys if key in config), ("", None))


def _numbers(config: ConfigMapping, word: str) -> list[float]:
    """Returns all numbers of a config, at any depth, whose key contains the word."""
    numbers = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            numbers += _numbers(value, word)
        # By exact type, as a flag is an int as well.
        elif word in str(key) and type(value) in (int, float):
            numbers.append(float(value))
    return numbers


def _compared(
    config: ConfigMapping, recipe: SiteRecipe, windowed: bool
) -> Iterator[Comparison]:
    """Compares each setting that both a config and a recipe have; `windowed` is whether any layer has a window."""
    key, is_normed = _first(config, NORMED)
    normed = [side for side in "qk" if {"q": recipe.query, "k": recipe.key}[side].acts]
    if type(is_normed) is bool and "unknown" not in (
        recipe.query.kind,
        recipe.key.kind,
    ):
        does = f"a norm is applied to {' and '.join(normed)}"
        if len(normed) < (2 if is_normed else 1):
            sides = " or ".join(side for side in "qk" if side not in normed)
            does = f"no norm is applied to {sides}"
        agrees = len(normed) == (2 if is_normed else 0)
        yield Comparison(key, str(is_normed).lower(), does, agrees)
    scale = recipe.total_scale
    for key, power in (("query_pre_attn_scalar", -0.5), ("attention_multiplier", 1)):
        number = config.get(key)
        if isinstance(number, (int, float)) and number > 0 and not math.isnan(scale):
            expected = number**power
            says = f"{number:g}, which means logits {expected:.4g} · q·k"
            does = f"the observed scale is {scale_text((scale,), recipe.head_dim)}"
            yield Comparison(key, says, does, abs(scale / expected - 1) < 2e-3)
    key, cap = _first(config, _CAP)
    if key and isinstance(cap or 0.0, (int, float)):
        observed = "none" if recipe.softcap is None else f"{recipe.softcap:g}"
        agrees = math.isclose(cap or 0.0, recipe.softcap or 0.0, rel_tol=1e-3)
        yield Comparison(key, str(cap), f"the observed cap is {observed}", agrees)
    key, has_alibi = _first(config, _ALIBI)
    if has_alibi is True and recipe.scale:
        does = f"{'a bias' if recipe.bias else 'nothing'} is added to the scores"
        yield Comparison(key, "true", does, recipe.bias)
    for key, word, number in (
        ("num_attention_heads", "attention_heads", recipe.n_heads),
        ("head_dim", "head_dim", recipe.head_dim),
    ):
        if isinstance(config.get(key), int) and recipe.layer_type != "latent":
            agrees = number in _numbers(config, word)
            yield Comparison(key, str(config[key]), f"observed: {number}", agrees)
    bases = [*_numbers(config, "theta"), *_numbers(config, "base_freq")]
    if bases and recipe.rotation is not None and recipe.rotation.base is not None:
        observed_bases = recipe.rotation.base, recipe.rotation.whole_base
        agrees = any(
            abs((observed or 0.0) / base - 1) < 0.05
            for base in bases
            for observed in observed_bases
        )
        says = ", ".join(f"{base:,.6g}" for base in bases)
        does = f"the observed rotary base is {recipe.rotation.base:,.6g}"
        yield Comparison("rope_theta", says, does, agrees)
    yield from _window(config, recipe, windowed)


def _window(
    config: ConfigMapping, recipe: SiteRecipe, windowed: bool
) -> Iterator[Comparison]:
    """Compares the window that was seen with the configured one, or says that a window narrower than the batch is lost.

    Without `layer_types`, which layers have the window is the code's choice, so one layer with a window is enough:
    `windowed` says whether there is one.
    """
    key, window = _first(config, _WINDOW)
    # A list has one for each layer, of unknown order.
    if window is not None and type(window) is not int:
        return
    if config.get("use_sliding_window") is False or type(window) is not int:
        window = 0
    if recipe.window is not None:
        if key:
            does = f"queries see only {recipe.window} keys"
            # Whether a window counts the query's own token differs between libraries.
            agrees = abs(window - recipe.window) <= 1
            yield Comparison(key, str(window or "off"), does, agrees)
    elif window > 0 and recipe.keys is not None and recipe.keys > window + 1:
        types, number = config.get("layer_types"), re.search(r"\d+", recipe.name)
        layer = -1 if number is None else int(number[0])
        if isinstance(types, Sequence) and 0 <= layer < len(types):
            is_lost = "sliding" in str(types[layer])
        else:
            is_lost = not windowed
        if is_lost:
            yield Comparison(key, str(window), "queries see all earlier keys", False)
