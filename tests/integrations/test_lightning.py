"""The callback watches a real Lightning training, changes no bit of it, and the loggers get each number at its step."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qkeel.errors import InvalidValueError
from qkeel.records import RunDirectory, RunStatus

L = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from qkeel.integrations.lightning import QkeelCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what lightning warns of is its own


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.out(h + self.attention(h, h, h, need_weights=False)[0])


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(callback: QkeelCallback | None, folder: Path, *, resume: str | None = None, **options: Any) -> Any:
    L.seed_everything(0, verbose=False)
    module = Module()
    data = torch.utils.data.TensorDataset(torch.randint(0, 32, (16, 8)))
    given = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[callback] if callback else [], default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, **given,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=resume)
    return trainer


def recorded(path: Path) -> dict[int, float]:
    """The largest logit by step, as the run directory has it."""
    return {record["step"]: record["max_logit"] for record in RunDirectory(path).metrics()}


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
    assert RunDirectory(tmp_path / "run").status is RunStatus.DONE
    assert list(recorded(tmp_path / "run")) == [0, 2, 4, 6, 7]
    assert not seen.lightning_module.net._forward_pre_hooks


def test_the_loggers_get_each_number_at_its_step(tmp_path: Path) -> None:
    """Whatever the cadence, accumulated gradients and the steps at which Lightning itself logs."""
    settings: list[tuple[int, list[int], dict[str, Any]]] = [
        (50, [0, 7], {}),
        (1, [0, 1, 2, 3], {"accumulate_grad_batches": 2}),
        (3, [0, 3, 6, 9, 12, 15], {"max_epochs": 2, "log_every_n_steps": 2}),
        (4, [0, 4], {"max_steps": 5, "max_epochs": -1, "log_every_n_steps": 1}),
    ]
    for i, (every, steps, options) in enumerate(settings):
        logger = CSVLogger(tmp_path, name="csv", version=str(i))
        fitted(QkeelCallback(every=every, sinks=tmp_path / f"run{i}"), tmp_path, logger=logger, **options)
        assert list(recorded(tmp_path / f"run{i}")) == steps, options
        assert logged(tmp_path / "csv" / str(i)) == pytest.approx(recorded(tmp_path / f"run{i}")), options


def test_a_resumed_training_goes_on_at_its_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    from .stored import tensorboard_scalars

    first = fitted(None, tmp_path)
    first.save_checkpoint(tmp_path / "last.ckpt")
    callback = QkeelCallback(every=5, sinks=tmp_path / "run")
    options: dict[str, Any] = {"max_epochs": 2, "logger": TensorBoardLogger(tmp_path / "tb")}
    fitted(callback, tmp_path, resume=str(tmp_path / "last.ckpt"), **options)
    assert list(recorded(tmp_path / "run")) == [10, 15]
    assert tensorboard_scalars(tmp_path / "tb", "attn/max_logit") == pytest.approx(recorded(tmp_path / "run"), rel=1e-6)


def test_a_module_is_chosen_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="has no module 'nett'; its children: net"):
        fitted(QkeelCallback(module="nett"), tmp_path)
