"""What a newcomer tries first, written from README and the pages that it links to, with the wheel: `make slow`."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.contract.integrations.stored import tensorboard_scalars, wandb_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
KEY = "attn/max_logit"

GPT = """
import torch
from torch import nn

torch.manual_seed(0)
tokens = torch.randint(64, (400, 16))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), num_layers=2)
        self.head = nn.Linear(32, 64)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))

def loss_of(model, x):
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
"""
LOOP = """
import torch, qkeel
from gpt import GPT, loss_of, tokens

model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
with qkeel.watch(model, optimizer, every=10, sinks=SINKS) as monitor:
    for step in range(50):
        loss_of(model, tokens[8 * step : 8 * step + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINER = """
import transformers
from gpt import tokens
from qkeel.integrations.huggingface import QkeelCallback

sizes = dict(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
data = [{"input_ids": row, "labels": row} for row in tokens.tolist()]
arguments = transformers.TrainingArguments("out", max_steps=50, report_to="tensorboard", use_cpu=True)
callbacks = [QkeelCallback(every=10)]
transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks).train()
"""
LIGHTNING = """
import lightning, torch
import qkeel.integrations.lightning
from gpt import GPT, loss_of, tokens

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT()

    def training_step(self, batch, index):
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

callback = qkeel.integrations.lightning.QkeelCallback(every=10)
trainer = lightning.Trainer(max_steps=50, accelerator="cpu", callbacks=[callback])
trainer.fit(Module(), torch.utils.data.DataLoader(tokens, batch_size=8))
"""
CELLS = (
    LOOP.replace("SINKS", '["runs/a"]'),
    "monitor",
    'monitor.history.to_pandas().pivot_table(index="step", columns=["layer", "head"], values="max_logit").plot()',
    'run = qkeel.load("runs/a")\nrun.heads.to_pandas().groupby("layer").max_logit.max()',
    'run.plot("heads")',
)


@pytest.fixture
def folder(wheel, tmp_path, monkeypatch):
    """An empty folder with a model in a file, where qkeel comes from the wheel."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    here = tmp_path / "mine"
    here.mkdir()
    (here / "gpt.py").write_text(GPT)
    monkeypatch.chdir(here)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(here)])
    )
    return here


def ran(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def drawn(page):
    """The HTML of a page when its charts are drawn."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no Chromium")
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        "--dump-dom",
    )
    return subprocess.run(
        [browser, *flags, page.as_uri()], capture_output=True, text=True, check=True
    ).stdout


def test_a_loop_of_its_own_with_wandb_offline(folder):
    pytest.importorskip("wandb")
    ran("-c", LOOP.replace("SINKS", '"wandb:project=gpt,mode=offline"'))
    assert [row["qkeel/step"] for row in wandb_rows(folder) if KEY in row] == [
        0,
        10,
        20,
        30,
        40,
        50,
    ]


def test_a_trainer_with_tensorboard(folder):
    pytest.importorskip("tensorboard")
    ran("-c", TRAINER)
    assert list(tensorboard_scalars(folder / "out", f"train/{KEY}")) == [
        0,
        10,
        20,
        30,
        40,
        49,
    ]


def test_a_lightning_run(folder):
    pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    ran("-c", LIGHTNING)
    assert list(tensorboard_scalars(folder / "lightning_logs", KEY)) == [
        0,
        10,
        20,
        30,
        40,
        49,
    ]


def test_a_notebook_that_plots_heads(folder):
    for name in ("nbclient", "ipykernel", "pandas", "matplotlib"):
        pytest.importorskip(name)
    cells = [
        {
            "cell_type": "code",
            "source": text,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for text in CELLS
    ]
    Path("a.ipynb").write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4})
    )
    ran("-c", "import nbclient.cli; nbclient.cli.main()", "--inplace", "a.ipynb")
    live, monitor, pandas, text, heads = (
        cell["outputs"] for cell in json.loads(Path("a.ipynb").read_text())["cells"]
    )
    page = "".join(live[-1]["data"]["text/html"])
    # The live view ends with the last sample, its table and its curve.
    assert "step 50" in page
    assert "polyline" in page
    assert "<td" in "".join(monitor[0]["data"]["text/html"])
    assert all(
        any("image/png" in one.get("data", {}) for one in cell)
        for cell in (pandas, heads)
    )
    assert "blocks.layers.1.self_attn" in "".join(text[0]["data"]["text/plain"])


def test_a_study_and_its_page(folder):
    grid = [
        "--remedies",
        "none",
        "qk_norm",
        "--lrs",
        "0.01",
        "0.1",
        "--seeds",
        "0",
        "1",
        "--steps",
        "20",
    ]
    out = ran("-m", "qkeel", "study", "lr", *grid, "--out", "runs/lr")
    assert "report runs/lr/report.html" in out
    ran("-c", LOOP.replace("SINKS", '"runs/a"'))
    ran("-m", "qkeel", "report", "runs/a", "runs/lr", "-o", "both.html")
    assert drawn(folder / "runs" / "lr" / "report.html").count("<svg") >= 3
    assert "What a study says" in drawn(folder / "both.html")
