"""What tests of formulas share: few, reproducible examples."""

import hypothesis
import torch
from hypothesis import strategies as st
from tests.drawing import rand

# Derandomised: the same examples on every machine and run.
few = hypothesis.settings(max_examples=25, derandomize=True, deadline=None)
seeds = st.integers(0, 10_000)


def randn(seed, *shape):
    """Standard normal numbers, float64."""
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def some_visible(seed, *shape):
    """A random mask with empty and full rows among the others; at least two rows."""
    seen = rand(*shape, seed=seed) < 0.6
    seen[..., 0, :] = False
    seen[..., 1, :] = True
    return seen
