"""The callback watches a real Lightning training and changes no bit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qkeel.errors import InvalidValueError
from qkeel.records import RunDirectory, RunStatus

L = pytest.importorskip("lightning.pytorch")

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


def fitted(callback: QkeelCallback | None, folder: Path) -> Any:
    L.seed_everything(0, verbose=False)
    module = Module()
    data = torch.utils.data.TensorDataset(torch.randint(0, 32, (16, 8)))
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback] if callback else [], default_root_dir=folder,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    return trainer


def test_training_is_bit_identical_and_its_numbers_are_logged(tmp_path: Path) -> None:
    plain = fitted(None, tmp_path)
    seen = fitted(QkeelCallback(every=2, sinks=tmp_path / "run"), tmp_path)
    a, b = plain.lightning_module.state_dict(), seen.lightning_module.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert "attn/max_logit" in seen.logged_metrics
    run = RunDirectory(tmp_path / "run")
    assert run.status is RunStatus.DONE
    assert [record["step"] for record in run.metrics()] == [0, 2]
    assert not seen.lightning_module.net._forward_pre_hooks


def test_a_module_is_chosen_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="has no module 'nett'; its children: net"):
        fitted(QkeelCallback(module="nett"), tmp_path)
