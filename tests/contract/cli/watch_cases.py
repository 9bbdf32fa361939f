"""Runs the example script without and with `qkeel watch` in one process, which loads no import hook of the tests.

`python watch_cases.py FOLDER NAME...` ends with an error unless weights and output are the same to the bit.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"
TINY = shlex.split(
    "--steps 4 --n-layer 2 --n-head 2 --n-embd 16 --block-size 16 --batch-size 2 --accumulate 2 --dropout 0.1 "
    "--eval-every 2 --eval-batches 1 --log-every 1 --device cpu"
)
CASES = {
    "plain": [],
    "handwritten": ["--no-flash"],
    "aot_eager": ["--compile", "--backend", "aot_eager"],
    "inductor": ["--compile"],
    "inductor_handwritten": ["--compile", "--no-flash"],
}


def same(name: str, folder: Path) -> None:
    """Run one case both ways."""
    weights, outputs = [], []
    for way in ("plain", "watched"):
        torch._dynamo.reset()
        save = folder / f"{name}.{way}.pt"
        arguments = [*TINY, *CASES[name], "--save", str(save)]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            if way == "plain":
                sys.argv = ["train_gpt.py", *arguments]
                runpy.run_path(str(EXAMPLE), run_name="__main__")
            else:
                words = [
                    "watch",
                    "--every",
                    "2",
                    "--out",
                    str(folder / name),
                    "--",
                    "python",
                    str(EXAMPLE),
                    *arguments,
                ]
                sys.argv = ["qkeel", *words]
                with contextlib.suppress(SystemExit):
                    runpy.run_module("qkeel", run_name="__main__", alter_sys=False)
        weights.append(torch.load(save))
        outputs.append(re.sub(r", \d+ s$", "", said.getvalue(), flags=re.M))
    assert outputs[0] == outputs[1], (
        f"{name}: the script says something else when watched"
    )
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key]), (
            f"{name}: {key} differs when watched"
        )
    measured = [
        json.loads(line)["step"]
        for line in (folder / name / "metrics.jsonl").read_text().splitlines()
    ]
    assert measured == [0, 2], f"{name}: not measured"


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, *cases = sys.argv[1:]
    for case in cases:
        same(case, Path(place))
