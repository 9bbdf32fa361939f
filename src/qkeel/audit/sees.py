"""Whether each output depends only on the tokens that it may see, found out by changing the others.

The tokens that must not matter are replaced, and the outputs at the other positions must not move. Nothing about the
model is trusted: not its masks, not its configuration, not the names of its modules. Where outputs move, the same two
passes name the first module that carried it, and the head if that is attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, final

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from qkeel.audit.allowed_inputs import Contract, Documents, Window
from qkeel.audit.visibility import config_says, named_arguments, read_visibility
from qkeel.capture.example import (
    ForwardArguments,
    arguments,
    copied,
    mapped,
    tensors,
    undisturbed,
)
from qkeel.capture.random_streams import seed_generators
from qkeel.errors import InvalidTypeError, InvalidValueError, QkeelError, ShapeError
from qkeel.metrics import Health, Status
from qkeel.patching.forward import extra_pass, unwrapped
from qkeel.patching.modes import Args, Kwargs

# Names of a decoder's tokens: any of its outputs may depend on any token of an encoder.
OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds", "tgt")
# Positions at which a contract is tried, borders of documents apart.
PLACES = 12
# Documents that are tried one by one, at most.
BORDERS = 64
# Outputs may move by so many roundings of their dtype where experts or kernels group the tokens in another way.
ROUNDINGS = 4
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trial:
    """Tokens to change and outputs that must not move, both [b t], and how a sentence calls the changed tokens."""

    changed: Bool[Tensor, "b t"]
    kept: Bool[Tensor, "b t"]
    words: str = "the others"


def check_sees(model: nn.Module, batch: object, contract: Contract) -> Health:
    """Checks what the outputs of a model depend on; see `qkeel.check(sees=...)`.

    The model runs in its own mode, with the same random numbers in each pass (about 16 passes without gradients), and
    is left as it was. Outputs with a position axis are judged; the sentence names those that are not.

    Args:
        model: the model. A compiled model runs as it is compiled; the culprit is looked for eagerly.
        batch: its input. The first tensor with two dimensions or more holds the tokens, [b t] or [b t d], unless others
            are named as such; of an encoder-decoder those of the decoder are changed. Tokens are
            replaced by other tokens of the batch, so that a leak which a special token alone opens (the end of a text,
            padding, a picture) shows only if the batch has that token.
        contract: "causal", Documents or Window.

    Raises:
        InvalidValueError: the contract is unknown, or the batch has fewer than two positions or different tokens.
        InvalidTypeError: the batch has no tokens to change.
    """
    args, kwargs = arguments(batch, "batch")
    passes = _Passes(model, args, kwargs)
    words = "causal"
    layers = 0
    if isinstance(contract, Documents):
        words = f"its own document{', causal' if contract.causal else ''}"
    elif isinstance(contract, Window):
        words = f"a window of {contract.size}"
        t = torch.arange(passes.length)
        distance = t[:, None] - t
        outside = ((distance >= contract.size) | (distance < 0))[None]
        seen = read_visibility(model, batch, outside)
        layers = contract.layers or len(seen)
        for layer in seen.values():
            weight, head = layer.weights.get("forbidden", (0.0, 0))
            # Under a rounding a weight moves nothing, such as that of a mask of -100.
            if weight > torch.finfo(torch.float32).eps:
                return _verdict(
                    Status.NOT_HEALTHY,
                    f"sees beyond its window of {contract.size}: {layer.layer}, head {head}, gives a weight of "
                    f"{weight:.3g} to other keys",
                )
    trials = list(_trials(contract, passes, layers))
    # Two equal passes show the noise of the model itself, which no contract can ask it to be below: kernels that add in
    # any order, and random numbers.
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
    for trial in trials:
        moved = passes.outputs(passes.changed(trial))
        for name in judged:
            x = first[name]
            size, position = passes.move(x, moved[name], trial.kept)
            noise, _ = passes.move(x, second[name], trial.kept)
            rounding = 0.0
            if x.is_floating_point():
                largest = x.abs().nan_to_num(0.0, 0.0, 0.0).max()
                rounding = ROUNDINGS * torch.finfo(x.dtype).eps * float(largest)
            if size > noise + rounding:
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
    is_even = (torch.arange(passes.length) % 2 == 0).expand(passes.samples, -1)
    even = _Trial(changed=is_even, kept=~is_even)
    moved = passes.outputs(passes.changed(even))
    if all(passes.move(first[x], moved[x], even.kept)[0] == 0 for x in judged):
        return _verdict(
            Status.NOT_KNOWN,
            f"{', '.join(judged)} did not move, but no position depends on another one of its sample: either the head "
            "or output projections are still zero, and the model has to be trained for some steps, or attention runs "
            f"over the batch, as where batch_first=True is missing, or the tokens {[*passes.tokens.shape]} are not "
            f"[b t]{left_out}",
        )
    note = ", but for rounding," if rounded else ""
    coarse = ""
    if passes.dtype in LOW_PRECISION:
        coarse = f"; what {passes.dtype} rounds away does not show: check a copy in float32 too"
        if rounded:
            return _verdict(
                Status.NOT_KNOWN,
                f"{rounded!r} moves by no more than rounding when tokens change that must not matter{coarse}{left_out}",
            )
    elif rounded and passes.dtype == torch.float32:
        coarse = "; a leak as small would look the same: check a copy in float64 too"
    return _verdict(
        Status.HEALTHY,
        f"sees what it should ({words}): {', '.join(judged)} did not move{note} in {len(trials)} trials{coarse}{left_out}",
    )


def _verdict(status: Status, sentence: str) -> Health:
    return Health(status=status, sentence=f"{status}: {sentence}")


@final
class _Passes:
    """Passes of a model with changed tokens and the same random numbers."""

    def __init__(self, model: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self.inner, self._model = unwrapped(model), model
        self._args, self._kwargs = tuple(args), dict(kwargs)
        # By name first: an attention mask has two dimensions too.
        named = named_arguments(model, args, kwargs)
        # An encoder-decoder makes its decoder's tokens of the labels.
        labels = ("labels",) * config_says(self.inner, "is_encoder_decoder")
        names = (*OF_DECODER, *labels, "input_ids", "inputs_embeds")
        by_name = [named.get(name) for name in names]
        candidates = [
            x
            for x in (*by_name, *tensors((args, dict(kwargs))))
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
        batch = copied((self._args, self._kwargs))
        return ForwardArguments(
            *mapped(batch, lambda x: tokens if x is self.tokens else x)
        )

    def outputs(self, tokens: Tensor, *, eager: bool = False) -> dict[str, Tensor]:
        """The tensors that the model returns for these tokens, by a name that says where each is.

        If `eager`, the model itself runs, on whose modules hooks may lie, and not the compiled one.
        """
        # These passes are no training: a monitor of the model must not count or record them.
        with torch.no_grad(), extra_pass(self), undisturbed(self.inner):
            # The same dropout in every pass, else everything moves.
            seed_generators(self.inner.parameters())
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
            # Another token of the batch is in the vocabulary for sure, and each is replaced by another one.
            values = tokens.unique()
            if len(values) == 1:
                raise InvalidValueError(
                    f"expected a batch with different tokens, which can replace each other, got {int(values)} alone"
                )
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
        distance = distance.masked_fill(is_same, 0.0)
        # One number per token, such as a loss or a value, has no more dimensions.
        distance = distance.reshape(*distance.shape[:2], -1).amax(2)
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
        document_of = contract.ids.cpu()
        if document_of.shape not in ((t,), (b, t)):
            raise ShapeError(
                f"expected document numbers of shape [{b} {t}] or [{t}], got {tuple(document_of.shape)}"
            )
        document_of = document_of.expand(b, t)
        counted = document_of >= 0
        # One document at a time, so that a leak names the one that it came from.
        for number in document_of[counted].unique().tolist()[:BORDERS]:
            yield _Trial(
                changed=counted & (document_of != number),
                kept=document_of == number,
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


def _culprit(passes: _Passes, trial: _Trial) -> str:
    """Says which module let the change through, and which head if it is attention; "" if that cannot be told.

    It is the first module whose inputs at the kept positions are the same and whose outputs are not.
    """
    changed = passes.changed(trial)
    try:
        before = _activations(passes, passes.tokens, trial.kept)
        after = _activations(passes, changed, trial.kept)
    except (RuntimeError, QkeelError):
        # Such as too little memory; the verdict stands without the name.
        return ""
    for call, changed_call in zip(before, after, strict=False):
        name, inputs, outputs = call
        if name != changed_call[0]:
            # The passes took different ways through the model.
            return ""
        # Later modules receive what has leaked already; the first with equal inputs is the one to blame.
        if not _equal(inputs, changed_call[1]) or _equal(outputs, changed_call[2]):
            continue
        carrier = ", no attention,"
        forbidden = trial.kept[:, :, None] & trial.changed[:, None]
        try:
            seen = read_visibility(passes.inner, passes.batch(changed), forbidden)
        except QkeelError:
            seen = {}
        for layer, keys in seen.items():
            weight, head = keys.weights.get("forbidden", (0.0, 0))
            is_inside = not name or f"{layer}.".startswith((f"{name}.", f"{name}#"))
            if is_inside and weight > 0:
                within = f" ({layer})" if layer != name else ""
                carrier = f"{within}, head {head}, with a weight of {weight:.3g},"
                break
        return f": {name or type(passes.inner).__name__}{carrier} lets them through"
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
