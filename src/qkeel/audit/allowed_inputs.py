"""What an output may depend on, for `check(sees=…)`: packed documents and windows."""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from qkeel.errors import InvalidValueError


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """A token sees the tokens of its own document, and of these, if `causal`, none after it.

    Args:
        ids: the number of each token's document, [b t] or [t] if the samples are packed alike. Tokens with a negative
            number are padding, which may see and be seen by anything.
        causal: whether later tokens are hidden too.

    Example:
        >>> Documents.from_positions(torch.tensor([[0, 1, 2, 0, 1]])).ids
        tensor([[0, 0, 0, 1, 1]])
    """

    ids: Int[Tensor, "*b t"]
    causal: bool = True

    @classmethod
    def from_positions(
        cls, position_ids: Int[Tensor, "*b t"], *, causal: bool = True
    ) -> Documents:
        """Documents that begin wherever the positions do not continue, as in packed batches."""
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[..., 1:] = position_ids[..., 1:] != position_ids[..., :-1] + 1
        return cls(starts.long().cumsum(-1) - 1, causal)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """In every attention layer, a token sees itself and the `size` - 1 tokens before it.

    Layers in a row see further: an output may depend on (size - 1) · layers tokens before it. A contract of one layer
    is therefore read from the weights of that layer, besides the change of tokens further away.

    Args:
        size: the number of tokens, at least 1.
        layers: how many layers pass tokens on; by default the number of attention layers of the model.

    >>> Window(128).size
    128
    """

    size: int
    layers: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidValueError(
                f"expected a window of at least 1 token, got {self.size}"
            )


Contract = str | Documents | Window
