"""kill -9 at random instants of a watched script and of a report: nothing that was written is lost or changed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.report.synthetic_watch import Seen, make_watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = 5
SCRIPT = """
import torch
from qkeel.nn import Decoder, DecoderConfig
torch.manual_seed(0)
model = Decoder(DecoderConfig(vocab_size=11, d_model=16, n_heads=2, n_layers=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(300):
    optimizer.zero_grad()
    model(torch.randint(11, (2, 8))).square().mean().backward()
    optimizer.step()
"""


def kill(words: list[str], has_begun: Callable[[], bool], seconds: float) -> None:
    """Starts a command and kills it within so many seconds after it began to write."""
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not has_begun():
            time.sleep(0.005)
        time.sleep(seconds)
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL)


def qkeel(*words: str) -> list[str]:
    return [sys.executable, "-m", "qkeel", *words]


def test_each_killed_watch_has_the_first_records_of_an_undisturbed_one_and_a_page(
    tmp_path: Path,
) -> None:
    script, instants = tmp_path / "train.py", random.Random(0)
    script.write_text(SCRIPT)

    def watch(out: Path) -> list[str]:
        return qkeel("watch", "--out", str(out), "--", sys.executable, str(script))

    subprocess.run(watch(tmp_path / "whole"), check=True, capture_output=True)
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    for i in range(KILLS):
        records = tmp_path / f"cut{i}" / "metrics.jsonl"
        kill(watch(records.parent), records.exists, instants.uniform(0, 1))
        assert whole.startswith(records.read_bytes())
        subprocess.run(
            qkeel("report", str(records.parent), "-o", str(tmp_path / "page.html")),
            check=True,
        )


def test_a_page_that_is_written_again_is_whole_at_any_instant(tmp_path: Path) -> None:
    make_watch(tmp_path / "run", Seen(layers=2, heads=2, samples=22))
    words = qkeel("report", str(tmp_path / "run"), "-o", str(tmp_path / "page.html"))
    subprocess.run(words, check=True, capture_output=True)
    page, instants = (tmp_path / "page.html").read_bytes(), random.Random(0)
    for _ in range(KILLS):
        kill(words, lambda: any(tmp_path.glob(".page*")), instants.uniform(0, 0.01))
        assert (tmp_path / "page.html").read_bytes() == page
