"""Tables of named specs: how position encodings are assigned to layers, and published attention recipes."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

from qkeel.errors import InvalidTypeError, InvalidValueError, check, unknown
from qkeel.functional.logits import cosine_scale, qk_norm_init
from qkeel.options import Recipe, build, described, lookup, parse
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.logits import (
    Fixed,
    FloorLogTemperature,
    GradientMax,
    InverseSqrt,
    Learned,
    LogN,
    Softcap,
    Sqrt,
)
from qkeel.spec.norm import L2Norm, LayerNorm, On, RMSNorm
from qkeel.spec.position import METHODS, ALiBi, Kerple, LeakyReRope
from qkeel.spec.rope import NoPosition, Position, Rope, SlidingWindow, XPos

# Positions by name. Each builder returns one spec per layer. The specs are equal, or most layers have a window and a
# few do not.

Specs = tuple[AttentionSpec, ...]


def _rope(*, base: float = 10_000.0, rotary: float = 1.0) -> Position:
    return Rope(base=base, rotary=rotary)


def _xpos(*, base: float = 10_000.0, scale: float = 512.0) -> Position:
    return XPos(base=base, scale=scale)


def _inv_leaky(
    *, train_length: int, window: int | None = None, leak: float = 1 / 16
) -> Position:
    width = _under("inv_leaky", window, train_length // 4, train_length)
    return LeakyReRope(window=width, factor=leak)


def _windowed(spec: AttentionSpec, window: int) -> AttentionSpec:
    return spec.replace(position=SlidingWindow(window=window, inner=spec.position))


def _window(spec: AttentionSpec, n_layers: int, /, *, window: int) -> Specs:
    return (_windowed(spec, window),) * n_layers


def _hwfa(
    spec: AttentionSpec,
    n_layers: int,
    /,
    *,
    train_length: int,
    window: int | None = None,
) -> Specs:
    if n_layers < 2:
        raise InvalidValueError(
            f"hwfa mixes layers with and without a window, so it needs at least 2 layers, got {n_layers}"
        )
    width = _under(
        "hwfa", window, int(0.75 * train_length / (n_layers - 1)), train_length
    )
    scale = spec.scale
    if not isinstance(scale, LogN):
        scale = LogN(inner=scale, train_length=train_length)
    last = spec.replace(position=NoPosition(), scale=scale)
    return (*(_windowed(spec, width),) * (n_layers - 1), last)


def _hwfa2(
    spec: AttentionSpec,
    n_layers: int,
    /,
    *,
    train_length: int,
    window: int | None = None,
    full: int = 1,
) -> Specs:
    check(
        1 <= full < n_layers,
        f"2 or more layers, and fewer full ones than {n_layers}",
        full,
    )
    default = min(3 * train_length // n_layers, train_length // 2)
    near = _windowed(spec, _under("hwfa2", window, default, train_length))
    # Evenly spaced, neither the first nor the last layer where there are others.
    full_layers = {n_layers * j // (full + 1) for j in range(1, full + 1)}
    return tuple(spec if i in full_layers else near for i in range(n_layers))


def _under(name: str, window: int | None, default: int, train_length: int) -> int:
    width = max(1, default) if window is None else window
    if not 1 <= width < train_length:
        raise InvalidValueError(
            f"expected a window from 1 to {train_length - 1} for {name}, under the training length, got {width}: a "
            "wider one hides nothing in training"
        )
    return width


# A row builds the position of every layer or, from the form and the number of layers, the specs of all of them. Names that
# are not listed here may be methods of `AttentionSpec.extrapolate`, which are then used in training.
POSITIONS: dict[str, Recipe[Position | Specs]] = {
    "rope": Recipe(
        "rotary; base=, rotary= (fraction of each head)", "arXiv 2104.09864", _rope
    ),
    "nope": Recipe("none: the causal mask alone", "arXiv 2305.19466", NoPosition),
    "alibi": Recipe("- m_h|i - j| on the logit", "arXiv 2108.12409", ALiBi),
    "kerple_log": Recipe(
        "- p ln(1 + a|i - j|), learned per head", "arXiv 2205.09921", Kerple
    ),
    "kerple_power": Recipe(
        "- a|i - j|^p, learned per head",
        "arXiv 2205.09921",
        functools.partial(Kerple, kind="power"),
    ),
    "xpos": Recipe("RoPE that fades; base=, scale=", "arXiv 2212.10554", _xpos),
    "inv_leaky": Recipe(
        "distances beyond window= grow 16 times as fast; tested with plain RoPE ('rope' post hoc)",
        "kexue.fm 9728",
        _inv_leaky,
    ),
    "window": Recipe(
        "the form's own position, limited to keys within window= tokens",
        "arXiv 1904.10509",
        _window,
    ),
    "hwfa": Recipe(
        "windows of 3/4 L/(layers - 1) tokens, the last layer full and without positions, log n",
        "kexue.fm 9603",
        _hwfa,
    ),
    "hwfa2": Recipe(
        "windows of 3 L/layers tokens, L/2 at most; full= evenly spaced layers without one, which post-hoc methods "
        "change",
        "kexue.fm 9731, 9948",
        _hwfa2,
    ),
}


def positions() -> dict[str, str]:
    """Returns the names of all position encodings and of their assignments to layers, each with a one-line description
    and its source.

    >>> "alibi" in positions()
    True
    """
    methods = {
        name: line
        for name, line in METHODS.items()
        if name not in ("none", "log_n", "rope", "window")
    }
    return {**described(POSITIONS), **methods}


def layer_specs(
    spec: AttentionSpec,
    n_layers: int,
    positions: str = "",
    train_length: int | None = None,
) -> Specs:
    """Returns one spec per layer, each of which is `spec` with its position replaced by the named one.

    Args:
        spec: the attention of every layer.
        n_layers: the number of layers.
        positions: a name from POSITIONS or from `qkeel.spec.METHODS`, with options if needed, such as "alibi" or
            "hwfa:window=16". Several names joined by "/", such as "window:window=64/rope", alternate over the layers.
            If it is empty, `spec` is used unchanged.
        train_length: the training length in tokens, for positions that depend on it and whose options do not give it.

    Raises:
        UnknownNameError: the position or an option is unknown.
        InvalidValueError: an option is out of range.
        RefusedError: the spec cannot have this position.

    Example:
        >>> [s.position.formula() for s in layer_specs(AttentionSpec(position=Rope()), 2, "hwfa", train_length=64)]
        ['RoPE(base 10000), |i - j| < 48', 'no position']
    """
    if not positions:
        return (spec,) * n_layers
    rows = [
        _placed(spec, n_layers, position, train_length)
        for position in positions.split("/")
    ]
    return tuple(row[i] for i, row in zip(range(n_layers), itertools.cycle(rows)))


def _placed(
    spec: AttentionSpec, n_layers: int, text: str, train_length: int | None
) -> Specs:
    terms = parse(text)
    if len(terms) != 1:
        raise InvalidValueError(
            f"expected one position, got {len(terms)} in {text!r}; join positions of layers by '/'"
        )
    name, options = terms[0].name, terms[0].options
    if name not in POSITIONS:
        if name not in METHODS or name in ("none", "log_n"):
            raise unknown("position", name, {**POSITIONS, **METHODS})
        adapted = spec.extrapolate(name, **{"train_length": train_length, **options})  # type: ignore[arg-type]
        return (adapted,) * n_layers
    make = POSITIONS[name].build
    if (
        "train_length" in inspect.signature(make).parameters
        and "train_length" not in options
    ):
        if train_length is None:
            raise InvalidValueError(
                f"{name} needs the training length: {name}:train_length=512"
            )
        options = {**options, "train_length": train_length}
    if name == "window" and "window" not in options:
        raise InvalidValueError(
            "window needs the number of tokens that a query sees: window:window=128"
        )
    by_layer = make in (_window, _hwfa, _hwfa2)
    form = (spec, n_layers) if by_layer else ()
    built = build(f"position {name!r}", make, options, *form)
    if isinstance(built, Position):
        return (spec.replace(position=built),) * n_layers
    return built


# Every published recipe is one row. All constants from papers and models are listed here, with their source.

_HF = "as shipped in transformers 5.23"
_SU = "Su 2023, kexue.fm 9859"


def _slots(on: On, gain: bool) -> dict[str, Any]:
    """The norm and position slots. As in the source, the norm follows the rotation. A norm with a gain per dimension
    must precede it instead, because after the rotation such a gain would make the logits depend on more than the
    distance."""
    order = "norm_then_rotate" if gain else "rotate_then_norm"
    return {
        "norm": L2Norm(on=on, gain="dim" if gain else "none"),
        "position": Rope(order=order),
    }


def _baseline(train_length: int = 512) -> AttentionSpec:
    return AttentionSpec(position=Rope())


def _baseline_logn(train_length: int = 512, clip: bool = False) -> AttentionSpec:
    return AttentionSpec(
        position=Rope(), scale=LogN(train_length=train_length, clip=clip)
    )


def _one_normed(
    on: On,
) -> tuple[Callable[..., AttentionSpec], Callable[..., AttentionSpec]]:
    """Builders of QNA or KNA, the first without log n and the second with it."""

    def plain(train_length: int = 512, gain: bool = False) -> AttentionSpec:
        return AttentionSpec(**_slots(on, gain), scale=Fixed(1.0))

    def log_n(
        train_length: int = 512, clip: bool = False, gain: bool = False
    ) -> AttentionSpec:
        scale = LogN(inner=Fixed(1.0), train_length=train_length, clip=clip)
        return AttentionSpec(**_slots(on, gain), scale=scale)

    return plain, log_n


_QNA, _QNA_LOGN = _one_normed("q")
_KNA, _KNA_LOGN = _one_normed("k")


def _cosa(
    train_length: int = 512, gradient: bool = False, gain: bool = False
) -> AttentionSpec:
    scale = (
        GradientMax(keys=train_length / 2)
        if gradient
        # In causal attention a query sees half of the keys on average, hence n = L/2.
        else Fixed(cosine_scale(train_length))
    )
    return AttentionSpec(**_slots("qk", gain), scale=scale)


def _cosa_logn(
    train_length: int = 512,
    clip: bool = False,
    gradient: bool = False,
    gain: bool = False,
) -> AttentionSpec:
    # The dynamic scale of CosA is 4 ln n, which is the fixed 4 ln L times ln n / ln L.
    inner = (
        GradientMax(keys=train_length)
        if gradient
        else Fixed(4 * math.log(train_length))
    )
    return AttentionSpec(
        **_slots("qk", gain),
        scale=LogN(inner=inner, train_length=train_length, clip=clip),
    )


def _qknorm_2020(length: int = 72) -> AttentionSpec:
    return AttentionSpec(norm=L2Norm(), scale=Learned(init=qk_norm_init(length)))


def _vit() -> AttentionSpec:
    return AttentionSpec()


def _vit22b() -> AttentionSpec:
    return AttentionSpec(norm=LayerNorm(gain="dim", eps=1e-6))


def _chameleon(base: float = 10_000.0) -> AttentionSpec:
    return AttentionSpec(
        norm=LayerNorm(gain="head_dim", bias=True), position=Rope(base=base)
    )


def _flat_rms(
    eps: float, base: float, rotary: float = 1.0
) -> Callable[..., AttentionSpec]:
    def build(
        base: float = base, rotary: float = rotary, eps: float = eps
    ) -> AttentionSpec:
        norm = RMSNorm(over="layer", gain="head_dim", eps=eps)
        return AttentionSpec(norm=norm, position=Rope(base=base, rotary=rotary))

    return build


def _qwen3(base: float = 1_000_000.0, eps: float = 1e-6) -> AttentionSpec:
    return AttentionSpec(norm=RMSNorm(gain="dim", eps=eps), position=Rope(base=base))


def _qwen3_next(
    base: float = 10_000_000.0, rotary: float = 0.25, eps: float = 1e-6
) -> AttentionSpec:
    return AttentionSpec(
        norm=RMSNorm(gain="one_plus_dim", eps=eps),
        position=Rope(base=base, rotary=rotary),
    )


def _gemma2(
    base: float = 10_000.0, query_scalar: int = 256, cap: float = 50.0
) -> AttentionSpec:
    return AttentionSpec(
        position=Rope(base=base), scale=InverseSqrt(dim=query_scalar), cap=Softcap(cap)
    )


def _gemma3(
    base: float = 1_000_000.0, query_scalar: int = 256, eps: float = 1e-6
) -> AttentionSpec:
    return AttentionSpec(
        norm=RMSNorm(gain="one_plus_dim", eps=eps),
        position=Rope(base=base),
        scale=InverseSqrt(dim=query_scalar),
    )


def _gemma4(base: float = 10_000.0, eps: float = 1e-6) -> AttentionSpec:
    norm = RMSNorm(on="qkv", gain="dim", value_gain="none", eps=eps)
    return AttentionSpec(norm=norm, position=Rope(base=base), scale=Fixed(1.0))


def _cohere(base: float = 500_000.0, eps: float = 1e-5) -> AttentionSpec:
    position = Rope(base=base, pairing="interleaved")
    return AttentionSpec(norm=LayerNorm(gain="head_dim", eps=eps), position=position)


def _stablelm2(
    base: float = 10_000.0, rotary: float = 0.25, eps: float = 1e-5
) -> AttentionSpec:
    return AttentionSpec(
        norm=LayerNorm(gain="head_dim", eps=eps),
        position=Rope(base=base, rotary=rotary),
    )


def _phi(
    base: float = 10_000.0, rotary: float = 0.5, eps: float = 1e-5
) -> AttentionSpec:
    norm = LayerNorm(gain="dim", bias=True, eps=eps)
    return AttentionSpec(norm=norm, position=Rope(base=base, rotary=rotary))


def _llama4(base: float = 500_000.0, eps: float = 1e-5) -> AttentionSpec:
    position = Rope(base=base, pairing="interleaved", order="rotate_then_norm")
    return AttentionSpec(norm=RMSNorm(eps=eps), position=position)


def _llama4_nope(alpha: float = 0.1, floor: int = 8192) -> AttentionSpec:
    return AttentionSpec(
        position=NoPosition(), scale=FloorLogTemperature(alpha=alpha, floor=floor)
    )


def _nanochat(
    base: float = 100_000.0, multiplier: float = 1.44, eps: float = 1e-6
) -> AttentionSpec:
    return AttentionSpec(
        norm=RMSNorm(eps=eps),
        position=Rope(base=base, pairing="half_reversed", order="rotate_then_norm"),
        scale=InverseSqrt(multiplier=multiplier),
    )


def _ngpt(base: float = 10_000.0) -> AttentionSpec:
    norm = L2Norm(gain="head_dim", shared=True)
    return AttentionSpec(
        norm=norm, position=Rope(base=base, order="rotate_then_norm"), scale=Sqrt()
    )


def _swin_v2() -> AttentionSpec:
    return AttentionSpec(
        norm=L2Norm(), scale=Learned(init=10.0, per="head", log=True, maximum=100.0)
    )


PRESETS: dict[str, Recipe[AttentionSpec]] = {
    "baseline": Recipe(
        "scaled dot product with RoPE", "Vaswani et al. 2017; " + _SU, _baseline
    ),
    "baseline_logn": Recipe("baseline, logits × ln n/ln L", _SU, _baseline_logn),
    "qna": Recipe("L2-normed queries, scale 1", _SU, _QNA),
    "qna_logn": Recipe("QNA, logits × ln n/ln L", _SU, _QNA_LOGN),
    "kna": Recipe("KeyNorm: L2-normed keys, scale 1", _SU, _KNA),
    "kna_logn": Recipe("KeyNorm, logits × ln n/ln L", _SU, _KNA_LOGN),
    "cosa": Recipe("cosine attention, scale 4 ln(L/2)", _SU, _cosa),
    "cosa_logn": Recipe("cosine attention, scale 4 ln n", _SU, _cosa_logn),
    "qknorm_2020": Recipe(
        "L2-normed q and k, one learned scale per layer, no RoPE",
        "Henry et al. 2020, arXiv 2010.04245",
        _qknorm_2020,
    ),
    "vit": Recipe(
        "scaled dot product, no position (the model adds one to its input)",
        "Dosovitskiy et al. 2020, arXiv 2010.11929",
        _vit,
    ),
    "vit22b": Recipe(
        "LayerNorm on q and k per head, no position",
        "Dehghani et al. 2023, arXiv 2302.05442 (per head: as Wortsman et al. 2023, arXiv 2309.14322)",
        _vit22b,
    ),
    "chameleon": Recipe(
        "LayerNorm with gain and bias per head", "arXiv 2405.09818; " + _HF, _chameleon
    ),
    "olmo2": Recipe(
        "RMS norm over all heads of a token",
        "arXiv 2501.00656; " + _HF,
        _flat_rms(1e-6, 500_000.0),
    ),
    "olmoe": Recipe(
        "RMS norm over all heads of a token",
        "arXiv 2409.02060; " + _HF,
        _flat_rms(1e-5, 10_000.0),
    ),
    "minimax_m2": Recipe(
        "RMS norm over all heads, partial RoPE", _HF, _flat_rms(1e-6, 5_000_000.0, 0.5)
    ),
    "qwen3": Recipe(
        "RMS norm per head, gain shared by heads", "arXiv 2505.09388; " + _HF, _qwen3
    ),
    "qwen3_next": Recipe(
        "RMS norm per head, gain 1 + w, partial RoPE (without its output gate)",
        _HF,
        _qwen3_next,
    ),
    "gemma2": Recipe(
        "no norm, logits softcapped at 50", "arXiv 2408.00118; " + _HF, _gemma2
    ),
    "gemma3": Recipe(
        "RMS norm per head, gain 1 + w (global layers)",
        "arXiv 2503.19786; " + _HF,
        _gemma3,
    ),
    "gemma4": Recipe(
        "RMS norm on q, k and (gain-free) v, scale 1 (sliding layers)", _HF, _gemma4
    ),
    "cohere": Recipe(
        "LayerNorm, gain per head, interleaved RoPE", _HF + " (use_qk_norm)", _cohere
    ),
    "stablelm2": Recipe("LayerNorm module per head, partial RoPE", _HF, _stablelm2),
    "phi": Recipe(
        "LayerNorm shared by heads, partial RoPE", _HF + " (qk_layernorm)", _phi
    ),
    "llama4": Recipe(
        "gain-free RMS norm after RoPE", _HF + " (layers with RoPE)", _llama4
    ),
    "llama4_nope": Recipe(
        "no norm, no position, temperature by position",
        _HF + " (layers without RoPE)",
        _llama4_nope,
    ),
    "nanochat": Recipe(
        "gain-free RMS norm after RoPE, q and k × 1.2", "karpathy/nanochat", _nanochat
    ),
    "ngpt": Recipe(
        "L2 norm after RoPE, one gain for q and k, scale √d", "NVIDIA/ngpt", _ngpt
    ),
    "swin_v2": Recipe(
        "cosine attention, learned temperature per head (without its position-bias network)",
        "Liu et al. 2021, arXiv 2111.09883; " + _HF,
        _swin_v2,
    ),
}


def presets() -> dict[str, str]:
    """Returns the names of all presets, each with a one-line description and its source.

    >>> presets()["qwen3"]
    'RMS norm per head, gain shared by heads [arXiv 2505.09388; as shipped in transformers 5.23]'
    """
    return described(PRESETS)


def preset(name: str, **options: float | int | bool) -> AttentionSpec:
    """Returns the spec of a published recipe.

    Args:
        name: a name from `presets()`.
        options: values for the constants of the recipe (train_length, base, eps, …).

    Raises:
        UnknownNameError: the preset or an option is unknown; the message names the nearest known one.
        InvalidTypeError: an option has the wrong type.

    Example:
        >>> preset("kna", train_length=512).scale.formula()
        '1'
    """
    if not isinstance(name, str):
        raise InvalidTypeError(f"expected the name of a preset, got {name!r}")
    return build(f"preset {name!r}", lookup("preset", PRESETS, name).build, options)


def attention_spec(text: str) -> AttentionSpec:
    """Returns the spec that a preset string describes.

    >>> attention_spec("gemma2:cap=30").cap
    Softcap(cap=30)
    """
    terms = parse(text)
    if len(terms) != 1:
        raise InvalidValueError(
            f"expected one preset for the attention, got {len(terms)} in {text!r}"
        )
    options = {k: v for k, v in terms[0].options.items() if not isinstance(v, str)}
    if len(options) < len(terms[0].options):
        raise InvalidValueError(
            f"expected numbers as options of a preset, got {text!r}"
        )
    return preset(terms[0].name, **options)
