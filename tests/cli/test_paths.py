"""Every path that a command takes, and everything that may be there in its place: done, or one clear error."""

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from tests.report.synthetic_study import Made, make_study

from qkeel.cli.app import main

LIMIT = 300.0  # seconds after which a command counts as hung
MADE = Made(remedy="none", status="done")
STUDY = (
    "study lr --remedies none --lrs 0.1 --seeds 0 --jobs 1 --context 8 --n-heads 2 --batch 2 --d-model 16 --steps 2 "
    "--eval-sequences 2 --probe-sequences 2 --device cpu"
)
# A command -> its paths: what to type, with {} in the place of the path, and whether something is written there. The
# readers of other commands read as these do.
PATHS = {
    "report": {
        "runs": ("report {} -o page.html", False),
        "output": ("report study -o {}", True),
    },
    "study lr": {
        "out": (f"{STUDY} --data topics --out {{}}", True),
        "recipe": (f"{STUDY} --data topics --recipe {{}} --out s --dry-run", False),
        "data": (f"{STUDY} --data {{}} --out s --dry-run", False),
    },
}
# Where what is there makes another end than THERE says: command, path, what is there -> exit code.
OTHERWISE = {
    ("report", "output", "an empty folder"): 2,  # the page is a file
    # A link is replaced, and not the file that it leads to; so are a loop of links and a file that nobody may read.
    ("report", "output", "a link to a file elsewhere"): 0,
    ("report", "output", "a loop of links"): 0,
    ("report", "output", "a file that nobody may read"): 0,
}


def gone(path):
    """A path in a folder that is gone, which is the current one."""
    path.mkdir()
    os.chdir(path)
    path.rmdir()
    return Path("file")


def loop(path):
    path.symlink_to(path.name)
    return path


def link_to(target):
    def made(path):
        path.symlink_to(target)
        return path

    return made


def unreadable(path):
    path.write_text("x = 1")
    path.chmod(0)
    return path


def folder(path):
    path.mkdir()
    return path


# What is there, and whether something can be written in its place.
THERE = {
    "nothing": (lambda path: path, True),
    "an empty folder": (folder, True),
    "a loop of links": (loop, False),
    "a link to a file elsewhere": (link_to("../elsewhere/file"), False),
    "a file that nobody may read": (unreadable, False),
    "a file in a folder that is gone": (gone, False),
    "a name that is too long": (lambda path: path.with_name("a" * 300), False),
}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder next to the current one, which no command has to do with."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "file").write_text("theirs")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    make_study(Path("study"), [MADE])
    yield place
    os.chdir(tmp_path)


def hung(number, frame):
    raise AssertionError("the command hangs")


@pytest.mark.skipif(sys.platform == "win32", reason="links and modes of POSIX")
@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("command", PATHS)
def test_a_path_is_used_or_refused_in_one_line(
    command,
    there,
    elsewhere,
    capfd,
    monkeypatch,
):
    make, writable = THERE[there]
    if there == "a file that nobody may read" and os.geteuid() == 0:
        pytest.skip("root may read everything")
    wrong = []
    for name, (line, written) in PATHS[command].items():
        path = make(elsewhere.parent / "here" / f"the {name}")
        words = shlex.split(line.replace("{}", shlex.quote(str(path))))
        monkeypatch.setattr(sys, "argv", ["qkeel", *words])
        before = signal.signal(signal.SIGALRM, hung)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        try:
            code = main(words)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            os.chdir(elsewhere.parent / "here")
        told = capfd.readouterr().err
        one_line = told.startswith("error: ") and told.count("\n") == 1
        expected = OTHERWISE.get(
            (command, name, there), 0 if written and writable else 2
        )
        if code != expected:
            wrong.append(f"{name}: exit code {code}: {told[-200:]}")
        assert not told.startswith(("error: Unknown option", "error: Parameter")), told
        if code == 2 and not one_line:
            wrong.append(f"{name}: more than one line: {told[-500:]}")
    assert not wrong, "\n".join(wrong)
    assert [p.name for p in elsewhere.iterdir()] == ["file"]
    assert (elsewhere / "file").read_text() == "theirs"
