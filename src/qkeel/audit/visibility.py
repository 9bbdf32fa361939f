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

LEAST_WEIGHT = 1e-3  # of a row on keys it should not see, under which nothing is said
# Names under which models take the documents of a packed batch, and its padding.
SEGMENTS = ("segment_ids", "document_ids", "seq_idx")
BORDERS = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")
HIDDEN_IF_TRUE = ("key_padding_mask", "src_key_padding_mask")


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class SeenKeys:
    """The largest weight that a row of a layer gives to each kind of keys, with the head, and what the layer sees.

    `length` is the number of its queries, 0 if its keys are another sequence. `later`, `documents`, `padding` and
    `hidden` are (weight, head); `sees_earlier` and `sees_later` say whether any pair with an earlier or a later key has
    weight. `empty` is the first sample and query that sees no key and is not padding.
    """

    layer: str
    length: int = 0
    later: tuple[float, int] = (0.0, 0)
    documents: tuple[float, int] = (0.0, 0)
    padding: tuple[float, int] = (0.0, 0)
    hidden: tuple[float, int] = (0.0, 0)
    sees_earlier: bool = False
    sees_later: bool = False
    empty: tuple[int, int] | None = None


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
    seen_keys = SeenKeys(layer=label)
    for rows, weights in blocks_of_weights(calls):
        b, _, _, s = weights.shape
        device = weights.device
        queries = torch.arange(rows.start, rows.stop, device=device)
        keys = torch.arange(s, device=device)
        call = calls[0]
        t = call.query_shape[1]
        if t == s:  # otherwise queries and keys may be different sequences
            seen_keys.length = t
            later = keys > queries[:, None]
            seen_keys.later = max(seen_keys.later, _largest(weights * later))
            seen_keys.sees_later |= bool(((weights > 0) & later).any())
            seen_keys.sees_earlier |= bool(
                ((weights > 0) & (keys < queries[:, None])).any()
            )
        if ids is not None and t == s and ids.shape in ((b, s), (1, s)):
            numbers = ids.to(device)
            is_foreign = (numbers[:, rows, None] != numbers[:, None]) & (
                numbers[:, rows, None] >= 0
            )
            seen_keys.documents = max(
                seen_keys.documents, _largest(weights * is_foreign[:, None])
            )
        if padding is not None and padding.shape == (b, s):
            hidden = padding.to(device)
            if t == s:  # a query that is padding itself may see anything
                weight = weights * (
                    hidden[:, None, None] & ~hidden[:, None, rows, None]
                )
            else:
                weight = weights * hidden[:, None, None]
            seen_keys.padding = max(seen_keys.padding, _largest(weight))
        if seen_keys.empty is None:
            seen_keys.empty = _empty_row(weights, rows, padding if t == s else None)
        if isinstance(call, ScoresCall) and call.hidden is not None and len(calls) == 1:
            block = call.hidden[:, :, rows] if call.hidden.shape[2] > 1 else call.hidden
            block = block & ~block.all(
                -1, keepdim=True
            )  # rows that see no key are spread over all of them
            seen_keys.hidden = max(seen_keys.hidden, _largest(weights * block))
    return seen_keys


def _empty_row(
    weights: Tensor, rows: slice, padding: Bool[Tensor, "b t"] | None
) -> tuple[int, int] | None:
    """The first sample and query of weights [b h r s] whose row has no weight at all."""
    sums = weights.sum(-1)
    empty = ((sums == 0) | sums.isnan()).any(1)
    if padding is not None and len(padding) == len(empty):
        empty &= ~padding.to(empty.device)[:, rows]
    if not bool(empty.any()):
        return None
    sample, row = divmod(int(empty.flatten().int().argmax()), empty.shape[1])
    return sample, rows.start + row


def _largest(weights: Tensor) -> tuple[float, int]:
    """The largest sum of a row's weights [b h r s], and its head."""
    by_head = weights.sum(-1).nan_to_num(0.0).amax((0, 2))
    head = int(by_head.argmax())
    return float(by_head[head]), head


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
            kinds.setdefault(re.sub(r"\d+", "*", layer.layer), []).append(layer)
    length = next(
        (x.shape[1] for x in tensors(arguments(batch, "batch")) if x.ndim > 1), 0
    )
    causal = is_causal_by_config(model)
    for kind in kinds.values():
        backwards = [
            layer for layer in kind if layer.sees_later and not layer.sees_earlier
        ]
        leaking = [layer for layer in kind if layer.later[0] > LEAST_WEIGHT]
        hiding = len([layer for layer in kind if not layer.sees_later])
        if backwards:
            sentences.append(
                f"{_named(backwards)} sees later keys and no earlier one: its mask is inverted"
            )
        elif leaking and (
            hiding >= len(leaking) or (causal and leaking[0].length == length)
        ):
            weight, head = max(layer.later for layer in leaking)
            sentences.append(
                f"{_named(leaking)} sees later keys (head {head} with a weight of {weight:.3g})"
            )
    for field, words in (
        ("documents", "documents of the packed batch see each other in"),
        ("padding", "queries give weight to padding in"),
        (
            "hidden",
            "hidden pairs have weight, as the mask's number is not low enough beside the logits, in",
        ),
    ):
        affected = [
            layer for layer in layers if getattr(layer, field)[0] > LEAST_WEIGHT
        ]
        if affected:
            weight, head = max(getattr(layer, field) for layer in affected)
            sentences.append(
                f"{words} {_named(affected)} (head {head} with a weight of {weight:.3g})"
            )
    empty = [layer for layer in layers if layer.empty is not None]
    if empty and not finite:
        sample, query = empty[0].empty or (0, 0)
        sentences.append(
            f"an output is not finite, and sample {sample}, query {query} sees no key in {empty[0].layer}: a softmax "
            "over nothing is NaN"
        )
    elif not finite:
        sentences.append("an output is not finite")
    return sentences


def _named(layers: Sequence[SeenKeys]) -> str:
    more = len(layers) - 1
    return f"{layers[0].layer} and {more} more" if more else layers[0].layer


def is_causal_by_config(model: nn.Module) -> bool:
    """Whether a model says that it predicts later tokens from earlier ones: by its class or its configuration."""
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    if config is None:
        return False
    read = (
        config.get
        if isinstance(config, Mapping)
        else lambda key: getattr(config, key, None)
    )
    if read("is_encoder_decoder"):
        return False
    return (
        type(inner).__name__.endswith("ForCausalLM")
        or read("is_decoder") is True
        or read("is_causal") is True
    )
