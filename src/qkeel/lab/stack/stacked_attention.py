"""Attention of all runs of a stack in one call, shown to the observers of each run's own module.

The sequences of the runs stand one after the other in the batch. Everything after norm, rotation and learned factors is
alike in every run and computed at once; gradients of parameters are summed run by run, in the order they have alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from qkeel.functional.statistics.rows import KernelRows
from qkeel.kernels.encode import KINDS, encoded
from qkeel.kernels.native.norm_rope import norm_rope, ready
from qkeel.lab.stack.stacked_modules import times_by_run
from qkeel.nn.spec_module import SpecModule
from qkeel.ops import run, run_with_rows
from qkeel.sites.tap import Connection
from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.call import Visibility
from qkeel.spec.norm import NoNorm, Norm, Part
from qkeel.spec.scale import Fixed
from qkeel.spec.slot import Params

Report = Callable[[Sequence[AttentionCall]], None]

# Parameters of a spec that are factors or terms of q, k or logits [b h t d], so that each head may have its own.
FACTORS = frozenset(("q_norm", "k_norm", "v_norm", "logit_scale", "log_n_scale", "logit_bias", "sink"))


@final
class StackedAttention:
    """In place of `SpecModule.attend`: the call of all runs at once, shown to who watches a run's own module.

    `own` are the runs' own modules. While `report` is set, it gets each call with the heads of all
    runs in a row, [b runs·h t d], where the spec lets it be put so, else a call for each run.
    """

    def __init__(self, module: SpecModule, own: Sequence[SpecModule], compiled: bool) -> None:
        self.module, self.own, self.compiled = module, own, compiled
        self.report: Report | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, params: Params, seen: Visibility
    ) -> Tensor:
        """As `SpecModule.attend`, with the sequences of all runs as the batch and parameters [runs ...]."""
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
        """Attention and what its kernel finds of rows, where a run's observer asks for it and the kernel reports it."""
        asked = any(isinstance(o, Connection) and o.reads for own in self.own for o in own.observers)
        return run_with_rows(call, self.module.impl) if asked else None

    def _with_factors(self, call: AttentionCall, params: Params) -> AttentionCall:
        """Returns q and k normed and scaled, by operators that sum the gradient of each run's factor by itself."""
        q, k, spec = call.q, call.k, call.spec
        q, k = self._normed("q", q, spec.norm, params), self._normed("k", k, spec.norm, params)
        if spec.scale.kind == "learned":
            factors = spec.scale.factor(call.pos_q, q.shape[-1], params)
            q = times_by_run(q.unflatten(0, (len(self.own), -1)), torch.as_tensor(factors)).flatten(0, 1)
            spec = dataclasses.replace(spec, scale=Fixed(1.0))
        return dataclasses.replace(call, spec=dataclasses.replace(spec, norm=NoNorm()), q=q, k=k, params={})

    def _normed(self, part: Part, x: Tensor, norm: Norm, params: Params) -> Tensor:
        """Returns q or k normed by the gain of its run, [d] or [], if any."""
        if part not in norm.sides:
            return x
        gain = norm.weight(part, params)
        rows = x.transpose(1, 2).reshape(1, len(self.own), -1, x.shape[-1])
        own = None if gain is None else gain.view(len(self.own), -1)
        y = norm_rope(rows, own, None, KINDS[norm.kind], norm.eps, True)
        return y.view(len(x), x.shape[2], x.shape[1], -1).transpose(1, 2)

    def _of_run(self, call: AttentionCall, r: int, params: Params) -> AttentionCall:
        """A run's own call."""
        n = call.q.shape[0] // len(self.own)
        q, k, v = (x[r * n : (r + 1) * n] for x in (call.q, call.k, call.v))
        return dataclasses.replace(call, q=q, k=k, v=v, params=params)

    def _for_statistics(self, call: AttentionCall, params: Params) -> Sequence[AttentionCall]:
        if not FACTORS.issuperset(params) or call.spec.norm.over == "layer":
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
    """Returns whether parameters are factors of q and k that a run's heads share, which come before any rotation."""
    norm = spec.norm
    if norm.kind != "none":
        each = norm.over == "layer" or norm.bias or norm.gain not in ("none", "dim", "one_plus_dim", "scalar")
        if each or norm.kind not in KINDS or "v" in norm.sides or spec.position.order != "norm_then_rotate":
            return False
    learned = {"logit_scale"} if spec.scale.kind == "learned" and params["logit_scale"].ndim == 1 else set()
    return learned.union(("q_norm", "k_norm")).issuperset(params) and ready()


def _only_gains(spec: AttentionSpec, params: Params) -> bool:
    """True if the only parameters are gains of q and k, so that all after the encoding is alike in every run."""
    return "v" not in spec.norm.sides and {"q_norm", "k_norm"}.issuperset(params) and spec.position.keeps


def heads_in_a_row(x: Tensor, runs: int) -> Tensor:
    """[runs·b h t d] -> [b runs·h t d]."""
    return x.unflatten(0, (runs, -1)).transpose(0, 1).flatten(1, 2)


def by_head(p: Tensor, heads: int) -> Tensor:
    """A factor by run, [runs], [runs d], [runs h 1], [runs h d] or [runs h 1 1], as one by head, [runs·h 1 1|d]."""
    wide = p.view(len(p), 1, 1, -1) if p.ndim <= 2 else p[:, :, None] if p.ndim == 3 else p
    return wide.expand(-1, heads, -1, -1).flatten(0, 1)
