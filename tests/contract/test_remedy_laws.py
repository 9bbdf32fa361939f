"""Laws that hold for every remedy: how it starts, what its removal restores, and what copies and checkpoints keep.

One table: each law is a test over all remedies, on qkeel's own decoder and on a model that is not qkeel's.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qkeel
from qkeel.errors import AlreadyAppliedError
from qkeel.nn import Attention, Decoder, DecoderConfig

VOCAB, WIDTH = 13, 16
IDS = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(7))
REMEDIES = [name for name in qkeel.remedies() if name != "none"]
# Remedies that act on optimizer steps alone.
STEPS = {"qk_clip", "lalr", "qk_lr", "frozen_qk", "qk_weight_decay", "spectral_cap"}
# Remedies that act on blocks or on the output.
BLOCKS = {"qkv_norm", "z_loss", "final_softcap", "swin_norm", "peri_norm", "dropout"}
# Remedies under which the model starts as it was, in evaluation mode.
NEUTRAL = STEPS | {"sigma_reparam", "output_gate", "z_loss", "dropout"}
# Options with which a remedy acts on these small models.
OPTIONS = {
    "attention_temperature": "attention_temperature:floor=2",
    "qk_clip": "qk_clip:threshold=0.02,steps=matched",
    "spectral_cap": "spectral_cap:cap=0.5",
    "final_softcap": "final_softcap:cap=0.05",
    "softcap": "softcap:cap=0.02",
    "qk_weight_decay": "qk_weight_decay:decay=0.5",
}


def own() -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(
        DecoderConfig(vocab_size=VOCAB, d_model=WIDTH, n_heads=4, n_layers=2)
    )
    model.init_weights()
    return model


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.mlp = (
            Attend(),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
        )
        self.first, self.second = (
            nn.RMSNorm(WIDTH, eps=1e-6),
            nn.RMSNorm(WIDTH, eps=1e-6),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x))
        return x + self.mlp(self.second(x))


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Foreign(nn.Module):
    """A pre-norm transformer in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = (
            nn.Embedding(VOCAB, WIDTH),
            nn.ModuleList([Layer(), Layer()]),
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {"own": own, "foreign": Foreign}
every_remedy = pytest.mark.parametrize("name", REMEDIES)
every_model = pytest.mark.parametrize("kind", MODELS)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.03)


def apply(model: nn.Module, name: str, optimizer: torch.optim.Optimizer) -> Any:
    return qkeel.apply(
        model, OPTIONS.get(name, name), optimizer, batch=IDS, train_length=8
    )


def train(
    model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0
) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(step)  # dropout
        ids = (IDS + step) % VOCAB
        optimizer.zero_grad()
        F.cross_entropy(
            model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
        optimizer.step()


def shape_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything but the values: names, order, classes, attributes, specs, hooks and groups."""
    modules = [(n, type(m), sorted(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks), getattr(m, "spec", 0))
               for n, m in model.named_modules()]  # fmt: skip
    hooks = (
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
    )
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    return [
        modules,
        [(n, id(p)) for n, p in model.named_parameters()],
        list(model.state_dict()),
        hooks,
        groups,
    ]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[name]) for name, x in a.items()
    )


@every_model
@every_remedy
def test_start_and_undo_bit_for_bit(name: str, kind: str) -> None:
    model = MODELS[kind]().eval()
    optimizer = adamw(model)
    shape, before, out = shape_of(model, optimizer), values(model), model(IDS)
    handle = apply(model, name, optimizer)
    assert handle.active
    assert torch.equal(model(IDS), out) is (name in NEUTRAL)
    with pytest.raises(AlreadyAppliedError):
        apply(model, name, optimizer)
    handle.remove()
    handle.remove()
    assert not handle.active
    assert shape_of(model, optimizer) == shape
    assert equal(values(model), before)
    assert torch.equal(model(IDS), out)


@every_model
@every_remedy
def test_it_trains_changes_the_run_and_leaves_no_trace_but_the_weights(
    name: str, kind: str
) -> None:
    plain, model = MODELS[kind](), MODELS[kind]()
    optimizer = adamw(model)
    shape = shape_of(model, optimizer)
    handle = apply(model, name, optimizer)
    train(model, optimizer, 3)
    train(plain, adamw(plain), 3)
    handle.remove()
    assert shape_of(model, optimizer) == shape
    trained = values(model)
    assert all(x.isfinite().all() for x in trained.values())
    assert not equal(trained, values(plain))
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert set(optimizer.state) <= held


@every_model
@every_remedy
def test_a_resumed_run_is_the_one_that_was_not_stopped(name: str, kind: str) -> None:
    def fresh() -> tuple[Any, Any, Any]:
        model = MODELS[kind]()
        optimizer = adamw(model)
        return model, optimizer, apply(model, name, optimizer)

    model, optimizer, handle = fresh()
    train(model, optimizer, 3)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), handle.state()], buffer)
    train(model, optimizer, 3, first=3)
    buffer.seek(0)
    saved = torch.load(buffer)
    again, other, resumed = fresh()
    train(again, other, 1, first=9)
    for part, state in zip((again, other), saved):
        part.load_state_dict(state)
    resumed.load(saved[2])
    train(again, other, 3, first=3)
    assert equal(values(model), values(again))


@every_model
@every_remedy
def test_a_copy_computes_the_same_and_has_no_hook_on_steps(
    name: str, kind: str
) -> None:
    model = MODELS[kind]()
    optimizer = adamw(model)
    with apply(model, name, optimizer):
        train(model, optimizer, 1)
        model.eval()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(IDS), model(IDS))
            assert list(twin.state_dict()) == list(model.state_dict())
            if name in STEPS:
                with apply(twin, name, adamw(twin)):
                    pass
        assert not copy.deepcopy(optimizer)._optimizer_step_post_hooks


@pytest.mark.slow
@every_model
@every_remedy
def test_compiled_before_or_after_the_same_weights_come_out(
    name: str, kind: str
) -> None:
    results = []
    for when in ("never", "before", "after"):
        torch.compiler.reset()
        model = MODELS[kind]()
        optimizer = adamw(model)
        run: Any = (
            torch.compile(model, backend="aot_eager") if when == "before" else model
        )
        with apply(run, name, optimizer):
            run = torch.compile(model, backend="aot_eager") if when == "after" else run
            train(run, optimizer, 2)
            results.append([p.detach().clone() for p in model.parameters()])
    if name != "dropout":  # compiled code draws other random numbers
        for other in results[1:]:
            assert all(
                torch.allclose(a, b, atol=1e-4)
                for a, b in zip(results[0], other, strict=True)
            )


@pytest.mark.parametrize(
    "name", [name for name in REMEDIES if name not in STEPS | BLOCKS]
)
def test_decoding_with_a_cache_computes_what_one_pass_does(name: str) -> None:
    torch.manual_seed(0)
    model, x = (
        Attention(WIDTH, 4, 2).double(),
        torch.randn(2, 8, WIDTH, dtype=torch.float64),
    )
    qkeel.apply(model, OPTIONS.get(name, name), train_length=8)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        model.eval()
        cache = model.new_cache()
        steps = torch.cat(
            [model(x[:, i : i + 1], cache=cache) for i in range(x.shape[1])], dim=1
        )
        assert torch.allclose(steps, model(x), atol=1e-12)


@every_model
@every_remedy
def test_frozen_weights_stay(name: str, kind: str) -> None:
    model = MODELS[kind]()
    frozen = [
        p for n, p in model.named_parameters() if ".v" in n or n.startswith("embed")
    ]
    for p in frozen:
        p.requires_grad_(False)
    before = [p.clone() for p in frozen]
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.03
    )
    with apply(model, name, optimizer):
        train(model, optimizer, 2)
        assert not any(p.requires_grad for p in frozen)
    assert all(torch.equal(p, old) for p, old in zip(frozen, before))
