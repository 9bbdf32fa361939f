"""Contradictions between a model's config and what its attention was seen to do."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from qkeel.audit.checkpoint_config import ConfigMapping, section
from qkeel.audit.recipes import SiteRecipe, compress, scale_text

_NORM = ("use_qk_norm", "qk_layernorm", "qk_norm", "use_qk_layernorm", "query_key_norm")
_CAP = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")
_WINDOW = ("sliding_window", "sliding_window_size", "attention_window", "local_window")


def differences(model: nn.Module, recipes: Sequence[SiteRecipe]) -> tuple[str, ...]:
    """Returns one sentence for each contradiction, with the attention layers that it concerns.

    The config of a layer is that of the innermost module around it that has one: a mapping, a dataclass, a namespace,
    or an object with `to_dict`. The result is empty if there is none.
    """
    layers: dict[str, list[str]] = {}
    for recipe in recipes:
        config = config_of(model, recipe.name)
        for check in (_norm, _scale, _cap, _window, _heads, _base):
            sentence = check(config, recipe)
            if sentence:
                layers.setdefault(sentence, []).append(recipe.name)
    lost = _lost_window(model, recipes)
    if lost:
        layers[lost] = [recipe.name for recipe in recipes]
    sentences = []
    for sentence, names in layers.items():
        place_names = "everywhere" if len(names) == len(recipes) else compress(names)
        sentences.append(f"{sentence} ({place_names})")
    return tuple(sentences)


def config_of(model: nn.Module, site: str) -> ConfigMapping:
    """Returns the config of the innermost module around a site that has one, as a mapping; empty if there is none."""
    path = site.split("#")[0].split(".")
    for end in range(len(path), -1, -1):
        config = getattr(model.get_submodule(".".join(path[:end])), "config", None)
        values = as_mapping(config)
        if values is not None:
            return section(values, site)
    return {}


def as_mapping(config: object) -> ConfigMapping | None:
    """Returns the entries of a config, whatever it is, or None for what is no config."""
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        config = to_dict()
    if isinstance(config, Mapping):
        return config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {
            field.name: getattr(config, field.name, None)
            for field in dataclasses.fields(config)
        }
    if isinstance(config, types.SimpleNamespace) or type(config).__name__ in (
        "Namespace",
        "Config",
    ):
        return {
            name: value
            for name, value in vars(config).items()
            if not name.startswith("_")
        }
    return None


def _numbers(config: ConfigMapping, word: str) -> list[float]:
    """Returns all numbers of a config, at any depth, whose key contains the word."""
    numbers = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            numbers += _numbers(value, word)
        elif (
            word in str(key)
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
        ):
            numbers.append(float(value))
    return numbers


def _first_key(
    config: ConfigMapping, keys: Sequence[str], accepts: Callable[[object], bool]
) -> str | None:
    for key in keys:
        if key in config and accepts(config[key]):
            return key
    return None


def _norm(config: ConfigMapping, recipe: SiteRecipe) -> str:
    key = _first_key(config, _NORM, lambda value: isinstance(value, bool))
    if key is None or "unknown" in (recipe.query.kind, recipe.key.kind):
        return ""
    acting = [
        side for side, norm in (("q", recipe.query), ("k", recipe.key)) if norm.acts
    ]
    if config[key] and len(acting) < 2:
        missing = "q or k" if not acting else "q" if "k" in acting else "k"
        return f"config.{key} is true, but no norm is applied to {missing}"
    if not config[key] and acting:
        return f"config.{key} is false, but a norm is applied to {' and '.join(acting)}"
    return ""


def _scale(config: ConfigMapping, recipe: SiteRecipe) -> str:
    scalar, multiplier = (
        config.get("query_pre_attn_scalar"),
        config.get("attention_multiplier"),
    )
    if isinstance(scalar, (int, float)) and scalar > 0:
        expected, name = (
            float(scalar) ** -0.5,
            f"config.query_pre_attn_scalar {scalar:g}",
        )
    elif isinstance(multiplier, (int, float)) and multiplier:
        expected, name = (
            float(multiplier),
            f"config.attention_multiplier {multiplier:g}",
        )
    else:
        return ""
    scale = recipe.total_scale
    if math.isnan(scale) or abs(scale / expected - 1) < 2e-3:
        return ""
    observed = scale_text((scale,), recipe.head_dim)
    return f"{name} means logits {expected:.4g} · q·k, but the observed scale is {observed}"


def _cap(config: ConfigMapping, recipe: SiteRecipe) -> str:
    key = _first_key(
        config, _CAP, lambda value: value is None or isinstance(value, (int, float))
    )
    if key is None:
        return ""
    configured, cap = config[key] or None, recipe.softcap
    if configured == cap or (configured and cap and abs(cap / configured - 1) < 1e-3):
        return ""
    observed = "none" if cap is None else f"{cap:g}"
    return f"config.{key} is {config[key]}, but the observed cap is {observed}"


def _configured_window(config: ConfigMapping) -> int | None:
    if config.get("use_sliding_window") is False:
        return None
    key = _first_key(
        config,
        _WINDOW,
        lambda value: isinstance(value, int) and not isinstance(value, bool),
    )
    return None if key is None or config[key] < 1 else config[key]


def _window(config: ConfigMapping, recipe: SiteRecipe) -> str:
    """Compares a window that was seen; one that was not may be wider than the batch, see `_lost_window`."""
    window = recipe.window
    if window is None:
        return ""
    configured = _configured_window(config)
    if configured is None:
        is_named = any(key in config for key in _WINDOW)
        return (
            f"config says no sliding window, but queries see only {window} keys"
            if is_named
            else ""
        )
    # Whether a window counts the query's own token differs between libraries.
    is_near = abs(configured - window) <= 1
    return (
        ""
        if is_near
        else f"config.sliding_window is {configured}, but queries see only {window} keys"
    )


def _lost_window(model: nn.Module, recipes: Sequence[SiteRecipe]) -> str:
    """Says that a configured window narrower than the batch is in effect nowhere, or not where config.layer_types says.

    Without `layer_types`, which layers have the window is the code's choice, so one layer with a window is enough.
    """
    lost = []
    for recipe in recipes:
        config = config_of(model, recipe.name)
        configured = _configured_window(config)
        if configured is None or recipe.keys is None or recipe.keys <= configured + 1:
            continue
        layer_types, number = config.get("layer_types"), re.search(r"\d+", recipe.name)
        layer = -1 if number is None else int(number[0])
        is_listed = isinstance(layer_types, Sequence) and 0 <= layer < len(layer_types)
        if (
            isinstance(layer_types, Sequence)
            and is_listed
            and "sliding" not in str(layer_types[layer])
        ):
            continue
        if recipe.window is not None and not is_listed:
            return ""
        if recipe.window is None:
            lost.append((configured, recipe.name))
    if not lost:
        return ""
    return f"config.sliding_window is {lost[0][0]}, but queries see all earlier keys in {compress([n for _, n in lost])}"


def _heads(config: ConfigMapping, recipe: SiteRecipe) -> str:
    if recipe.latent:
        return ""
    for key, word, number in (
        ("num_attention_heads", "attention_heads", recipe.n_heads),
        ("head_dim", "head_dim", recipe.head_dim),
    ):
        configured = config.get(key)
        if isinstance(configured, int) and number not in _numbers(config, word):
            return f"config.{key} is {configured}, observed: {number}"
    return ""


def _base(config: ConfigMapping, recipe: SiteRecipe) -> str:
    configured = [*_numbers(config, "theta"), *_numbers(config, "base_freq")]
    if not configured or recipe.rotation is None or recipe.rotation.base is None:
        return ""
    observed = recipe.rotation.base, recipe.rotation.whole_base
    for base in configured:
        if any(
            value is not None and abs(value / base - 1) < 0.05 for value in observed
        ):
            return ""
    bases = ", ".join(f"{base:,.6g}" for base in configured)
    return f"the rotary base is {bases} in config, but the observed one is {recipe.rotation.base:,.6g}"
