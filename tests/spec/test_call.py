"""The border: which keys are visible, at which positions, with which parameters; and what is refused there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.each_row import each_row
from torch import Tensor

from qkeel import attention, reference
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    QkeelError,
    ShapeError,
    UnknownNameError,
)
from qkeel.reference import Attended
from qkeel.spec import (
    PRESETS,
    AttentionSpec,
    FloorLogTemperature,
    L2Norm,
    Learned,
    NoPosition,
    Rope,
    Sigmoid,
    Sink,
    SlidingWindow,
    Softcap,
    Softpick,
    SquaredReLU,
    preset,
)
from qkeel.spec.call import Visibility, make_call, with_query_mask

few = settings(max_examples=25, derandomize=True, deadline=None)
very_few = settings(few, max_examples=8)
every_preset = each_row("name", PRESETS)
NORMALIZERS = {
    "sink": Sink(),
    "sigmoid": Sigmoid(bias=-1.0, learned=True),
    "squared_relu": SquaredReLU(),
    "softpick": Softpick(),
}
SPECS = {**{name: preset(name) for name in PRESETS}}
SPECS.update(
    {
        name: AttentionSpec(position=Rope(), normalizer=n)
        for name, n in NORMALIZERS.items()
    }
)
SPECS["capped"] = AttentionSpec(position=Rope(), cap=Softcap(2.0))
every_spec = each_row("name", SPECS)


def draw(
    seed: int = 0,
    b: int = 2,
    h: int = 4,
    g: int = 4,
    t: int = 5,
    s: int = 5,
    d: int = 8,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((b, h, t, d), (b, g, s, d), (b, g, s, d))
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes
    ]


def params_of(
    spec: AttentionSpec, h: int = 4, g: int = 4, d: int = 8
) -> dict[str, Tensor]:
    """Parameters off their neutral start."""
    generator = torch.Generator().manual_seed(9)
    made = spec.init_params(h, g, d)
    return {
        name: p.double() + 0.3 * torch.randn(p.shape, generator=generator).double()
        for name, p in made.items()
    }


def attend(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, **rest: Any
) -> Attended:
    return reference.attend(
        spec, q, k, v, params=params_of(spec, q.shape[1], k.shape[1]), **rest
    )


def same(a: Tensor, b: Tensor, atol: float = 1e-13) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# Masks


def test_causal_weights_are_lower_triangular_and_non_causal_ones_are_not() -> None:
    assert (attend(AttentionSpec(), *draw()).weights.triu(1) == 0).all()
    assert (attend(AttentionSpec(), *draw(), causal=False).weights > 0).all()


@every_spec
def test_a_padding_mask_is_leaving_the_padded_keys_out(name: str) -> None:
    spec, (q, k, v) = SPECS[name], draw()
    keep = torch.tensor([[True] * 5, [False, False, True, True, True]])
    pos = torch.arange(5)
    padded = attend(spec, q, k, v, mask=keep)
    cut = attend(
        spec, q[1:, :, 2:], k[1:, :, 2:], v[1:, :, 2:], pos_q=pos[2:], pos_k=pos[2:]
    )
    same(padded.out[1:, :, 2:], cut.out)
    assert torch.equal(padded.out[:1], attend(spec, q[:1], k[:1], v[:1]).out)


@every_spec
def test_rows_that_see_no_key_give_zero_and_finite_gradients(name: str) -> None:
    spec = SPECS[name]
    tensors = [
        x.requires_grad_() for x in draw(t=7)
    ]  # t > s: the first two queries come before every key
    params = {key: p.requires_grad_() for key, p in params_of(spec).items()}
    mask = torch.ones(2, 1, 7, 5, dtype=torch.bool)
    mask[0, :, 4] = False
    found = reference.attend(spec, *tensors, params=params, mask=mask)
    for empty in (
        found.weights[:, :, :2],
        found.weights[0, :, 4],
        found.out[:, :, :2],
        found.out[0, :, 4],
    ):
        assert (empty == 0).all()
    assert (found.logits[:, :, :2] == -math.inf).all()
    assert not found.logits.isnan().any()
    (found.out * torch.randn(found.out.shape, dtype=torch.float64)).sum().backward()
    for tensor in (*tensors, *params.values()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


def test_an_additive_mask_of_minus_infinity_is_a_boolean_mask() -> None:
    keep = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    additive = torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    for name, spec in SPECS.items():
        a, b = (attend(spec, *draw(), mask=mask) for mask in (keep, additive))
        assert torch.equal(a.out, b.out), name
        assert torch.equal(a.logits, b.logits), name


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_the_most_negative_number_hides_a_key_as_minus_infinity_does(
    dtype: torch.dtype,
) -> None:
    # transformers writes masks so. Row 3 sees nothing at all: weights 0, not a uniform row.
    keep = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    keep[:, :, 3] = False
    additive = torch.zeros(keep.shape, dtype=dtype).masked_fill(
        ~keep, torch.finfo(dtype).min
    )
    a, b = (attend(preset("qwen3"), *draw(), mask=mask) for mask in (keep, additive))
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.logits, b.logits)


def test_a_finite_additive_mask_is_added_to_the_logits_before_the_cap() -> None:
    spec, (q, k, v) = AttentionSpec(cap=Softcap(2.0)), draw()
    bias = torch.randn(4, 5, 5, dtype=torch.float64)
    found = attend(spec, q, k, v, mask=bias, causal=False)
    logits = q @ k.mT / math.sqrt(8) + bias
    same(found.logits, logits)
    same(found.weights, (2 * (logits / 2).tanh()).softmax(-1))


def test_masks_broadcast_over_batch_heads_queries_and_keys() -> None:
    x = draw(b=3)
    whole = torch.rand(3, 4, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    for part in (
        whole[:1],
        whole[:, :1],
        whole[:, :, :1],
        whole[..., :1],
        whole[0],
        whole[0, 0],
        whole[:, :1, :1],
    ):
        full = part.expand(3, 4, 5, 5)
        assert torch.equal(
            attend(AttentionSpec(), *x, mask=part).out,
            attend(AttentionSpec(), *x, mask=full).out,
        )


def test_a_square_mask_that_could_be_padding_or_pairs_is_refused_and_both_readings_can_be_said() -> (
    None
):
    x = draw(b=5)
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[2, :2] = False
    with pytest.raises(
        ShapeError, match=r"\[:, None, None, :\].*padding.*\[None, None\]"
    ):
        attend(AttentionSpec(), *x, mask=keep)
    padding = attend(AttentionSpec(), *x, mask=keep[:, None, None, :]).weights
    pairs = attend(AttentionSpec(), *x, mask=keep[None, None]).weights
    assert (padding[2, :, :, :2] == 0).all()
    assert (pairs[:, :, 2, :2] == 0).all()
    assert not torch.equal(padding, pairs)
    # One batch entry and one query: both readings are the same.
    one = draw(b=1, t=1)
    keep = torch.tensor([[True, False, True, True, True]])
    same(
        attend(AttentionSpec(), *one, mask=keep).out,
        attend(AttentionSpec(), *one, mask=keep[None, None]).out,
    )


# Grouped keys


@each_row("name", [name for name in SPECS if name != "ngpt"])
def test_grouped_keys_are_each_key_head_repeated_for_its_query_heads(name: str) -> None:
    for h, g in ((4, 2), (4, 1), (6, 3)):
        check_grouped(SPECS[name], h, g)


def check_grouped(spec: AttentionSpec, h: int, g: int) -> None:
    q, k, v = draw(h=h, g=g)
    params = params_of(spec, h, g)
    grouped = reference.attend(spec, q, k, v, params=params)
    # A norm over all key heads stays: repeating every head leaves the mean square as it is.
    wide = {
        key: p.repeat_interleave(h // g, 0)
        if key[0] == "k" and p.ndim and p.shape[0] == g != p.shape[-1]
        else p
        for key, p in params.items()
    }
    k, v = (x.repeat_interleave(h // g, dim=1) for x in (k, v))
    repeated = reference.attend(spec, q, k, v, params=wide)
    same(grouped.out, repeated.out)
    same(grouped.weights, repeated.weights)


# Positions


@every_spec
def test_fewer_or_more_queries_than_keys_are_aligned_to_the_end(name: str) -> None:
    spec, (q, k, v) = SPECS[name], draw(t=7)
    square = attend(spec, q[:, :, -5:], k, v).out
    same(attend(spec, q, k, v).out[:, :, 2:], square)
    for t in (1, 2):
        same(attend(spec, q[:, :, -t:], k, v).out, square[:, :, -t:])


def test_cross_attention_sees_every_key_whatever_the_lengths() -> None:
    for name, spec in SPECS.items():
        for t, s in ((3, 6), (6, 3)):
            found = attend(spec, *draw(t=t, s=s), causal=False)
            assert found.out.isfinite().all(), name
            assert found.logits.isfinite().all(), name
            assert found.weights.shape == (2, 4, t, s), name


def test_default_positions_can_be_given() -> None:
    x, pos = draw(), torch.arange(5)
    for name, spec in SPECS.items():
        expected = attend(spec, *x).out
        for rest in (
            {"pos_q": pos},
            {"pos_k": pos},
            {"pos_q": pos[None], "pos_k": pos.expand(2, 5)},
        ):
            assert torch.equal(attend(spec, *x, **rest).out, expected), name


@pytest.mark.parametrize(
    "name", ["baseline", "kna", "qwen3", "llama4", "nanochat", "cohere", "phi"]
)
def test_shifting_every_position_changes_nothing_where_only_the_distance_counts(
    name: str,
) -> None:
    x, pos = draw(), torch.arange(5)
    shifted = attend(SPECS[name], *x, pos_q=pos + 1000, pos_k=pos + 1000)
    same(shifted.out, attend(SPECS[name], *x).out, atol=1e-10)
    stretched = attend(SPECS[name], *x, pos_q=2 * pos, pos_k=2 * pos)
    assert (stretched.out - attend(SPECS[name], *x).out).abs().max() > 1e-3


def test_causality_follows_positions_not_the_order_in_memory() -> None:
    spec, (q, k, v) = preset("qwen3"), draw()
    order = torch.tensor([3, 0, 4, 1, 2])
    moved = attend(
        spec, q[:, :, order], k[:, :, order], v[:, :, order], pos_q=order, pos_k=order
    )
    same(moved.out, attend(spec, q, k, v).out[:, :, order])


def test_key_positions_alone_place_the_queries_at_the_last_keys() -> None:
    spec, (q, k, v) = preset("baseline_logn"), draw()
    pos = torch.tensor([[4, 5, 6, 7, 8], [0, 1, 2, 3, 9]])
    found = attend(spec, q[:, :, -2:], k, v, pos_k=pos)
    same(found.out, attend(spec, q[:, :, -2:], k, v, pos_k=pos, pos_q=pos[:, -2:]).out)


def test_packed_sequences_attend_as_if_apart() -> None:
    spec, (q, k, v) = preset("baseline_logn"), draw()
    document, pos = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 0, 1, 2])
    packed = attend(
        spec, q, k, v, pos_q=pos, pos_k=pos, mask=document[:, None] == document
    ).out
    same(packed[:, :, :2], attend(spec, q[:, :, :2], k[:, :, :2], v[:, :, :2]).out)
    same(packed[:, :, 2:], attend(spec, q[:, :, 2:], k[:, :, 2:], v[:, :, 2:]).out)


# Blocks: what kernels rely on


@every_spec
@very_few
@given(
    rows=st.tuples(st.integers(0, 6), st.integers(1, 7)),
    keys=st.tuples(st.integers(0, 5), st.integers(1, 6)),
)
def test_a_block_of_scores_is_that_block_of_the_logits(
    name: str, rows: tuple[int, int], keys: tuple[int, int]
) -> None:
    spec, (q, k, v) = SPECS[name], draw(t=7, s=6)
    bias = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).double()
    whole = attend(spec, q, k, v, mask=bias).logits
    call = make_call(spec, q, k, v, params=params_of(spec), mask=bias)
    r, c = slice(*sorted(rows)), slice(*sorted(keys))
    q, k = call.encoded()
    block = call.scores(q[:, :, r], k[:, :, c], r, c)
    visible = call.visible(r, c)
    assert visible is not None
    same(block.masked_fill(~visible, -math.inf), whole[:, :, r, c], atol=1e-12)


@few
@given(
    t=st.integers(1, 7),
    s=st.integers(1, 7),
    ends=st.tuples(st.integers(0, 6), st.integers(1, 7)),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 8),
)
def test_the_span_of_a_block_of_rows_is_from_the_first_key_that_any_of_them_sees_to_the_last(
    t: int, s: int, ends: tuple[int, int], causal: bool, window: int | None
) -> None:
    start, stop = min(*ends, t - 1), max(min(max(ends), t), 1)
    rows = slice(min(start, stop - 1), stop)
    position = (
        NoPosition()
        if window is None
        else SlidingWindow(window=window, inner=NoPosition())
    )
    call = make_call(AttentionSpec(position=position), *draw(t=t, s=s), causal=causal)
    visible = call.visible(rows, slice(0, s))
    seen = (
        torch.ones(1, s, dtype=torch.bool)
        if visible is None
        else visible.flatten(0, -2)
    )
    found = seen.any(0).nonzero().flatten().tolist()
    span = call.span(rows)
    assert list(range(span.start, span.stop)) == found


# dtype


@every_preset
def test_the_callers_dtype_comes_back_and_logits_are_float32_or_wider(
    name: str,
) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        check_dtype(SPECS[name], dtype)


def check_dtype(spec: AttentionSpec, dtype: torch.dtype) -> None:
    x = [y.to(dtype) for y in draw()]
    params = {key: p.to(dtype) for key, p in params_of(spec).items()}
    found = reference.attend(spec, *x, params=params)
    wide = torch.promote_types(dtype, torch.float32)
    assert (found.out.dtype, found.logits.dtype, found.weights.dtype) == (
        dtype,
        wide,
        wide,
    )
    exact = reference.attend(
        spec,
        *(y.double() for y in x),
        params={key: p.double() for key, p in params.items()},
    )
    # One rounding of the result at most doubles the error of the wide computation.
    assert (found.out.double() - exact.out).abs().max() <= 4 * torch.finfo(
        dtype
    ).eps + 1e-5 * (dtype != torch.float64)


def test_values_may_have_a_size_of_their_own() -> None:
    q, k, v = draw()
    found = reference.attend(preset("kna"), q, k, v[..., :3])
    assert found.out.shape == (2, 4, 5, 3)
    assert torch.equal(found.out, reference.attend(preset("kna"), q, k, v).out[..., :3])


@pytest.mark.parametrize("name", ["baseline", *NORMALIZERS])
def test_no_keys_give_zeros(name: str) -> None:
    q, k, v = draw()
    found = attend(SPECS[name], q, k[:, :, :0], v[:, :, :0], causal=False)
    assert torch.equal(found.out, torch.zeros_like(q))


# Refusals

Q, K, V = draw(g=2)
GAIN, SCALE = (
    AttentionSpec(norm=L2Norm(on="q", gain="dim")),
    AttentionSpec(scale=Learned(init=2.0)),
)
ODD = {"q": Q[..., :7], "k": K[..., :7], "v": V[..., :7]}
BAD: dict[type[QkeelError], list[dict[str, Any]]] = {
    InvalidTypeError: [
        {"spec": "qwen3"},
        {"q": [1.0]},
        {"k": K.long()},
        {"k": K.to(torch.float8_e4m3fn)},
        {"v": V.float()},
        {"mask": [[True]]},
        {"mask": torch.ones(5, 5, dtype=torch.int64)},
        {"pos_k": [0, 1, 2, 3, 4]},
        {"spec": SCALE, "params": {"logit_scale": 2.0}},
    ],
    ShapeError: [
        {"q": Q[0]},
        {"q": Q[:1]},
        {"v": V[:, :, :4]},
        {"q": Q[..., :4]},
        {"v": V.transpose(1, 2)},
        {"q": Q[:, :3]},
        {"spec": AttentionSpec(position=Rope()), **ODD},
        {"mask": torch.ones(5, 4, dtype=torch.bool)},
        {"mask": torch.ones(1, 1, 1, 5, 5, dtype=torch.bool)},
        {"pos_q": torch.arange(4)},
        {"pos_k": torch.zeros(3, 5)},
        {"spec": GAIN, "params": {"q_norm": torch.ones(4)}},
    ],
    InvalidValueError: [
        {"spec": GAIN},
        *({"dropout": p} for p in (-0.1, 1.0, 2.0, math.nan)),
    ],
    UnknownNameError: [
        {"spec": GAIN, "params": {"q_nrm": torch.ones(8)}},
        {"params": {"q_norm": torch.ones(8)}},
    ],
}


@each_row("kind", BAD)
def test_bad_input_is_refused(kind: type[QkeelError]) -> None:
    for bad in BAD[kind]:
        more = {"spec": AttentionSpec(), "q": Q, "k": K, "v": V, **bad}
        spec, q, k, v = (more.pop(name) for name in ("spec", "q", "k", "v"))
        with pytest.raises(kind):
            attention(q, k, v, spec=spec, **more)


def test_a_temperature_by_position_is_harmless_for_queries_before_the_first_key() -> (
    None
):
    spec = AttentionSpec(scale=FloorLogTemperature(floor=2))
    q, k, v = draw(t=9, s=3)
    found = attend(spec, q, k, v, causal=False)
    assert found.out.isfinite().all()
    same(
        found.logits[:, :, :6],
        attend(AttentionSpec(), q, k, v, causal=False).logits[:, :, :6],
    )


def test_a_query_mask_is_taken_only_where_it_is_of_the_calls_own_rows() -> None:
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    call = make_call(preset("baseline"), q, k, k)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    masked = with_query_mask(call, mask)
    assert masked.query_mask is not None
    assert torch.equal(masked.query_mask, mask)
    assert masked.q is call.q
    assert call.query_mask is None
    with pytest.raises(InvalidTypeError, match="boolean query_mask"):
        with_query_mask(call, mask.float())
    for other in (
        mask[:1],
        mask[0],
        mask.T,
        torch.ones(2, 5).bool(),
        torch.ones(2, 1).bool(),
        mask[None],
    ):
        assert with_query_mask(call, other) is call


def test_which_numbers_and_devices_positions_masks_and_parameters_may_have() -> None:
    for kind in (
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bfloat16,
        torch.float16,
        torch.double,
    ):
        pos = torch.arange(5).to(kind)
        assert (
            make_call(AttentionSpec(), Q, K, V, pos_q=pos, pos_k=pos[None]).pos_k.dtype
            == kind
        )
    for kind in (torch.bool, torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(
            InvalidTypeError, match=f"expected pos_q as integers .* got {kind}"
        ):
            make_call(AttentionSpec(), Q, K, V, pos_q=torch.ones(5).to(kind))
    for kind in (torch.float8_e4m3fn, torch.complex64, torch.uint8):
        with pytest.raises(InvalidTypeError, match=f"a boolean mask .* got {kind}"):
            make_call(AttentionSpec(), Q, K, V, mask=torch.ones(5, 5).to(kind))
    meta: dict[str, Any] = {
        "mask": torch.ones(5, 5),
        "pos_q": torch.arange(5),
        "pos_k": torch.arange(5),
    }
    for name, x in meta.items():
        with pytest.raises(
            InvalidValueError, match=f"expected {name} on cpu like q, but it is on meta"
        ):
            make_call(AttentionSpec(), Q, K, V, **{name: x.to("meta")})
    scale = torch.tensor(2.0)
    far = [x.to("meta") for x in (Q, K, V)]
    assert make_call(
        AttentionSpec(scale=Learned(init=2.0)), *far, params={"logit_scale": scale}
    ).params
    gain = {"q_norm": torch.ones(8), "k_norm": torch.ones(8)}
    with pytest.raises(
        InvalidValueError,
        match="expected parameter 'q_norm' on meta like q, but it is on cpu",
    ):
        make_call(preset("qwen3"), *far, params=gain)
    for i in range(3):
        with pytest.raises(
            InvalidValueError, match="expected q, k and v on the same device"
        ):
            make_call(
                AttentionSpec(),
                *(x.to("meta") if i == j else x for j, x in enumerate((Q, K, V))),
            )
    for kind in (torch.int64, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(
            InvalidTypeError, match="floating-point numbers of at least 16 bits"
        ):
            make_call(
                preset("qwen3"),
                Q,
                K,
                V,
                params={"q_norm": torch.ones(8).to(kind), "k_norm": torch.ones(8)},
            )
    half = {"q_norm": torch.ones(8).half(), "k_norm": torch.ones(8).half()}
    assert (
        make_call(preset("qwen3"), Q, K, V, params=half).params["q_norm"].dtype
        == torch.float16
    )


def test_where_queries_and_keys_are_when_only_one_of_them_is_told_or_none() -> None:
    for t, s in ((5, 5), (3, 5), (5, 3)):
        q, k = torch.zeros(2, 1, t, 2), torch.zeros(2, 1, s, 2)
        call = make_call(AttentionSpec(), q, k, k)
        assert (call.pos_q.tolist(), call.pos_k.tolist()) == (
            [list(range(s - t, s))],
            [list(range(s))],
        )
        assert (call.pos_q is call.pos_k) == (t == s)
        keys = 10 + 2 * torch.arange(s)
        call = make_call(AttentionSpec(), q, k, k, pos_k=keys)
        assert call.pos_q.tolist() == (
            [list(range(s - t, s))] if t > s else [keys[s - t :].tolist()]
        )
        assert not call.plain
        queries = torch.arange(2 * t).view(2, t)
        call = make_call(AttentionSpec(), q, k, k, pos_q=queries)
        assert (call.pos_q.tolist(), call.pos_k.tolist()) == (
            queries.tolist(),
            [list(range(s))],
        )
    assert Visibility().call(AttentionSpec(), Q, K, V).causal
    pos = torch.arange(5)
    both = make_call(AttentionSpec(), Q, K, V, pos_q=pos, pos_k=pos)
    assert both.pos_q is both.pos_k
    apart = make_call(AttentionSpec(), Q, K, V, pos_q=pos + 1, pos_k=pos)
    assert (apart.pos_q - apart.pos_k).tolist() == [[1] * 5]


def test_a_mask_of_sequences_and_keys_is_one_of_padding_but_where_it_may_be_one_of_pairs() -> (
    None
):
    for b, t, s, shape, full in (
        (2, 5, 5, (2, 5), (2, 1, 1, 5)),
        (5, 3, 5, (5, 5), (5, 1, 1, 5)),
        (1, 1, 5, (1, 5), (1, 1, 1, 5)),
        (2, 3, 5, (3, 5), (1, 1, 3, 5)),
        (2, 3, 5, (1, 5), (1, 1, 1, 5)),
        (2, 3, 5, (), (1, 1, 1, 1)),
        (2, 3, 5, (4, 1, 1), (1, 4, 1, 1)),
    ):
        call = make_call(
            AttentionSpec(),
            *draw(b=b, t=t, s=s),
            mask=torch.ones(shape, dtype=torch.bool),
        )
        assert call.mask is not None
        assert tuple(call.mask.shape) == full, shape
    for b, t, s, shape in (
        (5, 5, 3, (5, 3)),
        (2, 2, 5, (2, 5)),
        (2, 3, 5, (3, 1, 1, 5)),
        (2, 3, 5, (3, 3, 5)),
    ):
        with pytest.raises(ShapeError, match="mask"):
            make_call(
                AttentionSpec(),
                *draw(b=b, t=t, s=s),
                mask=torch.ones(shape, dtype=torch.bool),
            )
