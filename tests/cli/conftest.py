"""`qkeel watch` in the process of the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.contract.cli.scripts import Result, Watch

from qkeel.cli.app import main


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Watch:
    """`qkeel watch` in this process, whose state is put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    # As a program begins: torch.distributed leaves a hook that puts the rank before each line of a traceback.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def watch(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["qkeel", "watch", *words])
        code = main(["watch", *words])
        return code, *capsys.readouterr()

    return watch
