"""`import qkeel` needs torch, numpy, safetensors and jaxtyping alone, and does no work."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.integrations.test_trackers import OUTSIDE

PACKAGE = Path(__file__).parents[2] / "src" / "qkeel"

# Blocks every module outside the standard library but torch, numpy, safetensors, jaxtyping and what they need.
BLOCKED = """
import sys
from importlib.metadata import distributions, requires
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

homes = {}  # the distributions that are not allowed, by what they install at the top
for found in distributions():
    owner = found.metadata["Name"].lower().replace("_", "-")
    for line in (found.read_text("RECORD") or "").splitlines():
        top = line.partition(",")[0].partition("/")[0].partition(".")[0]
        homes.setdefault(top, set()).add(owner)

asked = set()

class Hide:
    # A finder that does not find what is not allowed, and notes what it was asked for.
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        asked.add(top)
        owners = homes.get(top, set())
        if owners and not owners & allowed:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
"""


def run(code, *words):
    result = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.strip()


ROOMS = ("lab", "report", "records", "metrics", "integrations")

IMPORTS = """
try:
    import rich
except ModuleNotFoundError as error:
    print(error)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

asked.clear()
computed = []
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        computed.append(str(func))
        return func(*args, **(kwargs or {}))

with Watch():
    import qkeel
    from qkeel import AttentionSpec, apply, attention, find_sites, nn, preset, presets, reference, watch
    rooms = ("qkeel.lab", "qkeel.report", "qkeel.cli", "qkeel.integrations")
    slow = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
    print([name for name in (*rooms, *slow) if name in sys.modules])
    from qkeel import remedies
    import qkeel.lab, qkeel.report, qkeel.integrations
print(computed)
spec, q = preset("qwen3"), torch.randn(1, 2, 3, 8)
attention(q, q, q, spec=spec, params=spec.init_params(2, 2, 8), stats="max")
print(sorted(asked & {"transformers", "rich", "cyclopts", "joblib", "triton", *OUTSIDE}))
"""
USE = f"""
import logging
logging.basicConfig(level=logging.INFO)
with qkeel.sites.Tap(torch.nn.Linear(1, 1)):
    pass
q = torch.randn(1, 2, 4, 8)
qkeel.attention(q, q, q, spec=qkeel.AttentionSpec())
out, stats = qkeel.attention(q, q, q, spec=qkeel.preset("kna", train_length=512), stats=True)
model = torch.nn.Sequential(qkeel.nn.Attention(16, 2))
handle = qkeel.apply(model, "lalr:tau=0.3", torch.optim.AdamW(model.parameters()))
handle.remove()
print(len(qkeel.find_sites(model)), len(qkeel.presets()) > 20, qkeel.remedies is not None)

import importlib
for room in {ROOMS}:
    importlib.import_module("qkeel." + room)
    print(room)

from qkeel.lab import DataConfig, ModelConfig, RunConfig, study
model, data = ModelConfig(d_model=16, n_heads=2), DataConfig(source="topics", context=8)
base = RunConfig(model=model, data=data, steps=2, device="cpu")
print(study("lr", remedies=["none"], lrs=[0.1], seeds=[0], out=sys.argv[1], base=base).table[0]["status"])

# A machine with a GPU has these, pytest and Triton; no environment is made there.
allowed.add("triton")
for part in ("__main__", "kernels", "machine", "train", "watched", "logsumexp"):
    importlib.import_module("benchmarks.on_gpu." + part)
print("make gpu")
"""


def test_qkeel_and_its_rooms_work_with_its_four_dependencies_alone(
    tmp_path,
):
    """And importing them asks for nothing else, computes no tensor, and nothing lands in the host's log."""
    assert all(
        (PACKAGE / room).exists() or (PACKAGE / f"{room}.py").exists() for room in ROOMS
    )
    imports = IMPORTS.replace("OUTSIDE", str(list(OUTSIDE)))
    blocked, loaded, computed, asked, used, *rooms, trained, benchmarks = run(
        BLOCKED + imports + USE, str(tmp_path / "s")
    ).splitlines()
    assert blocked == "No module named 'rich'", "the block does not block"
    # torch's compiler alone would double the time of the import, sharding take half as long.
    assert loaded == "[]"
    assert computed == "[]"
    assert asked == "[]", (
        "the table of integrations imports no tracker, a CPU no Triton"
    )
    assert used == "1 True True"
    assert rooms == list(ROOMS)
    assert trained == "done", "the lab trains"
    assert benchmarks == "make gpu"


def test_the_report_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; import qkeel.report; print('ok')"
    assert run(code) == "ok"


def test_every_public_name_is_there():
    import qkeel

    for name in qkeel.__all__:
        assert getattr(qkeel, name) is not None
    assert set(qkeel.__all__) <= set(dir(qkeel))
    with pytest.raises(AttributeError, match="attentoin"):
        qkeel.attentoin  # noqa: B018
