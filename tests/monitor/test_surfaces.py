"""Every number in the tables of fields is on every surface: records, page, trackers, frames, alarms, definitions."""

import math

import numpy as np
import pytest
import torch
from sites.sparse_models import DSA, M, T
from tests.training import adamw, step
from torch import nn

import qkeel
from qkeel.records import (
    BLOCK_FIELDS,
    HEAD_FIELDS,
    MONITOR_FIELDS,
    RunDirectory,
    explain_field,
    layer_fields,
)
from qkeel.spec import AttentionSpec, Sink

LAYERS = ("blocks.0.attention", "blocks.1.attention")
# Of sparse layers: another run measures them. The last are of rows without a key, and gates.
SPARSE = {name for name in HEAD_FIELDS if name.startswith(("index_", "dense_"))}
ELSEWHERE = {"empty_sample", "empty_query", "output_gate"}


class SparseModel(nn.Module):
    """Two layers with indexers, under the names of the other model's."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(M, M)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"attention": DSA(fused=True)}) for _ in LAYERS]
        )

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = x + block["attention"](x)
        return x


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run in which everything is measured: its directory, last sample, history and table."""
    torch.manual_seed(0)
    model = qkeel.nn.Decoder(
        qkeel.nn.DecoderConfig(vocab_size=20, spec=AttentionSpec(normalizer=Sink()))
    )
    tokens = torch.randint(0, 20, (2, 8))
    return run_of(
        model,
        tokens,
        "all+gates+updates+residual",
        tmp_path_factory.mktemp("run"),
        probe_batch=(tokens,),
    )


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A run of sparse layers."""
    torch.manual_seed(0)
    return run_of(
        SparseModel(),
        torch.randn(2, T, M),
        "all+chosen",
        tmp_path_factory.mktemp("sparse"),
    )


def run_of(model, given, stats, path, **more):
    optimizer = adamw(model, 0.01)
    with qkeel.watch(
        model, optimizer, stats=stats, sinks=path / "run", **more
    ) as monitor:
        for _ in range(3):
            step(model, optimizer, given)
        sample, table = monitor.sample, monitor.table()
        assert sample is not None
        history = monitor.history
    return path / "run", sample, history, table


def test_nearly_every_field_is_measured_here(watched, sparse):
    (_, sample, _, _), (_, other, _, _) = watched, sparse
    measured = [
        {n for n, x in one.heads.items() if np.isfinite(x).any()}
        for one in (sample, other)
    ]
    assert set(HEAD_FIELDS) - measured[0] == SPARSE | ELSEWHERE
    assert measured[1] >= SPARSE
    assert {name.partition("/")[0] for name in sample.values} >= {*BLOCK_FIELDS}
    assert set(sample.monitor) == set(MONITOR_FIELDS)


@pytest.mark.parametrize("name", [*HEAD_FIELDS, *BLOCK_FIELDS])
def test_a_number_of_heads_layers_or_blocks_is_everywhere(name, watched, sparse, pages):
    path, sample, history, table = sparse if name in SPARSE else watched
    page = pages[path]
    assert explain_field(name).endswith("]")
    if name in ELSEWHERE:
        return
    field = {**HEAD_FIELDS, **BLOCK_FIELDS}[name]
    known = sample.by_layer(name)
    whole = sample.overall(name)
    keys = sample.summaries()
    prefix = "hidden" if name in BLOCK_FIELDS else "attn"
    if not math.isnan(whole):
        assert keys[f"{prefix}/{name}"] == whole
        assert (f"{prefix}/layer_00/{name}" in keys) == (name in layer_fields())
        assert (field.column == "") or field.column in table
        by_layer = history.by_layer(name)
        np.testing.assert_allclose(by_layer[-1], known, rtol=1e-6, equal_nan=True)
        if name in HEAD_FIELDS:
            assert name in page
    if name in HEAD_FIELDS:
        assert name in RunDirectory(path).heads().values
        assert history.frame("heads")[name].shape
    if name in BLOCK_FIELDS:
        line = RunDirectory(path).metrics()[-1]
        assert [line[f"{name}/{layer}"] for layer in LAYERS] == known.tolist()
        assert history.frame("steps")[f"{name}/{LAYERS[0]}"][-1] == known[0]


@pytest.fixture(scope="module")
def pages(watched, sparse):
    paths = [watched[0], sparse[0]]
    found = [qkeel.report.write(path, path.parent / "page.html") for path in paths]
    return {path: page.read_text(encoding="utf-8") for path, page in zip(paths, found)}
