"""Packed sequences and windows on both sides have the statistics and the output of each sequence by itself."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch
from tests.drawing import rand
from tests.each_row import each_row
from tests.packed_sequences import CASES, LENGTHS, packed
from torch.testing import assert_close

from qkeel import attention, errors, preset
from qkeel.functional.statistics import TENSORS, merge
from qkeel.kernels.statistics import logit_stats
from qkeel.ops import run
from qkeel.spec import ALiBi, AttentionSpec, NoPosition, Rope, SlidingWindow, Softcap
from qkeel.spec.call import BandCall, band_call, make_call

ENDS = torch.tensor([0, 3, 3, 10, 12], dtype=torch.int32)
OTHER = torch.tensor([0, 5, 6, 10, 13], dtype=torch.int32)


@each_row("name, options", CASES)
def test_where_ends_are_not_read_a_span_has_all_keys_that_its_rows_see(name, options):
    of_q, of_k, _ = LENGTHS[name]
    call = packed(name, **options).call(longest=max(*of_q, *of_k))
    # The keys of other sequences begin elsewhere than their queries.
    assert (call.longest is None) == (of_q != of_k)
    (t, s), row = (call.q.shape[2], call.k.shape[2]), torch.arange(call.q.shape[2])
    sees = (call.high > call.low)[0]
    farthest = int(torch.maximum(row - call.low, call.high - row)[0, sees].max())
    for longest in (farthest, call.longest, None):
        unread = dataclasses.replace(call, low=call.low.to("meta"), longest=longest)
        for start in range(0, t, 3):
            for stop in range(start + 1, t + 1, 4):
                exact, span = (x.span(slice(start, stop)) for x in (call, unread))
                assert 0 <= span.start <= span.stop <= s
                assert exact.start == exact.stop or (
                    span.start <= exact.start and exact.stop <= span.stop
                )


@pytest.mark.parametrize(
    ("ends_k", "causal"), [(ENDS, True), (OTHER, True), (ENDS, False)]
)
@each_row(
    "spec",
    [
        preset("qwen3"),
        preset("cosa_logn"),
        AttentionSpec(position=ALiBi()),
        AttentionSpec(position=SlidingWindow(window=3, inner=Rope()), cap=Softcap(4.0)),
    ],
)
def test_attention_and_statistics_are_those_of_sequences_alone(spec, ends_k, causal):
    q, k, v = (torch.randn(1, h, 13, 16, requires_grad=True) for h in (4, 2, 2))
    padding = rand(1, 1, 1, 13, seed=1) < 0.8
    options = {
        "spec": spec,
        "params": spec.init_params(4, 2, 16),
        "causal": causal,
        "stats": True,
    }
    ends = ENDS if ends_k is ENDS else (ENDS, ends_k)
    out, stats = attention(q, k, v, mask=padding, cu_seqlens=ends, **options)
    truth, joined = torch.zeros_like(out), None
    for i, j, m, n in zip(ENDS, ENDS[1:], ends_k, ends_k[1:]):
        if i == j:
            continue
        # Not by `attention`, which refuses more causal queries than keys.
        sequence = make_call(
            spec,
            q[:, :, i:j],
            k[:, :, m:n],
            v[:, :, m:n],
            mask=padding[..., m:n],
            params=options["params"],
            causal=causal,
        )
        truth[:, :, i:j], alone = run(sequence, "auto"), logit_stats(sequence)
        joined = alone if joined is None else merge(joined, alone)
    assert_close(out, truth)
    for name in TENSORS:
        assert_close(
            getattr(stats, name), getattr(joined, name), rtol=1e-5, atol=1e-5, msg=name
        )
    ours, theirs = (
        torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, truth)
    )
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


X = torch.randn(1, 2, 12, 8)


@each_row(
    "error, ends, x",
    [
        (errors.InvalidTypeError, [0, 12], X),
        (errors.InvalidTypeError, ENDS.float(), X),
        (errors.ShapeError, ENDS[:1], X),
        (errors.ShapeError, ENDS[None], X),
        (errors.ShapeError, (ENDS, ENDS[:3]), X),
        (errors.ShapeError, ENDS, X.expand(2, 2, 12, 8)),
        (errors.InvalidValueError, ENDS + 1, X),
        (errors.InvalidValueError, ENDS.flip(0) % 12, X),
        (errors.InvalidValueError, torch.tensor([0, 13]), X),
        (errors.InvalidValueError, ENDS.to("meta"), X),
    ],
)
def test_what_cannot_be_read_as_ends_of_sequences_is_refused(error, ends, x):
    with pytest.raises(error):
        attention(x, x, x, spec=AttentionSpec(), cu_seqlens=ends)


def test_positions_restart_in_each_sequence_so_none_are_taken():
    with pytest.raises(errors.InvalidValueError):
        attention(
            X, X, X, spec=AttentionSpec(), cu_seqlens=ENDS, pos_q=torch.arange(12)
        )


@pytest.mark.slow
def test_torchs_compiler_makes_one_graph_for_any_ends_and_it_is_watched_alike():
    command = [sys.executable, "-m", "tests.spec.packed_compiled"]  # without jaxtyping
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# Queries, keys, and [first, stop) of both by sequence.
BANDS = [
    (6, 6, [(0, 6, 0, 6)]),
    (3, 7, [(0, 3, 0, 7)]),
    (7, 4, [(0, 7, 0, 4)]),
    (9, 9, [(0, 3, 0, 3), (3, 3, 3, 3), (3, 8, 3, 8)]),
    (8, 9, [(0, 2, 0, 5), (2, 6, 5, 6), (6, 7, 6, 9)]),
    (7, 9, [(0, 3, 0, 3), (3, 6, 3, 6)]),
]
SIDES = ((-1, -1), (2, 0), (0, 3), (1, -1), (-1, 1), (2, 2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reach", [None, 2])
@pytest.mark.parametrize("slopes_of", [None, "heads", "rows"])
@pytest.mark.parametrize("masked", [False, True])
@each_row("t, s, sequences", BANDS)
def test_who_sees_whom_and_with_which_bias_pair_by_pair(
    t, s, sequences, causal, reach, slopes_of, masked
):
    rng, is_packed = torch.Generator().manual_seed(0), len(sequences) > 1
    b = 1 if is_packed else 2
    # gap[i, j] is how far key j lies before query i, the last query being at the last key; NaN across sequences.
    gap, of_key = torch.full((t, s), torch.nan), torch.full((s,), -2)
    of_query = torch.zeros(b, t, dtype=torch.long)  # whose slopes a query has
    for n, (first_q, stop_q, first_k, stop_k) in enumerate(sequences):
        at_q = torch.arange(first_q - stop_q, 0.0)
        at_k = torch.arange(first_k - stop_k, 0.0)
        gap[first_q:stop_q, first_k:stop_k] = at_q[:, None] - at_k
        of_query[:, first_q:stop_q], of_key[first_k:stop_k] = n, n
    if not is_packed:
        of_query += torch.arange(b)[:, None]
    shown = torch.rand(b, s, generator=rng) < (0.7 if masked else 2.0)
    slopes, n_rows = None, len(sequences) if is_packed else b
    if slopes_of is not None:
        shape = (2,) if slopes_of == "heads" else (n_rows, 2)
        slopes = torch.rand(shape, generator=rng)
    position = NoPosition()
    if reach is not None:
        position = SlidingWindow(window=reach, inner=position)
    q, k = torch.zeros(b, 2, t, 2), torch.zeros(b, 2, s, 2)
    mask = shown[:, None, None] if masked else None
    spec = AttentionSpec(position=position)
    plain = make_call(spec, q, k, k, causal=causal, mask=mask)
    lengths = None
    if is_packed:
        of_q, of_k = (
            torch.tensor([0, *(x[i] for x in sequences)], dtype=torch.int32)
            for i in (1, 3)
        )
        lengths = of_q if of_q.equal(of_k) else (of_q, of_k)
    for window in SIDES:
        call = band_call(plain, window=window, slopes=slopes, cu_seqlens=lengths)
        if not isinstance(call, BandCall):
            assert (window, slopes, is_packed) == ((-1, -1), None, False)
            assert call is plain
            continue
        bounds = [t + s if x < 0 else x for x in window]
        left, right = (min(x, (reach or 99) - 1) for x in bounds)
        band = (gap <= left) & (-gap <= (0 if causal else right))
        visible = (band & shown[:, None])[:, None].expand(b, 2, t, s)
        for rows, keys in ((slice(0, t), slice(0, s)), (slice(1, 3), slice(2, s))):
            block, bias = visible[:, :, rows, keys], call.bias(rows, keys)
            assert torch.equal(call.visible(rows, keys).expand_as(block), block)
            assert (bias is None) == (slopes is None)
            if bias is not None:
                by_query = slopes.expand(n_rows, 2)[of_query[:, rows]].mT[..., None]
                expected = -gap.abs()[rows, keys] * by_query
                ours = bias.expand_as(block)[block]
                assert_close(ours, expected.expand_as(block)[block])
        # Spans go by the ends and the reach alone.
        some = itertools.combinations(range(t + 1), 2) if slopes is None else [(0, t)]
        for start, stop in some:
            span, seen = call.span(slice(start, stop)), band[start:stop].any(0)
            if seen.any():
                at = seen.nonzero().flatten().tolist()
                assert (span.start, span.stop - 1) == (at[0], at[-1])
            else:
                assert span.start == span.stop
        assert call.padding is (call.mask if masked else None)
        assert call.plain != is_packed
        assert is_packed == (call.of_key is not None)
        assert call.of_key is None or call.of_key.equal(of_key)
