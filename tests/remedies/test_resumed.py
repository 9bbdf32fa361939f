"""A run that is stopped and resumed equals one that was not: drawn remedies, optimizers and ways of saving."""

import copy
import io
import random
import tempfile
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

import qkeel
from qkeel.errors import AlarmWarning, QkeelWarning

from .test_saved_state import dcp_load, dcp_states

WIDTH, STEPS = 16, 7
BY_STEPS = (
    "lalr",
    "lalr:tau=0.3",
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
)
AUTOPILOT = "autopilot"
# By lalr, by clips and, after some records of a closer watch, by clips.
POLICIES = (
    "ladder:threshold=1,patience=1",
    "ladder:threshold=5,limit=20,patience=1",
    "ladder:threshold=20,limit=30,patience=2,calm=2",
)
WAYS = ("plain", "handle", "nested", "flat", "by hand")


def encoder():
    layer = nn.TransformerEncoderLayer(
        WIDTH, 2, 24, dropout=0.0, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def made(seed, kind, scale=3.0, speed=1.0):
    """A model, whose queries and keys are `scale` times as large, and its optimizers, `speed` times as fast."""
    torch.manual_seed(seed)
    model = encoder().double()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.in_proj_weight[: 2 * WIDTH] *= scale
    rate = 0.03 * speed
    if kind == "adamw":
        return model, [torch.optim.AdamW(model.parameters(), lr=rate)]
    if kind == "sgd":
        return model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    if kind == "muon":
        return model, [
            torch.optim.Muon(matrices, lr=rate),
            torch.optim.AdamW(vectors, lr=rate),
        ]
    return model, [
        torch.optim.AdamW(vectors, lr=rate),
        torch.optim.RMSprop(matrices, lr=rate / 10, momentum=0.5),
    ]


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return 2 * torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=generator)


def passes(model, optimizers, numbers, n):
    """Trains by a step after every `n` passes, and returns what qkeel warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", QkeelWarning)
        for number in numbers:
            x = batch(number)
            (model(x) - x.roll(1, 1)).square().mean().backward()
            for optimizer in optimizers if (number + 1) % n == 0 else ():
                optimizer.step()
                optimizer.zero_grad()
    # What an autopilot has seen and done is no warning of a missing state.
    return [
        str(warning.message)
        for warning in told
        if not issubclass(warning.category, AlarmWarning)
    ]


def outcome(seed, remedy=""):
    """What is wrong with a resume, or "" if nothing is. remedy: instead of a drawn one."""
    draw = random.Random(seed)
    remedy = remedy or draw.choice((*BY_STEPS, *IN_MODEL, AUTOPILOT))
    kinds = ["adamw", "sgd", "muon", "two"]
    kind = draw.choice(kinds[:2] if remedy in IN_MODEL else kinds)
    scale, speed, policy, every = 3.0, 1.0, "", 1
    if remedy == AUTOPILOT:
        policy, every = draw.choice(POLICIES), draw.choice([1, 1, 2])
        kind = draw.choice(["adamw", "muon", "two"])
        # Logits that are large from the start, and that grow to be.
        scale, speed = draw.choice([1.5, 3.0, 6.0]), 10.0 if kind == "adamw" else 5.0
    way = draw.choice(WAYS)
    is_saved_here = remedy in IN_MODEL or way not in ("plain", "handle")
    is_applied_first = is_saved_here or draw.random() < 0.5
    waits = draw.random() < 0.5
    is_watched = draw.random() < 0.3 and remedy != AUTOPILOT
    # The checkpoint may lie between two passes of one step.
    n = draw.choice([1, 1, 2, 3])
    last = STEPS * n
    stop = draw.randint(n, last - n - 1)
    title = f"{remedy} {kind} {way} first={is_applied_first} waits={waits} watched={is_watched} {stop} of {n}"

    def applied(model, optimizers):
        if is_watched:
            qkeel.watch(model, optimizers, every=2)
        options = {}
        if remedy in IN_MODEL or not waits:
            options["batch"] = batch(0)
        if remedy == AUTOPILOT:
            return qkeel.autopilot(
                model, optimizers, policy=policy, every=every, **options
            )
        return qkeel.apply(model, remedy, optimizers, **options)

    model, optimizers = made(0, kind, scale, speed)
    handle = applied(model, optimizers)
    # As Accelerate does before a training begins.
    for optimizer in optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    if told := passes(model, optimizers, range(stop), n):
        return f"{title}: told at first: {told}"
    stored = io.BytesIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as at_saving,
    ):
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", QkeelWarning)
        states = {
            "model": model.state_dict(),
            "optimizers": [x.state_dict() for x in optimizers],
            "handle": handle.state() if way == "handle" else {},
            "gradients": [p.grad for p in model.parameters()],
        }
        torch.save(states, stored)
        stored.seek(0)
        if way not in ("plain", "handle"):
            checkpoint.save(
                dcp_states(model, optimizers, way), checkpoint_id=folder, no_dist=True
            )
        told_at_saving = [str(warning.message) for warning in at_saving]
        warnings.simplefilter("ignore")
        # What was saved is not changed by going on.
        told_on = passes(model, optimizers, range(stop, last), n)
        expected = copy.deepcopy(model.state_dict())
        done = (handle.decisions, handle.events) if remedy == AUTOPILOT else None

        model, optimizers = made(1, kind, scale, speed)
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
                if waits and remedy not in (*IN_MODEL, AUTOPILOT):
                    with torch.no_grad():
                        model(batch(0))
                handle.load(states["handle"])
        else:
            dcp_load(model, optimizers, way, folder)
        stored.seek(0)
        gradients = torch.load(stored, weights_only=True)["gradients"]
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
    told = passes(model, optimizers, range(stop, last), n)
    told = [message for message in told if message not in told_on]
    # What the passes of an open step have shown is in no checkpoint.
    is_open = bool(told_at_saving) and stop % n > 0
    state = model.state_dict()
    moved = [name for name in expected if not torch.equal(state[name], expected[name])]
    if remedy == AUTOPILOT and (handle.decisions, handle.events) != done:
        moved.append("decisions")
    if moved and not is_open:
        return f"{title}: differs in {moved[0]}, told {told}"
    if (told_at_saving and not is_open) or told:
        return f"{title}: told {told_at_saving} {told}"
    return ""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("seed", "remedy"),
    [
        # Each way of saving, and checkpoints between two passes (1, 10, 17).
        *[(seed, "") for seed in (0, 1, 4, 5, 7, 10, 12, 13, 14, 17, 19)],
        *[(seed, AUTOPILOT) for seed in range(8)],
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(seed, remedy):
    assert not outcome(seed, remedy)


@pytest.mark.parametrize("remedy", ["lalr", "qk_clip:threshold=0.5,steps=matched"])
def test_a_state_is_loaded_where_there_is_no_qkeel(remedy):
    model, optimizers = made(0, "two")
    qkeel.apply(model, remedy, optimizers, batch=batch(0))
    passes(model, optimizers, range(2), 1)
    plain, others = made(1, "two")
    plain.load_state_dict(model.state_dict())
    for optimizer, other in zip(optimizers, others, strict=True):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not passes(plain, others, range(2, 4), 1)
