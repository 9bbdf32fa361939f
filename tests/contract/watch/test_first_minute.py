"""The first minute in Python: a model in eval mode, a tracker that is missing, a module's own statistics."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import qkeel
from qkeel.errors import InvalidTypeError, MissingLibraryError, UnknownNameError


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2, enable_nested_tensor=False)


def test_a_model_that_is_only_evaluated_has_a_history() -> None:
    model = encoder().eval()
    with qkeel.watch(model) as monitor, torch.no_grad():
        for _ in range(3):
            model(torch.randn(2, 5, 16))
        history = monitor.history
        assert history.phase == "eval"
        assert [int(step) for step in history.steps] == [0, 1, 2]
        assert history.heads["max_logit"].shape == (3, 2, 2)
        model.train()(torch.randn(2, 5, 16))
        assert (monitor.history.phase, len(monitor.history)) == ("train", 1)


def test_passes_in_evaluation_before_a_training_do_not_stop_an_autopilot() -> None:
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = qkeel.watch(model, optimizer)
    for _ in range(2):
        model.eval()(torch.randn(2, 5, 16))
    qkeel.autopilot  # noqa: B018 - loads it
    from qkeel.autopilot import attach

    attach(monitor, optimizer).remove()


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_is_an_error_before_anything_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    model = encoder()
    with pytest.raises(MissingLibraryError, match=f"pip install {name}"):
        qkeel.watch(model, sinks=name)
    assert not model._forward_hooks


def test_own_attention_takes_the_name_of_a_preset_and_returns_its_statistics() -> None:
    torch.manual_seed(0)
    attention, x = qkeel.nn.Attention(64, 4, spec="qwen3"), torch.randn(2, 9, 64)
    assert attention.spec == qkeel.preset("qwen3")
    assert qkeel.nn.Attention(64, 4, spec="gemma2:cap=30").spec == qkeel.preset("gemma2", cap=30)
    out, stats = attention(x, stats=True)
    assert torch.equal(out, attention(x))
    assert stats.max_logit.shape == (4,)
    with qkeel.watch(attention) as monitor:
        attention(x)
        torch.testing.assert_close(stats.max_logit, monitor.read()[""].max_logit.to(stats.max_logit.dtype))
    assert not attention.observers
    with pytest.raises(UnknownNameError, match="Did you mean 'qwen3'"):
        qkeel.nn.Attention(64, 4, spec="qwen33")
    with pytest.raises(InvalidTypeError, match="expected an AttentionSpec or the name of a preset"):
        qkeel.nn.Attention(64, 4, spec=3)  # type: ignore[arg-type]


def test_a_retrofit_takes_one_batch_as_well_as_a_list() -> None:
    def decoder() -> nn.Module:
        torch.manual_seed(0)
        return qkeel.nn.Decoder(qkeel.nn.DecoderConfig(vocab_size=8, d_model=16, n_heads=2, n_layers=1))

    tokens = torch.arange(8)[None]
    one, several = qkeel.retrofit(decoder(), "qk_norm", tokens), qkeel.retrofit(decoder(), "qk_norm", [tokens])
    assert one.report.gap == several.report.gap
    with pytest.raises(InvalidTypeError, match="got an empty list"):
        qkeel.retrofit(decoder(), "qk_norm", [])


def test_a_watched_model_is_explained_without_a_batch() -> None:
    model = encoder()
    with pytest.raises(InvalidTypeError, match=r"qkeel.explain\(model, batch\)"):
        qkeel.explain(model)
    with qkeel.watch(model):
        x = torch.randn(2, 5, 16)
        model(x)
        assert str(qkeel.explain(model)) == str(qkeel.explain(model, x))
