"""Windows: the numbers of the full form under a written-out mask; layers that have one and layers that do not."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from qkeel import attention, preset, reference
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
    UnknownNameError,
)
from qkeel.nn import Decoder, DecoderConfig
from qkeel.ops import KERNELS, run
from qkeel.spec import (
    PI,
    POSITIONS,
    ALiBi,
    AttentionSpec,
    Kerple,
    LeakyReRope,
    LogN,
    NoPosition,
    ReRope,
    Rope,
    SlidingWindow,
    XPos,
    layer_specs,
    positions,
)
from qkeel.spec.call import make_call


def near(t: int, s: int, window: int) -> Tensor:
    """Written out: query i, the (s - t + i)th token, and key j are less than `window` apart."""
    return torch.tensor(
        [[abs(s - t + i - j) < window for j in range(s)] for i in range(t)]
    )


@pytest.mark.parametrize(
    "inner",
    [Rope(), NoPosition(), ALiBi(), ReRope(window=2)],
    ids=lambda p: p.formula(),
)
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_is_the_full_form_under_a_mask(
    inner: NoPosition, causal: bool
) -> None:
    for t, s, window in (
        (7, 7, 1),
        (7, 7, 3),
        (3, 8, 4),
        (1, 9, 2),
        (9, 5, 3),
        (6, 6, 6),
        (6, 6, 50),
    ):
        q, k, v = (
            torch.randn(2, h, n, 8, dtype=torch.float64)
            for h, n in ((4, t), (2, s), (2, s))
        )
        full = reference.attend(
            AttentionSpec(position=inner),
            q,
            k,
            v,
            causal=causal,
            mask=near(t, s, window),
        )
        call = make_call(
            AttentionSpec(position=SlidingWindow(window=window, inner=inner)),
            q,
            k,
            v,
            causal=causal,
        )
        assert torch.equal(reference.attend_call(call).out, full.out)
        for name, kernel in KERNELS.items():
            if kernel.supports(call) is None:
                assert (kernel(call) - full.out).abs().max() <= 1e-13, (
                    name,
                    t,
                    s,
                    window,
                )


@pytest.mark.parametrize("impl", ["sdpa", "chunked"])
@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_go_block_by_block_to_the_same_numbers_and_gradients(
    impl: str, causal: bool
) -> None:
    q, k, v = (
        torch.randn(1, 2, 301, 8, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    spec = AttentionSpec(position=SlidingWindow(window=40))
    ours = run(make_call(spec, q, k, v, causal=causal), impl)
    full = reference.attend(
        AttentionSpec(position=Rope()), q, k, v, causal=causal, mask=near(301, 301, 40)
    ).out
    assert torch.allclose(ours, full, rtol=0, atol=1e-13)
    for a, b in zip(
        *(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (ours, full))
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_keys_outside_every_window_of_a_block_are_not_read() -> None:
    q, k, v = (
        torch.randn(1, 1, 1, 8),
        torch.randn(1, 1, 100, 8),
        torch.randn(1, 1, 100, 8),
    )
    k[:, :, :90] = math.nan
    for impl in ("sdpa", "chunked"):
        assert (
            attention(
                q,
                k,
                v,
                spec=AttentionSpec(position=SlidingWindow(window=10)),
                impl=impl,
            )
            .isfinite()
            .all()
        )


def test_own_positions_decide_who_is_near() -> None:
    q, k, v = (torch.randn(1, 1, 4, 8, dtype=torch.float64) for _ in range(3))
    pos = torch.tensor([[0, 5, 6, 20]])
    spec = AttentionSpec(position=SlidingWindow(window=3))
    for impl in ("sdpa", "chunked"):
        out = attention(q, k, v, spec=spec, pos_q=pos, pos_k=pos, impl=impl)
        alone = [0, 1, 3]
        assert torch.allclose(out[:, :, alone], v[:, :, alone], atol=1e-12)
        assert not torch.allclose(out[:, :, 2], v[:, :, 2])


def test_log_n_counts_the_keys_inside_the_window() -> None:
    spec = AttentionSpec(position=SlidingWindow(window=4), scale=LogN(train_length=8))
    found = (
        spec.factor(torch.tensor([[0, 1, 3, 4, 100]]), 4, {}, torch.float64)
        .flatten()
        .tolist()
    )  # type: ignore[union-attr]
    assert found == pytest.approx(
        [0.5 * math.log(n) / math.log(8) for n in (1, 2, 4, 4, 4)], abs=1e-15
    )


def test_statistics_are_those_of_the_visible_pairs() -> None:
    q, k, v = (torch.randn(1, 2, 90, 8, dtype=torch.float64) for _ in range(3))
    _, stats = attention(
        q, k, v, spec=AttentionSpec(position=SlidingWindow(window=5)), stats=True
    )
    _, masked = attention(
        q, k, v, spec=AttentionSpec(position=Rope()), mask=near(90, 90, 5), stats=True
    )
    for name in (
        "max_logit",
        "min_logit",
        "mean_logit",
        "entropy",
        "key_norm",
        "qk_frobenius",
    ):
        assert torch.allclose(
            getattr(stats, name), getattr(masked, name), rtol=1e-12
        ), name
    _, largest = attention(
        q, k, v, spec=AttentionSpec(position=SlidingWindow(window=5)), stats="max"
    )
    assert torch.equal(largest.max_logit, stats.max_logit)


# layers


FORM = preset("kna", train_length=64)
LIMITED = (
    "hwfa",
    "hwfa2",
    "inv_leaky",
)  # their windows are narrower than the training length


def test_hwfa_has_windows_and_a_last_layer_of_full_attention_with_log_n_and_no_position() -> (
    None
):
    *first, last = layer_specs(preset("baseline"), 24, "hwfa", 512)
    assert first == [AttentionSpec(position=SlidingWindow(window=16))] * 23
    assert last == AttentionSpec(scale=LogN(train_length=512))
    assert (
        (16 - 1) * 23 + 1 == 346 <= 0.75 * 512
    )  # what 23 windows see together: the source's own numbers
    kept = layer_specs(FORM, 3, "hwfa:window=5,train_length=64")
    assert [s.norm for s in kept] == [FORM.norm] * 3
    assert kept[0].position == SlidingWindow(window=5, inner=FORM.position)


def test_hwfa2_keeps_a_few_full_layers_evenly_spaced_and_only_those_change_post_hoc() -> (
    None
):
    specs = layer_specs(preset("baseline"), 24, "hwfa2:full=2", 512)
    assert [i for i, s in enumerate(specs) if s.position == Rope()] == [8, 16]
    assert specs[0].position == SlidingWindow(window=64)
    later = [
        s.extrapolate("rerope", factor=8, train_length=512).position for s in specs
    ]
    expected = [
        ReRope(window=256) if i in (8, 16) else s.position for i, s in enumerate(specs)
    ]
    assert later == expected


def test_positions_of_several_layers_are_repeated() -> None:
    found = [
        s.position for s in layer_specs(FORM, 5, "window:window=4/window:window=4/nope")
    ]
    near = SlidingWindow(window=4, inner=FORM.position)
    assert found == [near, near, NoPosition(), near, near]
    assert layer_specs(FORM, 2) == (FORM, FORM)


@pytest.mark.parametrize("name", POSITIONS)
def test_a_decoder_of_every_position_learns_and_decodes(name: str) -> None:
    """Its loss falls, and piece by piece it says what it says at once, at one and a half times its training length."""
    tokens = torch.randint(11, (3, 12), generator=torch.Generator().manual_seed(0))
    specs = layer_specs(FORM, 2, "window:window=4" if name == "window" else name, 8)
    model = Decoder(
        DecoderConfig(vocab_size=11, d_model=16, n_heads=2, spec=specs)
    ).double()
    model.init_weights(torch.Generator().manual_seed(0))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.02), []
    for _ in range(4):
        logits = model(tokens[:, :7]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:8].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    with torch.no_grad():
        caches = model.new_caches()
        parts = [
            model(part, caches=caches) for part in tokens.split((5, 1, 2, 1, 3), dim=1)
        ]
        assert torch.allclose(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-10)


def test_window_post_hoc_is_a_window_over_the_position_as_trained() -> None:
    assert FORM.extrapolate("window", train_length=64).position == SlidingWindow(
        window=64, inner=FORM.position
    )
    narrow = FORM.extrapolate("window", window=9).extrapolate("window", train_length=64)
    assert narrow.position == SlidingWindow(window=9, inner=FORM.position)
    alibi = AttentionSpec(position=ALiBi()).extrapolate("window", train_length=64)
    assert alibi.position == SlidingWindow(window=64, inner=ALiBi())


def test_a_window_wider_than_the_training_length_lets_its_rotation_change() -> None:
    wide = AttentionSpec(position=SlidingWindow(window=128))
    found = wide.extrapolate("pi", factor=8, train_length=64).position
    assert isinstance(found, SlidingWindow)
    assert (
        found.inner
        == AttentionSpec(position=Rope()).extrapolate("pi", factor=8).position
    )
    with pytest.raises(InvalidValueError, match="training length"):
        wide.extrapolate("pi", factor=8)


def test_inverse_leaky_rerope_is_tested_with_plain_rope() -> None:
    (spec,) = layer_specs(FORM, 1, "inv_leaky", 512)
    assert spec.position == LeakyReRope(window=128, factor=1 / 16)
    # In training distances reach 128 + 16 · (511 - 128) = 6256, more than 8 times 512.
    assert spec.extrapolate("rope").position == Rope()


def test_what_cannot_be_is_refused() -> None:
    for error, text, n_layers, train_length in (
        *((InvalidValueError, f"hwfa2:full={full}", 4, 64) for full in (0, 4)),
        *((InvalidValueError, name, 1, 64) for name in ("hwfa", "hwfa2")),
        *(
            (InvalidValueError, f"{name}:window={window}", 4, 64)
            for name in LIMITED
            for window in (0, 64)
        ),
        (InvalidValueError, "hwfa", 4, None),
        (InvalidValueError, "window", 4, 64),
        (InvalidValueError, "rope+nope", 4, 64),
        *(
            (UnknownNameError, name, 4, 64)
            for name in ("alibii", "xpos:bass=3", "none", "log_n")
        ),
        *(
            (InvalidTypeError, name, 4, 64)
            for name in ("rope:base=big", "xpos:base=true")
        ),
    ):
        with pytest.raises(error):
            layer_specs(FORM, n_layers, text, train_length)
    with pytest.raises(RefusedError):
        layer_specs(preset("vit22b"), 4, "pi:factor=2")
    with pytest.raises(InvalidValueError, match="one spec per layer"):
        DecoderConfig(vocab_size=5, n_layers=3, spec=(FORM, FORM))


def test_every_position_has_a_line_and_a_source() -> None:
    assert set(POSITIONS) < set(positions())
    assert all(line.endswith("]") for line in positions().values())


def test_layers_where_nothing_is_said_and_the_widths_that_follow_from_the_length() -> (
    None
):
    for text, position in {
        "rope": Rope(),
        "rope:base=500,rotary=0.5": Rope(base=500, rotary=0.5),
        "xpos": XPos(),
        "xpos:base=500,scale=64": XPos(base=500, scale=64),
        "nope": NoPosition(),
        "alibi": ALiBi(),
        "kerple_log": Kerple(),
        "kerple_power": Kerple(kind="power"),
        "inv_leaky": LeakyReRope(window=16, factor=1 / 16),
        "inv_leaky:window=63,leak=0.5": LeakyReRope(window=63, factor=0.5),
        "window:window=1": SlidingWindow(window=1, inner=FORM.position),
        "pi:factor=2": dataclasses.replace(FORM.position, stretch=PI(factor=2)),  # type: ignore[type-var]
    }.items():
        assert (
            layer_specs(FORM, 2, text, 64) == (FORM.replace(position=position),) * 2
        ), text
    base = preset("baseline")
    for n, length, width in ((2, 64, 48), (4, 64, 16), (24, 4, 1)):
        *near, _ = layer_specs(base, n, "hwfa", length)
        assert near == [AttentionSpec(position=SlidingWindow(window=width))] * (n - 1)
    for n, full, width, whole in (
        (2, 1, 32, {1}),
        (4, 1, 32, {2}),
        (12, 1, 16, {6}),
        (12, 3, 16, {3, 6, 9}),
        (3, 2, 32, {1, 2}),
    ):
        specs = layer_specs(base, n, f"hwfa2:full={full}" if full > 1 else "hwfa2", 64)
        assert {i for i, s in enumerate(specs) if s == base} == whole
        assert {s.position for s in specs} == {
            base.position,
            SlidingWindow(window=width),
        }
    for window in (1, 63):
        assert layer_specs(base, 2, f"hwfa:window={window}", 64)[
            0
        ].position == SlidingWindow(window=window)
    logged = preset("kna_logn", train_length=64)
    assert layer_specs(logged, 2, "hwfa", 64)[1] == logged.replace(
        position=NoPosition()
    )
    assert not {"none", "log_n"} & set(positions())
    assert {"pi", "yarn", "rope", "window"} <= set(positions())


def test_whether_one_fused_call_does_and_how_far_a_query_sees() -> None:
    for t, s, causal, masked, given, window in itertools.product(
        (3, 5), (3, 5), (False, True), (False, True), (False, True), (None, 3, 4, 5)
    ):
        spec = (
            AttentionSpec()
            if window is None
            else AttentionSpec(position=SlidingWindow(window=window))
        )
        q, k = torch.zeros(1, 1, t, 2), torch.zeros(1, 1, s, 2)
        mask = torch.ones(1, 1, t, s, dtype=torch.bool) if masked else None
        call = make_call(
            spec,
            q,
            k,
            k,
            causal=causal,
            mask=mask,
            pos_k=torch.arange(s) if given else None,
        )
        assert call.plain == (not given)
        near = window is not None and (given or window < max(t, s))
        assert call.window == (window if near else None)
        assert call.whole == (
            not masked and not near and (not causal or (not given and t == s))
        )
