"""Positions by name, one per layer: the same in all, or windows in most and full attention in a few."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping

from qkeel.errors import InvalidValueError, check, unknown
from qkeel.options import build
from qkeel.registry import Recipe, described, parse
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.position.bias import ALiBi, Kerple
from qkeel.spec.position.rerope import LeakyReRope
from qkeel.spec.position.rotary import NoPosition, Position, Rope, SlidingWindow, XPos
from qkeel.spec.post_hoc import METHODS
from qkeel.spec.scale import LogN

Specs = tuple[AttentionSpec, ...]


def _everywhere(spec: AttentionSpec, n_layers: int, position: Position) -> Specs:
    return (spec.replace(position=position),) * n_layers


def _rope(spec: AttentionSpec, n_layers: int, /, *, base: float = 10_000.0, rotary: float = 1.0) -> Specs:
    return _everywhere(spec, n_layers, Rope(base=base, rotary=rotary))


def _xpos(spec: AttentionSpec, n_layers: int, /, *, base: float = 10_000.0, scale: float = 512.0) -> Specs:
    return _everywhere(spec, n_layers, XPos(base=base, scale=scale))


def _plain(position: Position) -> Callable[..., Specs]:
    def build(spec: AttentionSpec, n_layers: int, /) -> Specs:
        return _everywhere(spec, n_layers, position)

    return build


def _inv_leaky(
    spec: AttentionSpec, n_layers: int, /, *, train_length: int, window: int | None = None, leak: float = 1 / 16
) -> Specs:
    width = _under("inv_leaky", window, train_length // 4, train_length)
    return _everywhere(spec, n_layers, LeakyReRope(window=width, factor=leak))


def _window(spec: AttentionSpec, n_layers: int, /, *, window: int) -> Specs:
    return (spec.replace(position=SlidingWindow(window=window, inner=spec.position)),) * n_layers


def _hwfa(spec: AttentionSpec, n_layers: int, /, *, train_length: int, window: int | None = None) -> Specs:
    _deep_enough("hwfa", n_layers)
    width = _under("hwfa", window, int(0.75 * train_length / (n_layers - 1)), train_length)
    near = spec.replace(position=SlidingWindow(window=width, inner=spec.position))
    scale = spec.scale if isinstance(spec.scale, LogN) else LogN(inner=spec.scale, train_length=train_length)
    return (*(near,) * (n_layers - 1), spec.replace(position=NoPosition(), scale=scale))


def _hwfa2(
    spec: AttentionSpec, n_layers: int, /, *, train_length: int, window: int | None = None, full: int = 1
) -> Specs:
    _deep_enough("hwfa2", n_layers)
    check(1 <= full < n_layers, f"1 to {n_layers - 1} full layers of {n_layers}", full)
    width = _under("hwfa2", window, min(3 * train_length // n_layers, train_length // 2), train_length)
    near = spec.replace(position=SlidingWindow(window=width, inner=spec.position))
    whole = {n_layers * j // (full + 1) for j in range(1, full + 1)}
    return tuple(spec if i in whole else near for i in range(n_layers))


def _under(name: str, window: int | None, default: int, train_length: int) -> int:
    width = max(1, default) if window is None else window
    if not 1 <= width < train_length:
        raise InvalidValueError(
            f"expected a window from 1 to {train_length - 1} for {name}, under the training length, got {width}: a "
            "wider one hides nothing in training"
        )
    return width


def _deep_enough(name: str, n_layers: int) -> None:
    if n_layers < 2:
        raise InvalidValueError(
            f"{name} mixes layers with a window and without, so it needs at least 2, got {n_layers}"
        )


# What is not here may be a method of `AttentionSpec.extrapolate`, used in training.
POSITIONS: dict[str, Recipe[Specs]] = {
    "rope": Recipe("rotary; base=, rotary= (share of each head)", "arXiv 2104.09864", _rope),
    "nope": Recipe("none: the causal mask alone", "arXiv 2305.19466", _plain(NoPosition())),
    "alibi": Recipe("- m_h|i - j| on the logit", "arXiv 2108.12409", _plain(ALiBi())),
    "kerple_log": Recipe("- p ln(1 + a|i - j|), learned per head", "arXiv 2205.09921", _plain(Kerple())),
    "kerple_power": Recipe("- a|i - j|^p, learned per head", "arXiv 2205.09921", _plain(Kerple(kind="power"))),
    "xpos": Recipe("RoPE that fades; base=, scale=", "arXiv 2212.10554", _xpos),
    "inv_leaky": Recipe(
        "distances beyond window= grow 16 times as fast; tested with plain RoPE ('rope' post hoc)",
        "kexue.fm 9728",
        _inv_leaky,
    ),
    "window": Recipe("the form's position, keys within window= tokens only", "arXiv 1904.10509", _window),
    "hwfa": Recipe(
        "windows of 3/4 L/(layers - 1) tokens, the last layer full, without position, log n", "kexue.fm 9603", _hwfa
    ),
    "hwfa2": Recipe(
        "windows of 3 L/layers tokens, L/2 at most, full= evenly spaced layers without; those change post hoc",
        "kexue.fm 9731, 9948",
        _hwfa2,
    ),
}


def positions() -> dict[str, str]:
    """Names of all positions and placements, each with one line and its source.

    >>> "alibi" in positions()
    True
    """
    methods = {name: line for name, line in METHODS.items() if name not in ("none", "log_n", "rope", "window")}
    return {**described(POSITIONS), **methods}


def layer_specs(spec: AttentionSpec, n_layers: int, positions: str = "", train_length: int | None = None) -> Specs:
    """One spec per layer: `spec` with the named position in place of its own.

    Args:
        positions: a name of POSITIONS or of `qkeel.spec.METHODS` with options, like "alibi" or "hwfa:window=16";
            several joined by "/" are repeated over the layers, like "window:window=64/rope". Empty: `spec`.
        train_length: for those that depend on it and do not say it themselves.

    Raises:
        UnknownNameError: no such position or option. InvalidValueError: a value that cannot be. RefusedError: the form
            cannot have this position.

    >>> [s.position.formula() for s in layer_specs(AttentionSpec(position=Rope()), 2, "hwfa", train_length=64)]
    ['RoPE(base 10000), |i - j| < 48', 'no position']
    """
    if not positions:
        return (spec,) * n_layers
    rows = [_placed(spec, n_layers, part, train_length) for part in positions.split("/")]
    return tuple(row[i] for i, row in zip(range(n_layers), itertools.cycle(rows)))


def _placed(spec: AttentionSpec, n_layers: int, text: str, train_length: int | None) -> Specs:
    terms = parse(text)
    if len(terms) != 1:
        raise InvalidValueError(f"expected one position, got {len(terms)} in {text!r}; join those of layers by '/'")
    name, options = terms[0].name, terms[0].options
    if name not in POSITIONS:
        return (_stretched(spec, name, options, train_length),) * n_layers
    make = POSITIONS[name].build
    if "train_length" in inspect.signature(make).parameters and "train_length" not in options:
        if train_length is None:
            raise InvalidValueError(f"{name} needs the training length: {name}:train_length=512")
        options = {**options, "train_length": train_length}
    if name == "window" and "window" not in options:
        raise InvalidValueError("window needs the number of tokens that a query sees: window:window=128")
    return build(f"position {name!r}", make, options, spec, n_layers)


def _stretched(
    spec: AttentionSpec, name: str, options: Mapping[str, bool | int | float | str], train_length: int | None
) -> AttentionSpec:
    if name not in METHODS or name in ("none", "log_n"):
        raise unknown("position", name, {**POSITIONS, **METHODS})
    return spec.extrapolate(name, **{"train_length": train_length, **options})  # type: ignore[arg-type]
