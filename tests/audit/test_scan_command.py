"""`qkeel scan` prints a table or JSON, says in its exit code what it found, and takes little memory."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from audit.models import save
from qkeel.cli.app import main


def test_a_checkpoint_is_printed_as_a_table_or_as_json(tmp_path, capsys):
    save("llama", tmp_path)
    assert main(["scan", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("model.layers.0.self_attn ") == 1
    assert "model.embed_tokens.weight" not in text
    assert main(["scan", str(tmp_path), "--every-head", "--tensors"]) == 0
    text = capsys.readouterr().out
    assert text.count("model.layers.0.self_attn ") == 4
    assert "model.embed_tokens.weight" in text
    assert main(["scan", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr()
    assert [site["n_heads"] for site in json.loads(out.out)["sites"]] == [4, 4]
    assert out.err == ""
    (tmp_path / "config.json").unlink()
    assert main(["scan", str(tmp_path), "--n-heads", "4", "--n-kv-heads", "2"]) == 0
    assert "unknown" not in capsys.readouterr().out
    assert main(["scan", str(tmp_path), "--heads", "layers.0=2", "layers.1"]) == 2


def test_a_weight_that_is_not_finite_is_exit_code_1(tmp_path, capsys):
    save("llama", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.embed_tokens.weight"][0, 0] = torch.inf
    save_file(stored, tmp_path / "model.safetensors")
    assert main(["scan", str(tmp_path)]) == 1
    assert "model.embed_tokens.weight has 1 NaN or infinite" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    for arguments in ([str(tmp_path)], [str(tmp_path / "no")], []):
        assert main(["scan", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


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
