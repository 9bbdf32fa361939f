"""Types of layers: in the table, the records, the page, the trackers' keys, and explain."""

import pytest
import torch
from tests.attention import Attention, from_heads, later
from tests.training import sgd, step
from torch import nn

import qkeel
from qkeel.errors import InvalidTypeError
from qkeel.monitor import Approach, Ceiling, EntropyCollapse, History, Outlook
from qkeel.records import RunDirectory
from qkeel.report.watched_runs import read_watched

T = 12


class Layer(Attention):
    def __init__(self, window=None, latent=None):
        super().__init__(m=32, heads=4)
        self.window = window
        if latent is not None:
            self.k = nn.Sequential(nn.Linear(32, latent), nn.Linear(latent, 32))

    def forward(self, x, other=None):
        q, k, v = self.heads(x)[0], *self.heads(x if other is None else other)[1:]
        mask = None
        if self.window is not None:
            seen = ~later(q, k)
            mask = seen & ~seen.tril(-self.window)
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and other is None
        )
        return x + from_heads(out)


class Mixed(nn.Module):
    """Layers of four types on x, the last one on what another module makes of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.encoder = nn.Linear(32, 32), nn.Linear(32, 32)
        self.layers = nn.ModuleList(
            [Layer(), Layer(window=4), Layer(latent=6), Layer()]
        )

    def forward(self, x):
        other, x = self.encoder(x[:, :5]), self.inner(x)
        for layer in self.layers[:3]:
            x = layer(x)
        return self.layers[3](x, other)


NAMES = [f"layers.{i}" for i in range(4)]
TYPES = dict(zip(NAMES, ("full", "window", "latent", "cross")))


def watched(**options):
    model = Mixed()
    optimizer = sgd(model, 0.001)
    with qkeel.watch(model, optimizer, **options) as monitor:
        for _ in range(3):
            step(model, optimizer, torch.randn(2, T, 32))
    return model, monitor


def test_types_are_found_and_shown(tmp_path):
    model, monitor = watched(every=1, sinks=tmp_path / "run")
    sample = monitor.sample
    assert sample.types == TYPES
    assert {site.name: site.layer_type for site in monitor.sites} == TYPES
    head, *rows = monitor.table().splitlines()[1:]
    assert head.split()[:2] == ["layer", "type"]
    assert [tuple(row.split()[:2]) for row in rows[:4]] == list(TYPES.items())
    assert " type " in monitor._repr_html_()
    run = RunDirectory(tmp_path / "run")
    assert {site["name"]: site["type"] for site in run.config()["sites"]} == TYPES
    assert History.read(run).types == monitor.history.types == TYPES
    for frame in (
        monitor.history.frame(),
        qkeel.load(tmp_path / "run").heads,
    ):
        assert dict(zip(frame["layer"], frame["type"])) == TYPES
    assert "type" not in monitor.history.frame("steps").columns
    page = qkeel.report.write([tmp_path / "run"], tmp_path / "page.html").read_text(
        encoding="utf-8"
    )
    assert all(f'<td class="text">{of}</td>' in page for of in TYPES.values())
    (read,) = read_watched([tmp_path / "run"])
    assert read.types == TYPES
    explained = qkeel.explain(model, torch.randn(2, T, 32))
    assert {one.name: one.layer_type for one in explained.sites} == TYPES
    assert "type      window: " in str(explained)


def test_a_longer_batch_shows_a_window_and_the_records_say_so(tmp_path):
    model = Mixed()
    with qkeel.watch(model, sinks=tmp_path / "run") as monitor:
        for t in (4, 4, T, 6):
            model(torch.randn(2, t, 32))
            assert monitor.sample.types["layers.1"] == (
                "full" if t == 4 and monitor.sample.step < 2 else "window"
            )
    run = RunDirectory(tmp_path / "run")
    assert History.read(run).types == TYPES
    assert read_watched([tmp_path / "run"])[0].types == TYPES
    (event,) = [event for event in run.events() if event["event"] == "layer types"]
    assert event["types"] == {"layers.1": "window"}
    assert event["step"] == 2


@pytest.mark.parametrize("rule", [Ceiling, Approach, Outlook, EntropyCollapse])
def test_a_threshold_that_is_none_gets_one_clear_error(rule):
    assert rule(threshold=100).threshold == 100.0
    for wrong in ("100", None, True, {"full": 100.0}, [100.0]):
        with pytest.raises(InvalidTypeError, match="expected a number for threshold"):
            rule(threshold=wrong)
