"""The gains of norms of q and k, told from all else that stands between projections and logits."""

import pytest
import torch
import torch.nn.functional as F
from tests.drawing import randn
from tests.sites.models import CASES, D, H, changed, fused, plain, rotated
from torch import nn

from qkeel import find_sites

SHARED = [[*range(D)]]
OF_HEADS = torch.arange(H * D).view(H, D).tolist()


def unit(x):
    return F.normalize(x, dim=-1)


def turned(x):
    return rotated(None, x).to(x.dtype)


def per_dim(m, x):
    return turned(F.rms_norm(x, (D,), m.gain))


def per_dim_and_bias(m, x):
    return turned(F.layer_norm(x, (D,), m.gain, m.bias))


def one_plus(m, x):
    return turned(F.rms_norm(x, (D,)) * (1.0 + m.bias))


def over_all_heads(m, x):
    return F.rms_norm(x.flatten(2), (H * D,), m.wide).unflatten(-1, (H, D))


def written_with_bias(m, x):
    return turned(m.heads * unit(x) + m.bias)


def a_norm_for_each_head(m, x):
    return torch.stack([norm(x[:, :, h]) for h, norm in enumerate(m.each)], 2)


def scaled_twice(m, x):
    return F.rms_norm(x, (D,), m.gain) * m.heads


def scaled_before(m, x):
    return unit(x * m.gain)


def added_before(m, x):
    return F.rms_norm(x + m.bias, (D,), m.gain)


def not_normed(m, x):
    return x * m.gain


# What is done to q and k: the gain, what is added to it, its entries by head, and the bias with its entries.
GAINS = {
    per_dim: [("gain", 0.0, SHARED, None, None)],
    per_dim_and_bias: [("gain", 0.0, SHARED, "bias", SHARED)],
    one_plus: [("bias", 1.0, SHARED, None, None)],
    over_all_heads: [("wide", 0.0, OF_HEADS, None, None)],
    written_with_bias: [("heads", 0.0, [[h] for h in range(H)], "bias", SHARED)],
    a_norm_for_each_head: [
        (f"each.{h}.weight", 0.0, SHARED, f"each.{h}.bias", SHARED) for h in range(H)
    ],
    scaled_twice: [],
    scaled_before: [],
    added_before: [],
    not_normed: [],
}


@pytest.mark.parametrize(
    ("attend", "dtype"), [(plain, torch.float32), (fused, torch.bfloat16)]
)
@pytest.mark.parametrize("change", GAINS, ids=lambda change: change.__name__)
def test_gains_and_their_entries_are_those_of_the_last_norm(change, attend, dtype):
    class Normed(changed(change)):
        def __init__(self):
            super().__init__(attend)
            self.bias = nn.Parameter(randn(D, seed=2) / 4)
            self.wide = nn.Parameter(torch.rand(H * D) + 0.5)
            self.heads = nn.Parameter(torch.rand(H, 1) + 0.5)
            self.each = nn.ModuleList(nn.LayerNorm(D) for _ in range(H))
            with torch.no_grad():
                for norm in self.each:
                    norm.bias.copy_(randn(D, seed=3))

    torch.manual_seed(0)
    model = Normed().to(dtype)
    (site,) = find_sites(model, CASES["written"].x().to(dtype))
    for gains in (site.query_gains, site.key_gains):
        facts = [
            (
                gain.parameter,
                gain.offset,
                gain.index.tolist(),
                gain.bias,
                None if gain.bias_index is None else gain.bias_index.tolist(),
            )
            for gain in gains
        ]
        assert facts == GAINS[change]
        assert [h for gain in gains for h in gain.heads] == [*range(H)] * bool(facts)
