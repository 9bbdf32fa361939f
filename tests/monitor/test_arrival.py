"""What arrives from the device: the record of a step is what its statistics say, head by head."""

import numpy as np
import pytest
import torch
from torch import nn

from qkeel import watch
from qkeel.nn import Attention
from qkeel.records import HEAD_FIELDS

# They may be known of a head of which nothing was counted.
MAXIMA = {
    "max_logit": "max_logit",
    "capped_max_logit": "capped_max_logit",
    "logit_spread": "logit_spread",
    "non_finite": "max_logit",
}


class Ragged(nn.Module):
    """Layers of 2, 6 and 1 heads, of which the second shares the keys of three."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = ({"n_heads": 2}, {"n_heads": 6, "n_kv_heads": 2}, {"n_heads": 1})
        self.layers = nn.ModuleList([Attention(12, head_dim=4, **x) for x in sizes])

    def forward(self, x, mask):
        for layer in self.layers:
            x = x + layer(x)
        return x


def expected_of(name, stats, head):
    """The value of a head by definition; NaN if it was not measured."""
    values, n = stats.value(name), len(stats.max_logit)
    counts = getattr(stats, HEAD_FIELDS[name].count)
    is_known = bool(counts[head * len(counts) // n] > 0)
    if name in MAXIMA:
        is_known |= bool(stats.value(MAXIMA[name])[head] != -torch.inf)
    return float(values[head * len(values) // n].double()) if is_known else np.nan


@pytest.mark.parametrize("stats", [True, "max"])
@pytest.mark.parametrize("rows", ["all", "some", "none", "not finite"])
def test_a_record_is_what_the_definitions_say(rows, stats):
    model, x = Ragged(), torch.randn(3, 5, 12)
    mask = {"some": torch.arange(15).view(3, 5) % 4 > 0, "none": torch.zeros(3, 5)}
    if rows == "not finite":
        x[1, 2, 3] = torch.inf
    with watch(model, stats=stats, query_mask="mask", rules=[]) as monitor:
        model(x, mask.get(rows, torch.ones(3, 5)))
        sample, reads = monitor.sample, monitor.read()
    assert sample.layers == tuple(reads) == ("layers.0", "layers.1", "layers.2")
    n_measured = 0
    for name in HEAD_FIELDS:
        if next(iter(reads.values())).value(name) is None:
            continue
        expected = np.full((3, 6), np.nan)
        for layer, of_site in enumerate(reads.values()):
            for head in range(len(of_site.max_logit)):
                expected[layer, head] = expected_of(name, of_site, head)
        np.testing.assert_array_equal(sample.heads[name], expected, err_msg=name)
        n_measured += bool(np.isfinite(expected).any())
    if rows != "not finite":
        assert n_measured == {"none": 0}.get(rows, 3 if stats == "max" else 21)


def test_names_of_the_whole_model_are_recorded_where_a_head_was_measured():
    model, x = Ragged(), torch.randn(3, 5, 12)
    names = ("max_logit", "min_logit", "max_abs_logit", "capped_max_logit", "entropy")
    for mask, stats, expected in (
        (torch.ones(3, 5), True, names),
        (torch.ones(3, 5), "max", ("max_logit",)),
        (torch.zeros(3, 5), True, ()),
    ):
        with watch(model, stats=stats, query_mask="mask") as monitor:
            model(x, mask)
            values = monitor.sample.values
        assert {name: name in values for name in names} == {
            name: name in expected for name in names
        }
        for name in expected:
            assert values[name] == monitor.sample.overall(name)
