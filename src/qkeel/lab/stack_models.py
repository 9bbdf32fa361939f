"""Stacks of runs that train as one model: which runs may share a stack, and how their models are joined.

Shapes: runs in a stack, b sequences per run, h heads, t tokens, n = b·t rows per run. The batch dimension of a stacked
model is runs·b, with one run after the other.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.errors import InvalidValueError, RefusedError
from qkeel.functional.statistics import KernelRows
from qkeel.kernels.encode import KINDS, encoded
from qkeel.kernels.native import operators
from qkeel.kernels.native.operators import norm_rope, norm_rope_ready
from qkeel.lab.build_run import not_stacked, resolve
from qkeel.lab.config import RunConfig
from qkeel.nn.attention import SpecModule
from qkeel.nn.decoder import MLP
from qkeel.ops import run, run_with_rows
from qkeel.sites.tap import Connection
from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.call import Visibility
from qkeel.spec.logits import Fixed
from qkeel.spec.norm import NoNorm, Norm, NormedPart
from qkeel.spec.slot import Params

# Which runs may train as one stack, and how many at once.

StackSize = Literal["auto", "off"] | int
T = TypeVar("T")

_WORDS: tuple[Literal["auto"], Literal["off"]] = ("auto", "off")

AT_ONCE = 16  # default number of runs in a stack; more runs are no faster, because their data no longer fits the cache
# Options that may differ between the runs of a stack, besides the number of steps.
_OWN_RATES = ("lr", "warmup", "schedule", "final", "weight_decay", "decay")
WIDEST, MOST_TOKENS = 128, 2048  # largest width and tokens per step for which "auto" stacks; beyond, a core is busy


def why_not_stacked(config: RunConfig) -> str:
    """Returns why a resolved configuration would give different results in a stack than alone; "" if it would not.

    >>> why_not_stacked(RunConfig(device="cpu", dtype="fp32", accumulate=2))
    'a step is computed in 2 parts'
    """
    remedies = not_stacked(config.remedy)
    reasons = (
        (config.data.task != "text", f"the task is {config.data.task}, not text"),
        (config.device != "cpu", f"the device is {config.device}, not a CPU"),
        (config.dtype != "fp32", f"the arithmetic is {config.dtype}, not fp32"),
        (config.compile, "the model is trained with torch.compile"),
        (config.accumulate != 1, f"a step is computed in {config.accumulate} parts"),
        (config.optim.z_loss > 0, "the loss has a z-loss"),
        (config.model.block != "mha", f"the model has {config.model.block} blocks, not multi-head attention"),
        (bool(remedies), f"{', '.join(remedies)} changes the forward pass of a single run"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def small(config: RunConfig) -> bool:
    """True if a stack of such runs is faster than running them one by one."""
    return config.model.d_model <= WIDEST and config.data.batch * config.data.context <= MOST_TOKENS


def check_how(how: object) -> StackSize:
    """Returns "auto", "off" or a number of runs, which may be given as a string.

    Raises InvalidValueError for anything else.
    """
    for word in _WORDS:
        if how == word:
            return word
    number = int(how) if isinstance(how, str) and how.isdigit() else how
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidValueError(f"expected stack to be auto, off or a number of runs of at least 1, got {how!r}")
    return number


def plan_stacks(runs: Sequence[tuple[RunConfig, T]], how: StackSize, workers: int) -> list[list[T]]:
    """Groups runs that differ only in seed, steps, rates and weight decay into stacks, so that every worker gets work.

    Args:
        runs: pairs of a configuration and the object that represents it in the result.
        how: "off" for no stacks, a number to set the number of runs per stack, or "auto" to stack only small models.
        workers: the number of processes.

    Raises:
        InvalidValueError: `how` is none of these.
    """
    how = check_how(how)
    most = AT_ONCE if how == "auto" else 1 if how == "off" else how
    most = max(1, min(most, -(-len(runs) // max(1, workers))))  # no stack is so large that a worker stays idle
    alike: dict[str, list[tuple[RunConfig, T]]] = {}
    for number, (config, thing) in enumerate(runs):
        kind = _kind(resolve(config), how) if most > 1 else None
        alike.setdefault(kind or str(number), []).append((config, thing))
    # Runs of one seed share their batches.
    groups = [sorted(group, key=lambda one: one[0].seed) for group in alike.values()]
    found = [part for group in groups for part in _cut(group, -(-len(group) // most))]
    # Stacks that do not divide evenly among the workers are cut finer, so that all workers finish together.
    rest = len(found) % workers if len(found) > workers else 0
    found = [part for i, s in enumerate(found) for part in _cut(s, min(len(s), -(-workers // rest)) if i < rest else 1)]
    return [[thing for _, thing in stack] for stack in found]


def _cut(group: list[T], parts: int) -> list[list[T]]:
    """Cuts a group into `parts` parts of nearly equal size."""
    cuts = [len(group) * i // parts for i in range(parts + 1)]
    return [group[a:b] for a, b in itertools.pairwise(cuts)]


def _kind(config: RunConfig, how: StackSize) -> str | None:
    """Returns a key that the runs of a stack share; None for a run that should train alone."""
    if why_not_stacked(config) or (how == "auto" and not small(config)):
        return None
    values = config.to_dict()
    values["optim"] = {k: v for k, v in values["optim"].items() if k not in _OWN_RATES}
    return json.dumps({k: v for k, v in values.items() if k not in ("seed", "steps", "nudge")}, sort_keys=True)


# The modules of a stacked model. Each holds the weights of all runs and applies them to their run's part of the batch.
#
# They use either torch's operators or compiled operators, which round differently. With either kind, a run has the same
# results alone and in a stack.


Context = Any  # of an autograd function


@final
class _StackedProduct(torch.autograd.Function):
    """y = x Wᵀ for each run. The derivative is defined here because `bmm` would lay out the gradient as Wᵀ, not W."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, compiled: bool) -> Tensor:
        """Maps x [runs n in], weight [runs out in] to [runs n out]."""
        ctx.save_for_backward(x, weight)
        ctx.compiled = compiled
        return operators.linear(x, weight) if compiled else torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Returns the gradients of x and W, each with the memory layout of its operand."""
        x, weight = ctx.saved_tensors
        if ctx.compiled:
            return *operators.linear_backward(grads[0].contiguous(), x, weight), None
        of_x = torch.bmm(grads[0], weight) if ctx.needs_input_grad[0] else None
        of_weight = torch.bmm(grads[0].mT, x) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


@final
class _StackedFactor(torch.autograd.Function):
    """x times the factor of each run. The gradient is summed run by run, in the same order as for a single run."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, factor: Tensor) -> Tensor:
        """Maps x [runs ... d], factor [runs d] or [runs] to [runs ... d]."""
        ctx.save_for_backward(x, factor)
        return x * _wide(factor, x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x and of the factor."""
        x, factor = ctx.saved_tensors
        summed = tuple(range(x.ndim - factor.ndim))
        of_factor = torch.stack([part.sum(summed) for part in (grads[0] * x).unbind()])
        return grads[0] * _wide(factor, x), of_factor


def _wide(factor: Tensor, x: Tensor) -> Tensor:
    return factor.view(len(factor), *[1] * (x.ndim - factor.ndim), *factor.shape[1:])


def times_by_run(x: Tensor, factor: Tensor) -> Tensor:
    """Multiplies x [runs ... d] by the factor of each run, [runs d] or [runs]."""
    return apply(_StackedFactor, x, factor)


def apply(function: type[torch.autograd.Function], *inputs: object) -> Tensor:
    """Applies an autograd function that returns one tensor."""
    y = function.apply(*inputs)
    assert isinstance(y, Tensor)
    return y


@final
class StackedLinear(nn.Module):
    """y = x Wᵀ + b for each run, with weight [runs out in]; `compiled` needs sizes that are multiples of 8."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, compiled: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.compiled = weight, bias, compiled

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [runs·b ... in] to [runs·b ... out]."""
        y = apply(_StackedProduct, x.reshape(len(self.weight), -1, x.shape[-1]), self.weight, self.compiled)
        if self.bias is not None:
            y = y + self.bias[:, None]
        return y.view(*x.shape[:-1], -1)


@final
class StackedEmbedding(nn.Module):
    """Embedding lookup for each run, with weight [runs vocab d]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [runs·b t] to [runs·b t d]."""
        runs, vocab, _ = self.weight.shape
        first = torch.arange(0, runs * vocab, vocab, device=tokens.device)
        rows = tokens.view(runs, -1) + first[:, None]
        return F.embedding(rows.view_as(tokens), self.weight.flatten(0, 1))


@final
class StackedNorm(nn.Module):
    """RMS norm with a gain per run, [runs d] or None; `compiled` needs a gain whose size is a multiple of 8."""

    def __init__(self, weight: nn.Parameter | None, size: int, eps: float | None, *, compiled: bool = False) -> None:
        super().__init__()
        self.weight, self.size, self.eps, self.compiled = weight, size, eps, compiled

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [runs·b t d] to the same shape."""
        if self.compiled and self.weight is not None:
            eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
            return apply(_RunNorm, x.reshape(len(self.weight), -1, x.shape[-1]), self.weight, eps).view_as(x)
        y = F.rms_norm(x, (self.size,), None, self.eps)
        if self.weight is None:
            return y
        return times_by_run(y.unflatten(0, (len(self.weight), -1)), self.weight).flatten(0, 1)


@final
class _StackedHidden(torch.autograd.Function):
    """gelu(x Wᵀ) for each run. The slope of gelu overwrites the product, so the backward pass can run only once."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        """Maps x [runs n in], weight [runs out in] to [runs n out]."""
        slope = operators.linear(x, weight)
        y = operators.gelu_(slope)
        ctx.save_for_backward(x, weight, slope)
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x and W."""
        x, weight, slope = ctx.saved_tensors
        return operators.linear_backward(slope.mul_(grads[0]), x, weight)


@final
class CompiledMLP(nn.Module):
    """W₂ gelu(W₁ x) for each run."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down  # `stack_models` replaces them with stacked layers next

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [runs·b t m] to the same shape."""
        hidden = apply(_StackedHidden, x.reshape(len(self.up.weight), -1, x.shape[-1]), self.up.weight)
        return self.down(hidden).view_as(x)


@final
class _RunNorm(torch.autograd.Function):
    """RMS norm with a gain per run, computed by the compiled operator."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Maps x [runs n d], gain [runs d] to [runs n d]."""
        y, inverse = operators.rms_norm(x, gain, eps)
        ctx.save_for_backward(x, inverse, gain)
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Returns the gradients of x and of the gain."""
        x, inverse, gain = ctx.saved_tensors
        return *operators.rms_norm_backward(grads[0].contiguous(), x, inverse, gain), None


# Attention of all runs in one call, reported to the observers of each run's own module.
#
# Everything after the norm, rotation and learned factors is the same in every run and is computed at once. Gradients of
# parameters are summed run by run, in the same order as for a single run.

Report = Callable[[Sequence[AttentionCall]], None]

# Spec parameters that multiply or shift q, k or the logits head by head, so that runs can be treated as more heads.
FACTORS = frozenset(("q_norm", "k_norm", "v_norm", "logit_scale", "log_n_scale", "logit_bias", "sink"))


@final
class StackedAttention:
    """Replaces `SpecModule.attend` with one call for all runs; observers of each run's own module see their part of it.

    `own` are the modules of the runs. While `report` is set, it receives each call with the heads of all runs
    concatenated, [b runs·h t d], if the spec permits it, otherwise one call per run.
    """

    def __init__(self, module: SpecModule, own: Sequence[SpecModule], compiled: bool) -> None:
        self.module, self.own, self.compiled = module, own, compiled
        self.report: Report | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, params: Params, seen: Visibility
    ) -> Tensor:
        """Like `SpecModule.attend`, with the sequences of all runs as the batch and parameters [runs ...]."""
        parts = {name: p.unbind() for name, p in params.items()}
        each = [{name: part[r] for name, part in parts.items()} for r in range(len(self.own))]
        call = seen.call(spec, q, k, v, each[0])
        read = self._read(call) if self.compiled and not params and self.module.training else None
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
        if params and self.compiled and _factors_only(spec, params) and call.q.shape[-1] % 8 == 0:
            out = run(self._with_factors(call, params), self.module.impl)
        elif params and not _only_gains(spec, params):
            # Run by run, because gradients of parameters summed over all runs at once would round differently.
            out = torch.cat([run(self._of_run(call, r, own), self.module.impl) for r, own in enumerate(each)])
        else:
            out = run(self._encoded(call, each) if params else call, self.module.impl)
        return out.transpose(1, 2).flatten(2)

    def _encoded(self, call: AttentionCall, each: Sequence[Params]) -> AttentionCall:
        """Returns the call with q and k normalised and rotated, run by run so that gradients round the same."""
        parts = [self._of_run(call, r, own) for r, own in enumerate(each)]
        pairs = [encoded(part.spec, part.q, part.k, part.pos_q, part.pos_k, part.params) for part in parts]
        q, k = (_in_a_row(x) for x in zip(*pairs))
        spec, left = call.spec.core(call.params)
        return dataclasses.replace(call, spec=spec, q=q, k=k, params=left)

    def _read(self, call: AttentionCall) -> tuple[Tensor, KernelRows] | None:
        """Returns attention with the kernel's row statistics, if an observer requests them and the kernel has them."""
        asked = any(isinstance(o, Connection) and o.reads for own in self.own for o in own.observers)
        return run_with_rows(call, self.module.impl) if asked else None

    def _with_factors(self, call: AttentionCall, params: Params) -> AttentionCall:
        """Normalises and scales q and k with operators that sum the gradient of each run's factor separately."""
        q, k, spec = call.q, call.k, call.spec
        q, k = self._normed("q", q, spec.norm, params), self._normed("k", k, spec.norm, params)
        if spec.scale.kind == "learned":
            factors = spec.scale.factor(call.pos_q, q.shape[-1], params)
            q = times_by_run(q.unflatten(0, (len(self.own), -1)), torch.as_tensor(factors)).flatten(0, 1)
            spec = dataclasses.replace(spec, scale=Fixed(1.0))
        return dataclasses.replace(call, spec=dataclasses.replace(spec, norm=NoNorm()), q=q, k=k, params={})

    def _normed(self, part: NormedPart, x: Tensor, norm: Norm, params: Params) -> Tensor:
        """Normalises q or k with the gain of each run, [d] or [], if there is one."""
        if part not in norm.sides:
            return x
        gain = norm.weight(part, params)
        rows = x.transpose(1, 2).reshape(1, len(self.own), -1, x.shape[-1])
        own = None if gain is None else gain.view(len(self.own), -1)
        y = norm_rope(rows, own, None, KINDS[norm.kind], norm.eps, True)
        return y.view(len(x), x.shape[2], x.shape[1], -1).transpose(1, 2)

    def _of_run(self, call: AttentionCall, r: int, params: Params) -> AttentionCall:
        """Returns the call of one run."""
        n = call.q.shape[0] // len(self.own)
        q, k, v = (x[r * n : (r + 1) * n] for x in (call.q, call.k, call.v))
        return dataclasses.replace(call, q=q, k=k, v=v, params=params)

    def _for_statistics(self, call: AttentionCall, params: Params) -> Sequence[AttentionCall]:
        if not FACTORS.issuperset(params) or call.spec.norm.over == "layer":
            return [self._of_run(call, r, own.spec_params()) for r, own in enumerate(self.own)]
        q, k, v = (heads_in_a_row(x, len(self.own)) for x in (call.q, call.k, call.v))
        groups = {"q": call.q.shape[1], "k": call.k.shape[1], "v": call.k.shape[1]}
        own = {name: by_head(p, groups.get(name.split("_")[0], groups["q"])) for name, p in params.items()}
        # The norm expects gains [h d], not [h 1 d].
        own = {name: p[:, 0] if name.endswith("_norm") else p for name, p in own.items()}
        return [dataclasses.replace(call, q=q, k=k, v=v, params=own)]


def _in_a_row(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates [b h t d] of all runs, with the memory layout of a single run, so that sums have the same order."""
    if parts[0].stride(1) < parts[0].stride(2):
        return torch.cat([x.transpose(1, 2) for x in parts]).transpose(1, 2)
    return torch.cat(list(parts))


def _factors_only(spec: AttentionSpec, params: Params) -> bool:
    """True if all parameters are factors of q and k, shared by the heads of a run and applied before rotation."""
    norm = spec.norm
    if norm.kind != "none":
        each = norm.over == "layer" or norm.bias or norm.gain not in ("none", "dim", "one_plus_dim", "scalar")
        if each or norm.kind not in KINDS or "v" in norm.sides or spec.position.order != "norm_then_rotate":
            return False
    learned = {"logit_scale"} if spec.scale.kind == "learned" and params["logit_scale"].ndim == 1 else set()
    return learned.union(("q_norm", "k_norm")).issuperset(params) and norm_rope_ready()


def _only_gains(spec: AttentionSpec, params: Params) -> bool:
    """True if all parameters are gains of q and k, so that the attention of all runs is the same after the encoding."""
    return "v" not in spec.norm.sides and {"q_norm", "k_norm"}.issuperset(params) and spec.position.keeps


def heads_in_a_row(x: Tensor, runs: int) -> Tensor:
    """Rearranges [runs·b h t d] to [b runs·h t d]."""
    return x.unflatten(0, (runs, -1)).transpose(0, 1).flatten(1, 2)


def by_head(p: Tensor, heads: int) -> Tensor:
    """Expands a factor [runs], [runs d], [runs h 1], [runs h d] or [runs h 1 1] to [runs·h 1 1] or [runs·h 1 d]."""
    wide = p.view(len(p), 1, 1, -1) if p.ndim <= 2 else p[:, :, None] if p.ndim == 3 else p
    return wide.expand(-1, heads, -1, -1).flatten(0, 1)


# The stacked model. It reuses the forward code of blocks and attention; only leaf modules and attention are replaced.


def stack_models(models: Sequence[nn.Module], *, compiled: bool = False) -> nn.Module:
    """Returns one model for all runs, and turns the parameters of the given models into views of its parameters.

    With `compiled`, leaf modules use compiled operators, whose results are equal up to rounding.

    Raises:
        RefusedError: a part of the model cannot be stacked.
    """
    whole = copy.deepcopy(models[0])
    tables = [dict(model.named_modules()) for model in models]
    joined: dict[int, nn.Parameter] = {}
    for place, module in list(whole.named_modules()):
        own = [table[place] for table in tables]
        parameters = _stacked_parameters(own, joined)
        leaf = _stacked_leaf(module, parameters, compiled)
        if leaf is None:
            _stack_rest(module, place, parameters, own, compiled)
        else:
            home, _, name = place.rpartition(".")
            whole.get_submodule(home).add_module(name, leaf)
    return whole


def _stacked_parameters(own: Sequence[nn.Module], joined: dict[int, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Returns the parameters [runs ...] of a module; `joined` caches them by the id of each first run's parameter."""
    tables = [dict(module.named_parameters(recurse=False)) for module in own]
    for name, first in tables[0].items():
        if id(first) not in joined:  # a head may share its weight with the embedding
            joined[id(first)] = _join([table[name] for table in tables])
    return {name: joined[id(first)] for name, first in tables[0].items()}


@torch.no_grad()
def _join(each: Sequence[nn.Parameter]) -> nn.Parameter:
    """Returns one parameter [runs ...] and turns the given ones into views of it."""
    whole = nn.Parameter(torch.stack([p.detach() for p in each]), requires_grad=each[0].requires_grad)
    for p, part in zip(each, whole.detach()):
        p.data = part
    return whole


def _stacked_leaf(module: nn.Module, parameters: dict[str, nn.Parameter], compiled: bool) -> nn.Module | None:
    """Returns the stacked module for a leaf; None if the module is not a leaf."""
    if type(module) is nn.Linear:
        weight, bias = parameters["weight"], parameters.get("bias")
        fits = compiled and bias is None and weight.shape[1] % 8 == weight.shape[2] % 8 == 0
        return StackedLinear(weight, bias, compiled=fits)
    if type(module) is nn.Embedding:
        return StackedEmbedding(parameters["weight"])
    if type(module) is nn.RMSNorm:
        gain, size = parameters.get("weight"), module.normalized_shape
        fits = compiled and gain is not None and len(size) == 1 and size[0] % 8 == 0
        return StackedNorm(gain, size[-1], module.eps, compiled=fits)
    return CompiledMLP(module) if compiled and type(module) is MLP and _fits(module) else None


def _fits(mlp: MLP) -> bool:
    linear = mlp.gate is None and type(mlp.up) is type(mlp.down) is nn.Linear
    return linear and mlp.up.in_features % 8 == mlp.up.out_features % 8 == 0


def _stack_rest(
    module: nn.Module, place: str, parameters: dict[str, nn.Parameter], own: Sequence[nn.Module], compiled: bool
) -> None:
    """Stacks the parameters and the attention of a module that is not a leaf."""
    attention = isinstance(module, SpecModule)
    if any(True for _ in module.buffers(recurse=False)) or (module.dropout if attention else parameters):
        raise RefusedError(
            f"{place or 'the model'} ({type(module).__name__}) cannot be trained as one model with other runs"
        )
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    if isinstance(module, SpecModule):
        modules = [each for each in own if isinstance(each, SpecModule)]
        module.attend = StackedAttention(module, modules, compiled)
