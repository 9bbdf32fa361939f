"""The pre-norm blocks of a model, recognised by their activations, and norms at the end of their branches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor, nn

from qkeel.capture.example import tensors
from qkeel.errors import RefusedError
from qkeel.handle import Handle, compose
from qkeel.nn.decoder import Block, NormOrder
from qkeel.patching.module_tables import submodules_of
from qkeel.remedies.base import Target, evaluating, module_name, where
from qkeel.sites.site import AttentionSite

ModuleOutput = Tensor | tuple[Tensor, ...]
# The input and the output of each call of a block (under the empty name) and of its children.
BlockCalls = dict[str, list[tuple[Tensor, Tensor]]]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """A branch x + F(N(x)) of a block, with the names of the children F and N and of the norm to add after F."""

    block: nn.Module
    # The block's name in the model.
    name: str
    function: str
    norm: str
    post: str
    width: int

    def post_norm(self, norm: nn.Module) -> Handle:
        """Changes the branch to x + norm(F(...)). The norm becomes the block's child `post`."""
        if isinstance(self.block, Block):
            return swap(self.block, self.post, norm)
        hook = self.block.get_submodule(self.function).register_forward_hook(
            functools.partial(_normed, norm)
        )
        self.block.register_module(self.post, norm)
        drop = functools.partial(submodules_of(self.block).__delitem__, self.post)
        return compose([Handle(drop), Handle(hook.remove)])


def swap(block: nn.Module, name: str, module: nn.Module) -> Handle:
    """Replaces a child of a block and returns a handle that restores it."""
    old = submodules_of(block)[name]
    submodules_of(block)[name] = module
    return Handle(lambda: submodules_of(block).update({name: old}))


def pre_norm_branches(target: Target, remedy: str) -> list[Branch]:
    """Returns the branches of the block around each site, if the block computes x + A(N₁(x)), then x + M(N₂(x)).

    qkeel's own blocks are recognised by type. Other blocks are compared with the formula in one evaluation pass on the
    example.

    Raises:
        RefusedError: a site's block has a different form. The message names the site and the expected form.
    """
    own_blocks: dict[int, tuple[str, Block]] = {}
    for name, block in target.model.named_modules():
        if isinstance(block, Block):
            own_blocks[id(block.attention)] = name, block
            own_blocks[id(block.cross_attention)] = name, block
    foreign = [site for site in target.sites if id(site.module) not in own_blocks]
    calls = _calls_of_blocks(target, foreign) if foreign and any(target.batch) else {}
    branches: dict[tuple[str, str], Branch] = {}
    for site in target.sites:
        if id(site.module) in own_blocks:
            around = _branches_of_own(*own_blocks[id(site.module)], site, remedy)
        else:
            around = _branches_around(target, site, calls)
        if not around:
            raise RefusedError(
                f"{remedy} at {where(site)}: expected a block that computes x + A(N₁(x)), then x + M(N₂(x)), "
                "with A, M and both norms as direct children, but found none around this attention (post-norm, "
                "parallel and fused blocks differ; for blocks from other libraries, pass a batch: "
                "apply(..., batch=batch)); build the model with the norm order you want"
            )
        branches.update({(b.name, b.function): b for b in around})
    return list(branches.values())


def _branches_of_own(
    name: str, block: Block, site: AttentionSite, remedy: str
) -> list[Branch]:
    if block.norm_order != "pre":
        raise RefusedError(
            f"{remedy} at {site.name}: it re-orders pre-norm blocks, but {name or 'this block'} is "
            f"{block.norm_order}-norm; keep that order, or build the model with pre-norm blocks"
        )
    functions = ["attention", "cross_attention", "mlp"]
    if block.cross_attention is None:
        functions.remove("cross_attention")
    return [
        Branch(
            block=block,
            name=name,
            function=function,
            norm=f"{function}_norm",
            post=f"{function}_post_norm",
            width=next(block.mlp_norm.parameters()).shape[-1],
        )
        for function in functions
    ]


def _calls_of_blocks(
    target: Target, sites: list[AttentionSite]
) -> dict[str, BlockCalls]:
    """Runs the example and returns the calls of every module around a site, keyed by name."""
    names = {name for site in sites for name in _ancestors(module_name(site))}
    calls: dict[str, BlockCalls] = {name: {} for name in sorted(names)}

    def note(
        of_block: BlockCalls,
        name: str,
        module: nn.Module,
        args: object,
        kwargs: object,
        output: object,
    ) -> None:
        x, y = _first((args, kwargs)), _first(output)
        if x is not None and y is not None:
            of_block.setdefault(name, []).append((x, y))

    # In evaluation mode: dropout between the modules would break the equalities.
    with ExitStack() as hooks, evaluating(target.model):
        for block_name, of_block in calls.items():
            block = target.model.get_submodule(block_name)
            for name, module in (*block.named_children(), ("", block)):
                hook = functools.partial(note, of_block, name)
                hooks.callback(
                    module.register_forward_hook(hook, with_kwargs=True).remove
                )
        target.returned()
    return calls


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _branches_around(
    target: Target, site: AttentionSite, calls: dict[str, BlockCalls]
) -> list[Branch]:
    """Returns the branches of the innermost block around a site that computes the formula, or none."""
    attention = module_name(site)
    for parent in _ancestors(attention):
        child = attention.removeprefix(f"{parent}.").partition(".")[0]
        names = _matched(calls[parent], child) if parent in calls else None
        if names is not None:
            first, norm, mlp = names
            return [
                Branch(
                    block=target.model.get_submodule(parent),
                    name=parent,
                    function=function,
                    norm=before,
                    post=post,
                    width=calls[parent][""][-1][0].shape[-1],
                )
                for function, before, post in (
                    (child, first, "attention_post_norm"),
                    (mlp, norm, "mlp_post_norm"),
                )
            ]
    return []


def _matched(calls: BlockCalls, attention: str) -> tuple[str, str, str] | None:
    """Returns the names of N₁, N₂ and M of a block that computes the formula with this attention as A, or None."""
    # A module that runs twice in a block is neither its norm nor its MLP.
    once = {name: pairs[0] for name, pairs in calls.items() if len(pairs) == 1}
    block = calls.get("", [])
    once.pop("", None)
    if not block or attention not in once:
        return None
    (x, y), (a_in, a_out) = block[-1], once.pop(attention)

    def norms(output: Tensor, of: Tensor) -> list[str]:
        return [
            c
            for c, (n_in, n_out) in once.items()
            if n_out is output and _same(n_in, of)
        ]

    first = norms(a_in, x)
    if len(first) != 1 or a_out.shape != x.shape:
        return None
    # The stream between the branches is no module's output, so it is computed.
    middle = x + a_out
    for mlp, (m_in, m_out) in once.items():
        second = [c for c in norms(m_in, middle) if c not in (mlp, *first)]
        fits = m_out.shape == middle.shape and mlp not in first
        if second and fits and _same(middle + m_out, y):
            return first[0], second[0], mlp
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-5, atol=1e-6))
    )


def _first(value: object) -> Tensor | None:
    return next((x for x in tensors(value) if x.is_floating_point()), None)


def _normed(
    norm: nn.Module, module: nn.Module, inputs: object, output: ModuleOutput
) -> ModuleOutput:
    """A forward hook that norms a branch's first output. The norm is a child of the block, so copies include it."""
    return of_first(output, norm)


def of_first(output: ModuleOutput, change: Callable[[Tensor], Tensor]) -> ModuleOutput:
    """Returns a module's output with its first tensor changed."""
    if isinstance(output, tuple):
        return change(output[0]), *output[1:]
    return change(output)


def ordered(block: nn.Module, order: NormOrder) -> Handle:
    """Sets `norm_order` on one of qkeel's own blocks. A second call, for the block's other branch, changes nothing."""
    if not isinstance(block, Block) or block.norm_order != "pre":
        return Handle(lambda: None)
    block.norm_order = order
    return Handle(lambda: setattr(block, "norm_order", "pre"))
