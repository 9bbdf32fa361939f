"""Bounds on the largest logit of each head from the gains of a q/k norm, for any weights before the norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel import distributed as dist
from qkeel.distributed.layout import local
from qkeel.distributed.sharding import local_block
from qkeel.functional.norms import wide
from qkeel.monitor.numbers import Number, NumberKey, Numbers
from qkeel.nn.attention import SpecModule
from qkeel.patching.guards import without_gradients
from qkeel.sites.site import AttentionSite, NormGain
from qkeel.spec.slot import ParameterSizes, Params


@final
class GainBounds:
    """Reads `gain_bound` [h] for the sites whose q and k are both outputs of a norm.

    The bound is |scale| · ‖q‖max · ‖k‖max with ‖x‖max = factor · (length · max|g| + ‖b‖) per head, where length is √n
    for an RMS or layer norm over n elements and 1 for an L2 norm (Cauchy–Schwarz; a rotation preserves norms). The
    bound is in nats, before any cap, and excludes what a mask or a position bias adds. It is reached by a head whose q
    and k lie along the dimension of the largest gain. For scales that grow with the position (LogN,
    FloorLogTemperature), it is valid up to the training length, below the first floor.

    Of gains that are split across processes, each process reads the factors of its part, whose maxima are multiplied
    once they are merged: `query_bound` and `key_bound`.
    """

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self._parameters = dict(model.named_parameters())
        self._device = next(iter(self._parameters.values())).device
        self._places: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self.sites: list[AttentionSite] = []
        for site in sites:
            norms = (*site.query_gains, *site.key_gains)
            # Norms of biases and scales do not follow from the parts of them.
            unsplit: list[Tensor] = [*_scale_params(site).values()]
            unsplit += [self._parameters[norm.bias] for norm in norms if norm.bias]
            if (
                site.query_gains
                and site.key_gains
                and not any(map(dist.is_split, unsplit))
            ):
                self.sites.append(site)

    @without_gradients
    def read(self) -> Numbers:
        """Returns the bound of each site for the current gains, or this process's part of its factors."""
        numbers: dict[NumberKey, Tensor | Number] = {}
        for site in self.sites:
            query = self._lengths(site.query_gains, site.n_heads)
            last = torch.full(
                (1, 1), site.spec.scale.last_position, device=query.device
            )
            scale = site.spec.scale.factor(last, site.head_dim, _scale_params(site))
            like = {"dtype": query.dtype, "device": query.device}
            # One value, or one for each head.
            query = query * torch.as_tensor(scale, **like).abs().flatten()
            key = site.per_query_head(self._lengths(site.key_gains, site.n_kv_heads))
            # A product of maxima is no maximum of products, so the factors travel apart.
            gains = [norm.parameter for norm in (*site.query_gains, *site.key_gains)]
            if any(name and dist.is_split(self._parameters[name]) for name in gains):
                for name, value in (("query_bound", query), ("key_bound", key)):
                    weight = torch.ones_like(value)
                    numbers[site.name, name] = Number(value, weight, "max", "weights")
            else:
                numbers[site.name, "gain_bound"] = query * key
        return numbers

    def _lengths(self, norms: tuple[NormGain, ...], n_heads: int) -> Tensor:
        """The largest norm [heads] of each head's vectors."""
        lengths = []
        for norm in norms:
            if norm.parameter is None or norm.index is None:
                length = torch.full((1,), norm.length, device=self._device)
            else:
                gains = self._elements(norm.parameter, norm.index, norm.offset)
                length = gains.abs().amax(-1) * norm.length
            if norm.bias is not None and norm.bias_index is not None:
                length = length + self._elements(norm.bias, norm.bias_index).norm(
                    dim=-1
                )
            lengths.append(length if norm.factor == 1 else norm.factor * length)
        if len(norms) == 1:
            return lengths[0].expand(n_heads)
        of_heads = lengths[0].new_zeros(n_heads)
        for norm, length in zip(norms, lengths):
            of_heads[list(norm.heads)] = length
        return of_heads

    def _elements(self, name: str, index: Tensor, offset: float = 0.0) -> Tensor:
        """offset + the elements of a parameter for each head [n r], or 0 for those that another process has."""
        p = self._parameters[name]
        x = local(p).detach()
        # The index is moved once: a copy to the device in each step would make the host wait.
        if id(index) not in self._places:
            self._places[id(index)] = self._place(name, index)
        at, held = self._places[id(index)]
        if held is not None and not x.numel():
            return x.new_zeros(index.shape)
        x = x.reshape(index.shape) if at is None else x.flatten()[at]
        x = x.to(wide(x.dtype))
        x = x + offset if offset else x
        return x if held is None else x.masked_fill(~held, 0.0)

    def _place(self, name: str, index: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Where the elements lie in this process's part, None for all in their order, and which of them are in it,
        None if the parameter is not split."""
        p = self._parameters[name]
        block = local_block(name, p)
        if block is None:
            every = torch.arange(p.numel())
            # A view costs no launch, and nearly all gains are read whole.
            in_order = index.numel() == len(every) and index.flatten().equal(every)
            return None if in_order else index.to(p.device), None
        # The parameter is split by rows, and indices count its elements.
        first, last = (n * (p.numel() // len(p)) for n in block.spans[0])
        at = (index - first).clamp(0, max(last - first - 1, 0))
        return at.to(p.device), ((index >= first) & (index < last)).to(p.device)


def _scale_params(site: AttentionSite) -> Params:
    """The parameters from which a learned scale is computed, or {} if the scale is not learned."""
    heads = ParameterSizes(
        n_heads=site.n_heads, n_kv_heads=site.n_kv_heads, head_dim=site.head_dim
    )
    if not isinstance(site.module, SpecModule) or not site.spec.scale.parameters(heads):
        return {}
    return site.module.spec_params()
