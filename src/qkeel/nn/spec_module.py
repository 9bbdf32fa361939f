"""The base of every attention module: a spec, its parameters under plain names, and the observers of its calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkeel.errors import InvalidTypeError, InvalidValueError, ShapeError, caution, check
from qkeel.functional.statistics.rows import KernelRows
from qkeel.kernels.choose import KERNELS, choose
from qkeel.kernels.compiled_attention import Native
from qkeel.kernels.encode import encoded
from qkeel.nn.cache import Cache, KVCache
from qkeel.patching.module_tables import hooks_before
from qkeel.registry import lookup
from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.call import Visibility
from qkeel.spec.presets import scale_advice
from qkeel.spec.shapes import GivenMask, GivenPosQ, Hidden, Keys, Queries, Values
from qkeel.spec.slot import Params

Observer = Callable[[AttentionCall], None]
Heads = tuple[Queries, Keys, Values]


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """An observer that takes what the kernel finds of each row, and the call itself where the kernel finds nothing."""

    see: Observer
    """Gets a call on its way into attention, of whose logits nothing is known."""
    read: Callable[[AttentionCall, KernelRows], None]
    """Gets a call that was computed, and what was found meanwhile."""

    def __call__(self, call: AttentionCall) -> None:
        self.see(call)


@functools.cache  # a model has many layers, and a study many models
def _advise(advice: str) -> None:
    caution(advice)


def check_dropout(dropout: float) -> None:
    """Raise unless it is a probability under 1."""
    check(0 <= dropout < 1, "dropout in [0, 1)", dropout)


class SpecModule(nn.Module):
    """A module that attends under `spec`. The spec's parameters are its own (`q_norm`, `logit_scale`, …).

    `observers` are called with every AttentionCall on its way into attention; they must not change it. A Reader among
    them is given the largest logits and entropies of rows, where the kernel finds them in its pass.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int

    def __init__(self, spec: AttentionSpec, geometry: tuple[int, int, int], dropout: float, impl: str) -> None:
        super().__init__()
        check_dropout(dropout)
        if impl != "auto":
            lookup("kernel", KERNELS, impl)
        self.n_heads, self.n_kv_heads, self.head_dim = geometry
        self.dropout = dropout
        self.impl = impl
        self.observers: list[Observer] = []
        self.spec = spec
        advice = scale_advice(spec, geometry[2])
        if advice is not None:
            _advise(advice)
        for name, value in spec.init_params(*geometry).items():
            self.register_parameter(name, nn.Parameter(value))

    def spec_params(self) -> Params:
        """The spec's parameters that live on this module, by name."""
        return dict(self.named_parameters(recurse=False, remove_duplicate=False))

    def attend(
        self, q: Queries, k: Keys, v: Values, *, spec: AttentionSpec, params: Params, seen: Visibility
    ) -> Hidden:
        """Make the call, show it to the observers, run it: [b h t d] -> [b t h·d']."""
        call = seen.call(spec, q, k, v, params, self.dropout if self.training else 0.0)
        kernel = choose(call, self.impl)
        read = None
        if isinstance(kernel, Native) and any(isinstance(observer, Reader) for observer in self.observers):
            read = kernel.with_rows(call)
        for observer in self.observers:
            if read is not None and isinstance(observer, Reader):
                observer.read(call, read[1])
            else:
                observer(call)
        return (kernel(call) if read is None else read[0]).transpose(1, 2).flatten(2)

    def new_cache(self, max_length: int | None = None) -> Cache:
        """An empty cache for one batch; `max_length` tokens are reserved at once, else it grows by doubling."""
        return KVCache(max_length)

    def attend_self(
        self, cache: KVCache | None, qkv: Heads, *, causal: bool, mask: GivenMask | None, pos: GivenPosQ | None
    ) -> Hidden:
        """Attend to the same tokens' keys and values [b g t d], with a cache to all before them: -> [b t h·d']."""
        q, k, v = qkv
        if cache is None:
            seen = Visibility(causal=causal, mask=mask, pos_q=pos, pos_k=pos)
            return self.attend(q, k, v, spec=self.spec, params=self.spec_params(), seen=seen)
        if not isinstance(cache, KVCache):
            raise InvalidTypeError(f"expected a qkeel.nn.KVCache, got {type(cache).__name__}; new_cache() makes one")
        cache.check_positions(pos, mask)
        at = cache.next_positions(k, pos)
        spec, params = self.spec, self.spec_params()
        if spec.position.keeps:  # encode each token once; else the whole spec runs on raw keys every time
            q, k = encoded(spec, q, k, at, at, params)
            v = spec.values(v, params)
            spec, params = spec.core(params)
        k, v = cache.append(k, v, pos=None if pos is None else at)
        own = None if cache.pos is None else at
        seen = Visibility(causal=causal, mask=mask, pos_q=own, pos_k=cache.pos)
        return self.attend(q, k, v, spec=spec, params=params, seen=seen)

    def extra_repr(self) -> str:
        """Heads and the formula's norm, in print(model)."""
        heads = f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, {self.spec.norm.formula()}; {self.spec.position.formula()}"


def check_input(x: Tensor, d_model: int, layer: nn.Module | None = None, name: str = "x") -> None:
    """Raise unless x is [b t m], of floating point, and of the dtype and on the device of the `layer` that takes it."""
    if not isinstance(x, Tensor):
        raise InvalidTypeError(f"expected {name} to be a tensor, got {type(x).__name__}")
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise InvalidTypeError(
            f"expected {name} of floating-point numbers of 16 bits or more, got {x.dtype}; embed or convert it first"
        )
    if x.ndim != 3 or x.shape[-1] != d_model:
        raise ShapeError(f"expected {name} of shape [batch tokens {d_model}], got {tuple(x.shape)}")
    weight = layer.weight if type(layer) is nn.Linear else None
    if weight is None or (x.device == weight.device and x.dtype == weight.dtype):
        return
    # Layers with hooks may convert what comes, or fetch their weights first.
    if layer is None or hooks_before(layer) or "forward" in layer.__dict__:
        return
    if x.device != weight.device:
        raise InvalidValueError(
            f"expected {name} on {weight.device} as the weights, got it on {x.device}; move it there"
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise InvalidTypeError(
            f"expected {name} in {weight.dtype} as the weights, got {x.dtype}; convert one or use torch.autocast"
        )
