"""Which keys the queries of one attention call see, in words."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qkeel.audit.recipes import compress
from qkeel.capture.calls import ScoresCall, Seen

MOST_PAIRS = 1 << 26  # pairs of query and key of one sample that are looked at


def visible_pairs(call: Seen) -> Tensor:
    """Returns which pairs [b h t s] of a call are visible; dimensions that all pairs share may be 1.

    A call of packed sequences has one batch entry that holds them all.
    """
    if isinstance(call, ScoresCall):
        shape = call.capped.shape
        visible = torch.ones(shape, dtype=torch.bool) if call.hidden is None else ~call.hidden.cpu()
        return visible.expand(shape)
    t, s = call.q.shape[2], call.k.shape[2]
    visible = call.visible(slice(0, t), slice(0, s))
    visible = torch.ones(1, 1, t, s, dtype=torch.bool) if visible is None else visible.cpu()
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
    later = later_keys(pairs) if t == s else ""
    return f"another pattern of keys{f': {later}' if later else ''}", None


def doubts(calls: Mapping[str, Seen], kwargs: Mapping[str, object]) -> list[str]:
    """Returns what looks like a mask that does not do what was meant, in one sentence each.

    Judged by the first sample: queries that see later keys but not all earlier ones, documents of a packed batch
    (`position_ids` that start again) that see each other, and queries that see padding (0 in `attention_mask`).

    Args:
        calls: the first call of each attention layer.
        kwargs: the keyword arguments of the forward pass.
    """
    layers: dict[str, list[str]] = {}
    for name, call in calls.items():
        shape = call.capped.shape if isinstance(call, ScoresCall) else (*call.q.shape[:3], call.k.shape[2])
        if shape[-2] == shape[-1] and shape[-2] * shape[-1] <= MOST_PAIRS:
            pairs = visible_pairs(call)[0, 0]
            sentences = later_keys(pairs), _across_documents(pairs, kwargs), _on_padding(pairs, kwargs)
            for sentence in filter(None, sentences):
                layers.setdefault(sentence, []).append(name)
    return [f"{sentence} ({compress(names)})" for sentence, names in layers.items()]


def later_keys(pairs: Tensor) -> str:
    """Says that queries see later keys but not all earlier ones, as under an inverted mask; "" for other patterns.

    A symmetric pattern (documents, a window on both sides) and one that is the same for all queries (padding) are
    bidirectional attention, where later keys are meant to be seen.

    >>> later_keys(torch.ones(3, 3, dtype=torch.bool).triu())
    'queries see 3 of 3 later keys'
    """
    is_bidirectional = torch.equal(pairs, pairs.mT) or torch.equal(pairs, pairs[:1].expand_as(pairs))
    count = int(pairs.triu(1).sum())
    if is_bidirectional or not count:
        return ""
    return f"queries see {count:,} of {int(torch.ones_like(pairs).triu(1).sum()):,} later keys"


def _of_tokens(kwargs: Mapping[str, object], name: str, pairs: Tensor) -> Tensor | None:
    """Returns an argument [b t] for the first sample, if it has one number for each token."""
    values = kwargs.get(name)
    is_of_tokens = isinstance(values, Tensor) and values.ndim == 2 and values.shape[1] == len(pairs)
    return values[0].cpu() if is_of_tokens else None  # type: ignore[index]


def _across_documents(pairs: Tensor, kwargs: Mapping[str, object]) -> str:
    positions = _of_tokens(kwargs, "position_ids", pairs)
    if positions is None:
        return ""
    starts = torch.zeros_like(positions)
    starts[1:] = positions[1:] < positions[:-1]
    document = starts.cumsum(0)
    count = int((pairs & (document[:, None] != document)).sum())
    return f"packed documents see each other ({count:,} pairs of query and key)" if count else ""


def _on_padding(pairs: Tensor, kwargs: Mapping[str, object]) -> str:
    present = _of_tokens(kwargs, "attention_mask", pairs)
    if present is None:
        return ""
    is_real = present != 0
    count = int((pairs & is_real[:, None] & ~is_real).sum())
    return f"queries see padding ({count:,} pairs of query and key)" if count else ""
