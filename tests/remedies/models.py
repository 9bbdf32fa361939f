"""Small models and straightforward stand-ins that the tests of remedies share."""

import torch
from tests.drawing import randint
from torch import nn

from qkeel.nn import MLA, Attention, Decoder, DecoderConfig
from qkeel.nn.mla import LatentSizes
from qkeel.patching.held_objects import tensors_within

VOCAB, D_MODEL = 13, 16


def decoder(**options):
    """Two layers of four heads, weights from the seed the test starts with."""
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(**{"vocab_size": VOCAB, "d_model": D_MODEL, **options})
    )
    model.init_weights()
    return model


def mla(**options):
    """Latent attention whose norms differ per head and weight."""
    torch.manual_seed(0)
    sizes = LatentSizes(q_latent=12, kv_latent=10, rope_dim=4, nope_dim=6, value_dim=6)
    return MLA(D_MODEL, 4, sizes=sizes, **options)


def tokens(batch=2, length=8):
    """Fixed random tokens."""
    return randint(0, VOCAB, (batch, length), seed=7)


def loss(model, x):
    """Next-token loss."""
    return nn.functional.cross_entropy(
        model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()
    )


def train(model, optimizer, steps):
    """Steps on fixed data."""
    for i in range(steps):
        optimizer.zero_grad()
        loss(model, (tokens() + i) % VOCAB).backward()
        optimizer.step()


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


def gradients(model, steps, seed=3):
    """The same random gradients for whoever asks, per parameter name."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(
                p.dtype
            )
            for name, p in model.named_parameters()
        }


def step_by(model, optimizer, grads):
    """One optimizer step by given gradients."""
    for name, p in model.named_parameters():
        p.grad = grads[name].clone()
    optimizer.step()


def attention(dtype=torch.float64, n_kv_heads=2, **options):
    """Four query heads of size 4."""
    torch.manual_seed(0)
    return Attention(D_MODEL, 4, n_kv_heads, **options).to(dtype)


def snapshot(model, optimizer=None):
    """All that a handle must restore: state, order, classes, attributes, groups."""
    taken = {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "parameters": [(n, id(p)) for n, p in model.named_parameters()],
        "modules": [(n, type(m), sorted(m.__dict__)) for n, m in model.named_modules()],
        "observers": [len(getattr(m, "observers", [])) for m in model.modules()],
        "specs": [getattr(m, "spec", None) for m in model.modules()],
    }
    if optimizer is not None:
        taken["groups"] = [[id(p) for p in g["params"]] for g in optimizer.param_groups]
        taken["hooks"] = (
            len(optimizer._optimizer_step_pre_hooks),
            len(optimizer._optimizer_step_post_hooks),
        )
    return taken


def assert_same(a, b):
    """Two snapshots are the same bit for bit."""
    assert list(a["state"]) == list(b["state"])
    for name, value in a["state"].items():
        assert torch.equal(value, b["state"][name]), name
    for part in a.keys() - {"state"}:
        assert a[part] == b[part], part


# Optimizers by their class and, behind a space, what is special; the steps of all are proportional to the rate.
OPTIMIZERS = {
    "AdamW": {"weight_decay": 0.1},
    "AdamW fused": {"weight_decay": 0.1, "fused": True},
    "AdamW foreach": {"foreach": True},
    "Adam": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"weight_decay": 0.1, "lr_decay": 0.1},
    "RAdam": {},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "Adadelta": {"lr": 1.0},
    # It makes one step of a whole matrix, of which each head's rows are scaled.
    "Muon": {"weight_decay": 0.1},
}


def optimizer_of(kind, params, **options):
    kind = getattr(torch.optim, kind.partition(" ")[0])
    return kind(params, **{"lr": 0.01, **options})


def trained(output):
    """The output of a pass, which a gradient has reached, so that the pass counts as trained."""
    sum(x.sum() for x in tensors_within(output) if x.requires_grad).backward()
    return output
