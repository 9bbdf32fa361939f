"""Attention, latent attention and gated units with caches: in pieces, in one pass, in float32 and float64 alike."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.conformance.cases import SPECS
from tests.fuzz.hunt import Hunt
from torch import nn

from qkeel.nn import GAU, MLA, Attention, LatentSizes


def inputs() -> SearchStrategy[dict[str, Any]]:
    """A module, its spec and sizes, lengths of the pieces, a seed."""
    return st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["attention", "mla", "gau"]),
            "spec": st.sampled_from(sorted(SPECS)),
            "heads": st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
            "d": st.sampled_from([2, 4, 8, 16]),
            "latent": st.sampled_from([1, 5, 24]),
            "norm": st.booleans(),
            "pieces": st.lists(st.integers(1, 6), min_size=1, max_size=6),
            "reserved": st.booleans(),
            "seed": st.integers(0, 2**20),
        }
    )


def _module(case: dict[str, Any]) -> nn.Module:
    spec, (h, g), d = SPECS[case["spec"]], case["heads"], case["d"]
    if case["kind"] == "attention":
        return Attention(16, h, g, d, spec=spec, bias=True)
    if case["kind"] == "gau":
        return GAU(16, hidden=12, size=d, spec=spec, bias=True)
    sizes = LatentSizes(q_latent=case["latent"], kv_latent=case["latent"], rope_dim=d, nope_dim=d, value_dim=5)
    return MLA(16, h, sizes=sizes, spec=spec, latent_norm=case["norm"])


@torch.no_grad()
def check(case: dict[str, Any]) -> None:
    """A cache changes nothing but rounding; nor does float32."""
    torch.manual_seed(case["seed"])
    module = _module(case).eval()
    wide = copy.deepcopy(module).double()
    total = sum(case["pieces"])
    x = torch.randn(2, total, 16)
    whole = wide(x.double())
    scale = 1 + whole.abs().max().item()
    narrow = module(x)
    assert (narrow.double() - whole).abs().max().item() <= 2e-4 * scale, "float32"
    cache, start, parts = wide.new_cache(total if case["reserved"] else None), 0, []
    for size in case["pieces"]:
        parts.append(wide(x.double()[:, start : start + size], cache=cache))
        start += size
    # Dynamic NTK rotates by the length of the text so far: only the last piece is rotated as in one pass.
    since = total - case["pieces"][-1] if case["spec"] == "dynamic_ntk" else 0
    error = (torch.cat(parts, dim=1) - whole)[:, since:].abs().max().item()
    assert error <= 1e-9 * scale, f"in pieces: error {error:.3g}"


HUNT = Hunt(inputs=inputs, check=check, few=50)
