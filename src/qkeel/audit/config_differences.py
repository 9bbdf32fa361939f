"""Contradictions between a model's config and what its attention was seen to do."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from qkeel.audit.checkpoint_config import ConfigMapping, section
from qkeel.audit.recipes import NormRecipe, SiteRecipe, compress, scale_text
from qkeel.audit.visibility import SeenKeys
from qkeel.sites.site import AttentionSite

_NORM = ("use_qk_norm", "qk_layernorm", "qk_norm", "use_qk_layernorm", "query_key_norm")
_CAP = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")
_ALIBI = ("alibi", "use_alibi")
_WINDOW = ("sliding_window", "sliding_window_size", "attention_window", "local_window")


def differences(model: nn.Module, recipes: Sequence[SiteRecipe]) -> tuple[str, ...]:
    """Returns one sentence for each contradiction, with the attention layers that it concerns.

    The config of a layer is that of the innermost module around it that has one: a mapping, a dataclass, or any object
    with `to_dict` or plain attributes. The result is empty if there is none.
    """
    return _by_layers(model, recipes, _contradictions)


def _by_layers(
    model: nn.Module,
    recipes: Sequence[SiteRecipe],
    compare: Callable[[ConfigMapping, SiteRecipe], Iterator[str]],
) -> tuple[str, ...]:
    windowed = any(recipe.window is not None for recipe in recipes)
    layers: dict[str, list[str]] = {}
    for recipe in recipes:
        config = _config_of(model, recipe.name)
        for sentence in (
            *compare(config, recipe),
            *_window(config, recipe, windowed),
        ):
            layers.setdefault(sentence, []).append(recipe.name)
    return tuple(
        f"{sentence} ({'everywhere' if len(names) == len(recipes) else compress(names)})"
        for sentence, names in layers.items()
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
        unread = NormRecipe(kind="unknown")
        recipe = SiteRecipe(
            name=site.name,
            n_heads=site.n_heads,
            n_kv_heads=site.n_kv_heads,
            head_dim=site.head_dim,
            query=unread,
            key=unread,
            window=reach if is_windowed and reach < length else None,
            keys=length if is_windowed and reach == length else None,
            softcap=layer.softcap,
            scale=(scale,) if is_known else (),
        )
        recipes.append(recipe)
    return list(_by_layers(model, recipes, _scale_and_cap))


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


def _contradictions(config: ConfigMapping, recipe: SiteRecipe) -> Iterator[str]:
    key, is_normed = _first(config, _NORM)
    normed = [side for side in "qk" if {"q": recipe.query, "k": recipe.key}[side].acts]
    if type(is_normed) is bool and "unknown" not in (
        recipe.query.kind,
        recipe.key.kind,
    ):
        if is_normed and len(normed) < 2:
            missing = " or ".join(side for side in "qk" if side not in normed)
            yield f"config.{key} is true, but no norm is applied to {missing}"
        if not is_normed and normed:
            yield f"config.{key} is false, but a norm is applied to {' and '.join(normed)}"
    yield from _scale_and_cap(config, recipe)
    key, has_alibi = _first(config, _ALIBI)
    if has_alibi is True and recipe.scale and not recipe.bias:
        yield f"config.{key} is true, but nothing is added to the scores"
    for key, word, number in (
        ("num_attention_heads", "attention_heads", recipe.n_heads),
        ("head_dim", "head_dim", recipe.head_dim),
    ):
        is_stated = isinstance(config.get(key), int) and not recipe.latent
        if is_stated and number not in _numbers(config, word):
            yield f"config.{key} is {config[key]}, observed: {number}"
    bases = [*_numbers(config, "theta"), *_numbers(config, "base_freq")]
    if bases and recipe.rotation is not None and recipe.rotation.base is not None:
        observed_bases = recipe.rotation.base, recipe.rotation.whole_base
        if not any(
            abs((observed or 0.0) / base - 1) < 0.05
            for base in bases
            for observed in observed_bases
        ):
            text = ", ".join(f"{base:,.6g}" for base in bases)
            yield f"the rotary base is {text} in config, but the observed one is {recipe.rotation.base:,.6g}"


def _scale_and_cap(config: ConfigMapping, recipe: SiteRecipe) -> Iterator[str]:
    for key, power in (("query_pre_attn_scalar", -0.5), ("attention_multiplier", 1)):
        number = config.get(key)
        if isinstance(number, (int, float)) and number > 0:
            expected, scale = number**power, recipe.total_scale
            if not math.isnan(scale) and abs(scale / expected - 1) >= 2e-3:
                observed = scale_text((scale,), recipe.head_dim)
                yield (
                    f"config.{key} {number:g} means logits {expected:.4g} · q·k, but the observed scale is {observed}"
                )
    key, cap = _first(config, _CAP)
    cap = cap or 0.0
    is_compared = key and isinstance(cap, (int, float))
    if is_compared and not math.isclose(cap, recipe.softcap or 0.0, rel_tol=1e-3):
        observed = "none" if recipe.softcap is None else f"{recipe.softcap:g}"
        yield f"config.{key} is {config[key]}, but the observed cap is {observed}"


def _window(config: ConfigMapping, recipe: SiteRecipe, windowed: bool) -> Iterator[str]:
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
        # Whether a window counts the query's own token differs between libraries.
        if key and abs(window - recipe.window) > 1:
            configured = (
                f"config.{key} is {window}"
                if window > 0
                else "config says no sliding window"
            )
            yield f"{configured}, but queries see only {recipe.window} keys"
    elif window > 0 and recipe.keys is not None and recipe.keys > window + 1:
        types, number = config.get("layer_types"), re.search(r"\d+", recipe.name)
        layer = -1 if number is None else int(number[0])
        if isinstance(types, Sequence) and 0 <= layer < len(types):
            is_lost = "sliding" in str(types[layer])
        else:
            is_lost = not windowed
        if is_lost:
            yield f"config.{key} is {window}, but queries see all earlier keys"
