"""The program that makes the gallery ends where a run failed, though its script went through."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path

import pytest
from tests.docs.page_text import loaded

GUARDED = ("qkeel.autopilot.autopilot", "qkeel.monitor.monitor", "qkeel.remedies.qk_clip", "qkeel.sites.tap")


def test_a_failed_run_and_an_old_page_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = loaded("make_gallery")
    endings = [(0, importlib.import_module(name)._OFF.format("ValueError: x")) for name in GUARDED]
    for code, said in (*endings, (1, "")):
        done = subprocess.CompletedProcess([], code, stderr=said)
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        with pytest.raises(SystemExit, match="no picture was changed"):
            gallery.run("qkeel watch", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stderr="step 1: loss 2"))
    gallery.run("qkeel watch", tmp_path)
    page = tmp_path / "page.html"
    assert not gallery.is_new(page)
    page.write_text("")
    assert gallery.is_new(page)
    os.utime(page, (0, 0))
    assert not gallery.is_new(page)
