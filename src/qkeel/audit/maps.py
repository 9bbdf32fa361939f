"""The attention weights of any model, per layer and head, computed from the calls that a pass makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import nn

from qkeel.errors import InvalidTypeError, InvalidValueError, needed, unknown
from qkeel.sites.softmax_weights import (
    Weights,
    blocks_of_weights,
    captured_calls,
    weights_shape,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

# Numbers that are returned without being asked for by rows or heads: 1 GiB in float32.
LIMIT = 1 << 28


@final
class AttentionMaps(dict[str, Weights]):
    """Attention weights by layer: a dict from the name of a site to weights [b h r s] in float32 or wider.

    A row sums to 1 over the keys, or to less where the attention has a sink or a sigmoid. A row that sees no key has
    weights of 0.

    Attributes:
        heads: the numbers of the heads in dimension 1, by site.
        rows: the numbers of the queries in dimension 2, by site.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heads: dict[str, tuple[int, ...]] = {}
        self.rows: dict[str, tuple[int, ...]] = {}

    def __missing__(self, layer: str) -> Weights:
        raise unknown("layer of these attention maps", layer, self)

    def to_numpy(self) -> dict[str, np.ndarray]:
        """Returns the weights as NumPy arrays [b h r s] by layer."""
        return {layer: weights.cpu().numpy() for layer, weights in self.items()}

    def plot(
        self,
        layer: str | None = None,
        *,
        sample: int = 0,
        columns: int = 4,
        width: float | None = None,
    ) -> Figure:
        """Draws the heads of one layer side by side, queries downwards and keys to the right.

        Args:
            layer: the name of the layer; by default the first.
            sample: which sample of the batch is drawn.
            columns: the number of heads in a row of the picture.
            width: the width of the picture in inches; by default 2.2 for each column.

        Returns:
            A matplotlib figure, which a notebook shows.

        Raises:
            MissingLibraryError: matplotlib is not installed.
            UnknownNameError: there is no such layer.
            InvalidValueError: there is no such sample, or no head or row of the layer was wanted.
        """
        with needed("a plot of attention maps", "matplotlib"):
            from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
        layer = next(iter(self)) if layer is None else layer
        weights = self[layer]
        if not weights.numel():
            raise InvalidValueError(
                f"expected weights to draw, but those of {layer!r} have shape {list(weights.shape)}"
            )
        if not 0 <= sample < len(weights):
            raise InvalidValueError(
                f"expected a sample from 0 to {len(weights) - 1}, got {sample}"
            )
        images = weights[sample].detach().float().cpu().numpy()
        rows = self.rows[layer]

        def query(y: float, _: int | None = None) -> str:
            """The number of the query at a tick: the picture's first row may be any query."""
            return str(rows[int(y)]) if y in range(len(rows)) else ""

        columns = min(columns, len(images))
        lines = -(-len(images) // columns)
        width = 2.2 * columns if width is None else width
        height = lines * (width / columns + 0.2)
        figure = Figure(figsize=(width, height), layout="constrained")
        pictures = []
        for i, image in enumerate(images):
            axes = figure.add_subplot(lines, columns, i + 1)
            scale = {"vmin": 0.0, "vmax": 1.0, "cmap": "viridis"}
            pictures.append(
                axes.imshow(image, **scale, aspect="auto", interpolation="nearest")
            )
            axes.set_title(f"head {self.heads[layer][i]}", fontsize=8)
            axes.tick_params(labelsize=6)
            axes.yaxis.set_major_formatter(query)
        figure.colorbar(pictures[0], ax=figure.axes, shrink=0.6).ax.tick_params(
            labelsize=6
        )
        figure.suptitle(layer, fontsize=9)
        figure.supxlabel("key", fontsize=8)
        figure.supylabel("query", fontsize=8)
        return figure


def attention_maps(
    model: nn.Module,
    batch: object,
    *,
    layers: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | slice | None = None,
) -> AttentionMaps:
    """Returns the attention weights of a model's layers, whichever kernel computes them.

    The weights are softmax(z) of the logits z that the captured call has: with its scale, masks, biases, cap and sink,
    as the model applies them; dropout is left out. Fused kernels never form these weights, so they are computed here
    from q and k, block by block, in float32 or wider. One pass on the batch is made for them and left without a trace
    (see `find_sites`, whose passes come first); its random numbers, of noise and of dropout, are those that the model's
    next pass would have.

    Args:
        model: any PyTorch model, in the mode whose attention is wanted. Compiled models run eagerly.
        batch: input of the model: a tensor, a tuple of the forward's arguments or a dict of its keyword arguments.
        layers: the names of the layers that are wanted, as in `find_sites`; by default all.
        heads: the numbers of the query heads that are wanted; by default all.
        rows: the numbers of the queries that are wanted, or a slice; by default all. Negative numbers count from the
            end.

    Returns:
        The weights [b h t s] by layer. A layer that is called several times has those of its first call.

    Raises:
        NoAttentionError: no attention is observed in the pass.
        UnknownNameError: a layer is unknown.
        InvalidValueError: there is no such head or row, or the weights would take more than 1 GiB; the message says
            which arguments make them fewer.

    Example:
        >>> from qkeel.nn import Attention
        >>> maps = attention_maps(Attention(16, 2), torch.zeros(1, 3, 16))
        >>> maps[""][0, 0]
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"expected a torch.nn.Module, got {type(model).__name__}"
        )
    calls = captured_calls(model, batch, is_seeded=False)
    maps, total = AttentionMaps(), 0
    for layer in calls if layers is None else layers:
        if layer not in calls:
            raise unknown("layer with attention", layer, calls)
        b, h, t, s = weights_shape(calls[layer])
        maps.heads[layer] = _numbers("head", heads, h, layer)
        maps.rows[layer] = _numbers("row", rows, t, layer)
        total += b * len(maps.heads[layer]) * len(maps.rows[layer]) * s
    # Before anything is computed: a picture of all layers of a long batch would end the process.
    if total > LIMIT:
        raise InvalidValueError(
            f"expected at most {LIMIT:,} weights ({LIMIT * 4 >> 30} GiB), got {total:,}: choose layers=, heads= or "
            "rows=, or give a shorter batch"
        )
    for layer, of_heads in maps.heads.items():
        b, _, _, s = weights_shape(calls[layer])
        # Nothing to join where no row is wanted.
        blocks = [torch.zeros(b, len(of_heads), 0, s)]
        for _, weights in blocks_of_weights(calls[layer], rows=maps.rows[layer]):
            blocks.append(weights[:, list(of_heads)])
        maps[layer] = torch.cat(blocks[1:] or blocks, 2)
    return maps


def _numbers(
    kind: str, wanted: Sequence[int] | slice | None, size: int, layer: str
) -> tuple[int, ...]:
    """The wanted numbers of heads or rows, counted from 0."""
    if wanted is None or isinstance(wanted, slice):
        return tuple(range(size)[wanted or slice(None)])
    for number in wanted:
        if not -size <= number < size:
            raise InvalidValueError(
                f"expected a {kind} from 0 to {size - 1} in {layer!r}, got {number}"
            )
    return tuple([number % size for number in wanted])
