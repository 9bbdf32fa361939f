"""The residual stream of a watched model: what enters and leaves each block, and what each of its branches adds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qkeel import dist
from qkeel.capture.example import copied, tensors, undisturbed
from qkeel.errors import caution
from qkeel.functional.norms import STREAM_FORMULAS, StreamValues, widest
from qkeel.handle import Handle
from qkeel.monitor.gather import Reduction
from qkeel.monitor.token_classes import blocks_of
from qkeel.patching.autograd import version_of
from qkeel.patching.forward import extra_pass
from qkeel.patching.modes import (
    Args,
    Guarded,
    Hook,
    Kwargs,
    ModuleTree,
    function_name,
    in_this_thread,
    put_hooks,
    remove_hooks,
    unguarded,
)
from qkeel.records import BLOCK_FIELDS
from qkeel.sites.trace import spread

# What is known about a block: how it computes its output from its input. One pass is examined to find this.

_MOST = 4  # largest number of branches that are searched for in a block
_FEW = 12  # with more modules than this, one branch fewer: the sums to try grow with their number to the power of _MOST
_TOKENS = 64  # the number of tokens on which sums are compared
_EXACT = 1e-3  # a sum may differ from the output by this share of what the block adds
_UNSURE = 0.3  # if rounding is a larger share of what a block adds, its branches cannot be distinguished
_TRIES = 8  # passes to examine until the branch of every attention layer is found: a branch may add 0 at first


@dataclasses.dataclass(frozen=True, slots=True)
class StreamBranch:
    """A module whose output, times a factor, is added to the input of its block; sites: the attention layers in it, or
    () for an MLP."""

    module: str
    factor: float
    sites: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class _Shown:
    """What was recorded of a block in a pass: rows of its input, of its output and of its modules' outputs, in
    order."""

    given: Tensor
    rounding: float
    shape: torch.Size
    version: int
    out: Tensor | None = None
    modules: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    given_to: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # the inputs of the modules
    ended: list[str] = dataclasses.field(default_factory=list)  # the modules in the order in which they finished
    again: set[str] = dataclasses.field(default_factory=set)  # those that were called more than once
    mutated: bool = False


def branches_of(
    shown: _Shown, sites: Mapping[str, str], known: Sequence[Sequence[StreamBranch]] = ()
) -> list[StreamBranch] | None:
    """The smallest set of branches whose weighted sum equals the block's output minus its input; [] if the difference
    is too small to decide, None if it is not such a sum.

    Args:
        shown: what was recorded of one pass of the block.
        sites: for each attention layer of the block, the name of its module within the block.
        known: the branches found in similar blocks, which are tried first; they are used if they contain every
            attention layer.
    """
    assert shown.out is not None
    added = (shown.out - shown.given).flatten()
    size = float(added.norm())
    # The output is a sum of numbers as large as the input, each rounded to the dtype of the stream.
    rounding = shown.rounding * float(torch.maximum(shown.out.norm(), shown.given.norm()))
    within = max(_EXACT * size, rounding)
    for pattern in known:
        parts = [shown.modules.get(branch.module) for branch in pattern]
        if None not in parts and _covers(pattern, sites, shown):
            whole = sum(branch.factor * part.flatten() for branch, part in zip(pattern, parts) if part is not None)
            if float((added - whole).norm()) <= within:
                return _with_sites(pattern, sites, shown)
    if not size > rounding / _UNSURE:
        return []
    found = _fewest(added, within, _alike(shown), shown)
    return None if found is None else _with_sites(found, sites, shown)


def _fewest(added: Tensor, within: float, alike: Sequence[Sequence[str]], shown: _Shown) -> list[StreamBranch] | None:
    """The smallest set of modules whose weighted sum is what was added, up to `within`; if there are several, the one
    with the best fit."""
    columns = [shown.modules[names[-1]].flatten() for names in alike]
    if not columns:
        return None
    products = (torch.stack(columns) @ torch.stack([*columns, added]).mT).double().cpu()
    for n in range(1, (_MOST if len(columns) <= _FEW else _MOST - 1) + 1):
        best, found = within, None
        for chosen in map(list, itertools.combinations(range(len(columns)), n)):
            factors, failed = torch.linalg.solve_ex(products[chosen][:, chosen], products[chosen, -1])
            if bool(failed) or not bool(torch.isfinite(factors).all()):
                continue
            left = added - sum(f * columns[i] for f, i in zip(factors.tolist(), chosen))
            if float(left.norm()) <= best:
                best, found = float(left.norm()), list(zip(chosen, factors.tolist()))
        if found is not None:
            slack = 4 * within / float(added.norm())
            return [StreamBranch(alike[i][-1], 1.0 if abs(f - 1) <= slack else f, ()) for i, f in found]
    return None


def _alike(shown: _Shown) -> list[list[str]]:
    """The modules whose output is not zero, in groups with identical outputs; in each group, the last to finish comes
    last."""
    found: list[list[str]] = []
    for name in shown.ended:
        x = shown.modules.get(name)
        if x is None or not bool(x.any()) or not bool(torch.isfinite(x).all()):
            continue
        same = next((group for group in found if torch.equal(shown.modules[group[0]], x)), None)
        if same is None:
            found.append([name])
        else:
            same.append(name)
    # If a module is called more than once, such as one dropout for both branches, it is unclear to which it belongs.
    once = [[name for name in group if name not in shown.again] for group in found]
    return [group for group in once if group]


def _holds(outer: str, inner: str) -> bool:
    """True if the modules are the same or either contains the other, because a projection after attention belongs to
    it."""
    return outer == inner or inner.startswith(f"{outer}.") or outer.startswith(f"{inner}.")


def _with_sites(branches: Sequence[StreamBranch], sites: Mapping[str, str], shown: _Shown) -> list[StreamBranch]:
    """The branches, each with its attention layers: those inside it, or those whose output reaches it through other
    modules, such as a norm."""
    groups = _alike(shown)
    inside = [next((g for g in groups if branch.module in g), [branch.module]) for branch in branches]
    direct = [[s for s, inner in sites.items() if any(_holds(n, inner) for n in own)] for own in inside]
    left = {site: inner for site, inner in sites.items() if not any(site in own for own in direct)}
    found = []
    for branch, own in zip(branches, direct):
        names, done = [] if own or not left else [branch.module], list[str]()
        while names:
            name = names.pop()
            same = next((group for group in groups if name in group), [name])
            done += same
            given = [shown.given_to[one] for one in same if one in shown.given_to]
            back = [group[0] for group in groups if any(torch.equal(shown.modules[group[0]], x) for x in given)]
            names += [one for one in back if one not in done]
        own += [site for site, inner in left.items() if any(_holds(name, inner) for name in done)]
        found.append(dataclasses.replace(branch, sites=tuple(own)))
    return found


def _covers(branches: Sequence[StreamBranch], sites: Mapping[str, str], shown: _Shown) -> bool:
    """True if every attention layer is in one of the branches."""
    return {site for branch in _with_sites(branches, sites, shown) for site in branch.sites}.issuperset(sites)


# The pass that is examined runs without dropout, so that sums are exact.

_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})


class _WithoutDropout(TorchFunctionMode):
    """Makes dropout return its input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function_name(func) in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@final
class ResidualStream:
    """Computes the statistics in records.BLOCK_FIELDS for each measured pass, while the handle from `attach()` is
    active.

    A block is an element of a list of modules that contains attention (nn.ModuleList, nn.Sequential or nn.ModuleDict
    with numbers as keys), and its input and output have the same shape. Its branches are the modules in it whose
    outputs, times factors, sum to its output minus its input. If the output is not such a sum, for instance because a
    norm is applied to it, the block has no branches. Branches are found in an extra pass without gradients or dropout,
    before the first measured pass.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[str],
        add: Callable[[tuple[tuple[str, ...], str], Tensor, int, Reduction], None],
        guard: Guarded = unguarded,
        tree: ModuleTree | None = None,
    ) -> None:
        """add: receives the names of layers and the field, the values, the number of tokens each value covers, and how
        values are combined. guard: runs the hooks' code."""
        self.model, self._add, self._guard = model, add, guard
        self._tree = ModuleTree(model) if tree is None else tree
        self._of_site = blocks_of(model, sites)
        self.branches: dict[str, list[StreamBranch]] = {}  # by block, including blocks where none were found
        self._copied: set[str] = set()  # blocks that change their input in place
        self._layers: dict[str, tuple[str, ...]] = {}  # the layers under which the statistics of a block are recorded
        self._tries, self._seen, self._said = 0, False, False  # seen: a pass has shown the blocks
        self._most = 1 if spread(model) else _TRIES
        self._unsure: list[str] = []  # attention layers whose branch has added too little so far to be found
        self._refused: list[str] = []  # attention layers of blocks whose output is not such a sum
        self._open: dict[str, StreamValues] = {}
        self._others: dict[str, Tensor] = {}
        self._found: dict[tuple[str, str], tuple[Tensor, int]] = {}

    @property
    def complete(self) -> bool:
        """Returns whether no further pass will be examined. If all processes take part in a pass, only one pass is
        examined, because they may disagree on whether to examine another."""
        return self._tries >= self._most or (self._seen and not self._unsure)

    def look(self, owner: object, args: Args, kwargs: Kwargs) -> None:
        """Finds the blocks and their branches in a pass with these arguments, which has no side effects."""
        self._tries += 1
        shown: dict[str, _Shown] = {}
        eager, unchanged = torch.compiler.set_stance, undisturbed(self.model)
        with ExitStack() as undo, extra_pass(owner), torch.no_grad(), eager("force_eager"), unchanged:
            for name, module in self._candidates():
                self._hook(undo, shown, name, module)
            undo.enter_context(_WithoutDropout())
            try:
                self.model(*copied(args), **copied(dict(kwargs)))
            except Exception as error:
                # Usually the model's own pass fails too. If it does not, silence would look like a measurement.
                if self._tries >= self._most and not self._seen:
                    self._said = True
                    caution(
                        "the residual stream is not measured, because the model failed in the extra pass that finds "
                        f"its blocks: {type(error).__name__}: {error}"
                    )
                return
        self._understand({name: one for name, one in shown.items() if one.out is not None})

    def _candidates(self) -> list[tuple[str, nn.Module]]:
        """The modules in the lists that contain the blocks."""
        holders = {name.rpartition(".")[0] for name in self._of_site.values()}
        known = [(name, module) for name, module in self._tree.named() if name.rpartition(".")[0] in holders and name]
        return [(name, module) for name, module in known if not isinstance(module, torch.jit.ScriptModule)]

    def _hook(self, undo: ExitStack, shown: dict[str, _Shown], name: str, module: nn.Module) -> None:
        """Records the outputs of a block and of the modules in it."""

        def before(module: nn.Module, args: object, kwargs: object) -> None:
            x = _stream((args, kwargs))
            if x is not None and name not in shown:
                shown[name] = _Shown(_sample(x), torch.finfo(x.dtype).eps, x.shape, version_of(x))
                given[0] = x

        def after(module: nn.Module, args: object, output: object) -> None:
            x, one = _like(output, shown[name].shape if name in shown else None), shown.get(name)
            if x is None or given[0] is None:
                shown.pop(name, None)
            elif one is not None and one.out is None:
                one.out, one.mutated = _sample(x), version_of(given[0]) != one.version
                one.rounding = max(one.rounding, torch.finfo(x.dtype).eps)
            given[0] = None

        def inner(of: str, module: nn.Module, args: object, output: object) -> None:
            one = shown.get(name)
            if one is None or one.out is not None:
                return
            if of in one.ended:
                one.again.add(of)
                return
            one.ended.append(of)
            x, got = _like(output, one.shape), _like(args, one.shape)
            if x is not None:
                one.modules[of] = _sample(x)
            if got is not None:
                one.given_to[of] = _sample(got)

        given: list[Tensor | None] = [None]
        hooks = put_hooks(module, before, in_this_thread(after))
        for of, part in module.named_modules():
            if of and not isinstance(part, torch.jit.ScriptModule):
                act = in_this_thread(functools.partial(inner, of))
                hooks += put_hooks(part, None, act)
        undo.callback(remove_hooks, hooks)

    def _understand(self, shown: Mapping[str, _Shown]) -> None:
        kinds = {name: type(module) for name, module in self._tree.named()}
        known: dict[type, list[list[StreamBranch]]] = {}
        inside = {name: self._inside(name) for name in shown}
        self._unsure, self._refused, self._seen = [], [], True
        for again in (False, True):  # a block whose attention does not add anything yet gets the branches of its class
            for name, one in shown.items():
                own, patterns = inside[name], known.setdefault(kinds[name], [])
                if again and {site for branch in self.branches.get(name, ()) for site in branch.sites}.issuperset(own):
                    continue
                found = branches_of(one, own, patterns)
                if found and _covers(found, own, one):
                    patterns[:0] = [] if found in patterns else [found]
                if again:
                    seen = {site for branch in found or () for site in branch.sites}
                    (self._refused if found is None else self._unsure).extend(site for site in own if site not in seen)
                if found or own:
                    self.branches[name] = found or []
                    layers = tuple(site for site, block in self._of_site.items() if block == name)
                    self._layers[name] = layers or (name,)
                if one.mutated:
                    self._copied.add(name)
        self._tell()

    def _inside(self, name: str) -> dict[str, str]:
        """The attention layers of a block, each with the name of its module within the block."""
        own = [site for site, block in self._of_site.items() if block == name]
        return {site: site.partition("#")[0].removeprefix(name).removeprefix(".") for site in own}

    def _tell(self) -> None:
        """Warns once about what cannot be measured."""
        lacking = [*self._refused, *(self._unsure if self._tries >= self._most else ())]
        if self._said or (self.branches and not lacking):
            return
        self._said = True
        if not self.branches:
            caution(
                "the residual stream is not measured: expected blocks in an nn.ModuleList, nn.Sequential or numbered "
                "nn.ModuleDict that contain the attention and whose input and output have the same shape; no such "
                "block was seen"
            )
            return
        caution(
            f"attention_share is not measured for {', '.join(lacking)}: the output of the block is not its input plus "
            "multiples of its modules' outputs, for example because a norm follows the sum or each channel has its "
            "own factor. What enters and leaves the block is measured"
        )

    # Passes that are measured.

    def attach(self) -> Handle:
        """Starts measuring the blocks in the next pass; remove the handle when the pass is over."""
        self._open, self._others, self._found = {}, {}, {}
        modules = dict(self._tree.named())
        hooks: list[Hook] = []
        for name, branches in self.branches.items():
            if name not in modules:
                continue
            before = in_this_thread(functools.partial(self._guard, self._enter, name))
            after = in_this_thread(functools.partial(self._guard, self._leave, name))
            hooks += put_hooks(modules[name], before, after)
            for branch in branches:
                several = sum(not other.sites for other in branches) > 1 and not branch.sites
                take = in_this_thread(functools.partial(self._guard, self._take, name, branch, several))
                part = modules.get(f"{name}.{branch.module}")
                if part is not None:
                    hooks += put_hooks(part, None, take)

        def detach() -> None:
            remove_hooks(hooks)
            self._over()

        return Handle(detach)

    @torch.no_grad()
    def _enter(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        x = _stream((args, kwargs))
        if x is not None and x.numel():
            own = self._open[name] = StreamValues(x.clone() if name in self._copied else x)
            self._measure(name, "input", own)

    @torch.no_grad()
    def _take(
        self, name: str, branch: StreamBranch, several: bool, module: nn.Module, args: object, output: object
    ) -> None:
        before = self._open.get(name)
        x = None if before is None else _like(output, before.x.shape)
        if before is None or x is None:
            return
        if several:
            x = x * branch.factor
            self._others[name] = self._others[name] + x if name in self._others else x
        else:
            own = StreamValues(x, before, branch.factor)
            self._measure(name, "attention" if branch.sites else "mlp", own, branch.sites or None)

    @torch.no_grad()
    def _leave(self, name: str, module: nn.Module, args: object, output: object) -> None:
        before, others = self._open.pop(name, None), self._others.pop(name, None)
        x = None if before is None else _like(output, before.x.shape)
        if before is None or x is None:
            return
        if others is not None:
            self._measure(name, "mlp", StreamValues(others, before))
        self._measure(name, "output", StreamValues(x, before))

    def _measure(self, name: str, place: str, own: StreamValues, layers: tuple[str, ...] | None = None) -> None:
        n = max(1, own.x.numel() // max(1, own.x.shape[-1]))
        for field, formula in _FORMULAS[place]:
            value = formula(own)
            for layer in layers or self._layers[name]:
                known = self._found.get((layer, field))  # if the block is called again
                if known is None:
                    self._found[layer, field] = value, n
                else:
                    how, total = BLOCK_FIELDS[field].over, known[1] + n
                    self._found[layer, field] = joined(how, known[0], value, n / total), total

    def _over(self) -> None:
        """Ends the pass and passes on the statistics of all layers, with one tensor for each field."""
        groups: dict[object, list[tuple[str, Tensor]]] = {}
        for (layer, field), (x, n) in self._found.items():
            groups.setdefault((field, n, x.device, x.dtype), []).append((layer, x))
        for (field, n, *_), own in groups.items():  # type: ignore[misc]
            names = tuple([layer for layer, _ in own])
            self._add((names, field), torch.stack([x for _, x in own]), n, BLOCK_FIELDS[field].over)
        self._open, self._others, self._found = {}, {}, {}


_FORMULAS = {
    place: [(name, STREAM_FORMULAS[field.formula]) for name, field in BLOCK_FIELDS.items() if field.place == place]
    for place in ("input", "output", "attention", "mlp")
}


def joined(how: Reduction, known: Tensor, new: Tensor, share: float) -> Tensor:
    """Combines two values, where `share` is the share of the data that the new value covers.

    >>> joined("root_mean", torch.tensor(1.0), torch.tensor(7.0), 0.5)
    tensor(5.)
    """
    if how == "max":
        return torch.maximum(known, new)
    if how == "root_mean":
        return torch.lerp(known.square(), new.square(), share).sqrt()
    return torch.lerp(known, new, share)


def _streams(value: object) -> Iterator[Tensor]:
    for x in tensors(value):
        x = dist.local(x)
        if x.is_floating_point() and x.ndim >= 2:
            yield x.detach()


def _stream(given: object) -> Tensor | None:
    """The first floating-point tensor with at least two dimensions among the arguments of a block."""
    return next(_streams(given), None)


def _like(output: object, shape: torch.Size | None) -> Tensor | None:
    """The first tensor in a module's output, or None if its shape is not this one."""
    x = next(_streams(output), None)
    return x if x is not None and x.shape == shape else None


def _sample(x: Tensor) -> Tensor:
    """A sample of the tokens, [n m], in the widest dtype."""
    rows = x.reshape(-1, x.shape[-1])
    return rows[:: max(1, len(rows) // _TOKENS)][:_TOKENS].to(widest(x.device), copy=True)
