"""FlexAttention as a kernel: what it is asked for, by torch's own form of it on a CPU."""

import inspect

import pytest
import torch
from tests.flex_as_on_a_gpu import flex_as_on_a_gpu
from tests.kernels.harness import Case, check, check_gradients, rows_of
from torch.nn.attention.flex_attention import AuxOutput, flex_attention
from torch.testing import assert_close

import qkeel
from qkeel import preset
from qkeel.errors import RefusedError
from qkeel.kernels.attention import flex
from qkeel.kernels.attention.flex import Flex, visible
from qkeel.kernels.choose import explain_choice
from qkeel.spec import ALiBi, AttentionSpec, SlidingWindow, Softcap, logits
from qkeel.spec.call import make_call

# Of torch about its own form on a CPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),
]


@pytest.fixture(autouse=True)
def _compiled_as_it_is(monkeypatch):
    """FlexAttention compiles the cap, and torch.compile takes no function whose annotations are checked at run time."""
    monkeypatch.setattr(logits, "softcap", inspect.unwrap(logits.softcap))


@pytest.fixture
def _here(monkeypatch):
    monkeypatch.setattr(flex, "_DEVICE", "cpu")
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    flex_as_on_a_gpu(monkeypatch)


CASES = [
    Case(preset("qwen3"), 24, widths=(16, 16)),
    Case(AttentionSpec(position=SlidingWindow(window=5)), 8, 24, widths=(16, 16)),
    Case(
        AttentionSpec(position=SlidingWindow(window=5)),
        8,
        24,
        widths=(16, 16),
        causal=False,
    ),
    Case(
        AttentionSpec(cap=Softcap(2.0)), 8, 24, widths=(16, 16), causal=False, size=3.0
    ),
    Case(
        AttentionSpec(position=SlidingWindow(window=5), cap=Softcap(2.0)),
        24,
        widths=(16, 16),
        size=3.0,
    ),
]


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_gradients_logsumexps_and_maxima_are_those_of_the_oracle(case):
    call, kernel = case.call(torch.float32), Flex()
    check(call, "", kernel)
    check_gradients(call, "", kernel)
    _, lse, largest = kernel.with_maxima(call)
    rows = rows_of(call, True)
    # Of the capped logits, -inf where a row sees nothing.
    capped = case.spec.cap.apply(rows["largest"])
    for ours, true in ((lse, rows["lse"]), (largest, capped)):
        assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)
    options = {"params": call.params, "causal": call.causal, "spec": case.spec}
    flex, exact = (
        qkeel.attention(call.q, call.k, call.v, **options, **how)[1]
        for how in ({"impl": "flex", "stats": "max"}, {"stats": True})
    )
    assert_close(flex.max_logit, exact.max_logit, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_here")
def test_masks_and_caps_are_made_once_and_other_calls_are_refused():
    q = torch.randn(1, 2, 6, 8)
    spec = AttentionSpec(position=SlidingWindow(window=3), cap=Softcap(2.0))
    first, second = (make_call(spec, x, x, x) for x in (q, q + 1))
    with torch.inference_mode():
        mask = visible(first)
    assert mask is visible(second)
    assert not mask.kv_num_blocks.is_inference()
    assert flex._capped(Softcap(2.0)) is flex._capped(Softcap(2.0))
    assert visible(make_call(AttentionSpec(), q, q, q, causal=False)) is None
    plain = {"spec": AttentionSpec(), "impl": "flex"}
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32)
    for options, said in (
        ({"mask": torch.ones(6, 6, dtype=torch.bool)}, "without a mask"),
        ({"dropout": 0.1}, "without a mask"),
        ({"cu_seqlens": lengths}, "packed sequences"),
        ({"spec": AttentionSpec(position=ALiBi())}, "folded into q and k"),
    ):
        with pytest.raises(RefusedError, match=said):
            qkeel.attention(q, q, q, **{**plain, **options})
    assert explain_choice(
        make_call(AttentionSpec(cap=Softcap(2.0)), q, q, q)
    ).kernel in ("native", "chunked")


def test_a_nan_that_a_maximum_passes_over_is_told(
    monkeypatch,
):
    lse, top = (
        torch.tensor([[[1.0, torch.nan], [1.0, 2.0]]]),
        torch.tensor([[[0.5, 0.5], [0.5, 1.5]]]),
    )
    monkeypatch.setattr(flex, "_DEVICE", "cpu")
    monkeypatch.setattr(
        flex,
        "_compiled",
        lambda: lambda q, k, v, **_: (v, AuxOutput(lse=lse, max_scores=top)),
    )
    q = torch.randn(1, 2, 2, 8)
    _, found = qkeel.attention(q, q, q, spec=AttentionSpec(), impl="flex", stats="max")
    assert found.max_logit.isnan().tolist() == [True, False]
