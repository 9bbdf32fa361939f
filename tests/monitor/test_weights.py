"""The weights behind each head and what a step adds to them, as a watched step records them: against dense products."""

import random
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from numpy.testing import assert_allclose
from tests.training import adamw, sgd
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import qkeel
from qkeel.errors import InvalidValueError, QkeelWarning
from qkeel.nn import GAU, MLA, Attention, Decoder, DecoderConfig
from qkeel.nn.mla import LatentSizes
from qkeel.spec import AttentionSpec, RMSNorm

WIDTH, H = 24, 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 7, WIDTH, dtype=torch.float64, generator=GENERATOR)
IDS = torch.randint(3, 11, (2, 7), generator=GENERATOR)
SIZES = LatentSizes(q_latent=10, kv_latent=9, rope_dim=4, nope_dim=6, value_dim=3)

# [h d m] of q and of k, the latter of each query head's key head
Dense = tuple[Tensor, Tensor]


def heads(weight, n):
    """[h d m] of rows one head after the other, repeated for grouped keys."""
    return weight.detach().clone().unflatten(0, (n, -1)).repeat_interleave(H // n, 0)


def dense_attention(model):
    return heads(model.q_proj.weight, H), heads(model.k_proj.weight, model.n_kv_heads)


def dense_gpt2(model):
    q, k, _ = model.h[0].attn.c_attn.weight.mT.split(WIDTH)
    return heads(q, H), heads(k, H)


def dense_neox(model):
    fused = model.layers[0].attention.query_key_value.weight.detach().clone()
    q, k, _ = fused.unflatten(0, (H, 3, -1)).unbind(1)
    return q, k


def dense_mla(model):
    """Of plain and rotated part together, from x to the head."""
    down_q, down_k = model.q_down.weight.detach(), model.kv_down.weight.detach()
    rope = heads(model.k_rope.weight, 1)
    if model.latent_norm:  # q from its latent; k from [its latent, x]
        down_q = torch.eye(10, dtype=torch.float64)
        down_k = torch.eye(9, 9 + WIDTH, dtype=torch.float64)
        rope = torch.cat([torch.zeros(H, 4, 9, dtype=torch.float64), rope], -1)
    up = [heads(w.weight, H) @ down_q for w in (model.q_up, model.q_rope)]
    return torch.cat(up, 1), torch.cat([heads(model.k_up.weight, H) @ down_k, rope], 1)


def dense_gau(model):
    """The gain of each side multiplies the rows of the weight that both have."""
    rows = model.qk_proj.z_proj.weight.detach()
    gains = model.qk_proj.q_gain, model.qk_proj.k_gain
    q, k = (gain.detach()[:, None] * rows for gain in gains)
    return q[None], k[None]


def gpt2():
    config = transformers.GPT2Config(vocab_size=11, n_embd=WIDTH, n_layer=1, n_head=H)
    return transformers.GPT2Model(config)


def neox():
    config = transformers.GPTNeoXConfig(
        vocab_size=11,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=H,
        intermediate_size=8,
    )
    return transformers.GPTNeoXModel(config)


def normed():
    """Norms behind the weights, with gains, are left out."""
    model = Attention(WIDTH, H, 2, spec=AttentionSpec(norm=RMSNorm(gain="head_dim")))
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data += torch.rand_like(p)
    return model


Kind = tuple[Callable[[], nn.Module], Callable[[nn.Module], Dense], Tensor]
KINDS = {
    "plain": (lambda: Attention(WIDTH, H), dense_attention, X),
    "grouped": (lambda: Attention(WIDTH, H, 2), dense_attention, X),
    "one key head": (lambda: Attention(WIDTH, H, 1, head_dim=4), dense_attention, X),
    "fused, columns": (gpt2, dense_gpt2, IDS),
    "fused, interleaved": (neox, dense_neox, IDS),
    "gau": (lambda: GAU(WIDTH, size=6), dense_gau, X),
    "mla": (lambda: MLA(WIDTH, H, sizes=SIZES), dense_mla, X),
    "mla, latents normed": (
        lambda: MLA(WIDTH, H, sizes=SIZES, latent_norm=True),
        dense_mla,
        X,
    ),
    "normed": (normed, dense_attention, X),
}


def step(model, optimizer, x, stats):
    """The numbers [heads] of the first layer in a watched step."""
    with qkeel.watch(model, optimizer, stats=stats) as monitor:
        out = model(x)
        (out if isinstance(out, Tensor) else out[0]).square().sum().backward()
        optimizer.step()
        return {name: x[0, 0] for name, x in monitor.history.heads.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_steps_weights_are_those_of_the_dense_products(kind):
    torch.manual_seed(1)
    make, dense, x = KINDS[kind]
    model = make().double()
    q, k = dense(model)
    optimizer = adamw(model, 0.003)
    found = step(model, optimizer, x, "max+updates")
    new_q, new_k = dense(model)
    second = (new_q - q).mT @ k + q.mT @ (new_k - k)
    third = (new_q - q).mT @ (new_k - k)
    for name, matrix in (("delta2", second), ("delta3", third)):
        sigma = torch.linalg.svdvals(matrix)
        share = sigma.square() / sigma.square().sum(-1, keepdim=True)
        entropy = -torch.special.xlogy(share, share).sum(-1)
        for summary, value in (
            ("spectral_norm", sigma[:, 0]),
            ("stable_rank", 1 / share[:, 0]),
            ("singular_entropy", entropy),
        ):
            assert_allclose(found[f"{name}_{summary}"], value, rtol=1e-5, err_msg=name)
    spectral = torch.linalg.matrix_norm(q.mT @ k, 2)
    assert_allclose(found["qk_spectral_norm"], spectral, rtol=1e-6)
    if kind not in ("gau", "mla", "mla, latents normed"):
        for name, new, old in (("query", new_q, q), ("key", new_k, k)):
            size, moved = old.flatten(1).norm(dim=1), (new - old).flatten(1).norm(dim=1)
            assert_allclose(found[f"{name}_weight_norm"], size, rtol=1e-6)
            assert_allclose(found[f"{name}_update_ratio"], moved / size, rtol=1e-6)


def test_gradients_are_root_mean_squares_over_a_heads_rows():
    model = Attention(8, 2, 1)  # query heads of 4 rows, one key head
    query = torch.full((8, 8), 3e-4)
    query[4:] = 0.0
    query[4, 0] = 8e-8  # one of 32 numbers
    weights = model.q_proj.weight, model.k_proj.weight
    for p, gradient in zip(weights, (query, torch.full((4, 8), -2e-5))):
        p.register_hook(lambda _, gradient=gradient: gradient)
    found = step(model, sgd(model), torch.randn(1, 3, 8), "max")
    head = 8e-8 / 32**0.5
    assert found["query_grad_rms"].tolist() == pytest.approx([3e-4, head])
    assert found["key_grad_rms"].tolist() == pytest.approx([2e-5, 2e-5])


def test_weights_that_are_computed_from_stored_ones_have_gradients_alone():
    # The norm of the stored W is not that of (γ/σ) W, which the layer uses.
    torch.manual_seed(0)
    model = nn.Sequential(Attention(WIDTH, H), Attention(WIDTH, H)).double()
    qkeel.apply(model[0], "sigma_reparam:init=one")
    optimizer = adamw(model)
    monitor = qkeel.watch(model, optimizer, stats="all+updates")
    model(X).square().sum().backward()
    with pytest.warns(UserWarning, match="not measured for 0: .* other weights"):
        optimizer.step()
    record = monitor.history.heads
    of_gradients = {"query_grad_rms", "key_grad_rms"}
    of_weights = {"query_weight_norm", "key_weight_norm", "qk_spectral_norm"}
    of_weights |= {"delta2_spectral_norm", "query_update_ratio", "key_update_ratio"}
    for layer, has_weights in ((0, False), (1, True)):
        known = {name for name, x in record.items() if not np.isnan(x[0, layer]).all()}
        assert known >= of_gradients
        assert (known & of_weights) == (of_weights if has_weights else set())


def test_the_change_by_a_step_is_not_measured_unless_it_is_named():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=11, d_model=16, n_layers=1, n_heads=2))
    found = step(model, adamw(model), IDS, "all")
    assert "qk_spectral_norm" in found
    assert not {name for name in found if "delta" in name or "update" in name}
    with pytest.raises(InvalidValueError, match="optimizer"):
        qkeel.watch(model, stats="all+updates")


def test_weights_that_are_exchanged_are_read_from_then_on():
    torch.manual_seed(0)
    model = nn.Sequential(*[Attention(WIDTH, H) for _ in range(2)]).double()
    optimizer = sgd(model, 0.0)
    with qkeel.watch(model, optimizer, stats="all+updates") as monitor:
        for change in range(3):
            if change == 1:
                weights = {name: 2 * x for name, x in model.state_dict().items()}
                model.load_state_dict(weights, assign=True)
            elif change == 2:
                model[1].q_proj = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            model(X).square().sum().backward()
            optimizer.step()
            norms = monitor.sample.heads["query_weight_norm"]
            weights = [layer.q_proj.weight.unflatten(0, (H, -1)) for layer in model]
            expected = [x.detach().norm(dim=(1, 2)).tolist() for x in weights]
            assert_allclose(norms, expected, rtol=1e-6)


def test_a_layer_without_gradients_leaves_those_of_its_likes_as_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(*[Attention(WIDTH, H) for _ in range(3)]).double()
    model[1].q_proj.weight.requires_grad_(False)
    optimizer = adamw(model)
    with qkeel.watch(model, optimizer, stats="max") as monitor:
        model(X).square().sum().backward()
        optimizer.step()
        record = monitor.history.heads
    for i, layer in enumerate(model):
        for side, p in (("query", layer.q_proj.weight), ("key", layer.k_proj.weight)):
            rms = np.full(H, np.nan)
            if p.grad is not None:
                rms = p.grad.unflatten(0, (H, -1)).square().mean((1, 2)).sqrt()
            assert_allclose(record[f"{side}_grad_rms"][0, i], rms, rtol=1e-6)


def remove(model, name):
    delattr(model, name)


def mask(model, name):
    prune.identity(model.get_submodule(name).q_proj, "weight")


def reparametrise(model, name):
    parametrizations.weight_norm(model.get_submodule(name).k_proj)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("change", [remove, mask, reparametrise])
def test_weights_that_change_place_are_told_of_and_the_others_stay_watched(
    change, seed
):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layers = {name: Attention(d_model=WIDTH, n_heads=H) for name in "abc"}
    model = nn.Sequential(OrderedDict(layers)).double()
    optimizer, name, first = sgd(model), draw.choice("abc"), draw.randrange(1, 3)
    right = []
    with qkeel.watch(model, optimizer, rules=()) as monitor:
        for step in range(4):
            q = [dense_attention(layer)[0] for layer in layers.values()]
            right.append(torch.stack(q).flatten(2).norm(dim=2).numpy())
            if step == first:
                change(model, name)
            model(X).square().mean().backward()
            if step == first:
                with pytest.warns(QkeelWarning, match=f"weights of {name} are not"):
                    optimizer.step()
            else:
                optimizer.step()  # a second warning would be an error
        values = monitor.history.heads["query_weight_norm"]
    for of_step in right[first:]:
        of_step["abc".index(name)] = np.nan
    assert_allclose(values, right, rtol=1e-6)
