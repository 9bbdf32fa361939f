"""The batch's own `attention_mask` says which queries are padding, by whatever way a model is watched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qkeel

WIDTH = 8
MASKS: dict[str, tuple[Tensor | None, bool]] = {
    "padding": (torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]), True),
    "of booleans": (torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool(), True),
    "no padding": (torch.ones(2, 5), False),
    "added": (torch.tensor([[0.0, 0, 0, -1e4, -1e4], [0.0] * 5]), False),
    "of pairs": (torch.ones(2, 1, 5, 5).tril(), False),
    "of another shape": (torch.tensor([[1, 0], [1, 1]]), False),
    "absent": (None, False),
}


class Padded(nn.Module):
    """Self-attention whose padded queries have larger logits than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def largest(model: Padded, x: Tensor, rows: Tensor) -> list[float]:
    """In float64, over these rows [b t]."""
    weight = model.project.weight.double()
    q, k, _ = (x.double() @ weight.mT).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    hidden = ~torch.ones(5, 5, dtype=torch.bool).tril() | ~rows[:, None, :, None]
    logits = (q @ k.mT / 2).masked_fill(hidden, -torch.inf)
    return logits.amax((0, 2, 3)).tolist()


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("by_position", [False, True])
def test_rows_that_the_batch_marks_as_padding_are_left_out(
    name: str, by_position: bool
) -> None:
    mask, leaves_out = MASKS[name]
    torch.manual_seed(0)
    model, x = Padded(), torch.randn(2, 5, WIDTH)
    x[0, 3:] *= 20
    arguments = (x, mask) if by_position else (x,)
    named = {} if by_position else {"attention_mask": mask}
    with qkeel.watch(model) as monitor:
        model(*arguments, **named).sum().backward()
        (stats,) = monitor.read().values()
    every = torch.ones(2, 5, dtype=torch.bool)
    rows = mask.bool() if leaves_out and mask is not None else every
    assert stats.max_logit.tolist() == pytest.approx(largest(model, x, rows), rel=1e-5)


def test_a_causal_mask_of_as_many_sequences_as_tokens_is_no_padding() -> None:
    model, x = Padded(), torch.randn(5, 5, WIDTH)
    with qkeel.watch(model) as monitor:
        model(x, torch.ones(5, 5).tril())
        (stats,) = monitor.read("eval").values() or monitor.read().values()
    every = torch.ones(5, 5, dtype=torch.bool)
    assert stats.max_logit.tolist() == pytest.approx(largest(model, x, every), rel=1e-5)


def test_every_row_counts_if_a_function_says_so() -> None:
    mask, _ = MASKS["padding"]
    model, x = Padded(), torch.randn(2, 5, WIDTH)
    with qkeel.watch(model, query_mask=lambda *args: None) as monitor:
        model(x, mask)
        (stats,) = monitor.read().values()
    every = torch.ones(2, 5, dtype=torch.bool)
    assert stats.max_logit.tolist() == pytest.approx(largest(model, x, every), rel=1e-5)
