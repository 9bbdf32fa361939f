"""A scan takes little memory, however large the file is."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

_MEASURE = """
import resource, sys
from qkeel.audit import scan
scan(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = scan(sys.argv[2])
print(len(found.sites), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """A file of 260 MB, most of it in one tensor, takes under 80 MB more than a tiny one."""
    attention = {f"layers.0.attn.{n}_proj.weight": torch.randn(64, 64) for n in "qkv"}
    words = [sys.executable, "-c", _MEASURE]
    for name, rows in (("small", 8), ("large", 1_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"num_attention_heads": 4}')
        tensors = {"embed.weight": torch.ones(rows, 64), **attention}
        save_file(tensors, tmp_path / name / "model.safetensors")
        words.append(str(tmp_path / name))
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    sites, kilobytes = map(int, done.stdout.split())
    assert sites == 1
    assert kilobytes < 80_000
