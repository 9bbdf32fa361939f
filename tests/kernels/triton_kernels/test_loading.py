"""Triton is loaded when a CUDA tensor wants it, can be switched off, and is done without where it is missing."""

import pytest
import torch
from tests import forked

from qkeel.kernels import triton_access as available
from qkeel.kernels.norm_rope import operator as norm_rope

CUDA = torch.device("cuda", 0)


@pytest.fixture
def _a_gpu(monkeypatch):
    monkeypatch.setattr(available, "_modern", lambda device: True)


@pytest.mark.usefixtures("_a_gpu")
def test_cuda_tensors_go_through_triton_and_cpu_tensors_do_not(
    monkeypatch,
):
    assert norm_rope.operators_for(CUDA) is torch.ops.qkeel_triton
    assert not available.usable(torch.device("cpu"))
    monkeypatch.setattr(norm_rope, "ready", lambda: True)
    assert norm_rope.operators_for(torch.device("cpu")) is torch.ops.qkeel_native


@pytest.mark.usefixtures("_a_gpu")
def test_it_can_be_switched_off_and_is_off_under_transforms(
    monkeypatch,
):
    assert available.usable(CUDA)
    found = []
    torch.func.vmap(lambda x: found.append(available.usable(CUDA)) or x)(torch.ones(2))
    assert found == [False]
    monkeypatch.setenv("QKEEL_TRITON", "0")
    assert norm_rope.operators_for(CUDA) is None


def test_an_old_gpu_and_amds_are_left_to_torch(monkeypatch):
    for capability, hip, good in (
        ((7, 5), None, False),
        ((8, 0), None, True),
        ((9, 0), None, True),
        ((9, 4), "6.4", False),
    ):
        available._modern.cache_clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        assert available.usable(CUDA) is good
    available._modern.cache_clear()


def test_without_triton_torch_computes_after_one_warning(tmp_path):
    code = """
import sys, warnings
sys.modules["triton"] = None
import torch
from qkeel.kernels import triton_access as available
available._modern = lambda device: True
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    found = [available.usable(torch.device("cuda")) for _ in range(2)]
    print(*found, len(told), "QKEEL_TRITON=0" in str(told[0].message))
"""
    (tmp_path / "without.py").write_text(code)
    done = forked.python(["without.py"], tmp_path)
    assert done.stdout.split() == ["False", "False", "1", "True"], done.stderr
