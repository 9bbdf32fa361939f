"""Verifies that the known weights of a site determine its logits, head by head.

The smallest module that holds the projections and the attention call runs again with the inputs that it had, and with
the rows of some heads changed; exactly the logits of these heads must change. Rows are *rotated* within their head
(row i takes the place of row i + 1), not scaled: a norm over all heads keeps its value then, so that no other head
moves. Each head is in half of the changes and no two heads are in the same half, so that about log₂ h + 1 runs tell
every head from every other one.

The runs are made on a deep copy of the module, whose parameters share the model's memory, so that whatever the module
and its objects store is the copy's. Where no copy can be made, the module itself runs and is put back.
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
from qkeel.capture.example import GivenArguments, ModuleCall, tensors, undisturbed
from qkeel.capture.intercept import CapturedCall, CaptureMode, name_of
from qkeel.errors import RefusedError, caution
from qkeel.functional.norms import wide
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.heads.walk import nodes_of, projected_inputs
from qkeel.patching.modes import CollectiveMode, modules_of
from qkeel.sites.run import forward, spread

Weights = Mapping[str, Tensor]
RowsOfHeads = tuple[
    HeadSlice, Sequence[int] | None
]  # the rows of a weight, and some of their heads or None for all
_ROWS = 32  # enough rows of logits to see whether a head changes


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
        if not calls:
            return dataclasses.replace(
                site, unverified="the pass did not contain its attention call"
            )
        logits = [VisibleLogits(call.captured.call) for call in calls]
        heads = sum(reader.recorded.shape[1] for reader in logits)
        if heads != site.n_heads:
            return dataclasses.replace(
                site,
                unverified=f"the pass showed {heads} heads instead of {site.n_heads}",
            )
        if not any(bool(reader.recorded.isfinite().any()) for reader in logits):
            return dataclasses.replace(
                site, unverified="every key is hidden from its queries in this example"
            )
        if any(
            len({s.parameter for s in path}) < len(path)
            for t in site.terms
            for path in (t.query, t.key)
        ):
            # Changed rows would reach the logits in two ways, by which every head moves.
            self._by_gradients[site.name] = (
                "one weight is used twice on the way to a logit"
            )
            return site
        try:
            weights = ChangedWeights(self.model, site)
            rerun = _opened_rerun(self.model, site, calls, logits, weights)
        except CannotRerunError as error:
            self._by_gradients[site.name] = str(error)
            return site
        except dist.ApartError:
            raise
        except Exception as error:
            return dataclasses.replace(
                site,
                unverified=f"its module cannot run again: {type(error).__name__}: {error}",
            )
        kind = _kind(site, rerun.frame, weights)
        verified, module = self._alike.get(kind, (None, None))
        if verified is not None and module is rerun.frame.module:
            # The same weights in a second call, which the first call's result would reach as well.
            return dataclasses.replace(site, unscaled=verified.unscaled)
        with rerun.opened():
            try:
                experiment = _Experiment(site, weights, rerun)
                doubt = experiment.doubt(brief=verified is not None)
                unscaled = (
                    "" if doubt or verified is not None else experiment.disproportion()
                )
            except dist.ApartError:
                raise
            except Exception as error:
                doubt, unscaled = (
                    f"its module cannot run again: {type(error).__name__}: {error}",
                    "",
                )
        if verified is not None:
            unscaled = verified.unscaled
        site = dataclasses.replace(
            site, unverified=doubt, unscaled="" if doubt else unscaled
        )
        if not doubt:
            self._alike.setdefault(kind, (site, rerun.frame.module))
        return site

    def tell(self) -> None:
        """Says once which sites were verified by gradients alone."""
        if self._by_gradients:
            names = ", ".join(
                name or type(self.model).__name__ for name in self._by_gradients
            )
            reason = next(iter(self._by_gradients.values()))
            caution(
                f"the weights of each head of {names} are known from gradients alone: {reason}"
            )


def _kind(site: AttentionSite, frame: ModuleCall, weights: ChangedWeights) -> Hashable:
    """Equal for sites whose verification would show the same: modules of one class with the same rows of weights of the
    same names."""
    start = len(frame.name) + 1 if frame.name else 0
    rows = [
        (
            s.parameter[start:],
            s.axis,
            s.bias and s.bias[start:],
            tuple(s.index.flatten().tolist()),
            s.n,
        )
        for term in site.terms
        for s in (*term.query, *term.key)
    ]
    sides = tuple((len(term.query), len(term.key)) for term in site.terms)
    layout = None if site.layout is None else (site.layout.groups, site.layout.sizes)
    geometry = (site.n_heads, site.n_kv_heads, site.key_heads, site.normed, layout)
    return type(frame.module), tuple(rows), sides, geometry, tuple(weights.empty)


# --- Running a module again


def _opened_rerun(
    model: nn.Module,
    site: AttentionSite,
    calls: Sequence[RecordedCall],
    logits: Sequence[VisibleLogits],
    weights: ChangedWeights,
) -> Rerun:
    """The rerun of the smallest module call around an attention call in which the known weights change its logits.

    Raises:
        CannotRerunError: no module call computes the same logits when it is repeated.
        Exception: no module call can be repeated at all; this is the error of the innermost one.
    """
    needed = {id(p) for p in weights.parameters.values()}
    frames = [
        frame
        for frame in calls[0].captured.frame.line()
        if frame.given is not None
        and needed <= {id(p) for p in frame.module.parameters()}
    ]
    failures: list[Exception] = []
    fallback = None
    for frame, on_copy in itertools.product(frames, (True, False)):
        try:
            rerun = Rerun(
                model, site, frame, calls, logits, weights.parameters, on_copy=on_copy
            )
            with rerun.opened():
                rerun.check()
                base = rerun.logits(weights.filled())
                turned = rerun.logits(
                    weights.rotated([(s, None) for s in (*site.query, *site.key)])
                )
        except dist.ApartError:
            raise
        except Exception as error:
            failures.append(error)
            continue
        if any(_largest(b - a) > 0 for a, b in zip(base, turned)):
            return rerun
        fallback = fallback or rerun
    if fallback is not None:  # the experiment will say that its rows change nothing
        return fallback
    unlike = [error for error in failures if isinstance(error, CannotRerunError)]
    raise (
        unlike or failures or [RefusedError("no module of the model holds its weights")]
    )[0]


COPY_MARK = "_qkeel_copy_for_rerun"  # an attribute of the copies that a Rerun makes


class _EnoughError(BaseException):
    """Ends a rerun after the calls that were wanted."""


@final
class Rerun:
    """Repeats one module call with other weights and inputs, and reads the logits of one site in it.

    Args:
        model: the whole model.
        site: the site.
        frame: the module call that is repeated.
        calls: the calls of the site.
        logits: readers of the logits of these calls.
        parameters: the weights that change, by name.
        on_copy: whether a deep copy of the module runs instead of the module itself.
    """

    def __init__(
        self,
        model: nn.Module,
        site: AttentionSite,
        frame: ModuleCall,
        calls: Sequence[RecordedCall],
        logits: Sequence[VisibleLogits],
        parameters: Mapping[str, nn.Parameter],
        *,
        on_copy: bool,
    ) -> None:
        assert frame.given is not None
        self.frame, self.given = frame, frame.given
        self._readers = logits
        self._wanted = [call.positions[id(frame)] for call in calls]
        self._spread = spread(model)
        self._parameters, self.module = dict(parameters), frame.module
        if on_copy:
            shared = {id(p): p for p in model.parameters()}
            for name, p in parameters.items():
                self._parameters[name] = nn.Parameter(p.detach(), p.requires_grad)
                shared[id(p)] = self._parameters[name]
            self.module = copy.deepcopy(frame.module, shared)
            # It holds weights of the model's until a garbage collection, and whoever
            # looks through all live modules must not take it for the model.
            vars(self.module)[COPY_MARK] = True
        names = {id(module): name for name, module in modules_of(frame.module).items()}
        within = {name_of_call(call.captured, names) for call in calls}
        self._layouts = {
            name: site.layout for name in within if site.layout is not None
        }
        heads = (site.n_heads, site.n_kv_heads)
        self._key_heads = dict.fromkeys(within, heads) if site.key_heads is None else {}
        self._undo: Callable[[], None] = lambda: None

    @contextmanager
    def opened(self) -> Iterator[Rerun]:
        """A context in which the module can run; afterwards it is as it was."""
        with undisturbed(self.module) as self._undo:
            yield self

    def check(self) -> None:
        """Raises CannotRerunError unless the module computes the same logits as in the model's pass, or random ones
        that are the same in every run."""
        before = self._streams()
        first = self.logits({})
        random_numbers = not all(map(torch.equal, self._streams(), before))
        recorded = [reader.recorded for reader in self._readers]
        if _alike(first, recorded) or (
            random_numbers and _alike(first, self.logits({}))
        ):
            return
        raise CannotRerunError("running their modules again gave other logits")

    def _streams(self) -> list[Tensor]:
        devices = {x.device for x in self.frame.inputs if x.is_cuda}
        return [
            torch.get_rng_state(),
            *(torch.cuda.get_rng_state(device) for device in devices),
        ]

    def logits(
        self, weights: Weights, inputs: Mapping[int, Tensor] | None = None
    ) -> list[Tensor]:
        """The logits of the site's calls with these weights, and with other inputs, by their number, if given."""
        found = self._captured(weights, inputs)
        return [
            reader(call.call) for reader, call in zip(self._readers, found, strict=True)
        ]

    def projected_inputs(self) -> list[tuple[int, Tensor]]:
        """The floating-point inputs, with their numbers, that depend on the model's input and that a projection
        multiplies on the way to q or k."""
        leaves: list[Tensor] = []

        def tracked(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            # Not a leaf, because the module may write to its input.
            leaves.append(x.detach().requires_grad_().clone())
            return leaves[-1]

        args, kwargs = self.given.changed(tracked)
        calls = self._called(args, kwargs, {}, probing=True)
        products = [pair for c in calls for pair in products_of_call(c.call)]
        starts = [
            x.grad_fn
            for pair in products
            for x in pair
            if x is not None and x.grad_fn is not None
        ]
        behind = projected_inputs(starts, nodes_of(leaves))
        numbered = enumerate(tensors((args, kwargs)))
        # Inputs without a gradient, such as tables of positions, don't depend on the model's input, unless they are it.
        dynamic = {
            i
            for i, x in enumerate(self.frame.inputs)
            if x.requires_grad or self.frame.is_outermost
        }
        return [
            (i, x.detach())
            for i, x in numbered
            if i in dynamic and x.grad_fn is not None and x.grad_fn in behind
        ]

    def inputs_after(
        self, weights: Weights, wanted: Mapping[str, nn.Module]
    ) -> dict[str, Tensor]:
        """The first inputs of submodules, by name, that run after the last attention call of the site."""
        inputs: dict[str, Tensor] = {}
        reached: list[CapturedCall] = []
        with ExitStack() as undo:
            for name in wanted:

                def keep(
                    _module: nn.Module, args: tuple[object, ...], name: str = name
                ) -> None:
                    if (
                        len(reached) == len(self._wanted)
                        and args
                        and isinstance(args[0], Tensor)
                    ):
                        inputs.setdefault(name, args[0].detach().clone())

                undo.callback(
                    self.module.get_submodule(name)
                    .register_forward_pre_hook(keep)
                    .remove
                )
            args, kwargs = self.given.changed(lambda x: x.detach().clone())
            self._called(args, kwargs, weights, reached=reached, whole=True)
        return inputs

    def _captured(
        self, weights: Weights, inputs: Mapping[int, Tensor] | None
    ) -> list[CapturedCall]:
        args, kwargs = self.given.changed(lambda x: x.detach().clone())
        if inputs is not None:
            others = {
                id(x): inputs[i]
                for i, x in enumerate(tensors((args, kwargs)))
                if i in inputs
            }
            replaced = GivenArguments(args, kwargs, ())
            args, kwargs = replaced.changed(lambda x: others.get(id(x), x))
        return self._called(args, kwargs, weights)

    def _called(
        self,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        weights: Weights,
        *,
        probing: bool = False,
        reached: list[CapturedCall] | None = None,
        whole: bool = False,
    ) -> list[CapturedCall]:
        calls: list[CapturedCall] = [] if reached is None else reached
        count = itertools.count()

        def note(captured: CapturedCall) -> None:
            if next(count) in self._wanted:
                calls.append(captured)
            # All processes have to make the same calls of each other, so none of them may stop early.
            if len(calls) == len(self._wanted) and not (whole or self._spread):
                raise _EnoughError

        watcher = CaptureMode(self.module, note, layouts=self._layouts, probing=probing)
        watcher.key_heads = self._key_heads
        self._undo()
        alone = (
            nullcontext()
            if self._spread or dist.world() == 1
            else CollectiveMode(_refuse_collective)
        )
        with (
            self.given.as_given(),
            self._exchanged(weights),
            alone,
            suppress(_EnoughError),
        ):
            forward(
                self.module,
                watcher,
                args,
                dict(kwargs),
                graph=probing,
                together=self._spread,
            )
        if len(calls) < len(self._wanted):
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
    frame = dataclasses.replace(
        captured.frame, name=names.get(id(captured.frame.module), "")
    )
    return name_of(frame, captured.ordinal)


def products_of_call(call: Seen) -> Sequence[tuple[Tensor | None, Tensor | None]]:
    """The pairs of q and k whose products add up to the logits of a call."""
    return (
        call.products
        if isinstance(call, ScoresCall) and call.products
        else ((call.q, call.k),)
    )


def _alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """True if the logits differ by no more than rounding, and the same keys are hidden."""
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return False
        size = float(a.abs().nan_to_num(0.0).max())
        if float(difference(a, b).max()) > 1e-2 * size:
            return False
    return True


# --- Reading logits


class VisibleLogits:
    """Reads up to 32 rows of the logits [b h t s] of a call, with NaN where a key is hidden. `recorded` holds those of
    the call in the model's pass."""

    def __init__(self, call: Seen) -> None:
        t = call.query_shape[1]
        last, first = slice(max(0, t - _ROWS), t), slice(0, min(t, _ROWS))
        self._rows = last
        self.recorded = self(call)
        # Some rows may be padding, so the end with more nonzero logits is read.
        if t > _ROWS and (isinstance(call, ScoresCall) or call.mask is not None):
            recorded, self._rows = self.recorded, first
            self.recorded = self(call)
            if int(recorded.nan_to_num(0.0).count_nonzero()) >= int(
                self.recorded.nan_to_num(0.0).count_nonzero()
            ):
                self._rows, self.recorded = last, recorded

    @torch.no_grad()
    def __call__(self, call: Seen) -> Tensor:
        rows = self._rows
        if isinstance(call, ScoresCall):
            z, visible, dtype = call.logits[:, :, rows], None, call.logits.dtype
            z = z.to(wide(z.dtype))
            if call.hidden is not None:
                visible = ~(
                    call.hidden[:, :, rows] if call.hidden.shape[2] > 1 else call.hidden
                )
        else:
            q, k = call.encoded()
            keys = slice(0, k.shape[2])
            z, visible, dtype = (
                call.scores(q[:, :, rows], k, rows, keys),
                call.visible(rows, keys),
                call.q.dtype,
            )
        seen = z.isfinite() & (z > torch.finfo(dtype).min / 2)
        return z.masked_fill(~(seen if visible is None else seen & visible), torch.nan)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """|b - a|, or zero where a key is hidden in either."""
    return (b - a).abs().nan_to_num(0.0)


def _largest(change: Tensor) -> float:
    return float(change.abs().nan_to_num(0.0).max())


# --- The experiment on one site


@final
class _Experiment:
    """Compares the logits of a site after changes of its weights and inputs."""

    def __init__(
        self, site: AttentionSite, weights: ChangedWeights, rerun: Rerun
    ) -> None:
        self._site, self._weights, self._rerun = site, weights, rerun
        self._base = rerun.logits(weights.filled())
        least = min(
            weights.parameters.values(), key=lambda p: torch.finfo(p.dtype).bits
        ).dtype
        steps = 4 if torch.finfo(least).bits < 32 else 64
        #: the largest change of a logit that rounding may cause
        self._rounding = (
            steps
            * torch.finfo(least).eps
            * max(float(z.abs().nan_to_num(0.0).max()) for z in self._base)
        )

    def doubt(self, *, brief: bool) -> str:
        """Why the weights are not confirmed, or "". If `brief`, only half of the heads are told from the others."""
        return self._doubt_heads(brief=brief) or (
            "" if brief else self._doubt_unknown_weights()
        )

    def _doubt_heads(self, *, brief: bool) -> str:
        """Rows that change the logits of heads other than their own, or of no head."""
        for slices in (self._site.query, self._site.key):
            patterns = [*_patterns(slices, self._site)]
            for chosen, expected in patterns[:1] if brief else patterns:
                moved = self._heads_that_change(
                    self._rerun.logits(self._weights.rotated(chosen))
                )
                if moved != expected:
                    return _words(chosen, moved, expected)
        return ""

    def _doubt_unknown_weights(self) -> str:
        """An additive part of the logits that comes from other weights.

        With all known weights of one side set to zero, the logits must not depend on the module's input in the way of a
        product: from query to query, or from key to key.
        """
        projected = self._rerun.projected_inputs()
        if not projected:
            return ""
        generator = torch.Generator().manual_seed(0)
        inputs: dict[int, Tensor] = {}
        noisy: dict[int, Tensor] = {}  # an input that is passed twice stays one
        for i, x in projected:
            if x.data_ptr() not in noisy:
                noise = torch.randn(x.shape, generator=generator).to(x)
                noisy[x.data_ptr()] = x + noise * x.float().square().mean().sqrt().to(x)
            inputs[i] = noisy[x.data_ptr()]
        changed = self._rerun.logits(self._weights.filled(), inputs)
        scale = [_largest(b - a) for a, b in zip(self._base, changed)]
        site = self._site
        sides: list[tuple[str, str, list[HeadSlice], int | None]] = [
            ("the known query rows", " from query to query", site.query, 2),
            ("the known key rows", " from key to key", site.key, 3),
        ]
        if site.normed:  # a norm may add a constant to zeros, so nothing remains only if all weights before it are zero
            sides = [("all known rows", "", [*site.query, *site.key], None)]
        for rows, where, slices, dim in sides:
            zeros = self._weights.zeroed(slices)
            before, after = self._rerun.logits(zeros), self._rerun.logits(zeros, inputs)
            if dim is not None:
                # A constant in place of a query gives one value per key, which is not a product.
                before, after = (
                    [z - z.nanmean(dim, keepdim=True) for z in zs]
                    for zs in (before, after)
                )
            noise = 4 * self._rounding
            if any(
                _largest(b - a) > max(1e-3 * s, noise)
                for a, b, s in zip(before, after, scale, strict=True)
            ):
                return (
                    f"with {rows} set to zero, its logits still change{where} with its input: part of them comes from "
                    "other weights"
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
        query, key = (
            _unique_slices(t.query[-1] for t in site.terms),
            _unique_slices(t.key[-1] for t in site.terms),
        )
        shared = any(
            s.parameter == other.parameter and s.same(other)
            for s in query
            for other in key
        )
        # If q and k are computed from the same rows, each side gets the square root of the factor.
        sides = (
            [("query and key", _unique_slices([*query, *key]), 0.5)] if shared else []
        )
        sides += [] if shared else [("query", query, 1.0), ("key", key, 1.0)]
        several = len(site.query) + len(site.key) > 2
        for words, slices, power in sides:
            most = max(s.n for s in slices)
            # Half of the heads at a time, because a quantisation step is shared by all heads.
            for first in range(min(2, most)):
                heads = list(range(first, most, min(2, most)))
                chosen: list[RowsOfHeads] = [(s, heads) for s in slices if s.n == most]
                four, sixteen = (
                    self._rerun.logits(self._weights.multiplied(chosen, c**power))
                    for c in (4.0, 16.0)
                )
                bent = _by_head(
                    [
                        (two - one) - 4 * (one - z)
                        for z, one, two in zip(self._base, four, sixteen)
                    ]
                )
                grown = _by_head([two - one for one, two in zip(four, sixteen)])
                if doubt := self._bent(
                    _expected(site, most, set(heads)), bent, grown, several=several
                ):
                    return (
                        f"multiplying the {words} rows of {_heads(heads)} by {4.0**power:g} and by {16.0**power:g} "
                        f"{doubt}: these logits are not a plain product of queries and keys"
                    )
        return ""

    def _bent(
        self, expected: Sequence[bool], bent: Tensor, grown: Tensor, *, several: bool
    ) -> str:
        noise = 64 * self._rounding
        for head, should in enumerate(expected):
            if should and not several and grown[head] <= self._rounding:
                return "left the logits as they were"
            if should and bent[head] > max(1e-2 * float(grown[head]), noise):
                return "did not change the logits in proportion"
            if not should and grown[head] > noise:
                return f"also changed the logits of head {head}"
        return ""

    def _heads_that_change(self, after: Sequence[Tensor]) -> list[bool]:
        changes = _by_head([z - a for a, z in zip(self._base, after, strict=True)])
        return (changes > self._rounding).tolist()


def _by_head(changes: Sequence[Tensor]) -> Tensor:
    """The largest change [h] of each head, whose logits may be in several calls [b h' t s]."""
    return torch.cat([z.abs().nan_to_num(0.0).amax((0, 2, 3)) for z in changes])


def _patterns(
    slices: Sequence[HeadSlice], site: AttentionSite
) -> Iterator[tuple[list[RowsOfHeads], list[bool]]]:
    """Yields rows to change (rows of some heads, and each weight as a whole), and the heads whose logits must change.

    This is group testing: every head is in half of the changes, and no two heads are in the same half. If a row also
    affects another head, there is therefore a change that contains the row but not that head.
    """
    per_head = [s for s in slices if s.n > 1]
    for n in sorted({s.n for s in per_head}):
        changes = 2
        while math.comb(changes, changes // 2) < n:
            changes += 1
        codes = list(
            itertools.islice(itertools.combinations(range(changes), changes // 2), n)
        )
        for change in range(changes):
            heads = [h for h in range(n) if change in codes[h]]
            if heads:
                yield (
                    [(s, heads) for s in per_head if s.n == n],
                    _expected(site, n, set(heads)),
                )
    for s in slices:
        if s.n == 1 or len(slices) > 1:
            yield [(s, None)], [True] * site.n_heads


def _unique_slices(slices: Iterable[HeadSlice]) -> list[HeadSlice]:
    unique: list[HeadSlice] = []
    for s in slices:
        if not any(
            s.parameter == other.parameter and s.same(other) for other in unique
        ):
            unique.append(s)
    return unique


def _expected(site: AttentionSite, n: int, chosen: set[int]) -> list[bool]:
    """For each query head, whether it uses one of the chosen parts of a weight with n parts."""
    return [h in chosen for h in site.used(n).tolist()]


def _words(
    chosen: Sequence[RowsOfHeads], moved: Sequence[bool], expected: Sequence[bool]
) -> str:
    names = ", ".join(dict.fromkeys(s.parameter for s, _ in chosen))
    heads, should = (
        [h for h, yes in enumerate(flags) if yes] for flags in (moved, expected)
    )
    return (
        f"changing the rows of {names} that produce the logits of {_heads(should)} changed the logits of "
        f"{_heads(heads)}"
    )


def _heads(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (", …" if len(numbers) > 6 else "")
    return (
        f"{'heads' if len(numbers) > 1 else 'head'} {shown}" if numbers else "no head"
    )


# --- Changed weights


@final
class ChangedWeights:
    """Copies of a site's weights in which the rows of some heads are changed.

    Heads whose rows are all zero, as in an adapter before its first step, first get small random rows, because a factor
    of zero hides every change of the other factor. The same is done for heads whose product with the preceding weight
    is zero, as when an adapter starts from two orthogonal matrices.

    Attributes:
        parameters: the weights and biases by name.
        empty: for each weight, the heads whose values were filled.
    """

    def __init__(self, model: nn.Module, site: AttentionSite) -> None:
        self._slices = [*site.query, *site.key]
        names = dict.fromkeys(
            name
            for s in self._slices
            for name in (s.parameter, s.bias)
            if name is not None
        )
        self.parameters = {name: model.get_parameter(name) for name in names}
        self._base = {name: p.detach() for name, p in self.parameters.items()}
        self._filled: set[str] = set()
        self.empty = [self._fill(s, self._without_numbers(s)) for s in self._slices]
        for term in site.terms:
            for path in (term.query, term.key):
                for inner, outer in itertools.pairwise(path):
                    self.empty.append(self._fill(outer, self._vanishing(inner, outer)))

    def filled(self) -> dict[str, Tensor]:
        """The weights in which no head is zero, with which all changed weights are compared."""
        return {name: self._base[name] for name in self._filled}

    def rotated(self, chosen: Iterable[RowsOfHeads]) -> dict[str, Tensor]:
        """Moves each row of the chosen heads to the place of the next row of its head; if a head has a single row, its
        sign is changed.

        Rows from which both queries and keys are computed are scaled instead, because rotating both leaves their
        product unchanged.
        """

        def rotate(s: HeadSlice, rows: Tensor) -> Tensor:
            if (
                sum(
                    s.parameter == other.parameter and s.same(other)
                    for other in self._slices
                )
                > 1
            ):
                factors = (
                    0.5
                    + torch.arange(rows.shape[1], dtype=rows.dtype, device=rows.device)
                    % 2
                )
                return rows * factors.view(-1, *[1] * (rows.ndim - 2))
            return rows.roll(1, dims=1) if rows.shape[1] > 1 else -rows

        return self._changed(chosen, rotate)

    def multiplied(
        self, chosen: Iterable[RowsOfHeads], factor: float
    ) -> dict[str, Tensor]:
        """Multiplies the rows and biases of the chosen heads by a factor."""
        return self._changed(chosen, lambda _, rows: rows * factor)

    def zeroed(self, slices: Iterable[HeadSlice]) -> dict[str, Tensor]:
        """Sets all these rows and their biases to zero."""
        return self._changed(
            [(s, None) for s in slices], lambda _, rows: torch.zeros_like(rows)
        )

    def _changed(
        self,
        chosen: Iterable[RowsOfHeads],
        change: Callable[[HeadSlice, Tensor], Tensor],
    ) -> dict[str, Tensor]:
        """The weights after a change of rows [heads r …], and of the entries of a bias at the same indices."""
        weights = self.filled()
        copied: set[str] = set()
        for s, heads in chosen:
            biased = s.bias_of()
            for part in (s,) if biased is None else (s, biased):
                base = self._base[part.parameter]
                if part.parameter not in copied:
                    copied.add(part.parameter)
                    weights[part.parameter] = base.clone()
                index = (part.index if heads is None else part.index[list(heads)]).to(
                    base.device
                )
                part.rows_of(weights[part.parameter])[index] = change(
                    s, part.rows_of(base)[index]
                )
        return weights

    def _without_numbers(self, s: HeadSlice) -> Tensor | None:
        """Whether the rows of each head are all zero."""
        weight = self._base[s.parameter]
        if bool(weight.ne(0).all()):
            return None
        return ~s.rows_of(weight)[s.index.to(weight.device)].ne(0).flatten(1).any(1)

    def _vanishing(self, inner: HeadSlice, outer: HeadSlice) -> Tensor | None:
        """Whether the product of two weights is zero up to rounding, for each head; None if the second weight does not
        act on the rows of the first."""
        first, second = (s.rows_of(self._base[s.parameter]) for s in (inner, outer))
        if (
            first is second
            or inner.n != 1
            or inner.index.shape[1] != second.shape[1]
            or first.device != second.device
        ):
            return None
        before, after = (
            first[inner.index[0].to(first.device)],
            second[outer.index.to(second.device)],
        )
        size = after.flatten(1).norm(dim=1) * before.norm()
        return (after @ before).flatten(1).norm(dim=1) <= 8 * torch.finfo(
            after.dtype
        ).eps * size

    def _fill(self, s: HeadSlice, empty: Tensor | None) -> tuple[int, ...]:
        """Replaces the rows of empty heads by small random rows, and returns the indices of these heads."""
        if empty is None or not bool(empty.any()):
            return ()
        rows = s.rows_of(self._base[s.parameter])
        index = s.index.to(rows.device)[empty]
        generator = torch.Generator().manual_seed(0)
        noise = (
            torch.randn(*index.shape, rows.shape[1], generator=generator)
            * rows.shape[1] ** -0.5
        )
        self._base[s.parameter] = self._base[s.parameter].clone()
        s.rows_of(self._base[s.parameter])[index] = noise.to(rows)
        self._filled.add(s.parameter)
        return tuple(empty.nonzero().flatten().tolist())
