"""Twins of a model's leaves that hold the weights of many runs, and the model made of them.

The forward code of blocks and attention stays the only one: it gets the sequences of all runs, one run after the other
in the batch, and each twin treats its run's part of the batch by its run's weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.errors import RefusedError
from qkeel.functional.rows import KernelRows
from qkeel.kernels.contract import encoded
from qkeel.kernels.native.encode import KINDS
from qkeel.kernels.native.norm_rope import norm_rope, ready
from qkeel.lab.fused import Factor, FusedLinear, FusedMLP, FusedNorm
from qkeel.nn.block import MLP
from qkeel.nn.core import SpecModule
from qkeel.ops import run, run_with_rows
from qkeel.sites.tap import Connection
from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.call import make_call
from qkeel.spec.norm import GainNorm, NoNorm, Part
from qkeel.spec.scale import Fixed, Learned
from qkeel.spec.slot import Params

# Parameters of a spec that are factors or terms of q, k or logits [b h t d], so that each head may have its own.
FACTORS = frozenset(("q_norm", "k_norm", "v_norm", "logit_scale", "log_n_scale", "logit_bias", "sink"))


@final
class _Product(torch.autograd.Function):
    """y = x Wᵀ by run. Its own derivative, for that of `bmm` would lay out the gradient of Wᵀ, not of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x [runs n in], weight [runs out in] -> [runs n out]."""
        ctx.save_for_backward(x, weight)
        return torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and W, each in its own layout."""
        x, weight = ctx.saved_tensors
        of_x = torch.bmm(grads[0], weight) if ctx.needs_input_grad[0] else None
        of_weight = torch.bmm(grads[0].mT, x) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


@final
class StackedLinear(nn.Module):
    """y = x Wᵀ + b by run: weight [runs out in]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """x [runs·b ... in] -> [runs·b ... out]."""
        rows = x.reshape(self.weight.shape[0], -1, x.shape[-1])
        y = _Product.apply(rows, self.weight)
        assert isinstance(y, Tensor)
        if self.bias is not None:
            y = y + self.bias[:, None]
        return y.view(*x.shape[:-1], -1)


@final
class StackedEmbedding(nn.Module):
    """Rows of a table by run: weight [runs vocab d]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [runs·b t] -> [runs·b t d]."""
        runs, vocab, _ = self.weight.shape
        first = torch.arange(0, runs * vocab, vocab, device=tokens.device)
        rows = tokens.view(runs, -1) + first[:, None]
        return F.embedding(rows.view_as(tokens), self.weight.flatten(0, 1))


@final
class _Gain(torch.autograd.Function):
    """x times a gain by run. The gain's gradient is summed run by run: over all at once, sums run in another order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        """x [runs b t d], gain [runs d] -> [runs b t d]."""
        ctx.save_for_backward(x, gain)
        return x * gain[:, None, None]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        """The gradients of x and of the gain."""
        x, gain = ctx.saved_tensors
        of_gain = torch.stack([part.sum((0, 1)) for part in (grads[0] * x).unbind()])
        return grads[0] * gain[:, None, None], of_gain


@final
class StackedNorm(nn.Module):
    """RMS norm with a gain by run: weight [runs d], or None."""

    def __init__(self, weight: nn.Parameter | None, size: int, eps: float | None) -> None:
        super().__init__()
        self.weight, self.size, self.eps = weight, size, eps

    def forward(self, x: Tensor) -> Tensor:
        """x [runs·b t d] -> the same."""
        y = F.rms_norm(x, (self.size,), None, self.eps)
        if self.weight is None:
            return y
        scaled = _Gain.apply(y.unflatten(0, (len(self.weight), -1)), self.weight)
        assert isinstance(scaled, Tensor)
        return scaled.flatten(0, 1)


@final
class StackedAttend:
    """In place of `SpecModule.attend`: the call of all runs at once, shown to who watches a run's own module.

    `own` are the modules that it stands for, run by run. While `report` is set, it gets each call with the heads of all
    runs in a row, [b runs·h t d], where the spec lets it be put so, else a call for each run.
    """

    def __init__(self, module: SpecModule, own: Sequence[SpecModule], fused: bool) -> None:
        self.module, self.own, self.fused = module, own, fused
        self.report: Callable[[Sequence[AttentionCall]], None] | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        spec: AttentionSpec,
        params: Params,
        causal: bool,
        mask: Tensor | None,
        pos_q: Tensor | None,
        pos_k: Tensor | None,
        owned: bool = False,
    ) -> Tensor:
        """As `SpecModule.attend`, with the sequences of all runs as the batch and parameters [runs ...].

        q and k are overwritten never, `owned` or not: parts of them are runs' own.
        """
        parts = {name: p.unbind() for name, p in params.items()}
        each = [{name: part[r] for name, part in parts.items()} for r in range(len(self.own))]
        call = make_call(spec, q, k, v, params=each[0], causal=causal, mask=mask, pos_q=pos_q, pos_k=pos_k)
        read = self._read(call) if self.fused and not params and self.module.training else None
        for r, own in enumerate(self.own):
            for observer in own.observers if self.module.training else ():
                mine = self._of_run(call, r, own.spec_params())
                if read is not None and isinstance(observer, Connection) and observer.reads:
                    n = len(mine.q)
                    observer.read(mine, KernelRows(*(x[r * n : (r + 1) * n] for x in read[1])))
                else:
                    observer(mine)
        if self.report is not None:
            self.report(self._for_statistics(call, params))
        if read is not None:
            return read[0].transpose(1, 2).flatten(2)
        if params and self.fused and _factors_only(spec, params) and call.q.shape[-1] % 8 == 0:
            out = run(self._with_factors(call, params), self.module.impl)
        elif params and not _only_gains(spec, params):
            # Run by run: gradients of parameters summed over all at once would round otherwise.
            out = torch.cat([run(self._of_run(call, r, own), self.module.impl) for r, own in enumerate(each)])
        else:
            out = run(self._encoded(call, each) if params else call, self.module.impl)
        return out.transpose(1, 2).flatten(2)

    def _encoded(self, call: AttentionCall, each: Sequence[Params]) -> AttentionCall:
        """The call with q and k normed and rotated, run by run for the same reason."""
        parts = [self._of_run(call, r, own) for r, own in enumerate(each)]
        pairs = [encoded(part.spec, part.q, part.k, part.pos_q, part.pos_k, part.params) for part in parts]
        q, k = (_in_a_row(x) for x in zip(*pairs))
        spec, left = call.spec.core(call.params)
        return dataclasses.replace(call, spec=spec, q=q, k=k, params=left)

    def _read(self, call: AttentionCall) -> tuple[Tensor, KernelRows] | None:
        """Attention and what its kernel finds of rows, where a run's observer asks for it and the kernel tells."""
        asked = any(isinstance(o, Connection) and o.reads for own in self.own for o in own.observers)
        return run_with_rows(call, self.module.impl) if asked else None

    def _with_factors(self, call: AttentionCall, params: Params) -> AttentionCall:
        """q and k normed and scaled, by operators that sum the gradient of each run's factor by itself."""
        q, k, spec = call.q, call.k, call.spec
        if isinstance(spec.norm, GainNorm):
            q, k = self._normed("q", q, spec.norm, params), self._normed("k", k, spec.norm, params)
        if isinstance(spec.scale, Learned):
            factors = spec.scale.factor(call.pos_q, q.shape[-1], params)
            scaled = Factor.apply(q.unflatten(0, (len(self.own), -1)), factors)
            assert isinstance(scaled, Tensor)
            q, spec = scaled.flatten(0, 1), dataclasses.replace(spec, scale=Fixed(1.0))
        return dataclasses.replace(call, spec=dataclasses.replace(spec, norm=NoNorm()), q=q, k=k, params={})

    def _normed(self, part: Part, x: Tensor, norm: GainNorm, params: Params) -> Tensor:
        """q or k normed by the gain of its run, [d] or [], if any."""
        if part not in norm.on:
            return x
        gain = norm.weight(part, params)
        rows = x.transpose(1, 2).reshape(1, len(self.own), -1, x.shape[-1])
        own = None if gain is None else gain.view(len(self.own), -1)
        y = norm_rope(rows, own, None, KINDS[type(norm)], norm.eps, True)
        return y.view(len(x), x.shape[2], x.shape[1], -1).transpose(1, 2)

    def _of_run(self, call: AttentionCall, r: int, params: Params) -> AttentionCall:
        """A run's own call."""
        n = call.q.shape[0] // len(self.own)
        q, k, v = (x[r * n : (r + 1) * n] for x in (call.q, call.k, call.v))
        return dataclasses.replace(call, q=q, k=k, v=v, params=params)

    def _for_statistics(self, call: AttentionCall, params: Params) -> Sequence[AttentionCall]:
        norm = call.spec.norm
        if not FACTORS.issuperset(params) or (isinstance(norm, GainNorm) and norm.over == "layer"):
            return [self._of_run(call, r, own.spec_params()) for r, own in enumerate(self.own)]
        q, k, v = (heads_in_a_row(x, len(self.own)) for x in (call.q, call.k, call.v))
        groups = {"q": call.q.shape[1], "k": call.k.shape[1], "v": call.k.shape[1]}
        own = {name: by_head(p, groups.get(name.split("_")[0], groups["q"])) for name, p in params.items()}
        # Gains are [h d], not [h 1 d].
        own = {name: p[:, 0] if name.endswith("_norm") else p for name, p in own.items()}
        return [dataclasses.replace(call, q=q, k=k, v=v, params=own)]


def _in_a_row(parts: Sequence[Tensor]) -> Tensor:
    """Sequences [b h t d] of all runs, that lie in memory as those of one do: the order of a gradient's sums."""
    if parts[0].stride(1) < parts[0].stride(2):
        return torch.cat([x.transpose(1, 2) for x in parts]).transpose(1, 2)
    return torch.cat(list(parts))


def _factors_only(spec: AttentionSpec, params: Params) -> bool:
    """Whether parameters are factors of q and k that a run's heads share, which come before any rotation."""
    norm, scale = spec.norm, spec.scale
    if isinstance(norm, GainNorm):
        each = norm.over == "layer" or norm.bias or norm.gain not in ("none", "dim", "one_plus_dim", "scalar")
        if each or type(norm) not in KINDS or "v" in norm.on or spec.position.order != "norm_then_rotate":
            return False
    learned = {"logit_scale"} if type(scale) is Learned and scale.per == "layer" else set()
    return learned.union(("q_norm", "k_norm")).issuperset(params) and ready()


def _only_gains(spec: AttentionSpec, params: Params) -> bool:
    """Whether the only parameters are gains of q and k, so that all after the encoding is alike in every run."""
    norm = spec.norm
    gains = isinstance(norm, GainNorm) and "v" not in norm.on
    return gains and {"q_norm", "k_norm"}.issuperset(params) and spec.position.keeps


def heads_in_a_row(x: Tensor, runs: int) -> Tensor:
    """[runs·b h t d] -> [b runs·h t d]."""
    return x.unflatten(0, (runs, -1)).transpose(0, 1).flatten(1, 2)


def by_head(p: Tensor, heads: int) -> Tensor:
    """A factor by run, [runs], [runs d], [runs h 1], [runs h d] or [runs h 1 1], as one by head, [runs·h 1 1|d]."""
    wide = p.view(len(p), 1, 1, -1) if p.ndim <= 2 else p[:, :, None] if p.ndim == 3 else p
    return wide.expand(-1, heads, -1, -1).flatten(0, 1)


def stacked(models: Sequence[nn.Module], fused: bool = False) -> nn.Module:
    """The model of all these at once; their parameters become parts of its own and keep their values.

    `fused`: norms and GELU by the compiled operators, which are there, in place of torch's: the same but for rounding.

    Raises: RefusedError where a part of the model has no twin.
    """
    whole = copy.deepcopy(models[0])
    tables = [dict(model.named_modules()) for model in models]
    made: dict[int, nn.Parameter] = {}

    def parameter(place: str, name: str) -> nn.Parameter | None:
        each = [table[place]._parameters.get(name) for table in tables]
        if each[0] is None:
            return None
        if id(each[0]) not in made:  # a head may share its weight with the embedding
            made[id(each[0])] = _joined([p for p in each if p is not None])
        return made[id(each[0])]

    for place, module in list(whole.named_modules()):
        twin: nn.Module
        if type(module) is nn.Linear:
            twin = _linear(_need(parameter(place, "weight")), parameter(place, "bias"), fused)
        elif type(module) is nn.Embedding:
            twin = StackedEmbedding(_need(parameter(place, "weight")))
        elif type(module) is nn.RMSNorm:
            twin = _norm(module, parameter(place, "weight"), fused)
        elif fused and type(module) is MLP and _fuses(module):
            twin = FusedMLP(module)
        else:
            _stack_own(module, place, parameter, [table[place] for table in tables], fused)
            continue
        home, _, name = place.rpartition(".")
        whole.get_submodule(home)._modules[name] = twin
    return whole


def _linear(weight: nn.Parameter, bias: nn.Parameter | None, fused: bool) -> nn.Module:
    fits = fused and bias is None and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
    return FusedLinear(weight) if fits else StackedLinear(weight, bias)


def _fuses(mlp: MLP) -> bool:
    linear = mlp.gate is None and type(mlp.up) is type(mlp.down) is nn.Linear
    return linear and mlp.up.in_features % 8 == mlp.up.out_features % 8 == 0


def _norm(module: nn.RMSNorm, weight: nn.Parameter | None, fused: bool) -> nn.Module:
    size = module.normalized_shape
    if fused and weight is not None and len(size) == 1 and size[0] % 8 == 0:
        return FusedNorm(weight, module.eps)
    return StackedNorm(weight, size[-1], module.eps)


def _stack_own(
    module: nn.Module,
    place: str,
    parameter: Callable[[str, str], nn.Parameter | None],
    own: Sequence[nn.Module],
    fused: bool,
) -> None:
    """Stack what a module holds beside its children."""
    own_spec = isinstance(module, SpecModule)
    if module._buffers or (module.dropout if own_spec else module._parameters):
        raise RefusedError(f"{place or 'the model'} ({type(module).__name__}) cannot train as one with other runs'")
    for name in list(module._parameters):
        module._parameters[name] = parameter(place, name)
    if isinstance(module, SpecModule):
        attend = StackedAttend(module, [x for x in own if isinstance(x, SpecModule)], fused)
        module.__dict__["attend"] = attend


@torch.no_grad()
def _joined(each: Sequence[nn.Parameter]) -> nn.Parameter:
    """One parameter [runs ...] that these are the parts of from now on."""
    whole = nn.Parameter(torch.stack([p.detach() for p in each]), requires_grad=each[0].requires_grad)
    for p, part in zip(each, whole.detach()):
        p.data = part
    return whole


def _need(p: nn.Parameter | None) -> nn.Parameter:
    assert p is not None
    return p
