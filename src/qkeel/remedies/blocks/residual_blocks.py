"""Pre-norm blocks of a model, recognised by what flows through them, and norms put behind their branches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.modules import tensors
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.heads.site import AttentionSite
from qkeel.nn.block import Block, NormOrder
from qkeel.patching.module_tables import submodules_of
from qkeel.remedies.base import Target, evaluating, module_name, where

ModuleOutput = Tensor | tuple[Tensor, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """A branch x + F(N(x)) of a block: the children F and N, and the name of a norm of F's output."""

    block: nn.Module
    name: str  # of the block in the model
    function: str
    norm: str
    post: str
    width: int

    def post_norm(self, norm: nn.Module) -> Handle:
        """Makes it x + norm(F(...)), the norm a child of the block under `post`."""
        if isinstance(self.block, Block):
            return swap(self.block, self.post, norm)
        hook = self.block.get_submodule(self.function).register_forward_hook(functools.partial(_normed, norm))
        self.block.register_module(self.post, norm)
        return compose(
            [Handle(functools.partial(submodules_of(self.block).__delitem__, self.post)), Handle(hook.remove)]
        )


def swap(block: nn.Module, name: str, module: nn.Module) -> Handle:
    """Another module in a block's place of that name."""
    old = submodules_of(block)[name]
    submodules_of(block)[name] = module
    return Handle(lambda: submodules_of(block).update({name: old}))


def pre_norm_branches(target: Target, remedy: str) -> list[Branch]:
    """The branches of the block around each site, if that is x + A(N₁(x)), then x + M(N₂(x)).

    qkeel's own blocks say so. Of others one forward pass on the example, in evaluation, is compared with that formula.

    Raises:
        RefusedError: a site whose block is not of that form; the message says which and what was expected.
    """
    own = [(name, m) for name, m in target.model.named_modules() if isinstance(m, Block)]
    blocks = {id(branch): (name, m) for name, m in own for branch in (m.attention, m.cross_attention) if branch}
    foreign = [site for site in target.sites if id(site.module) not in blocks]
    seen = _observed(target, foreign) if foreign and any(target.example) else {}
    branches: dict[tuple[str, str], Branch] = {}
    for site in target.sites:
        around = blocks.get(id(site.module))
        found = _own(*around, site, remedy) if around is not None else _fitting(site, seen)
        if found is None:
            raise RefusedError(
                f"{remedy} at {where(site)}: expected a block x + A(N₁(x)), then x + M(N₂(x)), "
                "with A, M and both norms direct children of it, and saw none around this attention (post-norm, "
                "parallel and fused blocks are of another form; blocks that are not qkeel's show theirs on an example "
                "batch: apply(..., example=batch)); build the model with the order you mean"
            )
        branches.update({(b.name, b.function): b for b in found})
    return list(branches.values())


def _own(name: str, block: Block, site: AttentionSite, remedy: str) -> tuple[Branch, ...]:
    if block.norm_order != "pre":
        raise RefusedError(
            f"{remedy} at {site.name}: it re-orders pre-norm blocks, and {name or 'this block'} is "
            f"{block.norm_order}-norm; keep it, or build the model again"
        )
    width = next(block.mlp_norm.parameters()).shape[-1]

    def branch(function: str) -> Branch:
        norm, post = f"{function}_norm", f"{function}_post_norm"
        return Branch(block=block, name=name, function=function, norm=norm, post=post, width=width)

    cross = () if block.cross_attention is None else (branch("cross_attention"),)
    return branch("attention"), *cross, branch("mlp")


@dataclasses.dataclass(slots=True, eq=False)
class _Calls:
    """The inputs and outputs of a block and each of its children, first tensors only."""

    block: nn.Module
    seen: dict[str, list[tuple[Tensor, Tensor]]] = dataclasses.field(default_factory=dict)

    def note(self, name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        """A forward hook of a child, or of the block itself, whose name is empty."""
        x, y = _first((args, kwargs)), _first(output)
        if x is not None and y is not None:
            self.seen.setdefault(name, []).append((x, y))


def _observed(target: Target, sites: list[AttentionSite]) -> dict[str, _Calls]:
    """Calls of every module around a site, by name."""
    names = {name for site in sites for name in _ancestors(module_name(site))}
    seen = {name: _Calls(target.model.get_submodule(name)) for name in sorted(names)}
    with ExitStack() as hooks, evaluating(target.model):
        for calls in seen.values():
            for name, module in (*calls.block.named_children(), ("", calls.block)):
                note = functools.partial(calls.note, name)
                hooks.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        target.returned()
    return seen


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _fitting(site: AttentionSite, seen: dict[str, _Calls]) -> tuple[Branch, Branch] | None:
    """The branches of the innermost block around a site that computes the formula."""
    name = module_name(site)
    for parent in (p for p in _ancestors(name) if p in seen):
        child = name.removeprefix(f"{parent}.").partition(".")[0]
        found = _matched(parent, seen[parent], child)
        if found is not None:
            return found
    return None


def _matched(name: str, calls: _Calls, attention: str) -> tuple[Branch, Branch] | None:
    once = {child: pairs[0] for child, pairs in calls.seen.items() if child and len(pairs) == 1}
    if "" not in calls.seen or attention not in once:
        return None
    (whole_in, whole_out), (a_in, a_out) = calls.seen[""][-1], once[attention]
    first = [c for c, (x, y) in once.items() if y is a_in and c != attention and _same(x, whole_in)]
    if len(first) != 1 or a_out.shape != whole_in.shape:
        return None
    middle = whole_in + a_out
    for norm, (x, y) in once.items():
        for mlp, (m_in, m_out) in once.items():
            distinct = len({norm, mlp, first[0], attention}) == 4
            if distinct and m_in is y and _same(x, middle) and _same(middle + m_out, whole_out):
                pairs = ((attention, first[0], "attention_post_norm"), (mlp, norm, "mlp_post_norm"))
                one, two = (
                    Branch(block=calls.block, name=name, function=f, norm=n, post=p, width=whole_in.shape[-1])
                    for f, n, p in pairs
                )
                return one, two
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-5, atol=1e-6)))


def _first(value: object) -> Tensor | None:
    return next((x for x in tensors(value) if x.is_floating_point()), None)


def _normed(norm: nn.Module, module: nn.Module, inputs: object, output: ModuleOutput) -> ModuleOutput:
    """A forward hook that norms the first output of a branch; the norm is a child of the block, and copied with it."""
    return of_first(output, norm)


def of_first(output: ModuleOutput, change: Callable[[Tensor], Tensor]) -> ModuleOutput:
    """The output of a module with its first tensor changed."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def ordered(block: nn.Module, order: NormOrder) -> Handle:
    """The name of the new order on one of qkeel's blocks, by the first of its two branches."""
    if not isinstance(block, Block) or block.norm_order != "pre":
        return Handle(lambda: None)
    block.norm_order = order
    return Handle(lambda: setattr(block, "norm_order", "pre"))
