"""The fields of a model's config that contradict what was observed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from qkeel.audit.explain.recipe import SiteRecipe, compress, scale_text
from qkeel.audit.scan.geometry import Config, section

_NORM = ("use_qk_norm", "qk_layernorm", "qk_norm", "use_qk_layernorm", "query_key_norm")
_CAP = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap")

Check = Callable[[Config, SiteRecipe], str]


def differences(model: nn.Module, recipes: Sequence[SiteRecipe]) -> tuple[str, ...]:
    """Returns sentences, each with its attentions; empty where config and model agree or there is no config."""
    where: dict[str, list[str]] = {}
    for recipe in recipes:
        part = _config(model, recipe.name)
        for check in _CHECKS:
            text = check(part, recipe)
            if text:
                where.setdefault(text, []).append(recipe.name)
    whole = len(recipes)
    return tuple(f"{text} ({'everywhere' if len(n) == whole else compress(n)})" for text, n in where.items())


def _config(model: nn.Module, name: str) -> Config:
    """The config of the innermost module around a site that has one: a mapping, or what `to_dict` makes one."""
    path = name.split("#")[0].split(".")
    for end in range(len(path), -1, -1):
        config = getattr(model.get_submodule(".".join(path[:end])), "config", None)
        to_dict = getattr(config, "to_dict", None)
        values = to_dict() if callable(to_dict) else config
        if isinstance(values, Mapping):
            return section(values, name)
    return {}


def _named(config: Config, word: str) -> list[float]:
    """All numbers of a config, at any depth, whose key has the word in it."""
    found = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _named(value, word)
        elif word in str(key) and isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(float(value))
    return found


def _norm(config: Config, recipe: SiteRecipe) -> str:
    key = next((k for k in _NORM if isinstance(config.get(k), bool)), None)
    if key is None or "unknown" in (recipe.query.kind, recipe.key.kind):
        return ""
    acting = [side for side, norm in (("q", recipe.query), ("k", recipe.key)) if norm.acts]
    if config[key] and len(acting) < 2:
        return f"config.{key} is true, but no norm acts on {'q or k' if not acting else 'q' if 'k' in acting else 'k'}"
    if not config[key] and acting:
        return f"config.{key} is false, but a norm acts on {' and '.join(acting)}"
    return ""


def _scale(config: Config, recipe: SiteRecipe) -> str:
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
    return f"{name} means logits {said:.4g} · q·k, seen was {scale_text((got,), recipe.head_dim)}"


def _cap(config: Config, recipe: SiteRecipe) -> str:
    key = next((k for k in _CAP if k in config), None)
    if key is None:
        return ""
    said, got = config[key], recipe.softcap
    if (said or None) == got or (said and got and abs(got / said - 1) < 1e-3):
        return ""
    return f"config.{key} is {said}, the cap seen is {'none' if got is None else f'{got:g}'}"


def _window(config: Config, recipe: SiteRecipe) -> str:
    said = config.get("sliding_window")
    if recipe.window is None or config.get("use_sliding_window") is False:
        used = recipe.window is not None
        return f"config says no sliding window, {recipe.window} keys back are seen" if used else ""
    if said is None:
        return f"config.sliding_window is none, {recipe.window} keys back are seen"
    near = isinstance(said, int) and abs(said - recipe.window) <= 1
    return "" if near else f"config.sliding_window is {said}, {recipe.window} keys back are seen"


def _heads(config: Config, recipe: SiteRecipe) -> str:
    if recipe.latent:
        return ""
    for key, word, got in (
        ("num_attention_heads", "attention_heads", recipe.n_heads),
        ("head_dim", "head_dim", recipe.head_dim),
    ):
        said = config.get(key)
        if isinstance(said, int) and got not in _named(config, word):
            return f"config.{key} is {said}, seen were {got}"
    return ""


def _base(config: Config, recipe: SiteRecipe) -> str:
    got = None if recipe.rotation is None else recipe.rotation.base
    whole = None if recipe.rotation is None else recipe.rotation.whole_base
    said = [*_named(config, "theta"), *_named(config, "base_freq")]
    if not said or got is None or whole is None:
        return ""
    if any(abs(g / value - 1) < 0.05 for value in said for g in (got, whole)):
        return ""
    return f"the rotary base is {', '.join(f'{v:,.6g}' for v in said)} in config, the one seen is {got:,.6g}"


_CHECKS: tuple[Check, ...] = (_norm, _scale, _cap, _window, _heads, _base)
