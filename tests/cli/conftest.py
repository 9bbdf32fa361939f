"""`qkeel watch` in the process of the tests."""

import sys

import pytest

from qkeel.cli.app import main


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """`qkeel watch` in this process, whose state is put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    # As a program begins: torch.distributed leaves a hook that puts the rank before each line of a traceback.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def watch(*words):
        monkeypatch.setattr(sys, "argv", ["qkeel", "watch", *words])
        code = main(["watch", *words])
        return code, *capsys.readouterr()

    return watch
