"""Commands about a checkpoint or a run that is there: what they print, write and answer with their exit code."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.report.synthetic_watch import Seen, make_watch

from qkeel.audit import as_json
from qkeel.audit.scan import scan
from qkeel.cli.app import main
from qkeel.monitor.sinks import load

HEADS, LAYERS = 2, 3


@pytest.fixture
def checkpoint(tmp_path):
    """A folder as of Hugging Face, whose weights come from one generator."""
    folder, rng = tmp_path / "weights", torch.Generator().manual_seed(0)
    folder.mkdir()
    tensors = {
        f"model.layers.{layer}.self_attn.{part}_proj.weight": torch.randn(
            8, 8, generator=rng
        )
        for layer in range(LAYERS)
        for part in "qkvo"
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.input_layernorm.weight"
        tensors[name] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def asked(capsys):
    """Exit code, output and errors of a command."""

    def ask(*words):
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return ask


def test_a_scan_prints_layers_and_heads_as_asked(checkpoint, asked):
    _, layers, _ = asked("scan", checkpoint)
    code, heads, _ = asked("scan", checkpoint, "--every-head")
    assert code == 0
    n_more = len(heads.splitlines()) - len(layers.splitlines())
    assert n_more >= LAYERS * (HEADS - 1)
    code, text, _ = asked("scan", checkpoint, "--json")
    assert (code, json.loads(text)) == (0, as_json(scan(checkpoint)))
    (checkpoint / "config.json").unlink()
    for flags, n_sites in (((), LAYERS), (("--n-kv-heads", 2), 0)):
        _, text, _ = asked("scan", checkpoint, "--n-heads", 4, *flags, "--json")
        sites = json.loads(text)["sites"]
        # Two key heads of two rows each are not eight rows.
        assert [site["n_heads"] for site in sites] == [4] * n_sites


def test_a_weight_that_is_not_finite_is_exit_code_1(checkpoint, asked):
    save_file(
        {
            f"layers.0.self_attn.{x}_proj.weight": torch.full((8, 8), torch.nan)
            for x in "qk"
        },
        checkpoint / "model.safetensors",
    )
    code, text, _ = asked("scan", checkpoint, "--n-heads", 2)
    assert code == 1
    assert "layers.0.self_attn.q_proj.weight has 64 NaN or infinite" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "down_blocks.0"], "expected --heads STAGE=N"),
        (["--heads", "=2"], "got '=2'"),
        (["--heads", "a=0"], "got 'a=0'"),
        (["--heads", "a=x"], "got 'a=x'"),
    ],
)
def test_heads_of_a_stage_are_read_or_refused(words, message, checkpoint, asked):
    code, _, told = asked("scan", checkpoint, *words)
    assert code == 2
    assert message in told


@pytest.mark.parametrize("command", ["scan", "check"])
def test_the_name_of_a_model_on_a_hub_is_told_apart(command, asked, tmp_path):
    code, _, told = asked(command, "org/some-model.1")
    assert code == 2
    assert "hf download org/some-model.1" in told
    for path in (tmp_path, "a/b/c", "org/w.safetensors"):
        assert "hf download" not in asked(command, path)[2]


def test_check_answers_with_a_sentence_a_table_or_json_and_its_exit_code(
    checkpoint, asked, tmp_path
):
    run = make_watch(tmp_path / "run", Seen(layers=2, heads=2, samples=4, alarms=0))
    largest = float(np.nanmax(load(run).history.heads["max_logit"]))
    code, sentence, _ = asked("check", run)
    assert (code, sentence.count("\n")) == (0, 1)
    code, text, _ = asked("check", run, "--table")
    assert code == 0
    assert text.startswith(sentence)
    assert len(text.splitlines()) >= 3
    for threshold, expected in ((2 * largest, 0), (largest / 2, 1)):
        code, text, _ = asked("check", run, "--threshold", threshold, "--json")
        fields = json.loads(text)
        assert (code, fields["threshold"]) == (expected, threshold)
        assert fields["largest"] == pytest.approx(largest, rel=1e-6)
        assert fields["status"] == ("healthy" if code == 0 else "not healthy")
        assert f"{largest:.0f}" in fields["sentence"]
    for threshold, expected in ((1e9, 0), (1e-3, 4)):
        assert asked("check", checkpoint, "--threshold", threshold)[0] == expected
    for words, message in (
        (["--threshold", 0], "above 0 nats"),
        (["--sees", "causal"], "a model has to run for it"),
    ):
        code, _, told = asked("check", run, *words)
        assert code == 2
        assert message in told


def test_tables_are_written_to_a_new_folder(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_watch(tmp_path / "run", Seen(layers=2, heads=2, samples=4))
    code, text, _ = asked("export", run, "--to", "csv")
    names = ["steps", "heads"]
    assert code == 0
    assert text.split() == [f"run-tables/{name}.csv" for name in names]
    steps = (tmp_path / "run-tables" / "steps.csv").read_text().splitlines()
    assert len(steps) == 1 + 4
    code, _, told = asked("export", run, "--to", "csv", "--out", "run-tables")
    assert code == 2
    assert "is not empty" in told
    (tmp_path / "empty").mkdir()
    assert asked("export", run, "--to", "csv", "--out", "empty")[0] == 0
