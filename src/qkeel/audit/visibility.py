"""What the keys are that queries give weight to: later ones, those of other documents, padding, hidden ones.

Read from the weights that attention computes on a batch, whatever mask, flag or kernel made them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from qkeel.audit.sees import Documents
from qkeel.capture.calls import ScoresCall, Seen
from qkeel.capture.example import arguments, tensors
from qkeel.heads.site import Sites
from qkeel.patching.forward import unwrapped
from qkeel.sites.find import site_label
from qkeel.sites.weights import blocks_of_weights, captured_calls

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
    "earlier", "documents", "padding" and "hidden", as far as the layer and the batch have such keys. `empty` is the
    first sample and query that sees no key and is not padding, `empty_padding` the first that is.
    """

    layer: str
    length: int = 0
    weights: dict[str, Largest] = dataclasses.field(default_factory=dict)
    empty: tuple[int, int] | None = None
    empty_padding: tuple[int, int] | None = None

    def weight(self, kind: str) -> float:
        """The largest weight on keys of a kind, 0 if there are none."""
        return self.weights.get(kind, (0.0, 0))[0]


def read_visibility(
    model: nn.Module, batch: object, sites: Sites | None = None
) -> list[SeenKeys]:
    """Returns what the queries of each layer see on a batch, computed block by block from one pass."""
    _, kwargs = arguments(batch, "batch")
    calls = captured_calls(model, batch, sites)
    ids, padding = document_numbers(kwargs), padded_keys(kwargs)
    name = type(unwrapped(model)).__name__
    return [
        _of_layer(site_label(layer, name), site, ids, padding)
        for layer, site in calls.items()
    ]


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


def _of_layer(
    label: str,
    calls: Sequence[Seen],
    ids: Int[Tensor, "b t"] | None,
    padding: Bool[Tensor, "b t"] | None,
) -> SeenKeys:
    call = calls[0]
    length = call.query_shape[1]
    layer = SeenKeys(layer=label)
    for rows, weights in blocks_of_weights(calls):
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
        padded_rows = None
        if padding is not None and padding.shape == (b, s):
            padded = padding.to(device)[:, None, None]
            # a query that is padding itself may see anything.
            if is_self:
                padded_rows = padded.mT[:, :, rows]
                padded = padded & ~padded_rows
            masks["padding"] = padded
        if isinstance(call, ScoresCall) and call.hidden is not None and len(calls) == 1:
            hidden = call.hidden[
                :, :, rows if call.hidden.shape[2] > 1 else slice(None)
            ]
            # Rows that see no key are spread over all of them.
            masks["hidden"] = hidden & ~hidden.all(-1, keepdim=True)
        for kind, mask in masks.items():
            by_head = (weights * mask).sum(-1).nan_to_num(0.0).amax((0, 2))
            weight, head = by_head.max(0)
            largest = float(weight), int(head)
            layer.weights[kind] = max(layer.weights.get(kind, largest), largest)
        # A fused kernel gives an empty row zeros, a softmax by hand NaN, as it does for infinite logits.
        sums = weights.sum(-1)
        empty = ((sums == 0) | (sums.isnan() & _sees_none(calls, rows, sums))).any(1)
        for is_padding in (False, True):
            of_kind = empty
            if padded_rows is not None:
                of_kind = empty & (padded_rows[:, 0, :, 0] == is_padding)
            elif is_padding:
                break
            if bool(of_kind.any()):
                sample, row = divmod(
                    int(of_kind.flatten().int().argmax()), empty.shape[1]
                )
                first = sample, rows.start + row
                if is_padding:
                    layer.empty_padding = layer.empty_padding or first
                else:
                    layer.empty = layer.empty or first
    return layer


def _sees_none(calls: Sequence[Seen], rows: slice, sums: Tensor) -> Tensor:
    """Which rows of the calls of a layer see no key by their masks; broadcasts to [b h r]."""
    if not bool(sums.isnan().any()):
        return torch.zeros((), dtype=torch.bool, device=sums.device)
    sees = [visible_pairs(call)[:, :, rows].any(-1) for call in calls]
    return ~torch.cat(sees, 1).to(sums.device)


def findings(
    model: nn.Module, batch: object, layers: Sequence[SeenKeys], *, finite: bool = True
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
    batch_tensors = tensors(arguments(batch, "batch"))
    length = next((x.shape[1] for x in batch_tensors if x.ndim > 1), 0)
    for kind in kinds.values():
        inverted = [
            layer
            for layer in kind
            if layer.weight("later") and not layer.weight("earlier")
        ]
        leaking = [layer for layer in kind if layer.weight("later") > LEAST_WEIGHT]
        hiding = [layer for layer in kind if not layer.weight("later")]
        is_causal = is_causal_by_config(model) and kind[0].length == length
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
        if affected:
            sentences.append(f"{words} {_named(affected)} {_largest(affected, kind)}")
    empty = [(x.layer, x.empty, "") for x in layers if x.empty is not None]
    empty += [
        (x.layer, x.empty_padding, ", which is padding,")
        for x in layers
        if x.empty_padding is not None
    ]
    if empty and not finite:
        name, (sample, query), remark = empty[0]
        sentences.append(
            f"an output is not finite, and sample {sample}, query {query}{remark} sees no key in {name}: a softmax "
            "over nothing is NaN"
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
    config = getattr(inner, "config", None)

    def says(key: str) -> bool:
        if isinstance(config, Mapping):
            return config.get(key) is True
        return getattr(config, key, None) is True

    is_named = config is not None and type(inner).__name__.endswith("ForCausalLM")
    is_decoder = is_named or says("is_decoder") or says("is_causal")
    return is_decoder and not says("is_encoder_decoder")


def visible_pairs(call: Seen) -> Tensor:
    """Returns which pairs [b h t s] of a call are visible; dimensions that all pairs share may be 1.

    A call of packed sequences has one batch entry that holds them all.
    """
    if isinstance(call, ScoresCall):
        shape = call.capped.shape
        visible = (
            torch.ones(shape, dtype=torch.bool)
            if call.hidden is None
            else ~call.hidden.cpu()
        )
        return visible.expand(shape)
    t, s = call.q.shape[2], call.k.shape[2]
    visible = call.visible(slice(0, t), slice(0, s))
    visible = (
        torch.ones(1, 1, t, s, dtype=torch.bool) if visible is None else visible.cpu()
    )
    return visible.expand(*visible.shape[:2], t, s)


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
