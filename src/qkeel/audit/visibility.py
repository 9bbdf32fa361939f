"""What the keys are that queries give weight to: later ones, those of other documents, padding, hidden ones.

Read from the weights that attention computes on a batch, whatever mask, flag or kernel made them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from qkeel.audit.allowed_inputs import Documents
from qkeel.audit.saturation import LargestWeights
from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import arguments, tensors
from qkeel.patching.forward import unwrapped
from qkeel.patching.modes import Args, Kwargs
from qkeel.sites.find import site_label
from qkeel.sites.softmax_weights import blocks_of_weights, captured_calls

# Of a row on keys it should not see, under which nothing is said.
LEAST_WEIGHT = 1e-3
# Names under which models take the documents of a packed batch, and its padding.
SEGMENTS = ("segment_ids", "document_ids", "seq_idx")
BORDERS = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")
HIDDEN_IF_TRUE = ("key_padding_mask", "src_key_padding_mask")


# The largest weight, and its head.
Largest = tuple[float, int]


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class SeenKeys:
    """The largest weight that a row of a layer gives to each kind of keys, with the head, and what the layer sees.

    `length` is the number of its queries, 0 if its keys are another sequence. `weights` has the kinds "later",
    "earlier", "documents", "padding", "hidden" and "forbidden", as far as the layer and the batch have such keys.
    `empty` is the first sample and query that sees no key, and whether it is padding. `first_keys` [2 t]
    are queries of the first sample and the first keys that they see, and `positional` [h] says which heads mostly
    attend to one place. `scale` is the constant factor on q·k times √head_dim, and `softcap` the cap. The weights of a
    layer that does not `competes`, such as those of a sigmoid, need not sum to 1.
    """

    layer: str
    length: int = 0
    weights: dict[str, Largest] = dataclasses.field(default_factory=dict)
    empty: tuple[int, int, bool] | None = None
    first_keys: Tensor | None = None
    positional: Tensor | None = None
    competes: bool = True
    scale: float = math.nan
    softcap: float | None = None

    def weight(self, kind: str) -> float:
        """The largest weight on keys of a kind, 0 if there are none."""
        return self.weights.get(kind, (0.0, 0))[0]


def read_visibility(
    model: nn.Module,
    batch: object,
    forbidden: Bool[Tensor, "b t s"],
) -> dict[str, SeenKeys]:
    """Returns what the queries of each layer see on a batch, computed block by block from one pass.

    forbidden: pairs of a query and a key that are weighed besides.
    """
    calls = captured_calls(model, batch)
    tokens = PackedTokens.of(model, *arguments(batch, "batch"))
    name = type(unwrapped(model)).__name__
    return {
        layer: seen_keys(site_label(layer, name), site, tokens, forbidden=forbidden)
        for layer, site in calls.items()
    }


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTokens:
    """What the arguments of a pass say of its tokens: the document of each, which are padding, and how many there are."""

    documents: Int[Tensor, "b t"] | None = None
    padding: Bool[Tensor, "b t"] | None = None
    length: int = 0

    @classmethod
    def of(cls, model: nn.Module, args: Args, kwargs: Kwargs) -> PackedTokens:
        """Reads the arguments of a pass of a model."""
        named = named_arguments(model, args, kwargs)
        lengths = [x.shape[1] for x in tensors((args, dict(kwargs))) if x.ndim > 1]
        return cls(
            documents=document_numbers(named),
            padding=padded_keys(named),
            length=lengths[0] if lengths else 0,
        )


def named_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments of a forward by name, those in *args left out."""
    try:
        bound = inspect.signature(unwrapped(model).forward).bind_partial(*args)
    except TypeError:
        return dict(kwargs)
    return {**bound.arguments, **kwargs}


def document_numbers(kwargs: Mapping[str, Any]) -> Int[Tensor, "b t"] | None:
    """The document of each token, from the arguments of a packed batch, or None if it is not packed."""
    for name in SEGMENTS:
        ids = kwargs.get(name)
        if (
            isinstance(ids, Tensor)
            and ids.ndim == 2
            and int(ids.max()) > int(ids.min())
        ):
            return ids
    for name in BORDERS:
        borders = kwargs.get(name)
        if isinstance(borders, Tensor) and borders.ndim == 1 and len(borders) > 2:
            return torch.repeat_interleave(borders.diff().long())[None]
    positions = kwargs.get("position_ids")
    if (
        not isinstance(positions, Tensor)
        or positions.ndim != 2
        or positions.is_floating_point()
    ):
        return None
    # Left padding repeats position 0 or 1; a document that begins anew counts upwards from 0.
    begins = (positions[:, :-1] == 0) & (positions[:, 1:] == 1)
    if int(begins.sum(1).max()) < 2:
        return None
    return Documents.from_positions(positions).ids


def padded_keys(kwargs: Mapping[str, Any]) -> Bool[Tensor, "b t"] | None:
    """True where a token is padding, from the arguments of a batch, or None if there is none."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point():
        padding = mask == 0
        return padding if bool(padding.any()) else None
    for name in HIDDEN_IF_TRUE:
        mask = kwargs.get(name)
        if (
            isinstance(mask, Tensor)
            and mask.ndim == 2
            and mask.dtype == torch.bool
            and bool(mask.any())
        ):
            return mask
    return None


def seen_keys(
    label: str,
    calls: Sequence[Seen],
    tokens: PackedTokens,
    most: int | None = None,
    forbidden: Bool[Tensor, "b t s"] | None = None,
) -> SeenKeys:
    """Returns what the queries of one layer see; `calls` are those of its heads, if they are computed one by one.

    most: about how many weights are computed; of longer sequences, some rows speak for all.
    forbidden: pairs that are weighed besides, where the layer has as many queries and keys.
    """
    call, ids, padding = calls[0], tokens.documents, tokens.padding
    length = call.query_shape[1]
    layer = SeenKeys(layer=label)
    largest_weights, reaches = LargestWeights(), []
    for rows, weights in blocks_of_weights(calls, most):
        b, _, _, s = weights.shape
        device = weights.device
        keys = torch.arange(s, device=device)
        queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
        masks: dict[str, Tensor] = {}
        # Otherwise queries and keys may be different sequences.
        is_self = length == s
        if is_self:
            layer.length = length
            masks |= {"later": keys > queries, "earlier": keys < queries}
            if ids is not None and ids.shape in ((b, s), (1, s)):
                numbers = ids.to(device)[:, None]
                of_query = numbers.mT[:, rows]
                masks["documents"] = ((of_query != numbers) & (of_query >= 0))[:, None]
        if forbidden is not None and forbidden.shape in (
            (b, length, s),
            (1, length, s),
        ):
            masks["forbidden"] = forbidden[:, None, rows].to(device)
        padded_rows = None
        if padding is not None and padding.shape == (b, s):
            masks["padding"] = padded = padding.to(device)[:, None, None]
            padded_rows = padded.mT[:, :, rows] if is_self else None
        visible = call.visible(rows, slice(0, s))
        counted = weights
        if visible is not None:
            by_hand = isinstance(call, ScoresCall)
            if (by_hand or call.written_mask is not None) and len(calls) == 1:
                masks["hidden"] = ~visible
            # A mask of a large number spreads rows that see no key over all of them.
            counted = weights * visible.any(-1, keepdim=True)
        if padded_rows is not None:
            # A query that is padding itself may see anything.
            counted = counted * ~padded_rows
        for kind, mask in masks.items():
            # Rows of NaN are those that see no key, which have a sentence of their own below.
            by_head = (counted * mask).sum(-1).nan_to_num(0.0).amax((0, 2))
            weight, head = by_head.max(0)
            largest = float(weight), int(head)
            layer.weights[kind] = max(layer.weights.get(kind, largest), largest)
        largest_weights.add(rows, weights, visible)
        first = torch.zeros_like(queries[:, 0])
        if visible is not None:
            first = first + visible[0, 0].to(torch.uint8).argmax(-1)
        reaches.append(torch.stack([queries[:, 0], first]).cpu())
        # A fused kernel gives an empty row zeros, a softmax by hand NaN, as it does for infinite logits.
        sums = weights.sum(-1)
        is_blind = sums == 0
        if visible is not None:
            is_blind = is_blind | (sums.isnan() & ~visible.any(-1))
        empty = is_blind.any(1)
        # A query that is not padding is named first.
        real = empty
        if padded_rows is not None:
            real = empty & ~padded_rows[:, 0, :, 0]
        is_padding = not bool(real.any())
        is_worse = layer.empty is None or (layer.empty[2] and not is_padding)
        if is_worse and bool(empty.any()):
            index = int((empty if is_padding else real).flatten().int().argmax())
            sample, row = divmod(index, empty.shape[1])
            layer.empty = sample, rows.start + row, is_padding
    # Scores that are divided by a cap are scaled by more than the logits.
    if call.q is not None and (
        call.spec.cap.kind == "none" or not isinstance(call, ScoresCall)
    ):
        width = call.q.shape[-1]
        layer.scale = (call.spec.scale.constant(width) or math.nan) * width**0.5
    layer.first_keys = torch.cat(reaches, 1)
    layer.softcap = call.spec.cap.limit
    layer.positional = largest_weights.are_positional()
    layer.competes = call.spec.normalizer.kind in ("softmax", "sink")
    return layer


def findings(
    model: nn.Module,
    tokens: PackedTokens,
    layers: Collection[SeenKeys],
    *,
    finite: bool = True,
) -> list[str]:
    """Says in a sentence each what should not be seen and is, with the layer, the head and the weight.

    A query that sees no key is said where the outputs are not `finite`: fused kernels give it zeros, a softmax NaN.

    Later keys are none of it in a model that is made to see both ways. They are where most layers of the same kind hide
    them, where the configuration says "causal", or where a layer sees later keys and not one earlier key.
    """
    sentences = []
    kinds: dict[str, list[SeenKeys]] = {}
    for layer in layers:
        if layer.length > 1:
            # Layers of one stack are compared with each other: an encoder beside a decoder is no odd one out.
            kinds.setdefault(re.sub(r"\d+", "*", layer.layer), []).append(layer)
    for kind in kinds.values():
        inverted = [
            layer
            for layer in kind
            if layer.weight("later") and not layer.weight("earlier")
        ]
        leaking = [layer for layer in kind if layer.weight("later") > LEAST_WEIGHT]
        hiding = [layer for layer in kind if not layer.weight("later")]
        is_causal = is_causal_by_config(model) and kind[0].length == tokens.length
        if inverted:
            sentences.append(
                f"{_named(inverted)} sees later keys and no earlier one: its mask is inverted"
            )
        elif leaking and (len(hiding) >= len(leaking) or is_causal):
            sentences.append(
                f"{_named(leaking)} sees later keys {_largest(leaking, 'later')}"
            )
    for kind, words in _UNEXPECTED.items():
        affected = [layer for layer in layers if layer.weight(kind) > LEAST_WEIGHT]
        if kind == "padding" and config_says(unwrapped(model), "is_encoder_decoder"):
            # The mask is the encoder's, and the decoder's own tokens may be as many.
            affected = [x for x in affected if not x.length or x.weight("later")]
        if affected:
            sentences.append(f"{words} {_named(affected)} {_largest(affected, kind)}")
    empty = [x for x in layers if x.empty is not None]
    if empty and not finite:
        # One that is not padding first.
        layer = min(empty, key=lambda x: x.empty is not None and x.empty[2])
        assert layer.empty is not None
        sample, query, is_padding = layer.empty
        remark = ", which is padding," if is_padding else ""
        sentences.append(
            f"an output is not finite, and sample {sample}, query {query}{remark} sees no key in {layer.layer}: a "
            "softmax over nothing is NaN"
        )
    elif not finite:
        sentences.append("an output is not finite")
    return sentences


_UNEXPECTED = {
    "documents": "documents of the packed batch see each other in",
    "padding": "queries give weight to padding in",
    "hidden": "hidden pairs have weight, as the mask's number is not low enough beside the logits, in",
}


def _largest(layers: Sequence[SeenKeys], kind: str) -> str:
    weight, head = max(layer.weights[kind] for layer in layers)
    return f"(head {head} with a weight of {weight:.3g})"


def _named(layers: Sequence[SeenKeys]) -> str:
    n_more = len(layers) - 1
    return f"{layers[0].layer} and {n_more} more" if n_more else layers[0].layer


def is_causal_by_config(model: nn.Module) -> bool:
    """Whether a model says that it predicts later tokens from earlier ones: by its class or its configuration."""
    inner = unwrapped(model)
    has_config = getattr(inner, "config", None) is not None
    is_named = has_config and type(inner).__name__.endswith("ForCausalLM")
    is_decoder = (
        is_named or config_says(inner, "is_decoder") or config_says(inner, "is_causal")
    )
    return is_decoder and not config_says(inner, "is_encoder_decoder")


def config_says(model: nn.Module, key: str) -> bool:
    """Whether a model's configuration has a key that is true."""
    config = getattr(model, "config", None)
    if isinstance(config, Mapping):
        return config.get(key) is True
    return getattr(config, key, None) is True


def visible_pairs(call: Seen) -> Tensor:
    """Returns which pairs [b h t s] of a call are visible; dimensions that all pairs share may be 1.

    A call of packed sequences has one batch entry that holds them all.
    """
    *_, t, s = call.scores_shape
    visible = call.visible(slice(0, t), slice(0, s))
    if visible is None:
        return torch.ones(1, 1, t, s, dtype=torch.bool)
    return visible.cpu().expand(*visible.shape[:2], t, s)


def describe_visible(visible: Tensor) -> tuple[str, int | None]:
    """Describes which keys are visible [h t s], and returns the window in tokens if this batch shows one."""
    pairs = visible[0]
    t, s = pairs.shape
    if not bool((visible == pairs).all()):
        return "a mask that differs by head", None
    if bool(pairs.all()):
        return "every key", None
    distance = torch.arange(s - t, s)[:, None] - torch.arange(s)[None, :]
    if torch.equal(pairs, distance >= 0):
        return f"keys up to its own (of {s}; a wider window looks the same)", None
    reach = int(distance[pairs].max()) + 1 if bool(pairs.any()) else 0
    if torch.equal(pairs, (distance >= 0) & (distance < reach)):
        return f"the last {reach} keys, including its own", reach
    if torch.equal(pairs, distance.abs() < reach):
        return f"keys less than {reach} away on both sides", reach
    present = pairs.any(0)
    if torch.equal(pairs, present[None, :].expand_as(pairs)):
        return "every key that is not padding", None
    if torch.equal(pairs, present[None, :] & (distance >= 0)):
        return "keys up to its own that are not padding", None
    return "another pattern of keys", None
