"""The border: which keys are visible, at which positions, with which parameters; and what is refused there."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.changed import other_kinds, other_shapes
from tests.drawing import rand, randn
from tests.each_row import each_row
from torch.testing import assert_close

from qkeel import attention, reference
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    ShapeError,
    UnknownNameError,
)
from qkeel.spec import (
    PRESETS,
    AttentionSpec,
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
from qkeel.spec.call import make_call, with_query_mask

few = settings(max_examples=25, derandomize=True, deadline=None)
NORMALIZERS = (Sink(), Sigmoid(bias=-1.0, learned=True), SquaredReLU(), Softpick())
SPECS = {
    **{name: preset(name) for name in PRESETS},
    **{
        f"rope, {n.kind}": AttentionSpec(position=Rope(), normalizer=n)
        for n in NORMALIZERS
    },
    "capped": AttentionSpec(position=Rope(), cap=Softcap(2.0)),
}
every_spec = each_row("spec", SPECS.values(), ids=SPECS)
BOOL = {"dtype": torch.bool}


def draw(b=2, t=5, s=5, g=4):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(b, heads, n, 8, dtype=torch.float64, generator=generator)
        for heads, n in ((4, t), (g, s), (g, s))
    ]


def params_of(spec):
    """Parameters off their neutral start."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: p.double() + 0.3 * torch.randn(p.shape, generator=generator).double()
        for name, p in spec.init_params(4, 4, 8).items()
    }


def attend(spec, *qkv, **options):
    return reference.attend(spec, *qkv, params=params_of(spec), **options)


def same(a, b, atol=1e-13):
    assert_close(a, b, rtol=0, atol=atol)


# Masks


@every_spec
def test_a_padding_mask_is_leaving_the_padded_keys_out(spec):
    keep = torch.tensor([[True] * 5, [False, False, True, True, True]])
    pos, qkv = torch.arange(2, 5), draw()
    padded = attend(spec, *qkv, mask=keep).out
    cut = attend(spec, *(x[1:, :, 2:] for x in qkv), pos_q=pos, pos_k=pos).out
    same(padded[1:, :, 2:], cut)
    assert torch.equal(padded[:1], attend(spec, *(x[:1] for x in qkv)).out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_infinity_and_the_most_negative_number_hide_as_a_boolean_mask_does(
    dtype,
):
    # transformers writes masks with the latter. Row 3 sees nothing at all: weights 0, not a uniform row.
    keep = rand(2, 1, 5, 5, seed=0) < 0.6
    keep[:, :, 3] = False
    a = attend(preset("qwen3"), *draw(), mask=keep)
    for low in (torch.finfo(dtype).min, -math.inf):
        additive = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, low)
        b = attend(preset("qwen3"), *draw(), mask=additive)
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.logits, b.logits)


def test_a_finite_additive_mask_is_added_to_the_logits_before_the_cap():
    q, k, v = draw()
    bias = torch.randn(4, 5, 5, dtype=torch.float64)
    spec = AttentionSpec(cap=Softcap(2.0))
    attended = attend(spec, q, k, v, mask=bias, causal=False)
    logits = q @ k.mT / math.sqrt(8) + bias
    same(attended.logits, logits)
    same(attended.weights, (2 * (logits / 2).tanh()).softmax(-1))


@each_row(
    "b, t, s, shape, full",
    [
        (2, 5, 5, (2, 5), (2, 1, 1, 5)),
        (5, 3, 5, (5, 5), (5, 1, 1, 5)),
        (1, 1, 5, (1, 5), (1, 1, 1, 5)),
        (2, 3, 5, (3, 5), (1, 1, 3, 5)),
        (2, 3, 5, (1, 5), (1, 1, 1, 5)),
        (2, 3, 5, (), (1, 1, 1, 1)),
        (2, 3, 5, (4, 1, 1), (1, 4, 1, 1)),
        (2, 3, 5, (2, 1, 3, 1), (2, 1, 3, 1)),
        (5, 5, 3, (5, 3), None),  # padding or pairs
        (2, 2, 5, (2, 5), None),
        (2, 3, 5, (3, 1, 1, 5), None),
        (2, 3, 5, (3, 3, 5), None),
    ],
)
def test_a_mask_broadcasts_and_is_padding_where_it_can_be_nothing_else(
    b, t, s, shape, full
):
    qkv, keep = draw(b=b, t=t, s=s), torch.ones(shape, **BOOL)
    if full is None:
        with pytest.raises(ShapeError):
            make_call(AttentionSpec(), *qkv, mask=keep)
    else:
        mask = make_call(AttentionSpec(), *qkv, mask=keep).mask
        assert mask.shape == full


# Positions


@each_row("t, s", [(5, 5), (3, 5), (5, 3)])
def test_queries_stand_at_the_last_keys_where_nothing_else_is_said(t, s):
    def positions(**options):
        call = make_call(AttentionSpec(), *draw(t=t, s=s), **options)
        assert call.plain == (not options)
        return call.pos_q.tolist(), call.pos_k.tolist()

    last, keys = [list(range(s - t, s))], 10 + 2 * torch.arange(s)
    assert positions() == (last, [list(range(s))])
    at_keys = last if t > s else [keys[s - t :].tolist()]
    assert positions(pos_k=keys) == (at_keys, [keys.tolist()])
    queries = torch.arange(2 * t).view(2, t)
    assert positions(pos_q=queries) == (queries.tolist(), [list(range(s))])


def test_equal_positions_are_one_tensor():
    pos = torch.arange(5)
    for options, shared in (
        ({}, True),
        ({"pos_q": pos, "pos_k": pos}, True),
        ({"pos_q": pos + 1, "pos_k": pos}, False),
    ):
        call = make_call(AttentionSpec(), *draw(), **options)
        assert (call.pos_q is call.pos_k) == shared
        assert (call.pos_q - call.pos_k).unique().tolist() == [int(not shared)]
    assert make_call(AttentionSpec(), *draw()).causal


# Blocks: what kernels rely on


@every_spec
@settings(few, max_examples=8)
@given(
    rows=st.tuples(st.integers(0, 6), st.integers(1, 7)),
    keys=st.tuples(st.integers(0, 5), st.integers(1, 6)),
)
def test_a_block_of_scores_is_that_block_of_the_logits(spec, rows, keys):
    qkv = draw(t=7, s=6)
    bias = randn(7, 6, seed=0).double()
    logits = attend(spec, *qkv, mask=bias).logits
    call = make_call(spec, *qkv, params=params_of(spec), mask=bias)
    r, c = slice(*sorted(rows)), slice(*sorted(keys))
    q, k = call.encoded()
    block, visible = call.scores(q[:, :, r], k[:, :, c], r, c), call.visible(r, c)
    assert visible is not None
    same(block.masked_fill(~visible, -math.inf), logits[:, :, r, c], atol=1e-12)


@few
@given(
    t=st.integers(1, 7),
    s=st.integers(1, 7),
    ends=st.tuples(st.integers(0, 6), st.integers(1, 7)),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 8),
)
def test_the_span_of_rows_is_from_the_first_key_that_any_of_them_sees_to_the_last(
    t, s, ends, causal, window
):
    start, stop = min(*ends, t - 1), max(min(max(ends), t), 1)
    rows, position = slice(min(start, stop - 1), stop), NoPosition()
    if window is not None:
        position = SlidingWindow(window=window, inner=position)
    call = make_call(AttentionSpec(position=position), *draw(t=t, s=s), causal=causal)
    visible = call.visible(rows, slice(0, s))
    if visible is None:
        visible = torch.ones(1, s, **BOOL)
    span = call.span(rows)
    keys = visible.flatten(0, -2).any(0).nonzero().flatten().tolist()
    assert list(range(span.start, span.stop)) == keys


# Refusals

Q, K, V = draw(g=2)
GAIN = AttentionSpec(norm=L2Norm(on="q", gain="dim"), position=Rope())
SCALE = AttentionSpec(scale=Learned(init=2.0))
ONES = torch.ones(8)
GIVEN = {
    "q": Q,
    "k": K,
    "v": V,
    "mask": torch.ones(2, 1, 5, 5, **BOOL),
    "pos_q": torch.arange(5),
    "pos_k": torch.arange(5),
    "q_norm": ONES,
}
KINDS = (
    *(torch.bool, torch.uint8, torch.int64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float16, torch.float32),
)
# What may be in place of an argument: values of another width, masks that broadcast and biases, counts and fractions.
TAKEN = {
    "q": (),
    "k": (),
    "v": ("axis -1",),
    "mask": ("float16", "float32", "axis -4", "no first axis"),
    "pos_q": ("uint8", "float16", "float32", "one more axis"),
    "pos_k": ("uint8", "float16", "float32", "one more axis"),
    "q_norm": ("float16",),
}


def call(spec=GAIN, dropout=0.0, **changed):
    options = {**GIVEN, **changed}
    q, k, v, gain = (options.pop(name) for name in ("q", "k", "v", "q_norm"))
    options.setdefault("params", {"q_norm": gain})
    return attention(q, k, v, spec=spec, dropout=dropout, **options)


@each_row("name", GIVEN)
def test_an_argument_of_another_kind_device_or_shape_is_refused(name):
    x = GIVEN[name]
    wrong = [(*change, InvalidTypeError) for change in other_kinds(x, KINDS)]
    wrong += [(*change, ShapeError) for change in other_shapes(x)]
    wrong += [("numbers", x.tolist(), InvalidTypeError)]
    wrong += [("meta", x.to("meta"), InvalidValueError)]
    for change, other, error in wrong:
        if change in TAKEN[name]:
            assert call(**{name: other}).isfinite().all()
        else:
            with pytest.raises(error):
                call(**{name: other})


@each_row(
    "error, options",
    [
        (InvalidTypeError, {"spec": "qwen3"}),
        (InvalidTypeError, {"spec": SCALE, "params": {"logit_scale": 2.0}}),
        (ShapeError, {name: GIVEN[name][..., :7] for name in "qkv"}),
        *((InvalidValueError, {"dropout": p}) for p in (-0.1, 1.0, 2.0, math.nan)),
        (InvalidValueError, {"params": {}}),
        (UnknownNameError, {"params": {"q_nrm": ONES}}),
        (UnknownNameError, {"spec": AttentionSpec()}),
    ],
)
def test_what_does_not_go_together_is_refused(error, options):
    with pytest.raises(error):
        call(**options)


def test_counts_and_16_bits_are_taken_and_a_number_on_the_host_goes_anywhere():
    low, at = (torch.float16, torch.bfloat16), torch.arange(5)
    for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, *low):
        assert (
            make_call(AttentionSpec(), Q, K, V, pos_q=at.to(kind)).pos_q.dtype == kind
        )
    for kind in low:
        params = {"q_norm": ONES.to(kind)}
        assert make_call(GAIN, Q, K, V, params=params).params == params
    far = (x.to("meta") for x in (Q, K, V))
    assert make_call(SCALE, *far, params={"logit_scale": torch.tensor(2.0)}).params


def test_a_query_mask_is_taken_only_where_it_is_of_the_calls_own_rows():
    call = make_call(AttentionSpec(), *draw(t=3))
    mask = torch.tensor([[True, False, True], [True, True, False]])
    masked = with_query_mask(call, mask)
    assert torch.equal(masked.query_mask, mask)
    assert (masked.q is call.q, call.query_mask) == (True, None)
    for wrong in (mask.float(), mask.tolist()):
        with pytest.raises(InvalidTypeError):
            with_query_mask(call, wrong)
    for other in (mask[:1], mask[0], mask.T, mask[:, :1], mask[None]):
        assert with_query_mask(call, other) is call
