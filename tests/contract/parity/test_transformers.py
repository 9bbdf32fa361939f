"""Same weights, same output as the attention modules of transformers, an oracle that no one here wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qkeel import reference
from qkeel.spec import AttentionSpec, Fixed, NoCap, NoNorm, NoPosition

from .families import FAMILIES, Family, Sizes, Stock
from .float64 import float64_throughout

pytest.importorskip("transformers")

SEEDS = range(4)
every_family = pytest.mark.parametrize(
    "family", FAMILIES, ids=lambda family: family.name
)


class Case:
    """One family at one seed: stock module, input, positions, padding. Batches of odd seeds are left-padded."""

    def __init__(self, family: Family, seed: int) -> None:
        torch.manual_seed(seed)
        self.family = family
        self.sizes: Sizes = family.sizes(seed)
        self.stock: Stock = family.build(self.sizes)
        tokens = self.sizes.tokens
        self.x = torch.randn(2, tokens, self.sizes.d_model)
        pad = torch.tensor([0, tokens // 3 if seed % 2 and family.paddable else 0])
        self.pos = (torch.arange(tokens) - pad[:, None]).clamp_min(0)
        self.real = torch.arange(tokens) >= pad[:, None]

    def theirs(self) -> Tensor:
        """The stock output, with the mask in the stock convention: the most negative number where hidden."""
        seen = self.real[:, None, None, :]
        if self.family.causal:
            tokens = self.x.shape[1]
            seen = seen & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(self.x.dtype).min)
        table = self.family.table(self.stock, self.x, self.pos)
        return self.family.call(self.stock.attention, self.x, table, mask)

    def ours(self, spec: AttentionSpec | None = None) -> Tensor:
        """qkeel's output from the stock module's projections and gains."""
        family, attention = self.family, self.stock.attention
        split = [
            y.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)
            for y in family.project(attention, self.x)
        ]
        positions: dict[str, Any] = (
            {"pos_q": self.pos, "pos_k": self.pos} if family.paddable else {}
        )
        params = family.params(attention)
        if spec is not None:
            needed = spec.init_params(
                self.sizes.n_heads, self.sizes.n_kv_heads, self.sizes.head_dim
            )
            params = {name: value for name, value in params.items() if name in needed}
        out = reference.attend(
            spec or family.spec(self.sizes),
            *split,
            params=params,
            causal=family.causal,
            mask=self.real[:, None, None, :],
            **positions,
        ).out
        return family.finish(attention, out.transpose(1, 2).flatten(-2), self.x)

    def gap(self, spec: AttentionSpec | None = None) -> float:
        """Largest difference over the tokens that are not padding."""
        theirs, ours = self.theirs(), self.ours(spec)
        assert theirs.dtype == ours.dtype == self.x.dtype
        assert theirs.shape == ours.shape == self.x.shape
        return (theirs - ours)[self.real].abs().max().item()


@every_family
@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_same_weights_give_the_stock_output(
    family: Family, seed: int, record_property: Any
) -> None:
    gap = Case(family, seed).gap()
    record_property("gap", gap)
    assert gap <= 2e-6


@every_family
@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_same_weights_give_the_stock_output_in_float64(
    family: Family, seed: int, record_property: Any
) -> None:
    with float64_throughout():
        gap = Case(family, seed).gap()
    record_property("gap", gap)
    assert gap <= 1e-12


@every_family
@torch.no_grad()
def test_leaving_a_slot_out_breaks_parity(family: Family) -> None:
    with float64_throughout():
        case = Case(family, 0)
        spec = family.spec(case.sizes)
        plain = {
            "norm": NoNorm(),
            "position": NoPosition(),
            "cap": NoCap(),
            "scale": Fixed(0.5),
        }
        for slot, value in plain.items():
            if type(getattr(spec, slot)) is not type(value):
                assert case.gap(spec.replace(**{slot: value})) > 1e-4, slot


@torch.no_grad()
def test_stock_modules_compute_in_float32_even_when_their_weights_are_float64() -> None:
    # Why the float64 comparison needs `float64_throughout`: parity at 1e-10 is not there without it.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert 1e-10 < Case(FAMILIES[0], 0).gap() < 1e-5
    finally:
        torch.set_default_dtype(before)
