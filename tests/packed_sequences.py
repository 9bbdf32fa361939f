"""The rows of packed sequences, one sequence after the other in float64: the truth for every kernel of theirs."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qkeel.spec import AttentionSpec, Fixed, NoCap, Softcap
from qkeel.spec.call import band_call, make_call

H, G, D = 4, 2, 8
SCALE = 0.4

# Lengths of queries and of keys, and the tokens after the last sequence, which belong to none.
LENGTHS = {
    "some empty": ((3, 0, 5, 1), (3, 0, 5, 1), 0),
    "single tokens": ((1,) * 20, (1,) * 20, 0),
    "no multiple of a tile": ((129, 1, 70), (129, 1, 70), 0),
    "keys of their own": ((0, 1, 64, 65, 2, 5), (2, 1, 70, 33, 0, 90), 3),
}
WINDOWS = {"all": (-1, -1), "left": (3, -1), "right": (-1, 2), "both": (40, 1)}


@dataclasses.dataclass(frozen=True)
class Packed:
    """Packed q [1 h total d] and k [1 g total d], their ends, and how they attend."""

    q: Tensor
    k: Tensor
    ends: tuple[Tensor, Tensor]
    causal: bool
    window: tuple[int, int]
    cap: float

    def call(self, **more):
        """The call of all sequences at once."""
        spec = AttentionSpec(
            scale=Fixed(SCALE), cap=Softcap(self.cap) if self.cap else NoCap()
        )
        call = make_call(spec, self.q, self.k, self.k, causal=self.causal)
        return band_call(call, window=self.window, cu_seqlens=self.ends, **more)


def packed(name, *, causal=True, window="all", cap=0.0):
    """Sequences of the lengths of that name."""
    of_q, of_k, more = LENGTHS[name]
    first, second = (
        torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        for lengths in (of_q, of_k)
    )
    ends = (first, first) if of_q == of_k else (first, second)
    generator = torch.Generator().manual_seed(len(name))
    q = torch.randn(1, H, sum(of_q) + more, D, generator=generator)
    k = 2 * torch.randn(1, G, sum(of_k) + more, D, generator=generator)
    return Packed(q, k, ends, causal, WINDOWS[window], cap)


CASES = [
    ("some empty", {"causal": False}),
    ("some empty", {"causal": True, "cap": 3.0}),
    ("single tokens", {"causal": True, "window": "left"}),
    ("no multiple of a tile", {"causal": True}),
    ("no multiple of a tile", {"causal": False, "window": "both"}),
    ("keys of their own", {"causal": True, "window": "left"}),
    ("keys of their own", {"causal": False, "window": "right", "cap": 5.0}),
]


def spoiled(name):
    """The same with a NaN in one key of the first key head of one sequence, and the rows of that sequence."""
    whole = packed(name)
    ends = whole.ends[1].tolist()
    longest = max(range(len(ends) - 1), key=lambda n: ends[n + 1] - ends[n])
    k = whole.k.clone()
    k[0, 0, ends[longest]] = torch.nan
    rows = whole.ends[0].tolist()
    return dataclasses.replace(whole, k=k), slice(rows[longest], rows[longest + 1])
