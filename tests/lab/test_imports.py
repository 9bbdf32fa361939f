from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
for name in ({blocked}):
    sys.modules[name] = None
"""


def python(code: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    block = BLOCK.format(blocked=", ".join(map(repr, blocked)) + ",")
    return subprocess.run(
        [sys.executable, "-c", block + code],
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_the_command_line_says_what_it_needs() -> None:
    done = python(
        "from qkeel.__main__ import main; sys.argv = ['qkeel', 'presets']; sys.exit(main())",
        "cyclopts",
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: the command line needs cyclopts and rich: pip install --upgrade qkeel\n"
    )


def test_an_unknown_name_of_the_lab_is_an_attribute_error() -> None:
    import qkeel.lab

    assert "study" in qkeel.lab.__all__
    assert all(callable(getattr(qkeel.lab, name)) for name in qkeel.lab.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = qkeel.lab.nonsense
