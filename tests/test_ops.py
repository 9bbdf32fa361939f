"""qkeel.attention: one entry, checked input, a named kernel or the first that can."""

import pytest
import torch

from qkeel import attention, preset
from qkeel.errors import UnknownNameError
from qkeel.ops import run, run_with_weights
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

RNG = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, heads, 5, 8, generator=RNG) for heads in (4, 2, 2))
SPEC = preset("qwen3")
PARAMS = SPEC.init_params(4, 2, 8)

WHOLE = ("sdpa", "chunked")  # the kernels for every position that folds into q and k


def test_the_weights_are_those_that_make_the_output():
    call = make_call(SPEC, Q, K, V, params=PARAMS)
    out, weights = run_with_weights(call)
    torch.testing.assert_close(out, run(call))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))
    torch.testing.assert_close(weights @ V.repeat_interleave(2, 1), out)


@pytest.mark.parametrize("impl", WHOLE)
def test_dropout_drops_weights_and_keeps_the_mean(impl):
    q, k, v = Q[:1, :2].double(), K[:1].double(), V[:1].double()
    whole = attention(q, k, v, spec=preset("baseline"), impl=impl)
    many = [t.expand(4000, *t.shape[1:]) for t in (q, k, v)]
    dropped = attention(*many, spec=preset("baseline"), impl=impl, dropout=0.3)
    spread = dropped.std(0) / 4000**0.5
    assert ((dropped.mean(0) - whole[0]).abs() <= 6 * spread + 1e-9).all()
    assert (spread > 0).any()


def test_dropout_is_repeated_by_the_same_seed_in_forward_and_recomputed_backward(
    monkeypatch,
):
    from qkeel.kernels.attention import chunked

    monkeypatch.setattr(
        chunked, "BLOCK", 40
    )  # several blocks, so that backward recomputes them
    q = Q[:1].double().requires_grad_()

    def gradient():
        torch.manual_seed(3)
        out = attention(
            q,
            K[:1].double(),
            V[:1].double(),
            spec=AttentionSpec(),
            dropout=0.5,
            impl="chunked",
        )
        return torch.autograd.grad(out.sum(), q)[0]

    step = 1e-6 * torch.randn(q.shape, dtype=torch.float64)

    def loss(x):
        torch.manual_seed(3)
        return attention(
            x,
            K[:1].double(),
            V[:1].double(),
            spec=AttentionSpec(),
            dropout=0.5,
            impl="chunked",
        ).sum()

    with torch.no_grad():
        change = (loss(q + step) - loss(q - step)) / 2
    assert change.item() == pytest.approx((gradient() * step).sum().item(), rel=1e-4)


def test_an_unknown_kernel_names_the_nearest():
    with pytest.raises(UnknownNameError, match="chunked"):
        attention(Q, K, V, spec=SPEC, params=PARAMS, impl="chunkd")
