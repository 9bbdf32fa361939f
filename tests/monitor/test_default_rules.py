"""What a monitor worries about without being told to: the rules that fit what it sees."""

import pytest
import torch
from tests import forked
from tests.attention import Attention as Foreign
from tests.attention import Joint, fused, written
from tests.contract.watch.small import batch, small
from tests.training import adamw
from torch import nn

import qkeel
from qkeel import watch
from qkeel.monitor import (
    DEFAULT,
    Ceiling,
    History,
    Setting,
    replay,
    rules_for,
)
from qkeel.monitor.alarms import LOWER_RATE, fitted
from qkeel.records import Heads


def names(model, *args):
    """The rules of one watched pass that are no default ones."""
    with watch(model) as monitor:
        model(*args)
        assert monitor.sample is not None
        return {rule.name for rule in monitor._recorder.log.rules} - {
            rule.name for rule in DEFAULT
        }


ALWAYS = {"saturation"}


@pytest.mark.parametrize(
    ("dtype", "short"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_the_number_format_and_kernel_that_are_seen_bring_their_rule(dtype, short):
    assert names(small().to(dtype), batch(0).to(dtype)) == {
        *ALWAYS,
        f"resolution {short} fused",
    }
    assert names(Foreign(written).to(dtype), batch(0).to(dtype)) == {
        *ALWAYS,
        f"resolution {short} eager",
    }


def test_autocast_counts_as_the_format_it_casts_to():
    with torch.autocast("cpu", torch.bfloat16):
        assert names(small(), batch(0)) == {*ALWAYS, "resolution bf16 fused"}


def test_where_formats_differ_no_rule_guesses():
    model = nn.Sequential(Foreign(written), nn.Identity(), Foreign(written).bfloat16())
    model[1].register_forward_hook(lambda _, args, x: x.bfloat16())
    assert names(model, batch(0)) == ALWAYS


def test_numbers_that_were_not_measured_are_no_alarm():
    heads = Heads(
        steps=torch.arange(2).numpy(),
        values={"max_logit": torch.full((2, 1, 1), torch.nan).numpy()},
    )
    assert replay(History.of([{"step": 0}, {"step": 1}], heads, ("one",))) == []


class Normed(Joint):
    """Attention whose queries and keys are normed by modules of its own."""

    def __init__(self, attend=fused):
        super().__init__(attend)
        self.query_scaler, self.key_scaler = nn.RMSNorm(4), nn.RMSNorm(4)

    def heads(self, x):
        q, k, v = super().heads(x)
        return self.query_scaler(q), self.key_scaler(k), v


def capped(q, k, v):
    return (30 * torch.tanh(q @ k.mT / 30)).softmax(-1) @ v


class Both(nn.Module):
    """A layer that every remedy takes, before one that only some take."""

    def __init__(self):
        super().__init__()
        self.first, self.second = qkeel.nn.Attention(8, 2), Normed()

    def forward(self, x):
        return self.second(self.first(x))


def frozen():
    model = qkeel.nn.Attention(8, 2)
    model.k_proj.weight.requires_grad_(False)
    return model


KINDS = {
    "plain": (lambda: qkeel.nn.Attention(8, 2), "qk_clip:threshold=15,steps=matched"),
    "grouped": (
        lambda: qkeel.nn.Attention(8, 2, n_kv_heads=1),
        "qk_clip:threshold=15,steps=matched",
    ),
    "torch's": (
        lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True),
        "qk_clip:threshold=15,steps=matched",
    ),
    "capped": (
        lambda: qkeel.nn.Attention(8, 2, spec=qkeel.preset("gemma2")),
        "qk_clip:threshold=15,steps=matched",
    ),
    "latent": (lambda: qkeel.nn.MLA(8, 2), "lalr:tau=0.1+qk_clip:threshold=100"),
    "half precision": (
        lambda: qkeel.nn.Attention(8, 2).bfloat16(),
        '"qk_clip:threshold=100"',
    ),
    "frozen": (frozen, '"lalr:tau=0.1"'),
    "Qwen3's norms": (
        lambda: qkeel.nn.Attention(8, 2, spec=qkeel.preset("qwen3")),
        '"softcap:cap=50"',
    ),
    "own norms": (Normed, '"softcap:cap=50"'),
    "one of two normed": (Both, '"softcap:cap=50"'),
    "capped and normed": (lambda: Normed(capped), LOWER_RATE),
}


def test_the_line_of_every_alarm_can_be_pasted_for_every_kind_of_model():
    """With the names that it says: model, optimizer, batch. No model refuses the line of its logits."""
    setting = Setting(dtype="bf16", kernel="eager", head_dim=4)
    run = set()
    for kind, (make, expected) in KINDS.items():
        model = make()
        x = batch(0).to(next(model.parameters()).dtype)
        optimizer = adamw(model)
        with watch(model, optimizer, rules=[]) as monitor:
            model(x).square().mean().backward()
            optimizer.step()
        lines = {
            rule.name: rule.remedy
            for rule in fitted(rules_for(setting), model, monitor.sites)
        }
        assert expected in lines["growth"], (kind, lines["growth"])
        for line in sorted(
            {lines["growth"], *lines.values()} - (run - {lines["growth"]})
        ):
            run.add(line)
            fresh = make()
            optimizer = adamw(fresh)
            with watch(
                fresh, optimizer, rules=[]
            ):  # the script is watched when a line is pasted into it
                fresh(x).square().mean().backward()
                optimizer.step()
                exec(
                    line,
                    {
                        "qkeel": qkeel,
                        "model": fresh,
                        "optimizer": optimizer,
                        "batch": x,
                    },
                )
                fresh(x).square().mean().backward()
                optimizer.step()


def test_a_warning_names_the_users_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        """import torch, qkeel
model = qkeel.nn.Attention(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with qkeel.watch(model, optimizer, rules=qkeel.monitor.Ceiling(threshold=-100.0)) as monitor:
    model(torch.ones(1, 3, 8)).sum().backward()
    optimizer.step()
    monitor.close()
"""
    )
    done = forked.python([str(script)], tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"{script}:6: AlarmWarning: alarm at step 0"), (
        done.stderr
    )
    assert lines[1:] == ["  optimizer.step()"]


def test_the_line_of_an_alarm_names_all_optimizers():
    model = qkeel.nn.Attention(8, 2)
    sites = qkeel.find_sites(model, batch(0))
    optimizers = [adamw(model), adamw(model)]
    (rule,) = fitted([Ceiling(threshold=1.0)], model, sites, optimizers)
    spec = "qk_clip:threshold=15,steps=matched"
    assert rule.remedy == f'qkeel.apply(model, "{spec}", optimizers)'
