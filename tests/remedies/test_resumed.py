"""A run that is stopped and resumed equals one that was not: drawn remedies, optimizers, ways of saving, and places."""

import copy
import io
import random
import tempfile
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint

import qkeel
from qkeel.errors import QkeelWarning

from .test_saved_state import dcp_load, dcp_states

WIDTH, STEPS = 16, 7
BY_STEPS = (
    "lalr",
    "lalr:norm=spectral,tau=0.3",
    "qk_lr:factor=0.1",
    "qk_clip:threshold=0.5",
    "qk_clip:threshold=0.5,steps=matched",
    "qk_weight_decay",
    "spectral_cap:cap=0.5",
    "frozen_qk",
    "lalr+qk_clip:threshold=1",
    "qk_clip:threshold=0.5,steps=matched+qk_weight_decay",
)
# What adds parameters or buffers to the model stands before its state is loaded, as a new layer would.
IN_MODEL = (
    "sigma_reparam",
    "sigma_reparam:init=one,on=attention",
    "qk_norm",
    "softcap:cap=2",
    "autopilot",
)
WAYS = ("plain", "handle", "nested", "flat", "by hand")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 24, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def made(seed: int, kind: str) -> tuple[Net, list[torch.optim.Optimizer]]:
    """A model and its optimizers."""
    torch.manual_seed(seed)
    model = Net().double()
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.self_attn.in_proj_weight[: 2 * WIDTH] *= 3
    if kind == "adamw":
        return model, [torch.optim.AdamW(model.parameters(), lr=0.03)]
    if kind == "sgd":
        return model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    if kind == "muon":
        return model, [
            torch.optim.Muon(matrices, lr=0.03),
            torch.optim.AdamW(vectors, lr=0.03),
        ]
    return model, [
        torch.optim.AdamW(vectors, lr=0.03),
        torch.optim.RMSprop(matrices, lr=0.003, momentum=0.5),
    ]


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return 2 * torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=generator)


def steps(
    model: Net, optimizers: list[torch.optim.Optimizer], numbers: range
) -> list[str]:
    """Trains, and returns what qkeel warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", QkeelWarning)
        for number in numbers:
            x = batch(number)
            (model(x) - x.roll(1, 1)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    messages = [str(warning.message) for warning in told]
    # What an autopilot has done is no warning of a missing state.
    return [x for x in messages if not x.startswith("autopilot at step")]


def outcome(seed: int) -> str:
    """What is wrong with a resume, or "" if nothing is."""
    draw = random.Random(seed)
    remedy = draw.choice((*BY_STEPS, *IN_MODEL))
    kinds = ["adamw", "sgd", "muon", "two"]
    kind = draw.choice(kinds[:2] if remedy in IN_MODEL else kinds)
    way = draw.choice(WAYS)
    is_saved_here = remedy in IN_MODEL or way not in ("plain", "handle")
    is_applied_first = is_saved_here or draw.random() < 0.5
    waits = draw.random() < 0.5
    is_watched = draw.random() < 0.3 and remedy != "autopilot"
    stop = draw.randint(1, STEPS - 2)
    title = f"{remedy} {kind} {way} first={is_applied_first} waits={waits} watched={is_watched} {stop}"

    def applied(model, optimizers):
        if is_watched:
            qkeel.watch(model, optimizers, every=2)
        if remedy == "autopilot":
            return qkeel.autopilot(model, optimizers[0], batch=batch(0), every=2)
        options = {} if waits and remedy not in IN_MODEL else {"batch": batch(0)}
        return qkeel.apply(model, remedy, optimizers, **options)

    model, optimizers = made(0, kind)
    handle = applied(model, optimizers)
    if told := steps(model, optimizers, range(stop)):
        return f"{title}: told at first: {told}"
    stored = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = {
            "model": model.state_dict(),
            "optimizers": [x.state_dict() for x in optimizers],
            "handle": handle.state() if way == "handle" else {},
        }
        torch.save(states, stored)
        stored.seek(0)
        if way not in ("plain", "handle"):
            checkpoint.save(
                dcp_states(model, optimizers, way), checkpoint_id=folder, no_dist=True
            )
        # What was saved is not changed by going on.
        steps(model, optimizers, range(stop, STEPS))
        expected = copy.deepcopy(model.state_dict())

        model, optimizers = made(1, kind)
        if is_applied_first:
            handle = applied(model, optimizers)
        if way in ("plain", "handle"):
            states = torch.load(stored, weights_only=True)
            model.load_state_dict(states["model"])
            for optimizer, state in zip(optimizers, states["optimizers"], strict=True):
                if way == "handle":
                    # As a program would that keeps what qkeel has added out of its checkpoint.
                    for group in state["param_groups"]:
                        group.pop("qkeel", None)
                optimizer.load_state_dict(state)
            if not is_applied_first:
                handle = applied(model, optimizers)
            if way == "handle":
                if waits and remedy not in IN_MODEL:
                    with torch.no_grad():
                        model(batch(0))
                handle.load(states["handle"])
        else:
            dcp_load(model, optimizers, way, folder)
    told = steps(model, optimizers, range(stop, STEPS))
    state = model.state_dict()
    moved = [name for name in expected if not torch.equal(state[name], expected[name])]
    if moved:
        return (
            f"{title}: {'told, ' if told else 'SILENT, '}differs in {moved[0]}: {told}"
        )
    return f"{title}: equal, but told {told}" if told else ""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("seed", range(12))
def test_a_resumed_run_equals_the_uninterrupted_one(seed: int) -> None:
    assert not outcome(seed)


@pytest.mark.parametrize("remedy", ["lalr", "qk_clip:threshold=0.5,steps=matched"])
def test_a_state_is_loaded_where_there_is_no_qkeel(remedy: str) -> None:
    model, optimizers = made(0, "two")
    qkeel.apply(model, remedy, optimizers, batch=batch(0))
    steps(model, optimizers, range(2))
    plain, others = made(1, "two")
    plain.load_state_dict(model.state_dict())
    for optimizer, other in zip(optimizers, others, strict=True):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not steps(plain, others, range(2, 4))
