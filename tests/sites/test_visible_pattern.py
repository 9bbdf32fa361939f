"""The type of a layer by the keys that its queries reach."""

import pytest
import torch
from tests.drawing import randn

from qkeel.capture.calls import ScoresCall
from qkeel.capture.visible_pattern import VisiblePattern, told_apart, visible_pattern
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

T = 12


def pairs(f, s=T):
    return f(torch.arange(T)[:, None], torch.arange(s)[None])


def causal(i, j):
    return j <= i


def window(i, j):
    return (j <= i) & (i - j < 4)


def chosen(k):
    scores = randn(T, T, seed=0).masked_fill(~pairs(causal), -torch.inf)
    return torch.zeros(T, T, dtype=torch.bool).scatter(
        -1, scores.topk(k, -1).indices, True
    ) & pairs(causal)


def with_memory(mask, *, front):
    memory = torch.ones(T, 2, dtype=torch.bool)
    return torch.cat([memory, mask] if front else [mask, memory], -1)


BLOCKS = pairs(
    lambda i, j: j < (i + 1) // 4, 3
)  # three compressed keys, each of four tokens
PADDED = torch.ones(2, T, dtype=torch.bool)
PADDED[1, :5] = False

MASKS = {
    "causal": (pairs(causal), "full", False),
    "all": (torch.ones(T, T, dtype=torch.bool), "full", False),
    "prefix": (pairs(lambda i, j: (j <= i) | (j < 4)), "full", False),
    "sliding window": (pairs(window), "window", False),
    "window to both sides": (pairs(lambda i, j: (i - j).abs() < 3), "window", False),
    "window and first keys": (
        pairs(lambda i, j: window(i, j) | ((j < 2) & (j <= i))),
        "sparse",
        False,
    ),
    "packed or in chunks": (
        pairs(lambda i, j: (j <= i) & (i // 4 == j // 4)),
        "full",
        True,
    ),
    "groups in no order": (pairs(lambda i, j: i % 2 == j % 2), "sparse", False),
    "every third key": (
        pairs(lambda i, j: (j <= i) & (i % 3 == j % 3)),
        "sparse",
        False,
    ),
    "the best four": (chosen(4), "sparse", False),
    "the best of all": (chosen(T), "full", False),
    "compressed": (BLOCKS, "compressed", False),
    "window and compressed": (
        torch.cat([pairs(window), BLOCKS], -1),
        "compressed",
        False,
    ),
    "chosen compressed": (
        torch.cat([pairs(window), BLOCKS & chosen(4)[:, :3]], -1),
        "compressed",
        False,
    ),
    "memory in front": (with_memory(pairs(causal), front=True), "full", False),
    "memory behind": (with_memory(pairs(causal), front=False), "full", False),
    "memory and a window": (with_memory(pairs(window), front=True), "window", False),
}


def call_of(mask, written):
    while mask.ndim < 4:
        mask = mask[None]
    b, s = mask.shape[0], mask.shape[-1]
    q, k = torch.randn(b, 2, T, 4), torch.randn(b, 2, s, 4)
    if not written:
        return make_call(AttentionSpec(), q, k, k, causal=False, mask=mask)
    z = q @ k.mT
    return ScoresCall(spec=AttentionSpec(), logits=z, capped=z, mask=mask, q=q, k=k)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_the_type_is_that_of_the_visible_pattern(name, written, monkeypatch):
    mask, visible, blocks = MASKS[name]
    assert visible_pattern(call_of(mask, written)) == VisiblePattern(
        visible=visible, blocks=blocks, queries=T
    )
    monkeypatch.setattr(
        "qkeel.capture.visible_pattern._PAIRS", 5 * 2 * mask.shape[-1]
    )  # five rows at a time
    assert visible_pattern(call_of(mask, written)) == VisiblePattern(
        visible=visible, blocks=blocks, queries=T
    )


def test_fewer_keys_than_queries_are_compressed_unless_they_come_of_another_source():
    q, k = torch.randn(1, 2, T, 4), torch.randn(1, 2, 5, 4)
    call = make_call(AttentionSpec(), q, k, k, causal=False)
    assert visible_pattern(call).visible == "compressed"
    assert visible_pattern(call, "other").visible == "full"
    assert (
        visible_pattern(make_call(AttentionSpec(), k, q, q, causal=False)).visible
        == "full"
    )


def test_a_window_over_pieces_of_the_sequence_is_a_window():
    """Four queries with their own four keys and the four before, as a local attention cuts them; the middle key is
    seen by all of a piece, and the first piece has no keys before it."""
    i, j = torch.arange(4)[:, None], torch.arange(8)
    piece = (j - i >= 1) & (j - i <= 4)
    mask = torch.stack([piece & (j >= 4), piece, piece])[:, None]
    z = torch.zeros(3, 2, 4, 8)
    call = ScoresCall(
        spec=AttentionSpec(), logits=z, capped=z, mask=mask, q=None, k=None
    )
    assert visible_pattern(call).visible == "window"


def test_chunks_are_windows_where_another_layer_sees_across_them():
    chunk, whole = (
        visible_pattern(call_of(MASKS[name][0], False))
        for name in ("packed or in chunks", "causal")
    )
    assert told_apart({"a": chunk, "b": whole}) == {"a": "window", "b": "full"}
    assert told_apart({"a": chunk, "b": chunk}) == {"a": "full", "b": "full"}
