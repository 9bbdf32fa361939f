"""A run that is stopped and resumed equals one that was not: drawn remedies, optimizers, ways of saving, and places."""

import copy
import importlib
import io
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

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

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        output = self.encoder(x)
        if labels is None:
            return output
        return {"loss": (output - labels).square().mean()}


def made(seed: int, kind: str) -> tuple[Net, list[torch.optim.Optimizer]]:
    """A model and its optimizers."""
    torch.manual_seed(seed)
    model = Net().double()
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.self_attn.in_proj_weight[: 2 * WIDTH] *= 3
    if kind in ("adamw", "fast"):
        # So fast that an autopilot acts.
        rate = 0.3 if kind == "fast" else 0.03
        return model, [torch.optim.AdamW(model.parameters(), lr=rate)]
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


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return 2 * torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=generator)


def passes(
    model: Net, optimizers: list[torch.optim.Optimizer], numbers: range, n: int
) -> list[str]:
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
    messages = [str(warning.message) for warning in told]
    # What an autopilot has done is no warning of a missing state.
    return [x for x in messages if not x.startswith("autopilot at step")]


def outcome(seed: int) -> str:
    """What is wrong with a resume, or "" if nothing is."""
    draw = random.Random(seed)
    remedy = draw.choice((*BY_STEPS, *IN_MODEL))
    kinds = ["adamw", "sgd", "muon", "two"]
    kind = draw.choice(kinds[:2] if remedy in IN_MODEL else kinds)
    if remedy == "autopilot":
        kind = "fast"
    way = draw.choice(WAYS)
    is_saved_here = remedy in IN_MODEL or way not in ("plain", "handle")
    is_applied_first = is_saved_here or draw.random() < 0.5
    waits = draw.random() < 0.5
    is_watched = draw.random() < 0.3 and remedy != "autopilot"
    # The checkpoint may lie between two passes of one step.
    n = draw.choice([1, 1, 2, 3])
    last = STEPS * n
    stop = draw.randint(n, last - n - 1)
    title = f"{remedy} {kind} {way} first={is_applied_first} waits={waits} watched={is_watched} {stop} of {n}"

    def applied(model, optimizers):
        if is_watched:
            qkeel.watch(model, optimizers, every=2)
        if remedy == "autopilot":
            policy = "ladder:threshold=1,patience=1"
            return qkeel.autopilot(
                model, optimizers[0], policy=policy, batch=batch(0), every=1
            )
        options = {} if waits and remedy not in IN_MODEL else {"batch": batch(0)}
        return qkeel.apply(model, remedy, optimizers, **options)

    model, optimizers = made(0, kind)
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
        passes(model, optimizers, range(stop, last), n)
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
        stored.seek(0)
        gradients = torch.load(stored, weights_only=True)["gradients"]
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
    told = passes(model, optimizers, range(stop, last), n)
    # What the passes of an open step have shown is in no checkpoint, and an autopilot's state has to be loaded itself.
    is_open = bool(told_at_saving) and stop % n > 0
    is_left_out = remedy == "autopilot" and way != "handle"
    state = model.state_dict()
    moved = [name for name in expected if not torch.equal(state[name], expected[name])]
    if moved and not (is_open or (is_left_out and told)):
        return f"{title}: differs in {moved[0]}, told {told}"
    if (told_at_saving and not is_open) or bool(told) != is_left_out:
        return f"{title}: told {told_at_saving} {told}"
    return ""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
# Each way of saving, checkpoints between two passes (1, 10, 17, 23), and autopilots (20, 22, 23).
@pytest.mark.parametrize("seed", [0, 1, 4, 5, 7, 10, 12, 13, 14, 17, 19, 20, 22, 23])
def test_a_resumed_run_equals_the_uninterrupted_one(seed: int) -> None:
    assert not outcome(seed)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of all batches of a training of `STEPS` steps."""

    def __init__(self, n: int) -> None:
        self.n = 2 * n * STEPS

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = batch(i // 2)[i % 2]
        return {"x": row, "labels": row.roll(1, 0)}


def trained_by_transformers(
    model: Net,
    optimizer: torch.optim.Optimizer,
    n: int,
    callbacks: list[Any],
    folder: Path,
    stop: int,
    *,
    resumes: bool,
) -> None:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=n,
        max_steps=STEPS,
        save_steps=stop,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Rows(n),
        callbacks=callbacks,
        optimizers=(optimizer, None),
    )
    trainer.train(str(folder / f"checkpoint-{stop}") if resumes else None)


def trained_by_lightning(
    model: Net,
    optimizer: torch.optim.Optimizer,
    n: int,
    callbacks: list[Any],
    folder: Path,
    stop: int,
    *,
    resumes: bool,
) -> None:
    """In epochs of `stop` steps, as Lightning goes on at the beginning of an epoch."""
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, rows: dict[str, Tensor], _: int) -> Tensor:
            return self.net(**rows)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    saves = lightning.callbacks.ModelCheckpoint(
        folder, filename="{epoch}", save_top_k=-1
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, saves],
        max_epochs=-(-STEPS // stop),
        accumulate_grad_batches=n,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.utils.data.Subset(Rows(n), range(2 * n * stop))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    trainer.fit(
        Module(), loader, ckpt_path=str(folder / "epoch=0.ckpt") if resumes else None
    )


def outcome_of_trainer(library: str, seed: int) -> str:
    """What is wrong with a training that a trainer resumes, or "" if nothing is."""
    draw = random.Random(f"{library} {seed}")
    remedy, kind = draw.choice((*BY_STEPS, *IN_MODEL)), draw.choice(["adamw", "sgd"])
    n, stop = draw.choice([1, 2]), draw.randint(1, STEPS - 1)
    by_callback = remedy not in IN_MODEL and draw.random() < 0.5
    if remedy == "autopilot":
        by_callback, kind = True, "fast"
    title = f"{library} {remedy} {kind} {stop} of {n} callback={by_callback}"
    package, train = {
        "huggingface": ("transformers", trained_by_transformers),
        "lightning": ("lightning.pytorch", trained_by_lightning),
    }[library]
    pytest.importorskip(package)
    integration = importlib.import_module(f"qkeel.integrations.{library}")

    def trained(model_seed: int, *, resumes: bool) -> tuple[dict[str, Tensor], object]:
        model, (optimizer,) = made(model_seed, kind)
        options: dict[str, Any] = {}
        if remedy == "autopilot":
            options = {"autopilot": "ladder:threshold=1,patience=1", "every": 1}
            if library == "lightning":
                options["batch"] = batch(0)
        elif by_callback:
            options = {"remedy": remedy}
        else:
            qkeel.apply(model, remedy, optimizer, batch=batch(0))
        callback = integration.QkeelCallback(**options)
        train(model, optimizer, n, [callback], Path(folder), stop, resumes=resumes)
        return model.state_dict(), callback.pilot and callback.pilot.decisions

    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("ignore")
        expected, decisions = trained(0, resumes=False)
        warnings.simplefilter("always", QkeelWarning)
        resumed, again = trained(1, resumes=True)
    messages = [
        str(warning.message) for warning in told if "state" in str(warning.message)
    ]
    moved = [x for x in expected if not torch.equal(resumed[x], expected[x])]
    if moved or decisions != again:
        return f"{title}: differs in {moved[:1]}, told {messages}, {decisions} {again}"
    return f"{title}: equal, but told {messages}" if messages else ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "library", ["huggingface", pytest.param("lightning", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("seed", range(4))
def test_a_training_that_a_trainer_resumes_equals_the_uninterrupted_one(
    library: str, seed: int
) -> None:
    assert not outcome_of_trainer(library, seed)


@pytest.mark.parametrize("remedy", ["lalr", "qk_clip:threshold=0.5,steps=matched"])
def test_a_state_is_loaded_where_there_is_no_qkeel(remedy: str) -> None:
    model, optimizers = made(0, "two")
    qkeel.apply(model, remedy, optimizers, batch=batch(0))
    passes(model, optimizers, range(2), 1)
    plain, others = made(1, "two")
    plain.load_state_dict(model.state_dict())
    for optimizer, other in zip(optimizers, others, strict=True):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not passes(plain, others, range(2, 4), 1)
