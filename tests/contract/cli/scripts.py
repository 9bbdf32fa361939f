"""Training scripts for the tests of `qkeel watch`, and the ways to run them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Start = Callable[[list[str], Path], subprocess.CompletedProcess[str]]
Result = tuple[int, str, str]  # exit code, output, errors
Watch = Callable[..., Result]

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (2, 8)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, layers=1):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.Sequential(*(Attention() for _ in range(layers)))

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


def batch(step):
    return torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))


def loss(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())


def train(model, optimizer, steps=3):
    for step in range(steps):
        loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def total(model):
    return sum(p.detach().double().sum().item() for p in model.parameters())
"""


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    """A script that begins with the model above."""
    path = folder / name
    path.write_text(MODEL + text)
    return path


def run(
    words: list[str], folder: Path, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """A command with this interpreter as `python`, in a folder."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def watched(
    command: list[str], folder: Path, *options: str, start: Start = run
) -> subprocess.CompletedProcess[str]:
    """The command under watch, in a process of its own."""
    return start(["-m", "qkeel", "watch", *options, "--", *command], folder)
