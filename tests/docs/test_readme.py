"""README: its two commands come first, and its commands run."""

import re
from pathlib import Path

from tests import forked

from qkeel.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_SCREEN = 45  # lines


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


def test_the_first_screen_has_the_clone_line_and_two_commands_that_the_makefile_knows():
    first_screen = "\n".join(README.splitlines()[:FIRST_SCREEN])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^git clone .*&& cd qkeel", first_screen, flags=re.M)
    for command in ("demo", "test"):
        assert re.search(rf"^make {command}\b", first_screen, flags=re.M)
        assert re.search(rf"^{command}:", makefile, flags=re.M)


def test_the_commands_of_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"`(qkeel study lr [^`]+)`", README)
    tiny = "--steps 2 --d-model 16 --n-layers 1 --n-heads 2 --head-dim 8 --context 8 --batch 2 --jobs 1 --eval-sequences 2"
    assert main([*command.split()[1:], *tiny.split()]) == 0
    assert (tmp_path / "runs" / "lr" / "report.html").exists()

    (command,) = re.findall(r"^\$ (qkeel watch .+)$", blocks("text")[1], flags=re.M)
    command = command.replace("--steps 150", "--steps 2").replace(
        "examples/", f"{ROOT}/examples/"
    )
    small = "--block-size 16 --n-layer 4 --n-head 2 --n-embd 16 --batch-size 2 --eval-batches 1"
    done = forked.python(["-m", *command.split(), *small.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "qkeel: watching 4 attention layers of GPT, run qkeel-runs/train_gpt"
        in done.stderr
    )
