"""Remedies on a model that several processes train: checks, handles, and the largest logits over all processes."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.heads.site import AttentionSite
from qkeel.patching.modes import is_compiled, joined, running_stage
from qkeel.patching.optimizers import go_first, in_real_steps, is_last
from qkeel.remedies.base import Remedy, Target, where
from qkeel.remedies.head_weights import innermost

# Remedies on a model that several processes train: which are refused, and the handle of a change that all made.

WHAT = "qkeel.apply"


def check_wrapper(model: nn.Module, remedies: Sequence[Remedy]) -> None:
    """Raises RefusedError for a model whose parameters FullyShardedDataParallel or DeepSpeed's ZeRO has flattened.

    Between two passes its parameters are empty, or parts of one vector. Stages 1 and 2 of ZeRO keep whole copies for
    the passes, so remedies of the passes alone are possible there."""
    if (stage := dist.zero_stage(model)) and (stage == 3 or any(remedy.on_steps for remedy in remedies)):
        raise RefusedError(
            f"this model trains under DeepSpeed's ZeRO, stage {stage}, whose optimizer steps flattened pieces of the "
            "weights, in which heads cannot be found. Use torch.distributed.fsdp.fully_shard, ZeRO stage 0, or a "
            "remedy that "
            "changes the model, such as qk_norm or softcap, applied before deepspeed.initialize"
        )
    if any(map(dist.is_flat, dist.wrappers(model))):
        raise RefusedError(
            "this model is wrapped in FullyShardedDataParallel, which flattens its parameters, so the weights of heads "
            "cannot be known. Use torch.distributed.fsdp.fully_shard, or apply the remedy before wrapping"
        )


def check_added(remedy: str, target: Target, before: Mapping[str, Tensor], handle: Handle) -> Handle:
    """Raises RefusedError if a remedy has added parameters whose gradients are not reduced over the processes.

    A wrapper reduces only the parameters that the model had when it was wrapped; fully_shard can take new modules.
    Tensor parallelism leaves each process with the gradient of its own heads. It may be applied later, so every pass
    checks for it until the returned handle is removed.
    """
    old, model = {id(p) for p in before.values()}, target.model
    zero = dist.zero_stage(model) > 0
    several = zero or dist.world() > 1
    new = {n: p for n, p in model.named_parameters() if n not in before and id(p) not in old} if several else {}
    if not new:
        return handle
    added, wrapper, reduced = [*new], "ZeRO" if zero else dist.wrapped_by(model), dist.fully_sharded(model)
    if wrapper and not all(id(p) in reduced for p in new.values()):
        more = f" and {len(added) - 1} more" if len(added) > 1 else ""
        raise RefusedError(
            f"{remedy} adds parameters ({added[0]}{more}) to a model that {wrapper} has already spread over processes: "
            "their gradients would not be averaged, and the processes would diverge. Apply it before the model is "
            "wrapped "
            "or split, and create the optimizer after that"
        )
    if wrapper and any(map(is_compiled, model.modules())):
        raise RefusedError(
            f"{remedy} adds modules ({added[0]}) to a model that has compiled parts: fully_shard's hooks on them "
            "break a compiled part into pieces, or make it fail where fullgraph=True. Apply it before parts are "
            "compiled, or compile the whole model afterwards"
        )

    def check() -> bool:
        held = [p for site in target.sites for p in site.module.parameters()]
        if not any(map(dist.is_split, held)):
            return False
        if dist.head_axes(model, held):
            raise RefusedError(
                f"{remedy} has added parameters ({added[0]}) that all heads share, and tensor parallelism has split "
                "the heads over processes: each process would update them from its own heads only. Use fully_shard or "
                "DistributedDataParallel, or a remedy without parameters"
            )
        return True

    if check():
        return handle

    def look(*_: object) -> None:
        if check():
            hook.remove()

    hook = model.register_forward_pre_hook(look)

    def undo() -> None:
        hook.remove()
        handle.remove()

    return Handle(undo, state=handle.state, load=handle.load)


def check_peers(model: nn.Module, sites: Sequence[AttentionSite]) -> None:
    """Raises ApartError unless processes that run the same layers see the same attention.

    The stages of a pipeline have different layers and are not compared."""
    if dist.world() == 1:
        return
    own = ", ".join(f"{where(site)} of {site.n_heads} heads" for site in sites) or "no attention"
    peers = dist.peer_ranks(model)
    words = dist.gather_messages(WHAT, f"{' '.join(map(str, peers))}|{own}")
    for other, word in enumerate(words):
        group, _, seen = word.partition("|")
        for peer in map(int, group.split()):
            theirs = words[peer].partition("|")[2]
            if theirs != seen:
                raise dist.ApartError(
                    f"{WHAT}: the processes of one model hold different attention layers. Process {other} has {seen}; "
                    f"process {peer} has {theirs}"
                )


def refuse_late_stage(model: nn.Module, remedy: str) -> Handle:
    """Makes the first optimizer step raise RefusedError if the model's PipelineStage was made after the remedy.

    The passes before that step show it on all stages, so no process waits for another."""
    if dist.world() == 1 or dist.stage_of(model) is not None:
        return Handle(lambda: None)
    late: list[bool] = []

    def look(*_: object) -> None:
        passes.remove()
        late.append(running_stage() is not None)

    def refuse(*_: object) -> None:
        if any(late):
            raise RefusedError(
                f"{remedy} was applied before the PipelineStage of this model was created, so the "
                "stage of the model was unknown: the step was not taken. Create every PipelineStage before qkeel.apply"
            )

    passes, steps = model.register_forward_pre_hook(look), register_optimizer_step_pre_hook(in_real_steps(refuse))
    return compose(map(Handle, (passes.remove, steps.remove)))


def on_all_processes(handle: Handle, name: str, optimizer: Optimizer | None) -> Handle:
    """Returns the handle of a change that all processes have made.

    If only some processes remove it, all raise an error before the next optimizer step, which is not taken."""
    if dist.world() == 1 or optimizer is None:
        return handle
    member = dist.Membership(name)
    left: list[bool] = []

    def before(*_: object) -> None:
        if not left and not member.step():
            left.append(True)
            if is_last(hook):  # otherwise it stays, idle
                hook.remove()

    hook = innermost(optimizer).register_step_pre_hook(in_real_steps(before))
    go_first(hook)  # before any other hook waits for the other processes

    def undo() -> None:
        handle.remove()
        member.leave()

    return Handle(undo, state=handle.state, load=handle.load)


def refused_under_zero(
    handle: Handle, model: nn.Module, remedies: Sequence[Remedy], optimizer: Optimizer | None
) -> Handle:
    """Returns the handle of remedies on steps that refuses every step if deepspeed.initialize came after them."""
    if optimizer is None or "deepspeed" not in sys.modules or not any(remedy.on_steps for remedy in remedies):
        return handle
    verdict: list[RefusedError | None] = []

    def look(*_: object) -> None:
        if not verdict:
            try:
                check_wrapper(model, remedies)
                verdict.append(None)
            except RefusedError as error:
                verdict.append(error)
        if verdict[0] is not None:
            raise verdict[0]

    hook = optimizer.register_step_pre_hook(in_real_steps(look))
    go_first(hook)  # before the remedies read weights, of which stage 3 keeps none between passes

    def undo() -> None:
        hook.remove()
        handle.remove()

    return Handle(undo, state=handle.state, load=handle.load)


# The largest logits of heads over all processes that run their layers.


@final
class SharedMaxima:
    """The maxima of a model's heads as one row, equal on all processes that run these heads.

    They take one collective per step: in steps that a monitor of the same optimizer measures, they share its
    collective; in other steps they make their own. Replicas of a model see different sequences, and tensor-parallel
    processes different heads of a layer. The stages of a pipeline run different layers, whatever their names, so each
    stage has its own part of the row.
    """

    def __init__(
        self, target: Target, optimizer: Optimizer, maxima: Callable[[], Mapping[str, Tensor]] = lambda: {}
    ) -> None:
        """`maxima` returns what this process has seen since the last step."""
        self._sites, self._maxima, self._exchange = target.sites, maxima, dist.StepExchange.of(optimizer)
        self._counts = [site.n_heads for site in target.sites]
        self._nothing = torch.full((sum(self._counts),), -torch.inf)
        self._first: dict[str, int] = {}  # of this process's heads of a site, where it has a part of them
        self._before = self._behind = 0  # numbers of other layers around this process's in the row of all
        self._over_all: dist.StepMaxima | None = None
        self._dtype = torch.float32  # in which they are reduced
        self._late: Handle | None = None
        self._model = target.model
        self._around: list[nn.Module] | None = None  # the wrappers of the model, once a step has come
        if dist.world() > 1:
            self._place_heads(target)
            self._meet(target)

    @property
    def several(self) -> bool:
        """Returns whether other processes run the same layers."""
        return self._over_all is not None

    def check_step(self) -> None:
        """Raises RefusedError for a step inside torch's Join, where the others would wait for the maxima of a process
        that has no more data."""
        if self._over_all is None:
            return
        if self._around is None:
            self._around = dist.wrappers(self._model)
        if any(map(joined, self._around)):
            raise RefusedError(
                "qk_clip needs the largest logits of all processes after each step, but inside "
                "torch.distributed.algorithms.Join a process that has run out of data takes no steps: the step was not "
                "taken. Give every process the same number of batches, or use a remedy whose steps need no other "
                "process, such "
                "as lalr. torch leaves a model in that mode when the context ends: wrap it again"
            )

    def remove(self) -> None:
        """Ends the exchange of the maxima."""
        if self._over_all is not None:
            self._exchange.maxima.remove(self._over_all)
        if self._late is not None:
            self._late.remove()

    def _meet(self, target: Target) -> None:
        own = {
            "peers": dist.peer_ranks(target.model),
            "sites": [(site.name, site.n_heads) for site in target.sites],
            "weights": _fingerprint(target),
            "double": any(target.parameter(x.parameter).dtype == torch.float64 for x in target.logit_slices()),
            "exchange": self._exchange.agreed,
        }
        words = [json.loads(word) for word in dist.gather_messages(WHAT, json.dumps(own))]
        self._dtype = torch.float64 if any(word["double"] for word in words) else torch.float32
        groups = _same_layers(words)
        lengths = {group: sum(n for _, n in words[group]["sites"]) for group in sorted(set(groups))}
        mine = groups[dist.rank()]
        self._before = sum(n for group, n in lengths.items() if group < mine)
        self._behind = sum(n for group, n in lengths.items() if group > mine)
        if any(word["weights"] and groups.count(group) > 1 for word, group in zip(words, groups)):
            self._late = refuse_late_stage(target.model, "qk_clip")  # equal stages would be taken for replicas
        if len(set(groups)) < len(groups):
            exchanges = {word["exchange"] for word in words}
            self._over_all = dist.StepMaxima(self._sent, exchanges.pop() if len(exchanges) == 1 else "")
            self._exchange.maxima.append(self._over_all)

    def row(self, maxima: Mapping[str, Tensor]) -> Tensor:
        """Returns the maxima of all sites in one row on one device; -inf for heads that this process did not see."""
        if not maxima:
            return self._nothing
        device = next(iter(maxima.values())).device
        self._nothing = self._nothing.to(device)
        nothing = self._nothing.split(self._counts)
        return torch.cat([self._placed(site, maxima, none) for site, none in zip(self._sites, nothing)])

    def _placed(self, site: AttentionSite, maxima: Mapping[str, Tensor], nothing: Tensor) -> Tensor:
        top = maxima.get(site.name)
        if top is None:
            return nothing
        if len(top) == site.n_heads:
            return top.to(nothing.device)
        first = self._first[site.name]
        return F.pad(top.to(nothing.device), (first, site.n_heads - first - len(top)), value=-torch.inf)

    def _place_heads(self, target: Target) -> None:
        """Finds the first of this process's heads at each site that tensor parallelism has split.

        fully_shard gathers what it has split for each pass, so a head may be stored in parts."""
        gathered = dist.fully_sharded(target.model)
        for site in target.sites:
            for s in site.terms[0].query[-1:]:
                p = target.parameter(s.parameter)
                part = dist.local_block(s.parameter, p, gathered.get(id(p), 0))
                if part is None:
                    continue
                first, last = part.in_pass[s.axis]
                here = ((s.index >= first) & (s.index < last)).all(1)
                some = ((s.index >= first) & (s.index < last)).any(1)
                if not torch.equal(here, some):
                    raise RefusedError(
                        f"qk_clip at {where(site)}: {s.parameter} is split in the middle of a head, so no process "
                        "sees the logits of that head; split it between heads"
                    )
                self._first[site.name] = int(here.int().argmax())

    def over_all(self) -> Tensor:
        """Returns the largest logit of each head over all processes."""
        row = self.row(self._maxima())
        if self._over_all is None:
            return row
        found = self._exchange.largest(self._over_all)
        return found[self._before : len(found) - self._behind].to(row)

    def _sent(self) -> Tensor:
        """Returns this process's maxima, at their place in the row of all layers."""
        row = self.row(self._maxima()).to(self._dtype)
        # No reduction keeps NaN for sure; infinity, which never clips either, is passed on.
        return F.pad(row.masked_fill(row.isnan(), torch.inf), (self._before, self._behind), value=-torch.inf)


def _same_layers(words: Sequence[Mapping[str, object]]) -> list[int]:
    """Returns for each process the first of those that run the same layers.

    These are the processes of one wrapper or mesh, and others with the same attention and weights."""
    group = list(range(len(words)))
    for i, word in enumerate(words):
        own = (word["sites"], word["weights"])
        alike = [j for j, other in enumerate(words) if word["weights"] and own == (other["sites"], other["weights"])]
        for peer in (*word["peers"], *alike):  # type: ignore[misc]
            old, new = sorted((group[i], group[peer]), reverse=True)
            group = [new if g == old else g for g in group]
    return group


def _fingerprint(target: Target) -> str:
    """Returns a checksum of the weights; "" if a wrapper or mesh shows which processes run the same layers."""
    if len(dist.peer_ranks(target.model)) > 1:
        return ""
    parts = [f"{name}{tuple(p.shape)}" for name, p in target.model.named_parameters()]
    for name in dict.fromkeys(s.parameter for s in target.logit_slices()):
        p = dist.local(target.parameter(name)).detach().double()  # all of it: no other process is in its mesh
        parts += [repr(x) for x in torch.stack([p.sum(), p.abs().sum(), p.flatten()[0]]).tolist()]
    return str(zlib.crc32("".join([*parts, repr(dist.stage_of(target.model))]).encode()))
