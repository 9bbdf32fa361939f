"""`import qkeel` needs torch, numpy, safetensors and jaxtyping alone, and does no work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .source import PACKAGE

# Blocks every module outside the standard library but torch, numpy, safetensors, jaxtyping and what they need.
BLOCKED = """
import sys
from importlib.metadata import packages_distributions, requires
import re

def needs(name, seen):
    if name in seen:
        return seen
    seen.add(name)
    try:
        wanted = requires(name) or []
    except Exception:
        return seen
    for line in wanted:
        if "extra ==" not in line:
            needs(re.match(r"[A-Za-z0-9_.-]+", line).group().lower().replace("_", "-"), seen)
    return seen

allowed = set()
for root in ("torch", "numpy", "safetensors", "jaxtyping"):
    needs(root, allowed)
allowed.add("qkeel")

homes = packages_distributions()

class Hide:
    # A finder that does not find what is not allowed.
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        owners = {d.lower().replace("_", "-") for d in homes.get(name.partition(".")[0], [])}
        if owners and not owners & allowed:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
"""


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_block_blocks() -> None:
    code = BLOCKED + "\ntry:\n    import rich\nexcept ModuleNotFoundError as e:\n    print(e)"
    assert run(code) == "No module named 'rich'"


USE = """
import torch, qkeel
q = torch.randn(1, 2, 4, 8)
out, stats = qkeel.attention(q, q, q, spec=qkeel.preset("kna", train_length=512), stats=True)
model = torch.nn.Sequential(qkeel.nn.Attention(16, 2))
handle = qkeel.apply("lalr:tau=0.3", model, torch.optim.AdamW(model.parameters()))
handle.remove()
print(len(qkeel.find_sites(model)), len(qkeel.presets()) > 20, qkeel.remedies is not None)
"""


def test_qkeel_works_with_its_four_dependencies_alone() -> None:
    assert run(BLOCKED + USE) == "1 True True"


@pytest.mark.parametrize("room", ["lab", "report", "records", "metrics", "integrations"])
def test_a_room_imports_with_the_four_dependencies_alone(room: str) -> None:
    assert (PACKAGE / room).exists() or (PACKAGE / f"{room}.py").exists()
    assert run(BLOCKED + f"\nimport qkeel.{room}\nprint('ok')") == "ok"


def test_the_report_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import qkeel.report; print('ok')"
    assert run(code) == "ok"


def test_importing_qkeel_loads_no_lab_report_or_third_party_extra() -> None:
    code = """
import sys
import qkeel
from qkeel import AttentionSpec, apply, attention, find_sites, nn, preset, presets, reference, watch
extra = ("qkeel.lab", "qkeel.report", "qkeel.cli", "qkeel.integrations", "transformers", "rich", "cyclopts", "joblib")
slow = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
print([name for name in (*extra, *slow) if name in sys.modules])
"""
    assert run(code) == "[]"  # torch's compiler alone would double the time of the import, sharding take half as long


def test_importing_qkeel_computes_no_tensor() -> None:
    code = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

seen = []
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))

with Watch():
    import qkeel
    from qkeel import AttentionSpec, apply, attention, find_sites, nn, preset, presets, reference, remedies
    import qkeel.lab, qkeel.report
print(seen)
"""
    assert run(code) == "[]"


def test_every_public_name_is_there() -> None:
    import qkeel

    for name in qkeel.__all__:
        assert getattr(qkeel, name) is not None
    assert set(qkeel.__all__) <= set(dir(qkeel))
    with pytest.raises(AttributeError, match="attentoin"):
        qkeel.attentoin  # noqa: B018
