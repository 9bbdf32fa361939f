"""Whether each output depends only on the tokens that it may see, found out by changing the others.

The tokens that must not matter are replaced, and the outputs at the other positions must not move. Nothing about the
model is trusted: not its masks, not its configuration, not the names of its modules. Where outputs move, the same two
passes name the first module that carried it, and the head if that is attention.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from qkeel.sites.find import site_label
from qkeel.sites.weights import blocks_of_weights, captured_calls

PLACES = 12  # positions at which a contract is tried, borders of documents apart
BORDERS = 64  # documents that are tried one by one, at most
# Outputs may move by so many roundings of their dtype where experts or kernels group the tokens in another way.
ROUNDINGS = 4


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
        batch: its input. The first tensor with two dimensions or more holds the tokens, [b t] or [b t d].
        contract: "causal", Documents or Window.

    Raises:
        InvalidValueError: the contract is unknown, or the batch has fewer than two positions.
        InvalidTypeError: the batch has no tokens to change.
    """
    args, kwargs = arguments(batch, "batch")
    passes = _Passes(unwrapped(model), model, args, kwargs)
    layers = 0
    if isinstance(contract, Window):
        calls = captured_calls(model, batch)
        layers = contract.layers or len(calls)
        beyond = _beyond_window(calls, contract, type(passes.inner).__name__)
        if beyond:
            return _verdict(
                Status.NOT_HEALTHY,
                f"sees beyond its window of {contract.size}: {beyond}",
            )
    trials = list(_trials(contract, passes, layers))
    first = passes.outputs(passes.tokens)
    second = passes.outputs(passes.tokens)
    judged = {
        name: values
        for name, values in first.items()
        if passes.by_position(values) is not None
    }
    skipped = [name for name in first if name not in judged]
    if not judged:
        shapes = (
            ", ".join(f"{name} {tuple(values.shape)}" for name, values in first.items())
            or "no tensor"
        )
        raise InvalidValueError(
            f"expected an output with an axis of {passes.length} positions, got {shapes}"
        )
    rounded: list[str] = []
    for trial in trials:
        moved = passes.outputs(passes.changed(trial))
        for name, values in judged.items():
            noise = _largest_move(passes, values, second[name], trial.kept)
            move = _largest_move(passes, values, moved[name], trial.kept)
            if not move.size > noise.size:
                continue
            if move.size <= noise.size + ROUNDINGS * move.rounding:
                rounded.append(name)
                continue
            culprit = _culprit(passes, trial)
            sentence = (
                f"sees what it must not: output {name!r} at position {move.position} of sample {move.sample} moves by "
                f"{move.size:.3g} when {trial.words} change{culprit}"
            )
            return _verdict(Status.NOT_HEALTHY, sentence)
    left_out = (
        f"; not judged, without an axis of positions: {', '.join(skipped)}"
        if skipped
        else ""
    )
    if not trials:
        return _verdict(
            Status.NOT_KNOWN,
            f"{passes.length} positions are too few to try this: layers in a row may see all of them{left_out}",
        )
    outputs = ", ".join(judged)
    note = ""
    if rounded and passes.dtype != torch.float64:
        exact = _in_float64(passes.inner, batch, contract)
        if exact is not None and exact.status is not Status.HEALTHY:
            return exact
        if exact is None and passes.dtype != torch.float32:
            return _verdict(
                Status.NOT_KNOWN,
                f"{rounded[0]!r} moves by no more than rounding when tokens change that must not matter, as with "
                f"experts that group tokens or a small leak, and the model does not run in float64{left_out}",
            )
        note = ", but for rounding,"
    return _verdict(
        Status.HEALTHY,
        f"sees what it should ({_words(contract)}): {outputs} did not move{note} in {len(trials)} trials{left_out}",
    )


def _in_float64(model: nn.Module, batch: object, contract: Contract) -> Health | None:
    """The verdict on a copy in float64, where rounding is too small to be seen and a leak is not; None if it does not
    run."""
    args, kwargs = arguments(batch, "batch")
    args, kwargs = mapped((tuple(args), dict(kwargs)), _doubled)
    try:
        return check_sees(
            copy.deepcopy(model).double(), ForwardArguments(args, kwargs), contract
        )
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ):  # layers that are fixed to a dtype, tensors that cannot be copied
        return None


def _doubled(value: object) -> object:
    return (
        value.double()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )


def _verdict(status: Status, sentence: str) -> Health:
    prefix = {Status.HEALTHY: "healthy", Status.NOT_HEALTHY: "not healthy"}.get(
        status, "not known"
    )
    return Health(status=status, sentence=f"{prefix}: {sentence}")


def _words(contract: Contract) -> str:
    if isinstance(contract, Documents):
        return "its own document, causal" if contract.causal else "its own document"
    return f"a window of {contract.size}" if isinstance(contract, Window) else contract


@final
class _Passes:
    """Passes of a model with changed tokens and the same random numbers."""

    def __init__(
        self,
        inner: nn.Module,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.inner, self._model, self._args, self._kwargs = inner, model, args, kwargs
        candidates = [
            x
            for x in tensors((args, dict(kwargs)))
            if x.ndim > 1 and x.dtype != torch.bool
        ]
        named = [
            kwargs[name]
            for name in ("input_ids", "inputs_embeds")
            if isinstance(kwargs.get(name), Tensor)
        ]
        if not candidates:
            raise InvalidTypeError(
                "expected a batch with a tensor of tokens [b t] or [b t d], got none"
            )
        self.tokens: Tensor = (named or candidates)[0]
        self.samples, self.length = self.tokens.shape[:2]
        self.dtype = next(
            (p.dtype for p in inner.parameters() if p.is_floating_point()),
            torch.float32,
        )
        if self.length < 2:
            raise InvalidValueError(
                f"expected at least two positions, got tokens of shape {tuple(self.tokens.shape)}"
            )

    def outputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """The tensors that the model returns for these tokens, by a name that says where each is."""
        with torch.no_grad(), extra_pass(self), undisturbed(self.inner):
            torch.manual_seed(0)
            args, kwargs = self._with(tokens)
            output = self._model(*args, **kwargs)
            return {name: x.detach().clone() for name, x in _named(output, "")}

    def eager(self, tokens: Tensor) -> None:
        """Runs the model itself, on whose modules hooks may lie."""
        with (
            torch.no_grad(),
            extra_pass(self),
            undisturbed(self.inner),
            torch.compiler.set_stance("force_eager"),
        ):
            torch.manual_seed(0)
            args, kwargs = self._with(tokens)
            self.inner(*args, **kwargs)

    def _with(self, tokens: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def exchanged(value: Any) -> Any:
            if value is self.tokens:
                return tokens
            if type(value) in (tuple, list):
                return type(value)([exchanged(x) for x in value])
            return (
                {name: exchanged(x) for name, x in value.items()}
                if type(value) is dict
                else value
            )

        return exchanged(copied(self._args)), exchanged(copied(dict(self._kwargs)))

    def batch(self, tokens: Tensor) -> object:
        """The batch with these tokens, as `qkeel.attention_maps` takes it."""
        args, kwargs = self._with(tokens)
        return ForwardArguments(args, kwargs)

    def changed(self, trial: _Trial) -> Tensor:
        """The tokens of a trial: other tokens of the batch, or vectors with noise of their own size."""
        generator = torch.Generator().manual_seed(1)
        tokens = self.tokens.detach()
        mask = trial.changed.to(tokens.device)
        if tokens.is_floating_point():
            noise = torch.randn(tokens.shape, generator=generator).to(tokens)
            size = (
                tokens.float().square().mean().sqrt().clamp_min(1e-3).to(tokens.dtype)
            )
            mask = mask.reshape(*mask.shape, *[1] * (tokens.ndim - 2))
            return torch.where(mask, tokens + noise * size, tokens)
        values = tokens.unique()
        if (
            len(values) == 1
        ):  # no other token is known to be in the vocabulary, but the one below or token 1 should be
            values = torch.stack(
                [values[0], values[0] - 1 if values[0] > 0 else values[0] + 1]
            )
        index = torch.searchsorted(values.sort().values, tokens)
        shift = torch.randint(1, len(values), tokens.shape, generator=generator).to(
            tokens.device
        )
        replacements = values.sort().values[(index + shift) % len(values)]
        mask = mask.reshape(*mask.shape, *[1] * (tokens.ndim - 2))
        return torch.where(mask, replacements, tokens)

    def by_position(self, x: Tensor) -> Tensor | None:
        """A view [b|1 t ...] of a tensor, or None if it has no axis of positions. Of a mask [... t t] these are the
        queries; tokens that are flattened to [b·t ...] are unflattened."""
        b, t = self.samples, self.length
        if x.ndim > 2 and x.shape[-1] == t == x.shape[-2]:
            x = x.movedim(-2, 1) if len(x) in (1, b) else x.movedim(-2, 0)[None]
        elif x.ndim > 1 and x.shape[1] == t:
            x = x if len(x) in (1, b) else x.movedim(1, 0)[None]
        elif x.ndim and len(x) == b * t:
            x = x.unflatten(0, (b, t))
        elif list(x.shape).count(t) == 1:
            axis = list(x.shape).index(t)
            x = (
                x.movedim(axis, 1)
                if axis > 1 and len(x) in (1, b)
                else x.movedim(axis, 0)[None]
            )
        else:
            return None
        return x


@dataclasses.dataclass(frozen=True, slots=True)
class _Move:
    """The largest change of an output, where it is, and the size of its rounding."""

    size: float
    sample: int
    position: int
    rounding: float


def _largest_move(
    passes: _Passes, before: Tensor, after: Tensor, kept: Bool[Tensor, "b t"]
) -> _Move:
    if before.shape != after.shape:
        return _Move(math.inf, 0, 0, 0.0)
    x, y = passes.by_position(before), passes.by_position(after)
    assert x is not None
    assert y is not None
    kept = kept.to(x.device)
    kept = kept if len(x) == len(kept) else kept.all(0, keepdim=True)
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    distance = torch.where(same, 0.0, (x - y).abs()).nan_to_num(
        torch.inf, torch.inf, torch.inf
    )
    distance = distance.flatten(2).amax(2) if distance.ndim > 2 else distance
    distance = distance.masked_fill(~kept, 0.0)
    index = int(distance.argmax())
    scale = float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0
    return _Move(
        float(distance.max()),
        index // kept.shape[1],
        index % kept.shape[1],
        eps * scale,
    )


def _named(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an output by name: keys of mappings, fields of dataclasses, places in tuples."""
    if isinstance(value, Tensor):
        yield name or "output", value
    elif isinstance(value, Mapping):
        for key, x in value.items():
            yield from _named(x, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for i, x in enumerate(value):
            yield from _named(x, f"{name}[{i}]" if name else f"output[{i}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _named(
                getattr(value, field.name),
                f"{name}.{field.name}" if name else field.name,
            )


def _trials(contract: Contract, passes: _Passes, layers: int) -> Iterator[_Trial]:
    """The changes of tokens that a contract says must not matter."""
    b, t = passes.samples, passes.length
    positions = torch.arange(t).expand(b, t)
    places = _places(t)
    if isinstance(contract, Window):
        reach = (contract.size - 1) * layers
        for place in places:
            kept = positions >= place + reach
            if bool(kept.any()):
                yield _Trial(
                    changed=positions < place,
                    kept=kept,
                    words=f"the tokens before {place}",
                )
                yield from _later_tokens(
                    positions, [place], torch.ones_like(positions, dtype=torch.bool)
                )
    elif isinstance(contract, Documents):
        ids = contract.ids.cpu()
        ids = ids.expand(b, t) if ids.ndim == 1 else ids
        if ids.shape != (b, t):
            raise ShapeError(
                f"expected document numbers of shape [{b} {t}] or [{t}], got {tuple(contract.ids.shape)}"
            )
        for number in ids[ids >= 0].unique().tolist()[:BORDERS]:
            inside = ids == number
            yield _Trial(
                changed=(ids >= 0) & ~inside,
                kept=inside,
                words=f"the tokens outside document {number}",
            )
        if contract.causal:
            yield from _later_tokens(positions, places, ids >= 0)
    elif contract == "causal":
        yield from _later_tokens(
            positions, places, torch.ones_like(positions, dtype=torch.bool)
        )
    else:
        raise InvalidValueError(
            f"expected sees='causal', sees=qkeel.Documents(ids) or sees=qkeel.Window(size), got {contract!r}"
        )


def _later_tokens(
    positions: Tensor, places: Sequence[int], counted: Tensor
) -> Iterator[_Trial]:
    for place in places:
        changed = (positions >= place) & counted
        if bool(changed.any()):
            yield _Trial(
                changed=changed,
                kept=(positions < place) & counted,
                words=f"the tokens from {place} on",
            )


def _places(length: int) -> list[int]:
    """Positions from 1 on: the first and last ones, and others drawn once for each length."""
    if length - 1 <= PLACES:
        return list(range(1, length))
    drawn = (
        torch.randperm(length - 3, generator=torch.Generator().manual_seed(length))[
            : PLACES - 3
        ]
        + 2
    )
    return sorted({1, length // 2, length - 1, *drawn.tolist()})


def _beyond_window(
    calls: Mapping[str, Sequence[Seen]], window: Window, model: str
) -> str:
    """Says which layer and head gives weight to a key outside its window, or "" if none does."""
    for layer, site in calls.items():
        for rows, weights in blocks_of_weights(site):
            s, t = weights.shape[3], site[0].query_shape[1]
            device = weights.device
            positions = torch.arange(
                s - t + rows.start, s - t + rows.stop, device=device
            )
            distance = positions[:, None] - torch.arange(s, device=device)
            outside = (
                (weights * ((distance >= window.size) | (distance < 0)))
                .sum(-1)
                .amax((0, 2))
            )
            if float(outside.max()) > 0:
                head = int(outside.argmax())
                weight = float(outside[head])
                return f"{site_label(layer, model)}, head {head}, gives a weight of {weight:.3g} to other keys"
    return ""


# --- The culprit: the first module whose inputs at the kept positions are the same and whose outputs are not


@final
class _Activations:
    """What modules receive and return at the kept positions, in the order in which their calls end."""

    def __init__(self, passes: _Passes, trial: _Trial) -> None:
        self._passes, self._kept = passes, trial.kept
        self.calls: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def take(self, tokens: Tensor) -> None:
        """Runs a pass with these tokens. It keeps the activations of all modules."""
        with ExitStack() as undo:
            for name, module in self._passes.inner.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    undo.callback(
                        module.register_forward_hook(
                            self._hook(name), with_kwargs=True
                        ).remove
                    )
            self._passes.eager(tokens)

    def _hook(self, name: str) -> Any:
        def keep(
            module: nn.Module, args: object, kwargs: object, output: object
        ) -> None:
            values = [x for _, x in _named(output, "")]
            self.calls.append(
                (name, self._at_kept(tensors((args, kwargs))), self._at_kept(values))
            )

        return keep

    def _at_kept(self, values: Iterator[Tensor] | Sequence[Tensor]) -> list[Tensor]:
        """The rows of the kept positions of each tensor, or the tensor itself if it has no axis of positions."""
        rows = []
        for x in values:
            by_position = self._passes.by_position(x.detach())
            if by_position is None:
                rows.append(x.detach().clone())
                continue
            kept = self._kept.to(x.device)
            kept = kept if len(by_position) == len(kept) else kept.all(0, keepdim=True)
            rows.append(by_position[kept])
        return rows


def _culprit(passes: _Passes, trial: _Trial) -> str:
    """Says which module let the change through, and which head if it is attention; "" if that cannot be told."""
    before, after = _Activations(passes, trial), _Activations(passes, trial)
    try:
        before.take(passes.tokens)
        after.take(passes.changed(trial))
    except (
        RuntimeError,
        QkeelError,
    ):  # such as too little memory; the verdict stands without the name
        return ""
    for call, other in zip(before.calls, after.calls, strict=False):
        name, inputs, outputs = call
        if name != other[0]:
            return ""  # the passes took different ways through the model
        if _equal(inputs, other[1]) and not _equal(outputs, other[2]):
            head = _head(passes, trial, name)
            label = name or type(passes.inner).__name__
            return (
                f": {label}{head} lets them through"
                if head
                else f": {label}, no attention, lets them through"
            )
    return ""


def _equal(values: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    if len(values) != len(others):
        return False
    return all(
        x.shape == y.shape and bool(((x == y) | (x != x)).all())
        for x, y in zip(values, others, strict=True)
    )


def _head(passes: _Passes, trial: _Trial, module: str) -> str:
    """The head of an attention in this module with the largest weight on changed tokens, and that weight."""
    try:
        maps = attention_maps(passes.inner, passes.batch(passes.changed(trial)))
    except QkeelError:
        return ""
    for layer, weights in maps.items():
        inside = (
            not module
            or layer == module
            or layer.startswith((f"{module}.", f"{module}#"))
        )
        b, t = trial.kept.shape
        if not inside or weights.shape[2:] != (t, t) or len(weights) != b:
            continue
        kept, changed = (
            mask.to(weights.device) for mask in (trial.kept, trial.changed)
        )
        leaked = (weights * changed[:, None, None, :]).sum(-1) * kept[:, None]
        largest = leaked.amax((0, 2))
        if float(largest.max()) > 0:
            within = f" ({layer})" if layer != module else ""
            return f"{within}, head {int(largest.argmax())}, with a weight of {float(largest.max()):.3g},"
    return ""
