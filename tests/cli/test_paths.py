"""What may be in the place of a path that a command takes: it is used, or refused in one line."""

import shlex
from pathlib import Path

import pytest
from tests.report.synthetic_study import Made, make_study

from qkeel.cli.app import main

STUDY = (
    "study lr --remedies none --lrs 0.1 --seeds 0 --jobs 1 --context 8 --n-heads 2 --batch 2 --d-model 16 --steps 2 "
    "--eval-sequences 2 --probe-sequences 2 --device cpu"
)
# What is typed, with {} in the place of the path, and what may be there for the command to end well.
COMMANDS = {
    "report {} -o page.html": (),
    "report study -o {}": ("nothing", "a loop", "a link"),
    f"{STUDY} --data topics --out {{}}": ("nothing", "a folder"),
    f"{STUDY} --data topics --recipe {{}} --out s --dry-run": (),
    f"{STUDY} --data {{}} --out s --dry-run": (),
}
THERE = {
    "nothing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a loop": lambda path: path.symlink_to(path.name),
    "a link": lambda path: path.symlink_to("../elsewhere"),
    "a name that is too long": lambda path: None,
}


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_is_used_or_refused_in_one_line(
    command, there, tmp_path, monkeypatch, capfd
):
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").write_text("theirs")
    monkeypatch.chdir(tmp_path / "here")
    make_study(Path("study"), [Made(remedy="none", status="done")])
    path = Path("a" * 300 if "long" in there else "there")
    THERE[there](path)
    words = shlex.split(command.format(path))
    monkeypatch.setattr("sys.argv", ["qkeel", *words])
    code, told = main(words), capfd.readouterr().err
    assert code == (0 if there in COMMANDS[command] else 2), told
    if code == 2:
        assert told.startswith("error: ")
        assert told.count("\n") == 1
    # A link is replaced, and not the file that it leads to.
    assert (tmp_path / "elsewhere").read_text() == "theirs"
