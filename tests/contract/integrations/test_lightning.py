"""The callback watches a real Lightning training, changes no bit of it, and the loggers get each number at its step."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qkeel import load
from qkeel.autopilot import Action, Autopilot
from qkeel.errors import InvalidValueError

L = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from qkeel.integrations.lightning import QkeelCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what lightning warns of is its own


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, dropout=dropout)
        self.out = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.out(h + self.attention(h, h, h, need_weights=False)[0])


class Module(L.LightningModule):
    def __init__(self, lr: float = 1e-2, dropout: float = 0.1) -> None:
        super().__init__()
        self.net, self.lr = Net(dropout), lr

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(
            self.net(batch[0]).flatten(0, 1), batch[0].flatten()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Continued(torch.utils.data.DataLoader[Any]):
    """A loader whose place is in Lightning's checkpoints."""

    given = 0

    def __iter__(self) -> Any:
        first = self.given % len(self)
        for i, batch in enumerate(super().__iter__()):
            self.given = i + 1
            if i >= first:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def fitted(
    callback: QkeelCallback | None,
    folder: Path,
    *,
    resume: str | None = None,
    module: Callable[[], Any] = Module,
    loader: Any = torch.utils.data.DataLoader,
    saves: Any = None,
    **options: Any,
) -> Any:
    L.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randint(0, 32, (16, 8)))
    given = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[one for one in (callback, saves) if one], default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, **given,
    )  # fmt: skip
    trainer.fit(module(), loader(data, batch_size=2), ckpt_path=resume)
    return trainer


def recorded(path: Path) -> dict[int, float]:
    """The largest logit by step, as the run directory has it."""
    steps = load(path).steps
    return dict(zip(steps["step"].tolist(), steps["max_logit"].tolist()))


def logged(folder: Path) -> dict[int, float]:
    """The same as the file of Lightning's CSVLogger has it."""
    with open(folder / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("attn/max_logit")]
    return {int(row["step"]): float(row["attn/max_logit"]) for row in rows}


def test_training_is_bit_identical_and_its_numbers_are_logged(tmp_path: Path) -> None:
    plain = fitted(None, tmp_path)
    seen = fitted(QkeelCallback(every=2, sinks=tmp_path / "run"), tmp_path)
    a, b = plain.lightning_module.state_dict(), seen.lightning_module.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert "attn/max_logit" in seen.callback_metrics
    assert load(tmp_path / "run").status == "done"
    assert list(recorded(tmp_path / "run")) == [0, 2, 4, 6, 7]
    assert not seen.lightning_module.net._forward_pre_hooks


class Stopper(L.Callback):
    """Stops before the planned end, as on a lack of progress."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 5


def test_the_loggers_get_each_number_at_its_step(tmp_path: Path) -> None:
    """Whatever the cadence, accumulated gradients and the steps at which Lightning itself logs."""
    settings: list[tuple[int, list[int], dict[str, Any]]] = [
        (50, [0, 7], {}),
        (1, [0, 1, 2, 3], {"accumulate_grad_batches": 2}),
        (3, [0, 3, 6, 9, 12, 15], {"max_epochs": 2, "log_every_n_steps": 2}),
        (4, [0, 4], {"max_steps": 5, "max_epochs": -1, "log_every_n_steps": 1}),
        (3, [0, 3], {"saves": Stopper()}),
    ]
    for i, (every, steps, options) in enumerate(settings):
        logger = CSVLogger(tmp_path, name="csv", version=str(i))
        fitted(
            QkeelCallback(every=every, sinks=tmp_path / f"run{i}"),
            tmp_path,
            logger=logger,
            **options,
        )
        assert list(recorded(tmp_path / f"run{i}")) == steps, options
        assert logged(tmp_path / "csv" / str(i)) == pytest.approx(
            recorded(tmp_path / f"run{i}")
        ), options


def test_a_resumed_training_goes_on_at_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    from .stored import tensorboard_scalars

    first = fitted(None, tmp_path)
    first.save_checkpoint(tmp_path / "last.ckpt")
    callback = QkeelCallback(every=5, sinks=tmp_path / "run")
    options: dict[str, Any] = {
        "max_epochs": 2,
        "logger": TensorBoardLogger(tmp_path / "tb"),
    }
    fitted(callback, tmp_path, resume=str(tmp_path / "last.ckpt"), **options)
    assert list(recorded(tmp_path / "run")) == [10, 15]
    assert tensorboard_scalars(tmp_path / "tb", "attn/max_logit") == pytest.approx(
        recorded(tmp_path / "run"), rel=1e-6
    )


def test_a_module_is_chosen_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidValueError, match="has no module 'nett'; its children: net"
    ):
        fitted(QkeelCallback(module="nett"), tmp_path)


def test_a_remedy_acts_on_the_optimizer_that_lightning_makes(tmp_path: Path) -> None:
    def run(remedy: str | None, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
        callback = QkeelCallback(remedy=remedy)
        module = functools.partial(Module, 0.3, 0.0)
        trainer = fitted(callback, tmp_path, module=module, max_epochs=2, **options)
        return trainer.lightning_module.state_dict(), callback.handle

    clip = "qk_clip:threshold=0.5,steps=matched"
    saves = ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
    whole, handle = run(clip, saves=saves, enable_checkpointing=True)
    assert handle.active
    plain, none = run(None)
    assert none is None
    assert any(not torch.equal(plain[name], whole[name]) for name in whole)
    resumed, _ = run(clip, resume=str(tmp_path / "saved" / "epoch=0.ckpt"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    with pytest.raises(InvalidValueError, match="either remedy or autopilot"):
        QkeelCallback(remedy="lalr", autopilot=True)


@pytest.mark.slow
def test_an_autopilot_resumes_to_the_same_bits_and_events(tmp_path: Path) -> None:
    """At the end of an epoch (8 steps) with any loader; within one with a loader that goes on where it was: without,
    Lightning gives the first batches of the epoch again, with an autopilot or without one. The checkpoints: before
    anything was decided, between a decision and its effect, with remedies in force.
    """

    def run(
        loader: Any, name: str, resume: str | None = None
    ) -> tuple[dict[str, torch.Tensor], Autopilot]:
        example = torch.zeros(1, 8, dtype=torch.long)
        callback = QkeelCallback(
            every=1, autopilot="ladder:threshold=2,patience=1", batch=example
        )
        trainer = fitted(
            callback, tmp_path, resume=resume, module=functools.partial(Module, 0.3, 0.0), loader=loader,
            saves=ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1),
            max_epochs=3, enable_checkpointing=True,
        )  # fmt: skip
        assert callback.pilot is not None
        return trainer.lightning_module.state_dict(), callback.pilot

    for loader in (torch.utils.data.DataLoader, Continued):
        bits, whole = run(loader, loader.__name__)
        clip = next(one.step for one in whole.decisions if one.action is Action.CLIP)
        assert clip < 16
        for step in (
            (8, 16)
            if loader is torch.utils.data.DataLoader
            else (clip - 1, clip + 1, clip + 4)
        ):
            again, pilot = run(
                loader, "again", str(tmp_path / loader.__name__ / f"step={step}.ckpt")
            )
            assert pilot.events == whole.events, (loader, step)
            assert all(torch.equal(bits[name], again[name]) for name in bits), (
                loader,
                step,
            )
