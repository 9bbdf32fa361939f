"""Packed sequences and windows on both sides have the statistics and the output of each sequence by itself."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch
from tests.each_row import each_row
from tests.packed_sequences import CASES, packed, spoiled
from torch import Tensor

import qkeel
from qkeel import attention, errors, preset
from qkeel.functional.statistics import TENSORS, merge
from qkeel.kernels import statistics
from qkeel.kernels.statistics import logit_stats, max_stats
from qkeel.spec import ALiBi, AttentionSpec, NoPosition, Rope, SlidingWindow, Softcap
from qkeel.spec.call import BandCall, band_call, make_call, with_query_mask

ENDS = torch.tensor([0, 3, 3, 10, 12], dtype=torch.int32)


@each_row("name, how", CASES)
def test_where_ends_are_not_read_a_span_has_all_keys_that_its_rows_see(
    name: str, how: dict[str, object]
) -> None:
    call = packed(name, **how).call()  # type: ignore[arg-type]
    (t, s), row = (call.q.shape[2], call.k.shape[2]), torch.arange(call.q.shape[2])
    sees = (call.high > call.low)[0]
    farthest = int(torch.maximum(row - call.low, call.high - row)[0, sees].max())
    for longest in (farthest, None):
        unread = dataclasses.replace(call, low=call.low.to("meta"), longest=longest)
        for start, stop in (
            (a, b) for a in range(0, t, 3) for b in range(a + 1, t + 1, 4)
        ):
            read, whole = call.span(slice(start, stop)), unread.span(slice(start, stop))
            assert read.start == read.stop or (
                whole.start <= read.start and read.stop <= whole.stop
            )
            assert 0 <= whole.start <= whole.stop <= s


def test_a_nan_in_one_sequence_reaches_its_own_rows_and_no_head_beside() -> None:
    one, own = spoiled("keys of their own")
    call = one.call()
    found, rest = logit_stats(call), torch.ones(one.q.shape[2], dtype=torch.bool)
    rest[own] = False
    beside = logit_stats(with_query_mask(call, rest[None]))
    assert beside.max_logit.isfinite().all()
    for x in (found.max_logit, found.entropy, max_stats(call).max_logit):
        assert x.isnan().tolist() == [
            True,
            True,
            False,
            False,
        ]  # the two that share the key head
    _, told = attention(
        one.q, one.k, one.k, spec=AttentionSpec(), cu_seqlens=one.ends, stats="max"
    )
    assert told.max_logit.isfinite().tolist() == [False, False, True, True]


def each(ends: tuple[Tensor, Tensor]) -> list[tuple[slice, slice]]:
    a, b = (x.tolist() for x in ends)
    return [
        (slice(i, j), slice(m, n))
        for i, j, m, n in zip(a, a[1:], b, b[1:])
        if j > i and n > m
    ]


@each_row(
    "spec",
    [
        preset("qwen3"),
        preset("gemma2"),
        preset("cosa_logn"),
        AttentionSpec(position=ALiBi()),
        AttentionSpec(position=SlidingWindow(window=3, inner=Rope()), cap=Softcap(4.0)),
    ],
)
def test_attention_and_statistics_of_any_spec_are_those_of_sequences_alone(
    spec: AttentionSpec,
) -> None:
    q, k, v = (torch.randn(1, h, 13, 16, requires_grad=True) for h in (4, 2, 2))
    params = spec.init_params(4, 2, 16)
    other = torch.tensor([0, 5, 6, 10, 13], dtype=torch.int32)
    for ends, causal in (
        ((ENDS, ENDS), True),
        ((ENDS, other), True),
        ((ENDS, ENDS), False),
    ):
        given = ENDS if ends[0] is ends[1] else ends
        out, found = attention(
            q,
            k,
            v,
            spec=spec,
            params=params,
            causal=causal,
            cu_seqlens=given,
            stats=True,
        )
        truth, parts = torch.zeros_like(out), []
        for rows, keys in each(ends):
            one = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
            truth[:, :, rows], stats = attention(
                *one, spec=spec, params=params, causal=causal, stats=True
            )
            parts.append(stats)
        torch.testing.assert_close(out, truth)
        whole = parts[0]
        for part in parts[1:]:
            whole = merge(whole, part)
        for name in TENSORS:
            torch.testing.assert_close(
                getattr(found, name),
                getattr(whole, name),
                rtol=1e-5,
                atol=1e-5,
                msg=name,
            )
        ours, theirs = (
            torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, truth)
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_it_costs_the_pairs_of_each_sequence_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = torch.arange(0, 4097, 32)
    call = band_call(
        make_call(AttentionSpec(), *[torch.randn(1, 1, 4096, 8)] * 3), cu_seqlens=ends
    )
    monkeypatch.setenv("QKEEL_NATIVE", "0")
    logits = 0
    scores = BandCall.scores

    def counted(
        self: BandCall, q: Tensor, k: Tensor, rows: slice, keys: slice
    ) -> Tensor:
        nonlocal logits
        logits += q.shape[2] * k.shape[2]
        return scores(self, q, k, rows, keys)

    monkeypatch.setattr(BandCall, "scores", counted)
    monkeypatch.setattr(statistics, "BLOCK", 1)
    logit_stats(call)
    assert logits == 4096 * 64  # blocks of 64 rows, which are two sequences


def test_what_cannot_be_read_as_ends_of_sequences_is_refused() -> None:
    q, spec = torch.randn(1, 2, 12, 8), AttentionSpec()
    two = torch.randn(2, 2, 12, 8)
    for error, given, x in (
        (errors.InvalidTypeError, [0, 12], q),
        (errors.InvalidTypeError, ENDS.float(), q),
        (errors.ShapeError, ENDS[:1], q),
        (errors.ShapeError, (ENDS, ENDS[:3]), q),
        (errors.ShapeError, ENDS, two),
        (errors.InvalidValueError, ENDS + 1, q),
        (errors.InvalidValueError, ENDS.flip(0) % 12, q),
        (errors.InvalidValueError, torch.tensor([0, 13]), q),
        (errors.InvalidValueError, ENDS.to("meta"), q),
    ):
        with pytest.raises(error):
            qkeel.attention(x, x, x, spec=spec, cu_seqlens=given, stats=True)  # type: ignore[call-overload]
    with pytest.raises(
        errors.InvalidValueError, match="neither pos_q nor pos_k with cu_seqlens"
    ):
        attention(q, q, q, spec=spec, cu_seqlens=ENDS, pos_q=torch.arange(12))


def test_a_mask_of_the_callers_hides_keys_besides() -> None:
    q, mask = torch.randn(1, 2, 12, 8), torch.rand(1, 12) < 0.6
    for given, where in (
        (mask[:, None, None], mask[0]),
        (torch.tensor(True), torch.ones(12, dtype=torch.bool)),
    ):
        out = attention(q, q, q, spec=AttentionSpec(), cu_seqlens=ENDS, mask=given)
        for rows, keys in each((ENDS, ENDS)):
            x = q[:, :, rows]
            theirs = attention(
                x, x, x, spec=AttentionSpec(), mask=where[keys][None, None, None]
            )
            torch.testing.assert_close(out[:, :, rows], theirs)
    assert not attention(
        q, q, q, spec=AttentionSpec(), cu_seqlens=ENDS, mask=torch.tensor(False)
    ).any()
    one = q[:, :, :1]
    out, found = attention(
        one,
        one,
        one,
        spec=AttentionSpec(),
        cu_seqlens=torch.tensor([0, 1]),
        mask=mask[:, :1] & False,
        stats=True,
    )
    assert not out.any()
    assert not found.n_queries.any()


@pytest.mark.slow
def test_torchs_compiler_makes_one_graph_for_any_ends_and_what_is_watched_of_it_is_the_same() -> (
    None
):
    command = [
        sys.executable,
        "-m",
        "tests.spec.packed_compiled",
    ]  # without the checks of types that tests have
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


BANDS: list[
    tuple[int, int, list[tuple[int, int, int, int]]]
] = [  # queries, keys, and [first, stop) of both by sequence
    (6, 6, [(0, 6, 0, 6)]),
    (3, 7, [(0, 3, 0, 7)]),
    (7, 4, [(0, 7, 0, 4)]),
    (9, 9, [(0, 3, 0, 3), (3, 3, 3, 3), (3, 8, 3, 8)]),
    (8, 9, [(0, 2, 0, 5), (2, 6, 5, 6), (6, 7, 6, 9)]),
]


@each_row("sequences", BANDS)
def test_who_sees_whom_and_with_which_bias_pair_by_pair(
    sequences: tuple[int, int, list[tuple[int, int, int, int]]],
) -> None:
    t, s, own = sequences
    packed_ones = len(own) > 1
    b, h, rng = 1 if packed_ones else 2, 2, torch.Generator().manual_seed(0)
    q, k = torch.zeros(b, h, t, 2), torch.zeros(b, h, s, 2)
    ends = [torch.tensor([0, *(x[i] for x in own)], dtype=torch.int32) for i in (1, 3)]
    of_query, of_key = (
        [
            next((n for n, x in enumerate(own) if x[i] <= at < x[i + 1]), None)
            for at in range(total)
        ]
        for i, total in ((0, t), (2, s))
    )
    padding = torch.rand(b, s, generator=rng) < 0.7
    slopes = {
        "heads": torch.rand(h, generator=rng),
        "rows": torch.rand(len(own) if packed_ones else b, h, generator=rng),
    }
    for window, causal, reach, how, masked in itertools.product(
        ((-1, -1), (2, 0), (0, 3), (1, -1), (-1, 1), (2, 2)),
        (False, True),
        (None, 2),
        (None, "heads", "rows"),
        (False, True),
    ):
        given = None if how is None else slopes[how]
        spec = (
            AttentionSpec()
            if reach is None
            else AttentionSpec(position=SlidingWindow(window=reach, inner=NoPosition()))
        )
        plain = make_call(
            spec,
            q,
            k,
            k,
            causal=causal,
            mask=padding[:, None, None] if masked else None,
        )
        lengths = (
            None
            if not packed_ones
            else ends[0]
            if ends[0].equal(ends[1]) and t == s
            else tuple(ends)
        )
        call = band_call(plain, window=window, slopes=given, cu_seqlens=lengths)
        if not isinstance(call, BandCall):
            assert (window, how, packed_ones) == ((-1, -1), None, False)
            assert call is plain
            continue
        assert call.low.shape == call.high.shape == (1, t)
        left, right = window
        if reach is not None:
            left, right = (reach - 1 if x < 0 else min(x, reach - 1) for x in window)
        right = 0 if causal else right
        seen, bias = torch.zeros(b, h, t, s, dtype=torch.bool), torch.zeros(b, h, t, s)
        band = torch.zeros(t, s, dtype=torch.bool)
        for i, j in itertools.product(range(t), range(s)):
            n = of_query[i]
            if n is None or n != of_key[j]:
                continue
            _, stop, first_k, stop_k = own[n]
            gap = (i - stop + stop_k - first_k) - (
                j - first_k
            )  # the last query is at the last key
            band[i, j] = (left < 0 or gap <= left) and (right < 0 or -gap <= right)
            seen[:, :, i, j] = (
                band[i, j] & (padding[:, j] if masked else torch.ones(b).bool())
            )[:, None]
            if given is not None:
                bias[:, :, i, j] = -abs(gap) * (
                    given if given.ndim == 1 else given[n] if packed_ones else given
                )
        for rows, keys in ((slice(0, t), slice(0, s)), (slice(1, 3), slice(2, s))):
            assert torch.equal(
                call.visible(rows, keys).expand(b, h, -1, -1), seen[:, :, rows, keys]
            ), (
                window,
                causal,
                reach,
                how,
            )
            found = call.bias(rows, keys)
            assert (found is None) == (given is None)
            if found is not None:
                where = seen[:, :, rows, keys]
                torch.testing.assert_close(
                    found.expand_as(where)[where], bias[:, :, rows, keys][where]
                )
        for start, stop in itertools.combinations(range(t + 1), 2):
            keys_seen = band[start:stop].any(0).nonzero().flatten().tolist()
            span = call.span(slice(start, stop))
            assert (
                (span.start, span.stop) == (keys_seen[0], keys_seen[-1] + 1)
                if keys_seen
                else span.start == span.stop
            )
        assert call.padding is (call.mask if masked else None)
        assert (
            call.mask is plain.mask or not masked or how
        )  # one next to slopes is an added one
        if packed_ones:
            assert call.of_key is not None
            assert call.of_key.tolist() == [-2 if n is None else n for n in of_key]
            assert not call.plain
        else:
            assert call.of_key is None
