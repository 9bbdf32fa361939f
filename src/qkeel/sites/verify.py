"""Verifies that the known weights of a site determine its logits, head by head.

The smallest module that holds the projections and the attention call runs again with
the inputs that it had, and with the rows of some heads changed; exactly the logits of
these heads must change. Rows are *rotated* within their head (row i takes the place of
row i + 1), not scaled: a norm over all heads keeps its value then, so that no other head
moves. Each head is in half of the changes and no two heads are in the same half, so that
about log₂ h + 1 runs tell every head from every other one.

The runs are made on a deep copy of the module, whose parameters share the model's
memory, so that whatever the module and its objects store is the copy's. Where no copy
can be made, the module itself runs and is put back.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.eager import reached
from qkeel.capture.example import ModuleCall, undisturbed
from qkeel.capture.intercept import CapturedCall, CaptureMode, name_of
from qkeel.errors import RefusedError, caution
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite, HeadSlice, unique_slices
from qkeel.heads.walk import nodes_of
from qkeel.patching.modes import CollectiveMode, modules_of, submodules_of
from qkeel.sites.run import forward, spread

Weights = Mapping[str, Tensor]
Logits = list[Tensor]
# The rows of a weight, and some of their heads or None for all.
RowsOfHeads = tuple[HeadSlice, Sequence[int] | None]
# Enough rows of logits to see whether a head changes.
_ROWS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """A captured call, and for each module call around it, by id, the number of attention calls reported before it."""

    captured: CapturedCall
    positions: Mapping[int, int]


class CannotRerunError(Exception):
    """A module does not compute alone what it computed in the model's pass; the message says why."""


@final
class Verification:
    """Verifies the sites of one pass of a model. Of sites that are alike, the first is verified fully, and of the
    others only that half of the heads are told from the other half."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._alike: dict[Hashable, tuple[AttentionSite, nn.Module]] = {}
        self._by_gradients: dict[str, str] = {}

    def site(self, site: AttentionSite, calls: Sequence[RecordedCall]) -> AttentionSite:
        """Returns the site; if its weights are not confirmed, `unverified` gives the reason.

        Args:
            site: the site.
            calls: the first call of the site, or one call for each head if the heads are computed one by one.
        """
        if not site.terms:
            return site
        doubt = unscaled = ""
        try:
            doubt, unscaled = self._check(site, calls)
        except CannotRerunError as error:
            self._by_gradients[site.name] = str(error)
        except dist.ApartError:
            raise
        except Exception as error:
            doubt = f"its module cannot run again: {type(error).__name__}: {error}"
        return dataclasses.replace(site, unverified=doubt, unscaled=unscaled)

    def _check(
        self, site: AttentionSite, calls: Sequence[RecordedCall]
    ) -> tuple[str, str]:
        """Why the weights are not confirmed, or "", and why the logits do not scale with them, or ""."""
        if not calls:
            return "the pass did not contain its attention call", ""
        readers = [LogitReader(call.captured.call) for call in calls]
        heads = sum(reader.recorded.shape[1] for reader in readers)
        if heads != site.n_heads:
            return f"the pass showed {heads} heads instead of {site.n_heads}", ""
        if not any(bool(reader.recorded.isfinite().any()) for reader in readers):
            return "every key is hidden from its queries in this example", ""
        for path in itertools.chain(*((t.query, t.key) for t in site.terms)):
            if len({s.parameter for s in path}) < len(path):
                # Changed rows would reach the logits in two ways, by which every head moves.
                raise CannotRerunError("one weight is used twice on the way to a logit")
        weights = ChangedWeights(self.model, site)
        rerun = smallest_rerun(self.model, site, calls, readers, weights)
        kind = _kind(site, rerun.frame)
        first, module = self._alike.get(kind, (None, None))
        if first is not None and module is rerun.frame.module:
            # The same weights in a second call, which the first call's result would reach as well.
            return "", first.unscaled
        with rerun.opened():
            experiment = _Experiment(site, weights, rerun)
            if first is not None:
                return experiment.doubt_heads(brief=True), first.unscaled
            doubt = experiment.doubt_heads() or experiment.doubt_unknown_weights()
            if doubt:
                return doubt, ""
            unscaled = experiment.disproportion()
        self._alike[kind] = (
            dataclasses.replace(site, unscaled=unscaled),
            rerun.frame.module,
        )
        return "", unscaled

    def tell(self) -> None:
        """Says once which sites were verified by gradients alone."""
        if self._by_gradients:
            names = ", ".join(
                n or type(self.model).__name__ for n in self._by_gradients
            )
            reason = next(iter(self._by_gradients.values()))
            caution(
                f"the weights of each head of {names} are known from gradients alone: {reason}"
            )


def _kind(site: AttentionSite, frame: ModuleCall) -> Hashable:
    """Equal for sites whose verification would show the same: modules of one class with the same rows of weights of the
    same names."""
    start = len(frame.name) + 1 if frame.name else 0
    paths = [
        [(s.parameter[start:], s.axis, s.bias, s.index.tolist()) for s in path]
        for term in site.terms
        for path in (term.query, term.key)
    ]
    geometry = (site.n_heads, site.n_kv_heads, site.key_heads, site.normed, site.layout)
    return type(frame.module), str(paths).replace(f"'{frame.name}.", "'"), geometry


# --- Running a module again


def smallest_rerun(
    model: nn.Module,
    site: AttentionSite,
    calls: Sequence[RecordedCall],
    readers: Sequence[LogitReader],
    weights: ChangedWeights,
) -> Rerun:
    """The rerun of the smallest module call around an attention call in which the known weights change its logits.

    Raises:
        CannotRerunError: no module call computes the same logits when it is repeated.
        Exception: no module call can be repeated at all; this is the error of the innermost one.
    """
    needed = {id(p) for p in weights.parameters.values()}
    failures: list[Exception] = []
    fallback = None
    for frame, on_copy in itertools.product(
        calls[0].captured.frame.line(), (True, False)
    ):
        within = {id(p) for p in frame.module.parameters()}
        if frame.given is None or not needed <= within:
            continue
        try:
            rerun = Rerun(
                model, site, frame, calls, readers, weights.parameters, on_copy=on_copy
            )
            with rerun.opened():
                rerun.check()
                all_rows = [(s, None) for s in (*site.query, *site.key)]
                before = rerun.base = rerun.logits(weights.filled())
                after = rerun.logits(weights.rotated(all_rows))
        except dist.ApartError:
            raise
        except Exception as error:
            failures.append(error)
            continue
        if _largest(before, after) > 0:
            return rerun
        fallback = fallback or rerun
    # The experiment will say that its rows change nothing.
    if fallback is not None:
        return fallback
    failures.sort(key=lambda error: not isinstance(error, CannotRerunError))
    raise (failures or [RefusedError("no module of the model holds its weights")])[0]


# An attribute of the copies that a Rerun makes.
COPY_MARK = "_qkeel_copy_for_rerun"


class _EnoughError(BaseException):
    """Ends a rerun after the calls that were wanted."""


@final
class Rerun:
    """Repeats one module call with other weights and inputs, and reads the logits of one site in it.

    Args:
        model: the full model.
        site: the site.
        frame: the module call that is repeated.
        calls: the calls of the site.
        readers: the readers of the logits of these calls.
        parameters: the weights that change, by name.
        on_copy: whether a deep copy of the module runs instead of the module itself.
    """

    #: the logits with the known weights as they are, which every change is compared with
    base: Logits | None = None

    def __init__(
        self,
        model: nn.Module,
        site: AttentionSite,
        frame: ModuleCall,
        calls: Sequence[RecordedCall],
        readers: Sequence[LogitReader],
        parameters: Mapping[str, nn.Parameter],
        *,
        on_copy: bool,
    ) -> None:
        assert frame.given is not None
        self.frame, self._given = frame, frame.given
        self._recorded, self._readers = calls, readers
        self._numbers = [call.positions[id(frame)] for call in calls]
        self._spread = spread(model)
        self._parameters, self.module = dict(parameters), frame.module
        if on_copy:
            # All other parameters are shared with the model, not copied.
            memo = {id(p): p for p in model.parameters()}
            for name, p in parameters.items():
                self._parameters[name] = nn.Parameter(p.detach(), p.requires_grad)
                memo[id(p)] = self._parameters[name]
            self.module = copy.deepcopy(frame.module, memo)
            # It holds weights of the model's until a garbage collection, and whoever
            # looks through all live modules must not take it for the model.
            vars(self.module)[COPY_MARK] = True
        names = {id(module): name for name, module in modules_of(frame.module).items()}
        within = {name_of_call(call.captured, names) for call in calls}
        self._layouts = (
            {} if site.layout is None else dict.fromkeys(within, site.layout)
        )
        heads = (site.n_heads, site.n_kv_heads)
        self._key_heads = dict.fromkeys(within, heads) if site.key_heads is None else {}
        self._undo: Callable[[], None] = lambda: None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A context in which the module can run; afterwards it is as it was."""
        with undisturbed(self.module) as self._undo:
            yield

    def check(self) -> None:
        """Raises CannotRerunError unless the module computes the same logits as in the model's pass, or, if they are
        random, the same in every run."""
        first, recorded = self.logits({}), [x.recorded for x in self._readers]
        if not (_alike(first, recorded) or _alike(first, self.logits({}))):
            raise CannotRerunError("running their modules again gave other logits")

    def logits(
        self, weights: Weights, inputs: Mapping[int, Tensor] | None = None
    ) -> Logits:
        """The logits of the site's calls with these weights, and with other inputs, by their number, if given."""
        number = itertools.count()

        def copied(x: Tensor) -> Tensor:
            return (inputs or {}).get(next(number), x).detach().clone()

        calls = self._calls(*self._given.changed(copied), weights)
        return [reader(call) for reader, call in zip(self._readers, calls)]

    def inputs_of_heads(self) -> dict[int, Tensor]:
        """The inputs, with their numbers, from which q or k was computed in the model's pass."""
        operands = [
            x.grad_fn
            for call in self._recorded
            for pair in products_of_call(call.captured.call)
            for x in pair
            if x is not None and x.grad_fn is not None
        ]
        behind = reached(operands, nodes_of(self.frame.inputs))
        # A tensor that is passed twice is one input.
        inputs = {id(x): x for x in self.frame.inputs}.values()
        return {
            i: x.detach()
            for i, x in enumerate(inputs)
            if x.grad_fn in behind
            or (self.frame.is_outermost and x.is_floating_point())
        }

    def inputs_after(
        self, weights: Weights, attention: nn.Module
    ) -> dict[str, tuple[nn.Module, Tensor]]:
        """The modules without submodules inside the attention module that run after its attention call, by name, in
        order, with their first inputs."""
        inputs: dict[str, tuple[nn.Module, Tensor]] = {}
        calls: list[Seen] = []
        inside = {id(module) for module in attention.modules()}
        with ExitStack() as undo:
            for name, module in modules_of(self.frame.module).items():
                if id(module) not in inside or submodules_of(module):
                    continue

                def keep(
                    _: nn.Module,
                    args: tuple[object, ...],
                    name: str = name,
                    module: nn.Module = module,
                ) -> None:
                    is_after = len(calls) == len(self._numbers)
                    if is_after and args and isinstance(args[0], Tensor):
                        inputs.setdefault(name, (module, args[0].detach().clone()))

                copied = self.module.get_submodule(name)
                undo.callback(copied.register_forward_pre_hook(keep).remove)
            args, kwargs = self._given.changed(lambda x: x.detach().clone())
            self._calls(args, kwargs, weights, calls)
        return inputs

    def _calls(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        weights: Weights,
        whole: list[Seen] | None = None,
    ) -> list[Seen]:
        """Runs the module and returns the site's calls. With `whole`, they are added to that list while the module runs
        to its end."""
        calls = [] if whole is None else whole
        count = itertools.count()

        def note(captured: CapturedCall) -> None:
            if next(count) in self._numbers:
                calls.append(captured.call)
            # All processes have to make the same calls of each other, so none of them may stop early.
            is_complete = len(calls) == len(self._numbers)
            if is_complete and whole is None and not self._spread:
                raise _EnoughError

        watcher = CaptureMode(self.module, note, layouts=self._layouts)
        watcher.key_heads = self._key_heads
        self._undo()
        alone = (
            nullcontext()
            if self._spread or dist.world() == 1
            else CollectiveMode(_refuse_collective)
        )
        with (
            self._given.as_given(),
            self._exchanged(weights),
            alone,
            suppress(_EnoughError),
        ):
            forward(
                self.module,
                watcher,
                args,
                dict(kwargs),
                graph=False,
                together=self._spread,
            )
        if len(calls) < len(self._numbers):
            raise CannotRerunError(
                "running their modules again made other attention calls"
            )
        return calls

    @contextmanager
    def _exchanged(self, weights: Weights) -> Iterator[None]:
        """A context in which the module's parameters hold other values, without a new version."""
        before = {name: self._parameters[name].data for name in weights}
        try:
            for name, value in weights.items():
                self._parameters[name].data = value
            yield
        finally:
            for name, value in before.items():
                self._parameters[name].data = value


def _refuse_collective(_ranks: tuple[int, ...], operator: str) -> None:
    raise CannotRerunError(
        f"{operator} combines values from several processes, and only one of them would repeat it"
    )


def name_of_call(captured: CapturedCall, names: Mapping[int, str]) -> str:
    """The name of a call where modules, by id, have other names."""
    name = names.get(id(captured.frame.module), "")
    return name_of(dataclasses.replace(captured.frame, name=name), captured.ordinal)


def products_of_call(call: Seen) -> Sequence[tuple[Tensor | None, Tensor | None]]:
    """The pairs of q and k whose products add up to the logits of a call."""
    return (
        call.products
        if isinstance(call, ScoresCall) and call.products
        else ((call.q, call.k),)
    )


# --- Reading logits


class LogitReader:
    """Reads up to 32 rows of the logits [b h t s] of a call, with NaN where a key is hidden. `recorded` holds those of
    the call in the model's pass."""

    def __init__(self, call: Seen) -> None:
        t = call.query_shape[1]

        def shown(rows: slice) -> int:
            self._rows = rows
            return int(self(call).nan_to_num(0.0).count_nonzero())

        # Some rows may be padding, so the end with more nonzero logits is read.
        ends = [slice(max(0, t - _ROWS), t), slice(0, min(t, _ROWS))]
        self._rows = max(ends, key=shown)
        self.recorded = self(call)

    @torch.no_grad()
    def __call__(self, call: Seen) -> Tensor:
        rows, visible = self._rows, None
        if isinstance(call, ScoresCall):
            z, dtype = call.logits[:, :, rows], call.logits.dtype
            z = z.to(wide(dtype))
            if call.hidden is not None:
                hidden = call.hidden
                visible = ~(hidden[:, :, rows] if hidden.shape[2] > 1 else hidden)
        else:
            q, k = call.encoded()
            keys, dtype = slice(0, k.shape[2]), call.q.dtype
            z = call.scores(q[:, :, rows], k, rows, keys)
            visible = call.visible(rows, keys)
        shows = z.isfinite() & (z > torch.finfo(dtype).min / 2)
        return z.masked_fill(
            ~(shows if visible is None else shows & visible), torch.nan
        )


def _alike(first: Logits, second: Logits) -> bool:
    """True if the logits differ by no more than rounding, and the same keys are hidden."""
    return all(
        a.shape == b.shape
        and torch.equal(a.isfinite(), b.isfinite())
        and _largest([a], [b]) <= 1e-2 * _largest([a])
        for a, b in zip(first, second)
    )


def _largest(logits: Logits, others: Logits | None = None) -> float:
    """The largest absolute logit, or the largest difference from others, where no key is hidden."""
    return float(_by_head(logits, others).max())


def _by_head(logits: Logits, others: Logits | None = None) -> Tensor:
    """The largest absolute logit [h] of each head, or difference from others; heads may be in several calls."""
    if others is not None:
        logits = [b - a for a, b in zip(logits, others, strict=True)]
    return torch.cat([z.abs().nan_to_num(0.0).amax((0, 2, 3)) for z in logits])


# --- The experiment on one site


@final
class _Experiment:
    """Compares the logits of a site after changes of its weights and inputs."""

    def __init__(
        self, site: AttentionSite, weights: ChangedWeights, rerun: Rerun
    ) -> None:
        self._site, self._weights, self._rerun = site, weights, rerun
        assert rerun.base is not None
        self._base = rerun.base
        dtypes = [torch.finfo(p.dtype) for p in weights.parameters.values()]
        least = min(dtypes, key=lambda dtype: dtype.bits)
        steps = 4 if least.bits < 32 else 64
        #: the largest change of a logit that rounding may cause
        self._rounding = steps * least.eps * _largest(self._base)

    def doubt_heads(self, *, brief: bool = False) -> str:
        """Rows that change the logits of heads other than their own, or of no head. If `brief`, only half of the heads
        are told from the others."""
        for slices in (self._site.query, self._site.key):
            patterns = [*_patterns(slices, self._site)]
            for chosen, expected in patterns[: 1 if brief else None]:
                after = self._rerun.logits(self._weights.rotated(chosen))
                moved = (_by_head(self._base, after) > self._rounding).tolist()
                if moved != expected:
                    names = ", ".join(dict.fromkeys(s.parameter for s, _ in chosen))
                    return (
                        f"changing the rows of {names} that produce the logits of {_heads(expected)} changed the "
                        f"logits of {_heads(moved)}"
                    )
        return ""

    def doubt_unknown_weights(self) -> str:
        """An additive part of the logits that comes from other weights.

        With all known weights of one side set to zero, the logits must not depend on the module's input in the way of a
        product: from query to query, or from key to key.
        """
        generator = torch.Generator().manual_seed(0)
        inputs = self._rerun.inputs_of_heads()
        for i, x in inputs.items():
            noise = torch.randn(x.shape, generator=generator).to(x)
            inputs[i] = x + noise * x.float().square().mean().sqrt().to(x)
        if not inputs:
            return ""
        changed = self._rerun.logits(self._weights.filled(), inputs)
        limit = max(1e-3 * _largest(self._base, changed), 4 * self._rounding)
        site = self._site
        sides = [
            ("the known query rows", " from query to query", site.query, 2),
            ("the known key rows", " from key to key", site.key, 3),
        ]
        if site.normed:
            # A norm may add a constant to zeros, so nothing remains only if all weights before it are zero.
            sides = [("all known rows", "", [*site.query, *site.key], None)]
        for rows, direction, slices, dim in sides:
            zeros = self._weights.changed([(s, None) for s in slices], torch.zeros_like)
            before, after = self._rerun.logits(zeros), self._rerun.logits(zeros, inputs)
            if dim is not None:
                # A constant in place of a query gives one value per key, which is not a product.
                before, after = (
                    [z - z.nanmean(dim, keepdim=True) for z in logits]
                    for logits in (before, after)
                )
            if _largest(before, after) > limit:
                return (
                    f"with {rows} set to zero, its logits still change{direction} with its input: part of them comes "
                    "from other weights"
                )
        return ""

    def disproportion(self) -> str:
        """How the logits fail to scale with the rows of q or of k, or "".

        A clip multiplies rows of q and of k, and the bound on a step relies on the same assumption, namely that logits
        are a product: multiplied by c, they must be a constant plus c times another constant.
        """
        site = self._site
        if site.normed:
            return ""
        query = unique_slices(term.query[-1] for term in site.terms)
        key = unique_slices(term.key[-1] for term in site.terms)
        both = unique_slices([*query, *key])
        sides = [("query", query, 1.0), ("key", key, 1.0)]
        noise = 64 * self._rounding
        is_only_path = len(site.query) + len(site.key) <= 2
        if len(both) < len(query) + len(key):
            # If q and k are computed from the same rows, each side gets the square root of the factor.
            sides = [("query and key", both, 0.5)]
        for words, slices, power in sides:
            most = max(s.n for s in slices)
            # Every second head, because a quantisation step is shared by all heads.
            heads = range(0, most, 2)
            chosen = [(s, heads) for s in slices if s.n == most]
            four, sixteen = (
                self._rerun.logits(self._weights.multiplied(chosen, c**power))
                for c in (4.0, 16.0)
            )
            first = [4 * (z - base) for base, z in zip(self._base, four)]
            second = [z - four_z for four_z, z in zip(four, sixteen)]
            bent, grown = _by_head(first, second), _by_head(second)
            scales = torch.tensor(_expected(site, most, heads)).to(grown.device)
            is_bent = (bent > 1e-2 * grown) & (bent > noise)
            # A logit of several products may be dominated by another one of them.
            is_bent |= is_only_path & (grown <= self._rounding)
            if bool(torch.where(scales, is_bent, grown > noise).any()):
                return (
                    f"multiplied by {4.0**power:g} and by {16.0**power:g}, the {words} rows of every second head did "
                    "not change its logits, and no others, in proportion: these are not a plain product of queries "
                    "and keys"
                )
        return ""


def _patterns(
    slices: Sequence[HeadSlice], site: AttentionSite
) -> Iterator[tuple[list[RowsOfHeads], list[bool]]]:
    """Yields rows to change (rows of some heads, and each weight as a whole), and the heads whose logits must change.

    This is group testing: every head is in half of the changes, and no two heads are in the same half. If a row also
    affects another head, there is therefore a change that contains the row but not that head.
    """
    for n in sorted({s.n for s in slices if s.n > 1}):
        changes = 2
        while math.comb(changes, changes // 2) < n:
            changes += 1
        codes = [*itertools.combinations(range(changes), changes // 2)][:n]
        for change in range(changes):
            heads = [h for h in range(n) if change in codes[h]]
            if heads:
                rows: list[RowsOfHeads] = [(s, heads) for s in slices if s.n == n]
                yield rows, _expected(site, n, heads)
    for s in slices:
        if s.n == 1 or len(slices) > 1:
            yield [(s, None)], [True] * site.n_heads


def _expected(site: AttentionSite, n: int, chosen: Sequence[int]) -> list[bool]:
    """For each query head, whether it uses one of the chosen parts of a weight with n parts."""
    return [h in chosen for h in site.used(n).tolist()]


def _heads(flags: Sequence[bool]) -> str:
    heads = [str(h) for h, flag in enumerate(flags) if flag]
    listed = ", ".join(heads[:6]) + (", …" if len(heads) > 6 else "")
    return f"{'heads' if len(heads) > 1 else 'head'} {listed}" if heads else "no head"


# --- Changed weights


@final
class ChangedWeights:
    """Copies of a site's weights in which the rows of some heads are changed.

    Rows that are all zero, as in an adapter before its first step, first get small random values, because a factor of
    zero hides every change of the other factor. So do the last weights of a product of several, because an adapter may
    also start from two orthogonal matrices.
    """

    def __init__(self, model: nn.Module, site: AttentionSite) -> None:
        self._slices = [*site.query, *site.key]
        names = [name for s in self._slices for name in (s.parameter, s.bias) if name]
        self.parameters = {name: model.get_parameter(name) for name in names}
        self._base = {name: p.detach() for name, p in self.parameters.items()}
        self._filled: set[str] = set()
        outer = [
            path[-1]
            for term in site.terms
            for path in (term.query, term.key)
            if len(path) > 1
        ]
        generator = torch.Generator().manual_seed(0)
        for s in self._slices:
            weight = self._base[s.parameter]
            index = s.index.to(weight.device)
            if not any(s is last for last in outer):
                if bool(weight.ne(0).all()):
                    continue
                index = index[~s.rows_of(weight)[index].ne(0).flatten(1).any(1)]
            if index.numel():
                weight = weight.clone()
                rows = s.rows_of(weight)
                shape = (*index.shape, rows.shape[1])
                noise = torch.randn(shape, generator=generator) * rows.shape[1] ** -0.5
                rows[index] = noise.to(rows)
                self._base[s.parameter] = weight
                self._filled.add(s.parameter)

    def filled(self) -> dict[str, Tensor]:
        """The weights in which no head is zero, with which all changed weights are compared."""
        return {name: self._base[name] for name in self._filled}

    def rotated(self, chosen: Iterable[RowsOfHeads]) -> dict[str, Tensor]:
        """Moves each row of the chosen heads to the place of the next row of its head; if a head has a single row, its
        sign is changed.

        Rows from which both queries and keys are computed are scaled instead, because rotating both leaves their
        product unchanged.
        """
        weights = self.filled()
        for s, heads in chosen:
            uses = [x for x in self._slices if s.parameter == x.parameter and s.same(x)]

            def rotate(rows: Tensor, uses: int = len(uses)) -> Tensor:
                n = rows.shape[1]
                if uses > 1:
                    factors = 0.5 + torch.arange(n, device=rows.device) % 2
                    return rows * factors.to(rows).view(-1, *[1] * (rows.ndim - 2))
                return rows.roll(1, dims=1) if n > 1 else -rows

            weights |= self.changed([(s, heads)], rotate, weights)
        return weights

    def multiplied(
        self, chosen: Iterable[RowsOfHeads], factor: float
    ) -> dict[str, Tensor]:
        """Multiplies the rows and biases of the chosen heads by a factor."""
        return self.changed(chosen, lambda rows: rows * factor)

    def changed(
        self,
        chosen: Iterable[RowsOfHeads],
        change: Callable[[Tensor], Tensor],
        weights: Weights | None = None,
    ) -> dict[str, Tensor]:
        """The weights after a change of rows [heads r …], and of the entries of a bias at the same indices. `weights`
        are those that were changed before."""
        changed = dict(self.filled() if weights is None else weights)
        for s, heads in chosen:
            for part in filter(None, (s, s.bias_of())):
                base = self._base[part.parameter]
                if changed.get(part.parameter, base) is base:
                    changed[part.parameter] = base.clone()
                index = part.index if heads is None else part.index[list(heads)]
                index = index.to(base.device)
                rows = part.rows_of(changed[part.parameter])
                rows[index] = change(part.rows_of(base)[index])
        return changed
