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
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, timeout=100)


def test_the_lab_trains_with_the_core_dependencies_alone(tmp_path: object) -> None:
    code = f"""
from qkeel.lab import DataConfig, ModelConfig, RunConfig, study
model, data = ModelConfig(d_model=16, n_heads=2), DataConfig(source="topics", context=8)
base = RunConfig(model=model, data=data, steps=2, device="cpu")
result = study("lr", remedies=["none"], lrs=[0.1], seeds=[0], out={str(tmp_path)!r} + "/s", base=base)
print(result.table[0]["status"])
"""
    done = python(code, "joblib", "rich", "cyclopts", "transformers", "pyarrow", "datasets", "docstring_parser")
    assert done.stdout.strip() == "done", done.stderr


def test_the_command_line_says_what_it_needs() -> None:
    done = python("from qkeel.__main__ import main; sys.argv = ['qkeel', 'presets']; sys.exit(main())", "cyclopts")
    assert done.returncode == 2
    assert done.stderr == "error: the command line needs cyclopts and rich: pip install 'qkeel[lab]'\n"


def test_an_unknown_name_of_the_lab_is_an_attribute_error() -> None:
    import qkeel.lab

    assert "study" in qkeel.lab.__all__
    assert all(callable(getattr(qkeel.lab, name)) for name in qkeel.lab.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = qkeel.lab.nonsense
