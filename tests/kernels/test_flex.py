"""FlexAttention as a kernel: what it is asked for, by torch's own form of it on a CPU."""

import dataclasses
import inspect

import pytest
import torch
from tests.flex_as_on_a_gpu import flex_as_on_a_gpu
from torch.nn.attention.flex_attention import AuxOutput, flex_attention

import qkeel
from qkeel import preset, reference
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


def near(found, truth, told):
    torch.testing.assert_close(
        found.double(),
        truth.double(),
        rtol=1e-4,
        atol=1e-4,
        msg=lambda message: f"{told}: {message}",
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_here")
def test_output_gradients_logsumexps_and_maxima_are_those_of_the_oracle():
    window = SlidingWindow(window=5)
    for spec, causal, t, s in (
        (preset("qwen3"), True, 24, 24),
        (AttentionSpec(position=window), True, 8, 24),
        (AttentionSpec(position=window), False, 8, 24),
        (AttentionSpec(cap=Softcap(2.0)), False, 8, 24),
        (AttentionSpec(position=window, cap=Softcap(2.0)), True, 24, 24),
    ):
        told = f"{spec}, causal={causal}, {t} of {s}"
        q, k, v = (3 * torch.randn(1, h, n, 16) for h, n in ((4, t), (2, s), (2, s)))
        call = make_call(
            spec, q, k, v, params=spec.init_params(4, 2, 16), causal=causal
        )
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        ours = qkeel.attention(
            *leaves, spec=spec, params=call.params, causal=causal, impl="flex"
        )
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        theirs = reference.attend_call(
            dataclasses.replace(call, q=wide[0], k=wide[1], v=wide[2])
        ).out
        made, exact = (
            (out, *torch.autograd.grad(out.double().cos().sum(), x))
            for out, x in ((ours, leaves), (theirs, wide))
        )
        for mine, truth in zip(made, exact):
            near(mine, truth, told)
        # Before the cap, -inf where a row does not see.
        z = reference.attend_call(call).logits
        z = spec.cap.apply(z).masked_fill(z == -torch.inf, -torch.inf)
        _, lse, top = Flex().with_maxima(call)
        near(lse, z.logsumexp(-1), told)
        near(top, z.amax(-1), told)
        _, found = qkeel.attention(
            q,
            k,
            v,
            spec=spec,
            params=call.params,
            causal=causal,
            impl="flex",
            stats="max",
        )
        _, whole = qkeel.attention(
            q, k, v, spec=spec, params=call.params, causal=causal, stats=True
        )
        near(found.max_logit, whole.max_logit, told)


@pytest.mark.usefixtures("_here")
def test_masks_and_caps_are_made_once_and_other_calls_are_refused():
    q = torch.randn(1, 2, 6, 8)
    spec = AttentionSpec(position=SlidingWindow(window=3), cap=Softcap(2.0))
    first, second = (make_call(spec, x, x, x) for x in (q, q + 1))
    with torch.inference_mode():
        mask = visible(first)
    assert mask is not None
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
            qkeel.attention(q, q, q, **{**plain, **options})  # type: ignore[arg-type]
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
