"""The compatibility page is the tests' own output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qkeel.remedies import REMEDIES
from qkeel.spec import PRESETS

from .matrix import FOREIGN, foreign_refusal, of_kernels, of_kinds

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
HINT = "python -m tests.conformance.modes > docs/compatibility.md"


def test_the_tables_of_our_own_modules_have_a_row_for_every_preset_and_remedy_and_stand_in_the_docs():
    for text, names in ((of_kernels(), PRESETS), (of_kinds(), REMEDIES)):
        assert all(f"\n| `{name}` |" in text for name in names)
        assert not PAGE.exists() or text in PAGE.read_text(encoding="utf-8"), HINT


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_in_the_docs_is_what_the_command_prints():
    """In a process of its own: torch's compiler does not go with checked annotations, nor with warnings as errors."""
    root = PAGE.parents[1]
    command = [sys.executable, "-m", "tests.conformance.modes"]
    path = os.pathsep.join([str(root), str(root / "src")])
    done = subprocess.run(
        command,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if PAGE.exists():
        assert PAGE.read_text(encoding="utf-8") == done.stdout, HINT


NORMS = ("qk_norm", "key_norm", "query_norm", "cosine")
CALLS = ("softcap", "log_n", "attention_temperature", "sigmoid", "softpick", "sink")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forward_remedies_fit_every_layout_of_heads():
    for kind, (layout, _) in FOREIGN.items():
        refused = {name for name in (*NORMS, *CALLS) if foreign_refusal(name, kind)}
        assert refused <= (set(NORMS) if layout == "deepseek" else set()), kind
