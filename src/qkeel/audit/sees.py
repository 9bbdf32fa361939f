"""Whether each output depends only on the tokens that it may see, found out by changing the others.

The tokens that must not matter are replaced, and the outputs at the other positions must not move. Nothing about the
model is trusted: not its masks, not its configuration, not the names of its modules. Where outputs move, the same two
passes name the first module that carried it, and the head if that is attention.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from qkeel.audit.maps import attention_maps
from qkeel.capture.calls import Seen
from qkeel.capture.example import (
    ForwardArguments,
    arguments,
    copied,
    mapped,
    tensors,
    undisturbed,
)
from qkeel.errors import InvalidTypeError, InvalidValueError, QkeelError, ShapeError
from qkeel.metrics import Health, Status
from qkeel.patching.forward import extra_pass, unwrapped
from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.find import site_label
from qkeel.sites.weights import blocks_of_weights, captured_calls

# Positions at which a contract is tried, borders of documents apart.
PLACES = 12
# Documents that are tried one by one, at most.
BORDERS = 64
# Outputs may move by so many roundings of their dtype where experts or kernels group the tokens in another way.
ROUNDINGS = 4
# Models in half precision with at most so many weights are also tried in float64.
LOW_PRECISION, MOST_WEIGHTS = (torch.bfloat16, torch.float16), 1 << 25


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """A token sees the tokens of its own document, and of these, if `causal`, none after it.

    Args:
        ids: the number of each token's document, [b t] or [t] if the samples are packed alike. Tokens with a negative
            number are padding, which may see and be seen by anything.
        causal: whether later tokens are hidden too.

    Example:
        >>> Documents.from_positions(torch.tensor([[0, 1, 2, 0, 1]])).ids
        tensor([[0, 0, 0, 1, 1]])
    """

    ids: Int[Tensor, "*b t"]
    causal: bool = True

    @classmethod
    def from_positions(
        cls, position_ids: Int[Tensor, "*b t"], *, causal: bool = True
    ) -> Documents:
        """Documents that begin wherever the positions do not continue, as in packed batches."""
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[..., 1:] = position_ids[..., 1:] != position_ids[..., :-1] + 1
        return cls(starts.long().cumsum(-1) - 1, causal)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """In every attention layer, a token sees itself and the `size` - 1 tokens before it.

    Layers in a row see further: an output may depend on (size - 1) · layers tokens before it. A contract of one layer
    is therefore read from the weights of that layer, besides the change of tokens further away.

    Args:
        size: the number of tokens, at least 1.
        layers: how many layers pass tokens on; by default the number of attention layers of the model.

    >>> Window(128).size
    128
    """

    size: int
    layers: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidValueError(
                f"expected a window of at least 1 token, got {self.size}"
            )


Contract = str | Documents | Window


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trial:
    """Tokens to change and outputs that must not move, both [b t], and how a sentence calls the changed tokens."""

    changed: Bool[Tensor, "b t"]
    kept: Bool[Tensor, "b t"]
    words: str


def check_sees(model: nn.Module, batch: object, contract: Contract) -> Health:
    """Checks what the outputs of a model depend on; see `qkeel.check(sees=...)`.

    The model runs in its own mode, with the same random numbers in each pass (about 16 passes without gradients), and
    is left as it was. Outputs with a position axis are judged; the sentence names those that are not.

    Args:
        model: the model. A compiled model runs as it is compiled; the culprit is looked for eagerly.
        batch: its input. The first tensor with two dimensions or more holds the tokens, [b t] or [b t d]. Tokens are
            replaced by other tokens of the batch, so that a leak which a special token alone opens (the end of a text,
            padding, a picture) shows only if the batch has that token.
        contract: "causal", Documents or Window.

    Raises:
        InvalidValueError: the contract is unknown, or the batch has fewer than two positions.
        InvalidTypeError: the batch has no tokens to change.
    """
    args, kwargs = arguments(batch, "batch")
    passes = _Passes(model, args, kwargs)
    layers = 0
    if isinstance(contract, Window):
        calls = captured_calls(model, batch)
        layers = contract.layers or len(calls)
        beyond = _beyond_window(calls, contract, type(passes.inner).__name__)
        if beyond:
            sentence = f"sees beyond its window of {contract.size}: {beyond}"
            return _verdict(Status.NOT_HEALTHY, sentence)
    trials = list(_trials(contract, passes, layers))
    # Two equal passes show the noise of the model itself, which no contract can ask it to be below.
    first, second = passes.outputs(passes.tokens), passes.outputs(passes.tokens)
    judged = [name for name, x in first.items() if passes.by_position(x) is not None]
    skipped = [name for name in first if name not in judged]
    if not judged:
        shapes = [f"{name} {tuple(x.shape)}" for name, x in first.items()]
        raise InvalidValueError(
            f"expected an output with an axis of {passes.length} positions, got {', '.join(shapes) or 'no tensor'}"
        )
    left_out = ""
    if skipped:
        left_out = f"; not judged, without an axis of positions: {', '.join(skipped)}"
    rounded = ""
    sensitivity = _sensitivity(passes, first, judged)
    for trial in trials:
        moved = passes.outputs(passes.changed(trial))
        for name in judged:
            size, position = passes.move(first[name], moved[name], trial.kept)
            # Two equal passes may differ too: kernels that add in any order, and random numbers.
            noise, _ = passes.move(first[name], second[name], trial.kept)
            x = first[name]
            eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
            largest = float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if eps else 0.0
            if size > noise + ROUNDINGS * eps * largest:
                return _verdict(
                    Status.NOT_HEALTHY,
                    f"sees what it must not: output {name!r} at position {position[1]} of sample {position[0]} moves "
                    f"by {size:.3g} when {trial.words} change{_culprit(passes, trial)}",
                )
            if size > noise:
                rounded = name
    if not trials:
        sentence = f"{passes.length} positions are too few to try this: layers in a row may see all of them"
        return _verdict(Status.NOT_KNOWN, sentence + left_out)
    if not sensitivity:
        return _verdict(
            Status.NOT_KNOWN,
            f"{', '.join(judged)} did not move, but no position depends on another token at all, as in a model whose "
            f"head or output projections are still zero: train it for some steps, or draw these weights{left_out}",
        )
    note = ""
    # In half precision a leak of some percent may move no bit of an output.
    n_weights = sum(p.numel() for p in passes.inner.parameters())
    is_coarse = passes.dtype in LOW_PRECISION and n_weights <= MOST_WEIGHTS
    if (rounded or is_coarse) and passes.dtype != torch.float64:
        # Rounding or a small leak? In float64 the one falls by nine digits and the other stays.
        exact = _in_float64(passes.inner, args, kwargs, contract)
        if exact is not None and exact.status is not Status.HEALTHY:
            return exact
        if rounded and exact is None and passes.dtype != torch.float32:
            return _verdict(
                Status.NOT_KNOWN,
                f"{rounded!r} moves by no more than rounding when tokens change that must not matter, as with "
                f"experts that group tokens or a small leak, and the model does not run in float64{left_out}",
            )
        note = ", but for rounding," if rounded else ""
    words = contract
    if isinstance(contract, Documents):
        words = f"its own document{', causal' if contract.causal else ''}"
    elif isinstance(contract, Window):
        words = f"a window of {contract.size}"
    return _verdict(
        Status.HEALTHY,
        f"sees what it should ({words}): {', '.join(judged)} did not move{note} in {len(trials)} trials{left_out}",
    )


def _sensitivity(
    passes: _Passes, before: Mapping[str, Tensor], judged: Sequence[str]
) -> float:
    """How far outputs at odd positions move when the tokens at even positions change; 0 where nothing is passed on."""
    b, t = passes.samples, passes.length
    is_even = (torch.arange(t) % 2 == 0).expand(b, t)
    trial = _Trial(changed=is_even, kept=~is_even, words="the tokens at even positions")
    after = passes.outputs(passes.changed(trial))
    return max(passes.move(before[n], after[n], trial.kept)[0] for n in judged)


def _in_float64(
    model: nn.Module, args: Args, kwargs: Kwargs, contract: Contract
) -> Health | None:
    """The verdict on a copy in float64, where rounding is too small to be seen and a leak is not; None if it does not
    run."""

    def doubled(value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double()
        return value

    batch = ForwardArguments(*mapped((tuple(args), dict(kwargs)), doubled))
    try:
        return check_sees(copy.deepcopy(model).double(), batch, contract)
    # Layers that are fixed to a dtype, tensors that cannot be copied.
    except (RuntimeError, TypeError, ValueError):
        return None


def _verdict(status: Status, sentence: str) -> Health:
    return Health(status=status, sentence=f"{status}: {sentence}")


@final
class _Passes:
    """Passes of a model with changed tokens and the same random numbers."""

    def __init__(self, model: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self.inner, self._model = unwrapped(model), model
        self._args, self._kwargs = args, kwargs
        # By name first: an attention mask has two dimensions too.
        named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds")]
        candidates = [
            x
            for x in (*named, *tensors((args, dict(kwargs))))
            if isinstance(x, Tensor) and x.ndim > 1 and x.dtype != torch.bool
        ]
        if not candidates:
            raise InvalidTypeError(
                "expected a batch with a tensor of tokens [b t] or [b t d], got none"
            )
        self.tokens: Tensor = candidates[0]
        self.samples, self.length = self.tokens.shape[:2]
        if self.tokens.is_floating_point() and self.tokens.ndim > 3:
            raise InvalidValueError(
                f"expected a batch whose first tensor is a sequence, [b t] or [b t d], got {tuple(self.tokens.shape)}, "
                "where the axis of positions is not known; pass a module that takes the embedded sequence"
            )
        floats = [p.dtype for p in self.inner.parameters() if p.is_floating_point()]
        self.dtype = (*floats, torch.float32)[0]
        if self.length < 2:
            raise InvalidValueError(
                f"expected at least two positions, got tokens of shape {tuple(self.tokens.shape)}"
            )

    def batch(self, tokens: Tensor) -> ForwardArguments:
        """The batch with these tokens."""

        def exchanged(value: Any) -> Any:
            if value is self.tokens:
                return tokens
            if type(value) in (tuple, list):
                return type(value)([exchanged(x) for x in value])
            if type(value) is dict:
                return {name: exchanged(x) for name, x in value.items()}
            return value

        return ForwardArguments(
            exchanged(copied(self._args)), exchanged(copied(dict(self._kwargs)))
        )

    def outputs(self, tokens: Tensor, *, eager: bool = False) -> dict[str, Tensor]:
        """The tensors that the model returns for these tokens, by a name that says where each is.

        If `eager`, the model itself runs, on whose modules hooks may lie, and not the compiled one.
        """
        # These passes are no training: a monitor of the model must not count or record them.
        with torch.no_grad(), extra_pass(self), undisturbed(self.inner):
            # The same dropout in every pass, else everything moves.
            torch.manual_seed(0)
            batch = self.batch(tokens)
            with torch.compiler.set_stance("force_eager") if eager else nullcontext():
                model = self.inner if eager else self._model
                output = model(*batch.args, **batch.kwargs)
            return {name: x.detach().clone() for name, x in _named(output, "")}

    def changed(self, trial: _Trial) -> Tensor:
        """The tokens of a trial: other tokens of the batch, or vectors with noise of their own size."""
        tokens = self.tokens.detach()
        if tokens.is_floating_point():
            # Drawn on the CPU, so that every device tries the same noise.
            generator = torch.Generator().manual_seed(1)
            noise = torch.randn(tokens.shape, generator=generator).to(tokens)
            size = tokens.float().square().mean().sqrt().clamp_min(1e-3)
            replacements = tokens + noise * size.to(tokens.dtype)
        else:
            values = tokens.unique()
            if len(values) == 1:
                # No other token is known to be in the vocabulary, but the one below or token 1 should be.
                values = torch.cat([values, (values - 1).where(values > 0, values + 1)])
                values = values.sort().values
            # Another token of the batch is in the vocabulary for sure, and each is replaced by another one.
            following = torch.searchsorted(values, tokens.contiguous()) + 1
            replacements = values[following % len(values)]
        mask = trial.changed.to(tokens.device)
        mask = mask.reshape(*mask.shape, *[1] * (tokens.ndim - 2))
        return torch.where(mask, replacements, tokens)

    def by_position(self, x: Tensor) -> Tensor | None:
        """A view [b|1 t ...] of a tensor, or None if it has no axis of positions. Of a mask [... t t] these are the
        queries; tokens that are flattened to [b·t ...] are unflattened."""
        sizes, b, t = list(x.shape), self.samples, self.length
        if len(sizes) > 2 and sizes[-2:] == [t, t]:
            axis = len(sizes) - 2
        elif sizes[1:2] == [t]:
            axis = 1
        elif sizes[:1] == [b * t]:
            return x.unflatten(0, (b, t))
        elif sizes.count(t) == 1:
            axis = sizes.index(t)
        else:
            return None
        is_batched = axis > 0 and sizes[0] in (1, b)
        return x.movedim(axis, 1) if is_batched else x.movedim(axis, 0)[None]

    def at(self, kept: Bool[Tensor, "b t"], x: Tensor) -> Bool[Tensor, "b t"]:
        """The kept positions of a tensor by position; those that all samples keep if it is the same for all."""
        kept = kept.to(x.device)
        return kept if len(x) == len(kept) else kept.all(0, keepdim=True)

    def move(
        self, before: Tensor, after: Tensor, kept: Bool[Tensor, "b t"]
    ) -> tuple[float, tuple[int, int]]:
        """The largest change of an output at the kept positions, and its sample and position."""
        x, y = self.by_position(before), self.by_position(after)
        # An output whose shape changes with tokens that it must not see has seen them.
        if x is None or y is None or x.shape != y.shape:
            return math.inf, (0, 0)
        wide = torch.complex128 if x.is_complex() else torch.float64
        x, y = x.to(wide), y.to(wide)
        is_same = (x == y) | (x.isnan() & y.isnan())
        distance = (x - y).abs().nan_to_num(torch.inf, torch.inf, torch.inf)
        distance = distance.masked_fill(is_same, 0.0).flatten(2)
        distance = distance.amax(2) if distance.ndim > 2 else distance
        distance = distance.masked_fill(~self.at(kept, x), 0.0)
        index = int(distance.argmax())
        return float(distance.max()), divmod(index, distance.shape[1])


def _named(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output by name: keys of mappings, fields of dataclasses, places in tuples."""
    dot = f"{name}." if name else ""
    if isinstance(value, Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, x in value.items():
            yield from _named(x, f"{dot}{key}")
    elif isinstance(value, (tuple, list)):
        for i, x in enumerate(value):
            yield from _named(x, f"{name or 'output'}[{i}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _named(getattr(value, field.name), f"{dot}{field.name}")


def _trials(contract: Contract, passes: _Passes, layers: int) -> Iterator[_Trial]:
    """The changes of tokens that a contract says must not matter."""
    b, t = passes.samples, passes.length
    positions = torch.arange(t).expand(b, t)
    counted = torch.ones_like(positions, dtype=torch.bool)
    # The first and last positions, and others drawn once for each length.
    positions_tried = list(range(1, t))
    if len(positions_tried) > PLACES:
        drawn = torch.randperm(t - 3, generator=torch.Generator().manual_seed(t)) + 2
        positions_tried = sorted({1, t // 2, t - 1, *drawn[: PLACES - 3].tolist()})
    if isinstance(contract, Documents):
        ids = contract.ids.cpu()
        if ids.shape not in ((t,), (b, t)):
            raise ShapeError(
                f"expected document numbers of shape [{b} {t}] or [{t}], got {tuple(ids.shape)}"
            )
        ids = ids.expand(b, t)
        counted = ids >= 0
        # One document at a time, so that a leak names the one that it came from.
        for number in ids[counted].unique().tolist()[:BORDERS]:
            yield _Trial(
                changed=counted & (ids != number),
                kept=ids == number,
                words=f"the tokens outside document {number}",
            )
        positions_tried = positions_tried if contract.causal else []
    elif isinstance(contract, Window):
        reach = (contract.size - 1) * layers
        positions_tried = [
            position for position in positions_tried if position + reach < t
        ]
        for position in positions_tried:
            yield _Trial(
                changed=positions < position,
                kept=positions >= position + reach,
                words=f"the tokens before {position}",
            )
    elif contract != "causal":
        raise InvalidValueError(
            f"expected sees='causal', sees=qkeel.Documents(ids) or sees=qkeel.Window(size), got {contract!r}"
        )
    for position in positions_tried:
        later = counted & (positions >= position)
        if bool(later.any()):
            yield _Trial(
                changed=later,
                kept=counted & (positions < position),
                words=f"the tokens from {position} on",
            )


def _beyond_window(
    calls: Mapping[str, Sequence[Seen]], window: Window, model: str
) -> str:
    """Says which layer and head gives weight to a key outside its window, or "" if none does."""
    for layer, site in calls.items():
        t = site[0].query_shape[1]
        for rows, weights in blocks_of_weights(site):
            keys = torch.arange(weights.shape[3], device=weights.device)
            queries = torch.arange(rows.start, rows.stop, device=weights.device)
            distance = (queries + len(keys) - t)[:, None] - keys
            is_outside = (distance >= window.size) | (distance < 0)
            by_head = (weights * is_outside).sum(-1).amax((0, 2))
            weight, head = by_head.max(0)
            # Under a rounding a weight moves nothing, such as that of a mask of -100.
            if float(weight) > torch.finfo(weights.dtype).eps:
                label = site_label(layer, model)
                return f"{label}, head {int(head)}, gives a weight of {float(weight):.3g} to other keys"
    return ""


def _culprit(passes: _Passes, trial: _Trial) -> str:
    """Says which module let the change through, and which head if it is attention; "" if that cannot be told.

    It is the first module whose inputs at the kept positions are the same and whose outputs are not.
    """
    try:
        before = _activations(passes, passes.tokens, trial.kept)
        after = _activations(passes, passes.changed(trial), trial.kept)
    except (RuntimeError, QkeelError):
        # Such as too little memory; the verdict stands without the name.
        return ""
    for (name, inputs, outputs), changed_call in zip(before, after, strict=False):
        if name != changed_call[0]:
            # The passes took different ways through the model.
            return ""
        # Later modules receive what has leaked already; the first with equal inputs is the one to blame.
        if _equal(inputs, changed_call[1]) and not _equal(outputs, changed_call[2]):
            head = _head(passes, trial, name) or ", no attention,"
            return f": {name or type(passes.inner).__name__}{head} lets them through"
    return ""


Activations = list[tuple[str, list[Tensor], list[Tensor]]]


def _activations(
    passes: _Passes, tokens: Tensor, kept: Bool[Tensor, "b t"]
) -> Activations:
    """What each module receives and returns in a pass at the kept positions, in the order in which their calls end."""
    calls: Activations = []

    def at_kept(values: Iterable[Tensor]) -> list[Tensor]:
        kept_values = []
        for x in values:
            by_position = passes.by_position(x.detach())
            if by_position is None:
                kept_values.append(x.detach().clone())
            else:
                kept_values.append(by_position[passes.at(kept, by_position)])
        return kept_values

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: Args, kwargs: Kwargs, output: object) -> None:
            outputs = [x for _, x in _named(output, "")]
            calls.append((name, at_kept(tensors((args, kwargs))), at_kept(outputs)))

        return keep

    with ExitStack() as undo:
        for name, module in passes.inner.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                handle = module.register_forward_hook(hook(name), with_kwargs=True)
                undo.callback(handle.remove)
        passes.outputs(tokens, eager=True)
    return calls


def _equal(values: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(values) == len(expected) and all(
        x.shape == y.shape and bool(((x == y) | (x != x)).all())
        for x, y in zip(values, expected, strict=True)
    )


def _head(passes: _Passes, trial: _Trial, module: str) -> str:
    """The head of an attention in this module with the largest weight on changed tokens, and that weight."""
    try:
        maps = attention_maps(passes.inner, passes.batch(passes.changed(trial)))
    except QkeelError:
        return ""
    inside = (f"{module}.", f"{module}#") if module else ("",)
    b, t = trial.kept.shape
    for layer, weights in maps.items():
        is_inside = layer == module or layer.startswith(inside)
        if not is_inside or (len(weights), *weights.shape[2:]) != (b, t, t):
            continue
        kept, changed = (x.to(weights.device) for x in (trial.kept, trial.changed))
        leaked = (weights * changed[:, None, None]).sum(-1) * kept[:, None]
        weight, head = leaked.amax((0, 2)).max(0)
        if float(weight) > 0:
            within = f" ({layer})" if layer != module else ""
            return f"{within}, head {int(head)}, with a weight of {float(weight):.3g},"
    return ""
