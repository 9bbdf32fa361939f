"""Methods that change a trained spec for longer contexts: weights stay, positions or the scale do not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from qkeel.errors import InvalidValueError, RefusedError, check, check_known
from qkeel.spec.norm import Norm
from qkeel.spec.position.rerope import LeakyReRope, ReRope
from qkeel.spec.position.rope_scaling import NTK, PI, DynamicNTK, Stretch, YaRN
from qkeel.spec.position.rotary import Position, Rope, SlidingWindow
from qkeel.spec.scale import LogN, Scale

Option = float | int | str | bool
Options = Mapping[str, Option]

# name -> (what it does, source). "log_n" changes the scale, all others the position.
METHODS: dict[str, str] = {
    "none": "as trained",
    "pi": "position interpolation, θ / factor [arXiv 2306.15595]",
    "ntk": "NTK-aware, base × factor [kexue.fm 9706: NTK-old]",
    "ntk_fixed": "NTK with one more step for every pair [kexue.fm 9706]",
    "ntk_mixed": "between interpolation and NTK-fixed, power=0.625 [kexue.fm 9706]",
    "dynamic_ntk": "NTK by the present length, from train_length on [transformers]",
    "abf": "a larger base= and continued training [arXiv 2309.16039]",
    "yarn": "interpolation of the slow pairs only, logits × (0.1 ln factor + 1)² [arXiv 2309.00071]",
    "rerope": "distances clipped at window= (half of train_length) [kexue.fm 9708]",
    "leaky_rerope": "distances beyond window= grow 1/factor as fast [kexue.fm 9708]",
    "rope": "plain RoPE in place of the clipped one of training (InvLeaky) [kexue.fm 9728]",
    "window": "only the last window= (train_length) keys are seen [arXiv 2004.05150]",
    "self_extend": "leaky_rerope at whole positions [arXiv 2401.01325]",
    "log_n": "logits × max(1, ln n / ln train_length) at test time [kexue.fm 9706]",
}


def position_for(
    position: Position, norm: Norm, method: str, factor: float, train_length: int | None, options: Options
) -> Position:
    """The position in place of a trained one; see AttentionSpec.extrapolate."""
    check_known("extrapolation method", method, METHODS)
    sound = math.isfinite(factor) and factor >= 1
    check(sound, f"a factor of at least 1 (test length / train length) for {method}", factor)
    if method in ("none", "log_n"):
        _only(method, options)
        return position
    if method == "window":
        return _seeing(position, train_length, options)
    if isinstance(position, SlidingWindow):
        return _beyond_window(position, norm, method, factor, train_length, options)
    if method == "rope":
        _only(method, options)
        return _unclipped(position)
    if not isinstance(position, Rope) or position.stretch.changes:
        raise RefusedError(
            f"{method} changes the rotation of a RoPE that is as trained; this spec has {position.formula()}"
        )
    if method == "abf":
        _only(method, options, "base")
        return dataclasses.replace(position, base=float(options.get("base", position.base * factor)))
    if method in ("rerope", "leaky_rerope", "self_extend"):
        return _clipped(position, method, factor, train_length, options)
    stretch = _stretch(method, factor, train_length, options)
    if stretch.magnitude != 1 and position.order == "rotate_then_norm":
        position = _normed_first(position, norm)
    return dataclasses.replace(position, stretch=stretch)


def _seeing(position: Position, train_length: int | None, options: Options) -> Position:
    _only("window", options, "window")
    window = int(options["window"]) if "window" in options else _length("window", train_length)
    if train_length is not None and window > train_length:
        raise InvalidValueError(
            f"expected a window of at most the training length, got {window} of {train_length}: keys further away were "
            "never seen in training"
        )
    inner = position.inner if isinstance(position, SlidingWindow) else position
    narrow = window if position.reach is None else min(window, position.reach)
    return SlidingWindow(window=narrow, inner=inner)


def _beyond_window(
    position: SlidingWindow, norm: Norm, method: str, factor: float, train_length: int | None, options: Options
) -> Position:
    """A window inside the training length sees no distance that is new, so nothing in it is changed."""
    inner = position_for(position.inner, norm, method, factor, train_length, options)
    return position if position.window <= _length(method, train_length) else dataclasses.replace(position, inner=inner)


def _unclipped(position: Position) -> Position:
    if isinstance(position, Rope) and not position.stretch.changes:
        return position
    if not isinstance(position, ReRope):
        raise RefusedError(f"rope undoes the clipping of ReRope and LeakyReRope; this spec has {position.formula()}")
    return Rope(base=position.base, rotary=position.rotary)


def _normed_first(rope: Rope, norm: Norm) -> Rope:
    """The same scores with the norm before the rotation, so that it does not cancel a factor on cos and sin."""
    if not norm.commutes_with_rotation:
        raise RefusedError(
            f"YaRN's factor on cos and sin would be cancelled by the norm behind the rotation ({norm.formula()}), "
            "which does not commute with it; use pi, ntk or rerope"
        )
    return dataclasses.replace(rope, order="norm_then_rotate")


def scale_for(scale: Scale, method: str, train_length: int | None) -> Scale:
    """The scale in place of a trained one."""
    if method != "log_n":
        return scale
    if isinstance(scale, LogN):
        raise RefusedError(f"log_n is in this scale already: {scale.formula()}")
    return LogN(inner=scale, train_length=_length(method, train_length), clip=True)


def _stretch(method: str, factor: float, train_length: int | None, options: Options) -> Stretch:
    if method == "pi":
        _only(method, options)
        return PI(factor=factor)
    if method in ("ntk", "ntk_fixed", "ntk_mixed"):
        if method == "ntk_mixed":
            _only(method, options, "power")
            return NTK(factor=factor, kind="mixed", power=float(options.get("power", 0.625)))
        _only(method, options)
        return NTK(factor=factor, kind="old" if method == "ntk" else "fixed")
    if method == "dynamic_ntk":
        _only(method, options)
        return DynamicNTK(train_length=_length(method, train_length))
    _only(method, options, "ramp", "fast", "slow")
    return YaRN(factor=factor, train_length=_length(method, train_length), **options)  # type: ignore[arg-type]


def _clipped(rope: Rope, method: str, factor: float, train_length: int | None, options: Options) -> Position:
    _only(method, options, "window", *(() if method == "rerope" else ("leak",)))
    if rope.pairing != "half":
        raise RefusedError(f"{method} is written for RoPE of half pairs, and this spec has {rope.formula()}")
    window = int(options["window"]) if "window" in options else _length(method, train_length) // 2
    if train_length is not None and window >= train_length:
        raise InvalidValueError(
            f"expected a window under the training length, got {window} of {train_length}: distances between them "
            "were never trained (kexue.fm 9708: accuracy falls to 8 %); a quarter to a half of it is best"
        )
    if method == "rerope":
        return ReRope(window=window, base=rope.base, rotary=rope.rotary)
    leak, rounded = float(options.get("leak", 2 * factor)), method == "self_extend"
    return LeakyReRope(window=window, base=rope.base, rotary=rope.rotary, factor=leak, rounded=rounded)


def _length(method: str, train_length: int | None) -> int:
    if train_length is None:
        raise InvalidValueError(f"{method} needs the training length: spec.extrapolate({method!r}, train_length=512)")
    return train_length


def _only(method: str, options: Options, *known: str) -> None:
    for name in options:
        check_known(f"option of {method}", name, known)
