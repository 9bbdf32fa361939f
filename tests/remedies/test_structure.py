"""spectral_cap, swin_norm, peri_norm, dropout, final_softcap on own and foreign models: what they compute, refuse."""

import pytest
import torch
from tests.drawing import randn
from tests.training import sgd
from torch import nn
from torch.testing import assert_close

import qkeel
from qkeel.errors import RefusedError
from qkeel.remedies.qk_weights import SpectralCap

from .models import (
    attention,
    decoder,
    tokens,
    train,
)

pytest.importorskip("transformers")

from tests.contract.watch.families import gemma2, gpt_neox, llama


def singular(weight):
    return float(torch.linalg.matrix_norm(weight.detach(), ord=2))


@pytest.mark.parametrize("per", ["head", "matrix"])
def test_spectral_cap_bounds_every_head_or_matrix_after_a_step_and_leaves_the_rest_bit_for_bit(
    per,
):
    model = decoder(n_kv_heads=2)
    q, k, v = (getattr(model.blocks[0].attention, f"{n}_proj") for n in "qkv")
    with torch.no_grad():
        q.weight[:4] *= 5  # one head of four
    optimizer = sgd(model, 0.0)
    q0, k0, v0 = (m.weight.detach().clone() for m in (q, k, v))
    cap = singular(q0[:4]) / 2
    qkeel.apply(model, f"spectral_cap:per={per}", optimizer, cap=cap)
    train(model, optimizer, 1)
    if per == "head":
        assert singular(q.weight[:4]) == pytest.approx(cap, rel=1e-5)
        assert torch.allclose(q.weight[:4], q0[:4] / 2, rtol=1e-5)
        assert torch.equal(q.weight[4:], q0[4:])
    else:
        assert singular(q.weight) == pytest.approx(cap, rel=1e-5)
    assert torch.equal(k.weight, k0)
    assert torch.equal(v.weight, v0)


@pytest.mark.parametrize("order", ["swin", "peri"])
def test_a_reordered_own_model_computes_what_one_built_in_that_order_computes(
    order,
):
    model, built = decoder(), decoder(norm_order=order)
    with torch.no_grad():
        for block in model.blocks:
            block.attention_norm.weight.uniform_(0.5, 1.5)
            block.mlp_norm.weight.uniform_(0.5, 1.5)
    optimizers = [sgd(m) for m in (model, built)]
    qkeel.apply(model, f"{order}_norm", optimizers[0])
    built.load_state_dict(model.state_dict())  # the same names
    for m, optimizer in zip((model, built), optimizers):
        train(m, optimizer, 2)
    assert torch.equal(model(tokens()), built(tokens()))


@pytest.mark.parametrize("remedy", ["swin_norm", "peri_norm"])
def test_blocks_are_recognised_by_what_they_compute_not_by_their_names(
    remedy,
):
    qkeel.apply(gpt_neox(use_parallel_residual=False), remedy, batch=tokens())
    for model, batch in (
        (gpt_neox(), tokens()),
        (gemma2(), tokens()),
        (decoder(norm_order="post"), None),
        (attention(), None),
    ):
        with pytest.raises(RefusedError):
            qkeel.apply(model, remedy, batch=batch)


@pytest.mark.parametrize("order", ["pre", "post", "swin", "peri", "none"])
def test_dropout_scales_what_it_keeps_of_both_branches_and_acts_in_training_alone(
    order,
):
    model, outputs = decoder(norm_order=order), []
    before = model(tokens())
    branches = [b.get_submodule(n) for b in model.blocks for n in ("attention", "mlp")]
    for branch in branches:  # in front of the remedy, and behind it
        branch.register_forward_hook(lambda _, __, y: outputs.append(y))
    handle = qkeel.apply(model, "dropout:rate=0.5")
    for branch in branches:
        branch.register_forward_hook(lambda _, __, y: outputs.append(y))
    model(tokens())
    for whole, dropped in zip(outputs[::2], outputs[1::2], strict=True):
        kept = dropped != 0
        assert 0.3 < kept.double().mean() < 0.7
        assert_close(dropped[kept], 2 * whole[kept])
    assert torch.equal(model.eval()(tokens()), before)
    handle.remove()
    assert torch.equal(model.train()(tokens()), before)


def test_final_softcap_caps_the_logits_of_any_model():
    for model, batch in (
        (decoder(), None),
        (llama(tie_word_embeddings=True).eval(), tokens()),
    ):
        logits = []
        for remedy in ("none", "final_softcap:cap=0.05"):
            with qkeel.apply(model, remedy, batch=batch):
                output = model(tokens())
                logits.append(output if batch is None else output.logits)
        plain, capped = logits
        assert_close(capped, 0.05 * torch.tanh(plain / 0.05))


class Doubled(nn.Module):
    """Its logits are changed on their way out."""

    def __init__(self):
        super().__init__()
        self.inner = decoder()

    def forward(self, x):
        return 2 * self.inner(x)


def test_what_makes_the_final_logits_is_observed_or_named():
    for remedy, batch in (
        ("final_softcap", tokens()),
        ("z_loss", None),
        ("z_loss:module=inner.hed", None),
    ):
        with pytest.raises(RefusedError):
            qkeel.apply(Doubled(), remedy, batch=batch)
    model = Doubled()
    qkeel.apply(model, "final_softcap:cap=0.05,module=inner.head")
    assert model(tokens()).abs().max() <= 0.1


@pytest.mark.parametrize("wrong", [0.0, torch.nan, torch.inf])
def test_heads_without_a_finite_largest_singular_value_are_not_capped(wrong):
    heads = randn(3, 2, 5, seed=0)
    heads[0] *= wrong
    factors = SpectralCap(cap=1e-3).factors(heads.half())
    expected = 1e-3 / torch.linalg.matrix_norm(heads[1:], 2)
    assert factors[0] == 1
    assert_close(factors[1:], expected, rtol=1e-2, atol=0)
    if wrong:
        assert (SpectralCap(cap=1e-3, per="matrix").factors(heads) == 1).all()
