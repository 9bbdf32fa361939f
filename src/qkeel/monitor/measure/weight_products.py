"""Products of the weights on the ways of q and k to a head's logits, from the input's side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qkeel.heads.site import HeadSlice

Chain = tuple[HeadSlice, ...]
Weight = Callable[[HeadSlice], Tensor]  # the rows of each head [n r m]


def own_rows(chains: Sequence[Chain]) -> list[HeadSlice]:
    """The last weight of each way, each once: the one with rows for the head."""
    found: list[HeadSlice] = []
    for chain in chains:
        if not any(chain[-1].parameter == f.parameter and chain[-1].same(f) for f in found):
            found.append(chain[-1])
    return found


def gram(chains: Sequence[Chain], weight: Weight) -> Tensor:
    """W Wᵀ [heads R R], W the products of all terms one under the other; weights that add up come as terms too."""
    if len(chains) == 1:
        return _product(chains[0], chains[0], weight)
    products = [[_product(a, b, weight) for b in chains] for a in chains]
    heads = max(len(x) for line in products for x in line)
    return torch.cat([torch.cat([x.expand(heads, -1, -1) for x in line], -1) for line in products], -2)


def _product(a: Chain, b: Chain, weight: Weight) -> Tensor:
    """(product of a)(product of b)ᵀ [heads r r'], from the input's side: nothing of its width is kept. Inputs
    of unequal width (MLA's normed latent and the tokens) are two inputs: nothing is shared.
    """
    first, second = weight(a[0]), weight(b[0])
    if first.shape[-1] == second.shape[-1]:
        inner = first @ second.mT
    else:
        inner = first.new_zeros(max(len(first), len(second)), first.shape[1], second.shape[1])
    for part in a[1:]:
        inner = _after(weight(part), inner)
    for part in b[1:]:
        inner = _after(weight(part), inner.mT).mT
    return inner


def _after(weight: Tensor, inner: Tensor) -> Tensor:
    """A weight times what comes before it; one column, as gains are, multiplies row by row."""
    return weight * inner if weight.shape[-1] == 1 else weight @ inner
