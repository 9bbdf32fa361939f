"""The weights of one model lie in several optimizers, such as Muon for matrices and AdamW for the rest."""

import random

import pytest
import torch
from tests.attention import Attention, values
from tests.drawing import randint, randn
from tests.training import SharpnessAware
from torch import nn
from torch.optim import SGD, AdamW
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.nn import Decoder, DecoderConfig


def model():
    torch.manual_seed(0)
    return Decoder(DecoderConfig(vocab_size=8, d_model=16, n_heads=2, n_layers=2))


def by_kind(model):
    """Matrices in one optimizer, gains and biases in the other."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [
        torch.optim.Muon(matrices, lr=0.02),
        AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.01),
    ]


def train(model, optimizers, steps=3):
    for step in range(steps):
        tokens = randint(8, (2, 6), seed=step)
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def warned(record):
    return [str(w.message) for w in record if "do not train" in str(w.message)]


def test_gains_that_no_optimizer_holds_are_told_of_once(recwarn):
    """A pretrained model with its optimizer, and a norm that is added without it."""
    decoder = model()
    optimizers = by_kind(decoder)
    with qkeel.apply(decoder, "qk_norm"):
        train(decoder, by_kind(decoder), 4)  # made after it, they hold the gains
    assert warned(recwarn) == []
    with qkeel.apply(decoder, "qk_norm"):
        train(decoder, optimizers, 4)
    (message,) = warned(recwarn)
    assert "norm" in message
    assert "the 4 parameters" in message  # two gains in two layers


# Weights and biases of one attention layer lie in different optimizers.

TAU = 0.3
HEADS, HEAD_DIM = 4, 8


class Separate(Attention):
    """Attention whose queries and keys have weights and biases of their own, and whose output is what it returns."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(m=HEADS * HEAD_DIM, heads=HEADS)

    def gamma(self, x):
        """τ over the largest logit of each head, at most 1, in float64."""
        return (TAU / self.largest(x)).clamp(max=1)


X = randn(8, 16, HEADS * HEAD_DIM, seed=1)


def muon_and_adamw(model):
    muon, adamw = by_kind(model)
    adamw.param_groups[0].update(lr=0.03, weight_decay=0.0)
    return [muon, adamw]


def queries_and_rest(model):
    queries = [p for name, p in model.named_parameters() if name.startswith("q.")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("q.")]
    return [SGD(queries, lr=0.5), AdamW(rest, lr=0.03, weight_decay=0.0)]


def trained(
    split,
    remedy,
    *,
    steps=1,
    listed=slice(None),
    stepped=slice(None),
):
    model = Separate()
    optimizers = split(model)
    handle = qkeel.apply(model, remedy, optimizers[listed], batch=X)
    handle.load(handle.state())
    for _ in range(steps):
        model(X).square().sum().backward()
        for optimizer in optimizers[stepped]:
            optimizer.step()
            optimizer.zero_grad()
    return model


REVERSED = slice(None, None, -1)


@pytest.mark.parametrize("listed", [slice(None), REVERSED])
@pytest.mark.parametrize("stepped", [slice(None), REVERSED])
@pytest.mark.parametrize("split", [muon_and_adamw, queries_and_rest])
def test_all_is_clipped_after_the_step_of_the_first_that_holds_query_or_key_weights(
    split, listed, stepped
):
    start = Separate()
    root = start.gamma(X).sqrt().repeat_interleave(HEAD_DIM)
    assert root.max() < 0.9
    clipped = trained(split, f"qk_clip:threshold={TAU}", listed=listed, stepped=stepped)
    plain = trained(split, "none", stepped=stepped)
    # Of both splits the first optimizer holds query weights, and of one the second holds key weights.
    first = 1 if split is queries_and_rest and listed is REVERSED else 0
    order = [0, 1][stepped]
    held = [
        {id(p) for group in x.param_groups for p in group["params"]}
        for x in split(start)
    ]
    for name, p in plain.named_parameters():
        factors = 1.0 if name.startswith("v") else root if p.ndim < 2 else root[:, None]
        old = start.get_parameter(name)
        holder = 0 if id(old) in held[0] else 1
        old, new = old.detach().double(), p.detach().double()
        expected = new * factors
        if order.index(holder) > order.index(first):
            expected = old * factors + (new - old)
        assert_close(clipped.get_parameter(name).detach().double(), expected, msg=name)


@pytest.mark.parametrize(
    "remedy",
    [
        "qk_lr:factor=0.1",
        "frozen_qk",
        "qk_weight_decay:decay=0.5",
        "spectral_cap:cap=0.5",
    ],
)
def test_two_optimizers_for_q_and_the_rest_act_as_one_optimizer_of_the_same_kind(
    remedy,
):
    def two(model):
        named = dict(model.named_parameters())
        halves = [[], []]  # type: list[list[nn.Parameter]]
        # q's weight and k's bias in one of them, everything else in the other.
        for name, p in named.items():
            halves[name not in ("q.weight", "k.bias")].append(p)
        return [SGD(half, lr=0.02, momentum=0.9) for half in halves]

    def single(model):
        return [SGD(model.parameters(), lr=0.02, momentum=0.9)]

    several, expected = (trained(split, remedy, steps=4) for split in (two, single))
    plain = trained(two, "none", steps=4)
    for name, p in expected.named_parameters():
        assert torch.equal(several.get_parameter(name), p), name
        if name == "q.weight":
            assert not torch.equal(plain.get_parameter(name), p)


class Pair(nn.Module):
    """Two layers, each checkpointed unless `reentrant` is None."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList([Separate(), Separate()]), reentrant

    def forward(self, x):
        for layer in self.layers:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("listed", [slice(None), REVERSED])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_optimizers_of_one_weight_each_step_inside_the_backward_pass(listed, reentrant):
    """As in layer-wise training: the gradients are those of the weights of the pass, and all is clipped before the next."""

    def run(is_clipped):
        model, x = Pair(reentrant).double(), X.double().requires_grad_()
        with torch.no_grad():
            inputs = [x, x + model.layers[0](x)]
            roots = [y.gamma(z).sqrt() for y, z in zip(model.layers, inputs)]
        optimizers = {p: SGD([p], lr=0.01) for p in [*model.parameters()][listed]}
        if is_clipped:
            tau = f"qk_clip:threshold={TAU}"
            qkeel.apply(model, tau, [*optimizers.values()], batch=x)
        for p in optimizers:
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        model(x).square().sum().backward()
        model(x)
        return model.layers, roots

    plain, roots = run(is_clipped=False)
    clipped, _ = run(is_clipped=True)
    for layer, root, other in zip(plain, roots, clipped):
        root = root.repeat_interleave(HEAD_DIM)
        assert root.min() < 0.9
        for name, p in layer.named_parameters():
            factors = 1 if name[0] == "v" else root if p.ndim < 2 else root[:, None]
            assert_close(other.get_parameter(name).detach(), p.detach() * factors)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_closure", [True, False])
def test_an_optimizer_inside_another_one_takes_the_steps(has_closure, seed):
    draw = random.Random(seed)
    base, lr, rho = draw.choice([SGD, AdamW]), draw.choice([0.0, 0.02]), draw.random()

    def run(watched):
        model = Separate().double()
        optimizer = SharpnessAware(model.parameters(), base, lr=lr, rho=rho)
        x, largest = X.double(), []

        def backward():
            largest.append(model.largest(x))
            model(x).square().mean().backward()

        monitor = None
        if watched:
            qkeel.apply(model, f"qk_clip:threshold={TAU}", optimizer, batch=x)
            monitor = qkeel.watch(model, optimizer, rules=())
        backward()
        if has_closure:
            optimizer.step(backward)
        else:
            optimizer.first_step()
            backward()
            optimizer.second_step()
        return model, torch.stack(largest).amax(0), monitor

    plain, largest, _ = run(watched=False)
    clipped, _, monitor = run(watched=True)
    root = (TAU / largest).clamp(max=1).sqrt().repeat_interleave(HEAD_DIM)
    for name, p in plain.named_parameters():
        factors = 1.0 if name.startswith("v") else root if p.ndim < 2 else root[:, None]
        assert_close(clipped.get_parameter(name).detach(), p.detach() * factors)
    assert monitor.history.steps.tolist() == [0]
    recorded = torch.from_numpy(monitor.history.heads["max_logit"][0, 0])
    assert_close(recorded, largest.to(recorded), rtol=1e-6, atol=0)
