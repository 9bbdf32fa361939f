"""The position slot's rotary embeddings: RoPE, its scaled forms, and the tables of angles that they keep."""

from __future__ import annotations

import abc
import dataclasses
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple, TypeVar, final, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError, check, check_known
from qkeel.functional import rope as f
from qkeel.functional.bounds import xpos_decay
from qkeel.functional.rope import Pairing, check_pairs, rope_frequencies, rope_table, rotate
from qkeel.patching.autograd import version_of
from qkeel.patching.modes import in_python_mode, transformed
from qkeel.spec.slot import Keys, Logits, Parameter, ParameterSizes, Params, PosK, PosQ, Queries, Slot

# Positions and tables that are made of them, kept on a GPU from layer to layer and from step to step.
#
# There a table takes as many launches as a layer's attention; on a CPU making it costs no more than looking for it.
# Only what is made of positions that were counted here is kept. Into another tensor of positions a caller may write
# in ways that torch does not count (a collective, a kernel, the replay of a graph), and to read it would be to wait.
# Nothing is kept, or taken from what is, where that would not be the same as making it: under torch's compiler, in a
# CUDA graph's capture (its memory goes with the graph), in transforms, traces and modes that see or replace torch's
# calls.

KEPT_ON = frozenset({"cuda"})  # kinds of devices
MOST = 16  # tensors of positions and groups of tables together
MOST_BYTES = 128 * 2**20  # of all of them
Tables = TypeVar("Tables", bound=tuple[tuple[Tensor, ...], ...])


class _Kept(NamedTuple):
    """Tables, and all tensors of them and of their positions: while those are held, their ids are theirs alone."""

    made: tuple[tuple[Tensor, ...], ...]
    tensors: list[Tensor]
    size: int

    @property
    def untouched(self) -> bool:
        """False once somebody who was handed one of the tensors has written into it, and for what may not be kept."""
        return not any(version_of(x) or x.requires_grad or type(x) is not Tensor for x in self.tensors)


class _Store(OrderedDict[tuple[Hashable, Hashable], _Kept]):
    """The tables that are kept, by device, stream and setting; those that were asked for last come last."""

    def put(self, key: tuple[Hashable, Hashable], one: _Kept) -> None:
        """Keep one more, and drop what was not asked for longest where that is too much."""
        with _LOCK:
            self[key] = one
            while len(self) > MOST or sum(each.size for each in self.values()) > MOST_BYTES:
                self.popitem(last=False)


_LOCK = threading.Lock()  # of several threads, each of which drives a GPU say
_KEPT = _Store()


def kept_positions(first: int, stop: int, device: torch.device) -> Tensor:
    """The positions first … stop - 1 as [1 n]: not to be written into."""
    return _kept(lambda: ((torch.arange(first, stop, device=device)[None],),), (first, stop), device)[0][0]


def kept(make: Callable[[], Tables], setting: Hashable, *positions: Tensor) -> Tables:
    """The tables that `make` makes of these positions and of a setting that says all else: not to be written into."""
    return _kept(make, (setting, *map(id, positions)), positions[0].device, positions)


def _kept(
    make: Callable[[], Tables], what: Hashable, device: torch.device, positions: tuple[Tensor, ...] = ()
) -> Tables:
    stream = _stream(device)
    if stream is None:
        return make()
    place = device, stream
    with _LOCK:
        found, others = _KEPT.pop((place, what), None), list(_KEPT.items())
    if found is not None and found.untouched:
        _KEPT.put((place, what), found)
        return found.made  # type: ignore[return-value]
    ours = [id(one.made[0][0]) for (where, _), one in others if where == place]
    if any(id(pos) not in ours for pos in positions):
        return make()
    with torch.inference_mode(False):
        made = make()
    tensors = [*positions, *(x for group in made for x in group)]
    new = _Kept(made, tensors, sum(x.numel() * x.element_size() for x in {id(x): x for x in tensors}.values()))
    if new.untouched and new.size <= MOST_BYTES:
        _KEPT.put((place, what), new)
    return made


def _stream(device: torch.device) -> int | None:
    """The stream whose work sees what is kept, 0 where there are none; None where nothing may be kept."""
    if transformed() or in_python_mode():
        return None
    if device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


# RoPE's frequencies, slowed down for contexts longer than in training; a part of the position slot.

Frequencies = Float[Tensor, "half"]


class Stretch(abc.ABC):
    """Frequencies in place of θ_i = base^(-2i/d), at training or at test time.

    `changes`: they are others than RoPE's own. `follows_length`: they depend on how many tokens there are, so rotated
    keys can't be kept while more come. `magnitude`: a factor on cos and sin.
    """

    __slots__ = ()
    changes: bool = True
    follows_length: bool = False
    magnitude: float = 1.0

    @abc.abstractmethod
    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        """[half] from RoPE's own [half] and the positions of all keys [b|1 s], which are not read back."""

    @abc.abstractmethod
    def formula(self) -> str:
        """In words of the formula."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class NoStretch(Stretch):
    """RoPE as it was trained."""

    changes = False

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return theta

    def formula(self) -> str:
        return ""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PI(Stretch):
    """Position interpolation: θ / factor. Source: Chen et al. 2023, arXiv 2306.15595."""

    factor: float  #: test length / training length, at least 1

    def __post_init__(self) -> None:
        _check(self, factor=self.factor)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return f.interpolate(theta, self.factor)

    def formula(self) -> str:
        return f"PI ×{self.factor:g}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NTK(Stretch):
    """NTK-aware frequencies: kind old (base · factor), exact, fixed, or mixed with `power`.

    Formulas: functional.rope_frequencies. Source: kexue.fm 9706. "exact" is the base that transformers uses.
    """

    factor: float  #: test length / training length, at least 1
    kind: Literal["old", "exact", "fixed", "mixed"] = "old"  #: which of the published formulas
    power: float = 0.625

    def __post_init__(self) -> None:
        _check(self, factor=self.factor)
        check_known("kind of NTK", self.kind, ("old", "exact", "fixed", "mixed"))
        check(self.power >= 0, "a power of at least 0 for NTK-mixed", self.power)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        if self.kind in ("old", "exact"):
            return f.ntk(theta, self.factor, exact=self.kind == "exact")
        return f.ntk_mixed(theta, self.factor, 1.0 if self.kind == "fixed" else self.power)

    def formula(self) -> str:
        power = f", power {self.power:g}" if self.kind == "mixed" else ""
        return f"NTK {self.kind} ×{self.factor:g}{power}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNTK(Stretch):
    """NTK exact with the factor that the length asks for: s = max(n, L)/L, base · (factor·s - factor + 1)^(d/(d-2)).

    Equal to RoPE up to the training length L. With factor 1 the base grows just with s. Every length has frequencies of
    its own, so keys must be kept unrotated. Source: emozilla 2023, as in transformers ("dynamic").
    """

    train_length: int  #: L, in tokens, at least 2
    factor: float = 1.0  #: at least 1
    follows_length = True

    def __post_init__(self) -> None:
        _check(self, factor=self.factor, train_length=self.train_length)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        length = pos_k.amax() + 1 if pos_k.numel() else torch.ones((), device=pos_k.device)
        share = length.to(theta.dtype).clamp_min(self.train_length) / self.train_length
        return f.ntk(theta.to(length.device), self.factor * share - (self.factor - 1), exact=True)

    def formula(self) -> str:
        return f"dynamic NTK from {self.train_length} tokens on, ×{self.factor:g}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YaRN(Stretch):
    """Slow pairs interpolated, fast ones left; cos and sin times 0.1 ln factor + 1, or `attention_factor`.

    ramp="code" as released (and in transformers), "paper" as printed: see functional.rope_frequencies.yarn.
    Source: Peng et al. 2023, arXiv 2309.00071.
    """

    factor: float  #: test length / training length, at least 1
    train_length: int  #: tokens, at least 2
    fast: float = 32.0  #: turns in training above which a pair stays
    slow: float = 1.0  #: turns below which it is interpolated
    ramp: f.Ramp = "code"
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check(self, factor=self.factor, train_length=self.train_length)
        check_known("ramp of YaRN", self.ramp, get_args(f.Ramp))
        check(0 < self.slow < self.fast, "0 < slow < fast turns", f"slow={self.slow}, fast={self.fast}")
        given = self.attention_factor
        check(given is None or given > 0, "an attention_factor above 0", given)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return f.yarn(theta, self.factor, self.train_length, base=base, fast=self.fast, slow=self.slow, ramp=self.ramp)

    @property
    def magnitude(self) -> float:  # type: ignore[override]
        """See Stretch."""
        return f.yarn_magnitude(self.factor) if self.attention_factor is None else self.attention_factor

    def formula(self) -> str:
        more = f"{self.ramp} ramp, cos and sin ×{self.magnitude:.4g}"
        return f"YaRN ×{self.factor:g} from {self.train_length} tokens, {more}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama3(Stretch):
    """Llama 3.1's frequencies, see functional.rope_frequencies.llama3."""

    factor: float  #: test length / training length, at least 1
    train_length: int  #: tokens, at least 2
    low: float = 1.0  #: turns in training below which a pair is slowed by the whole factor
    high: float = 4.0  #: turns above which it stays

    def __post_init__(self) -> None:
        _check(self, factor=self.factor, train_length=self.train_length)
        check(0 < self.low < self.high, "0 < low < high turns", f"low={self.low}, high={self.high}")

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return f.llama3(theta, self.factor, self.train_length, self.low, self.high)

    def formula(self) -> str:
        return f"Llama 3 ×{self.factor:g} from {self.train_length} tokens"


def _check(stretch: Stretch, *, factor: float, train_length: int = 2) -> None:
    name = type(stretch).__name__
    check(
        math.isfinite(factor) and factor >= 1, f"a factor of at least 1 (test length / train length) for {name}", factor
    )
    check(train_length >= 2, f"a train_length of at least 2 tokens for {name}", train_length)


# Position slot: how positions enter the score; no position, RoPE, one that fades, one that sees the keys near it.

CosSin = tuple[Tensor, Tensor]  # cos and sin
Order = Literal["norm_then_rotate", "rotate_then_norm"]


def counted(first: int, stop: int, device: torch.device) -> Int64[Tensor, "1 n"]:
    """The positions first … stop - 1; on a GPU one tensor for all who ask for the same ones: not to be written into."""
    if torch.compiler.is_compiling() or device.type not in KEPT_ON:
        return torch.arange(first, stop, device=device)[None]
    return kept_positions(first, stop, device)


class Position(Slot):
    """A position offers `encode` (what happens to q and k alone) and `scores` (what needs the pair).

    A position that is a rotation does all its work in `encode`. One that depends on the distance in another
    way (a bias, ReRoPE) overrides `scores` and says so by `folds = False`. One that hides keys says how far it sees.
    """

    __slots__ = ()
    # "none", "rope", "alibi", "rerope", "xpos", "window", "other"; that of Kerple is the one of its two kernels.
    kind: str = "other"
    folds: bool = True
    order: Order = "norm_then_rotate"

    @property
    def keeps(self) -> bool:
        """True if an encoded key stays what it is while more come, so that a cache may hold it."""
        return self.folds

    @property
    def reach(self) -> int | None:
        """A query sees the keys less than this many tokens away; None for all."""
        return None

    @property
    def unwindowed(self) -> Position:
        """The same position without its window, if it has one."""
        return self

    @property
    def rope(self) -> Rope | None:
        """The RoPE whose tables say all that this position does to q and k; None for any other position."""
        return None

    def encoded(self) -> Position:
        """The position for q and k that are encoded already."""
        return NoPosition()

    def check(self, head_dim: int) -> None:
        """Raise if this position cannot be used with that head size."""
        return None

    def encode(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Queries, Keys]:
        """Returns q [b h t d] and k [b g s d] after rotation; pos_q [b|1 t], pos_k [b|1 s]."""
        return q, k

    def scores(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params) -> Logits:
        """Unscaled scores [b h t s] of encoded q and k; g key heads serve h / g query heads each."""
        b, h, t, d = q.shape
        g, s = k.shape[1], k.shape[2]
        if g == h:
            return q @ k.mT
        return (q.reshape(b, g, h // g * t, d) @ k.mT).view(b, h, t, s)

    @abc.abstractmethod
    def formula(self) -> str:
        """The formula by which positions enter."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoPosition(Position):
    """NoPE: the causal mask is the only hint of order."""

    kind = "none"

    def formula(self) -> str:
        return "no position"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope(Position):
    """Rotary embedding of the first `rotary` share of each head.

    stretch: other frequencies for longer contexts (PI, NTK, YaRN, …). A larger base (ABF) is just that.

    order: the norm before the rotation or after it. The same for a norm without per-dimension gain; with one,
    norm-then-rotate is the one that keeps scores a function of the distance.
    """

    base: float = 10_000.0  #: of the frequencies base^(-2i/d)
    rotary: float = 1.0
    pairing: Pairing = "half"  #: which two numbers turn together, see functional.rope.rotate
    order: Order = "norm_then_rotate"
    stretch: Stretch = dataclasses.field(default_factory=NoStretch)
    kind = "rope"

    def __post_init__(self) -> None:
        check(self.base > 1, "a RoPE base above 1", self.base)
        check(0 < self.rotary <= 1, "the rotated share in (0, 1]", self.rotary)
        check_known("pairing", self.pairing, get_args(Pairing))
        check_known("order", self.order, get_args(Order))
        if not isinstance(self.stretch, Stretch):
            raise InvalidTypeError(f"expected a stretch such as PI(factor=8), got {self.stretch!r}")
        if self.order == "rotate_then_norm" and self.stretch.magnitude != 1:
            raise InvalidValueError(
                f"a norm after the rotation cancels the factor {self.stretch.magnitude:.4g} on cos and sin; use "
                "order='norm_then_rotate' (the same for norms without a gain per dimension), or attention_factor=1"
            )

    @property
    def keeps(self) -> bool:
        return not self.stretch.follows_length

    @property
    def rope(self) -> Rope | None:
        return self if self.kind == "rope" else None

    def check(self, head_dim: int) -> None:
        check_pairs(self._rotated(head_dim))

    def _rotated(self, head_dim: int) -> int:
        return round(int(head_dim) * self.rotary)  # a trace makes tensors of sizes

    def encode(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Queries, Keys]:
        (cos_q, sin_q), (cos_k, sin_k) = self.tables(q, k, pos_q, pos_k)
        return rotate(q, cos_q, sin_q, self.pairing), rotate(k, cos_k, sin_k, self.pairing)

    def tables(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[CosSin, CosSin]:
        """The cos and sin that turn q and those that turn k, [b|1 1 t half] each, float32 or wider.

        On a GPU they are kept for the next layer and step: not to be written into.
        """
        if torch.compiler.is_compiling() or q.device.type not in KEPT_ON:
            return self._made(q, k, pos_q, pos_k)
        setting = self, q.shape[-1], q.dtype, k.dtype, q.device
        return kept(lambda: self._made(q, k, pos_q, pos_k), setting, pos_q, pos_k)

    def _made(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[CosSin, CosSin]:
        # A copy from the host would make it wait for a GPU; elsewhere float64 may not be had.
        device = q.device if q.device.type == "cuda" else None
        theta = rope_frequencies(self._rotated(q.shape[-1]), self.base, device)
        frequencies = self.stretch.frequencies(theta, self.base, pos_k) if self.stretch.changes else theta
        keys = self._table(pos_k, frequencies, k)
        return (keys if pos_q is pos_k else self._table(pos_q, frequencies, q)), keys

    def _table(self, pos: Tensor, frequencies: Tensor, like: Tensor) -> CosSin:
        cos, sin = rope_table(pos[:, None], frequencies, like.dtype)
        m = self.stretch.magnitude
        return (cos, sin) if m == 1 else (cos * m, sin * m)

    def formula(self) -> str:
        share = "" if self.rotary == 1 else f", first {self.rotary:g} of each head"
        pairs = "" if self.pairing == "half" else f", {self.pairing.replace('_', ' ')} pairs"
        after = " before the norm" if self.order == "rotate_then_norm" else ""
        stretch = self.stretch.formula()
        return f"RoPE(base {self.base:g}{share}{pairs}{', ' if stretch else ''}{stretch}){after}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(Position):
    """`inner`, where query i sees the keys with |i - j| < window only: itself and window - 1 before it if causal.

    A window hides keys by the distance of positions, so it belongs to the slot of the position. log n counts the keys
    that a query sees: n = min(position + 1, window). The window is that of Mistral and Gemma in transformers.

    Source: Child et al. 2019, arXiv 1904.10509; Beltagy et al. 2020, arXiv 2004.05150.
    """

    window: int  #: tokens, at least 1
    inner: Position = dataclasses.field(default_factory=Rope)
    kind = "window"

    def __post_init__(self) -> None:
        check(self.window >= 1, "a window of at least 1 token", self.window)
        if not isinstance(self.inner, Position):
            raise InvalidTypeError(f"expected a position such as Rope() as inner, got {self.inner!r}")
        if self.inner.reach is not None:
            raise RefusedError(f"{self.inner.formula()} has a window already; use the smaller of the two alone")

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """See Position."""
        return self.inner.folds

    @property
    def order(self) -> Order:  # type: ignore[override]
        """See Position."""
        return self.inner.order

    @property
    def keeps(self) -> bool:
        return self.inner.keeps

    @property
    def reach(self) -> int:
        return self.window

    def encoded(self) -> Position:
        return SlidingWindow(window=self.window, inner=NoPosition())

    @property
    def unwindowed(self) -> Position:
        return self.inner

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        return self.inner.parameters(geometry)

    def check(self, head_dim: int) -> None:
        self.inner.check(head_dim)

    def encode(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Queries, Keys]:
        return self.inner.encode(q, k, pos_q, pos_k)

    def scores(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params) -> Logits:
        return self.inner.scores(q, k, pos_q, pos_k, params)

    def formula(self) -> str:
        return f"{self.inner.formula()}, |i - j| < {self.window}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XPos(Position):
    """Interleaved RoPE, pair n of q times ζ_n^(i/scale), of k times ζ_n^(-j/scale): scores fade as ζ_n^((i - j)/scale).

    Causal attention only: forward in time they would grow. The released code centres positions, which changes no score;
    here they are not, so that cached keys stay what they are. In float32 that holds to about 35,000 tokens.

    Source: Sun et al. 2022, arXiv 2212.10554 (LeX), torchscale.
    """

    base: float = 10_000.0  #: of RoPE's frequencies
    scale: float = 512.0  #: tokens over which scores fade by ζ
    kind = "xpos"

    def __post_init__(self) -> None:
        check(self.base > 1, "a RoPE base above 1", self.base)
        check(self.scale > 0, "a scale above 0 tokens", self.scale)

    def check(self, head_dim: int) -> None:
        check_pairs(head_dim)

    def encode(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Queries, Keys]:
        return self._turned(q, pos_q, 1.0), self._turned(k, pos_k, -1.0)

    def _turned(self, x: Tensor, pos: Tensor, sign: float) -> Tensor:
        d = x.shape[-1]
        cos, sin = rope_table(pos[:, None], rope_frequencies(d, self.base), x.dtype)
        power = sign * pos[:, None, :, None].to(x.dtype) / self.scale
        faded = xpos_decay(d).to(x) ** power
        return rotate(x, cos * faded, sin * faded, "interleaved")

    def formula(self) -> str:
        return f"xPos(base {self.base:g}, scale {self.scale:g})"
