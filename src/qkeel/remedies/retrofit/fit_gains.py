"""The gains of an inserted norm, and where their fit starts; `insert` says on what they are fitted, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.nn.attention import SpecModule
from qkeel.patching.module_tables import parameters_of, submodules_of
from qkeel.remedies.base import where
from qkeel.remedies.head_norms import HeadNorm
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionCall, NoNorm
from qkeel.spec.norm import NormedPart

# Derivation. A norm replaces x, a query or a key, by n = norm(x), and the gain g multiplies n. The start is the gain that
# brings g · n nearest to x over the tokens of a batch, by least squares for each number of the gain:
#
#     g = Σ x n / Σ n²,
#
# summed over everything that shares the number (tokens, and heads or dimensions). Logits then have the size that the
# old model gave them. From this start, L-BFGS minimises the distance of the model's outputs (KL of classes, squared
# error of numbers) over the gains of all layers together, because attention that hardly affects the output should not
# count as much as attention that matters.


@final
class InsertedNorm:
    """The norm that has just been inserted at a site, and its stored gains of q and of k.

    Args:
        site: the site.
        eps: the norm's new eps, or None to keep its current eps.

    Raises:
        RefusedError: the norm lacks a gain of q or of k.
    """

    def __init__(self, site: AttentionSite, eps: float | None) -> None:
        self._module = module = site.module
        children = submodules_of(module).values()
        self._heads = [child for child in children if isinstance(child, HeadNorm)]
        stored = [head.weight for head in self._heads]
        norm = self._heads[0].norm if self._heads else NoNorm()
        if isinstance(module, SpecModule):
            norm = module.spec.norm
            stored = [parameters_of(module).get(f"{side}_norm") for side in "qk"]
        self.gains = [gain for gain in stored if gain is not None]
        if len(self.gains) != 2:
            raise RefusedError(
                f"{where(site)}: this norm has no gains of q and k to fit; use "
                "kind=rms or layer with gain=dim, head, head_dim, one_plus_dim or scalar"
            )
        self.norm = norm if eps is None else norm.with_eps(eps)
        for head in self._heads:
            head.norm = self.norm
        if isinstance(module, SpecModule):
            module.spec = module.spec.replace(norm=self.norm)

    def start(self, run: Callable[[], object]) -> None:
        """Sets the gains to the start of the derivation, from the queries and keys of one pass."""
        sides: dict[NormedPart, Tensor] = {}

        def see_call(call: AttentionCall) -> None:
            sides["q"], sides["k"] = call.q, call.k

        def see_heads(head: HeadNorm, args: tuple[Tensor, ...]) -> None:
            # [1 h n d], where n counts all tokens of the batch.
            x = args[0].reshape(-1, *args[0].shape[-2:])
            sides[head.part] = x.transpose(0, 1)[None]

        if isinstance(self._module, SpecModule):
            self._module.observers.append(see_call)
        hooks = [head.register_forward_pre_hook(see_heads) for head in self._heads]
        try:
            run()
        finally:
            if isinstance(self._module, SpecModule):
                self._module.observers.remove(see_call)
            for hook in hooks:
                hook.remove()
        bare = dataclasses.replace(self.norm, gain="none")  # type: ignore[type-var]
        with torch.no_grad():
            # q comes before k, as among the gains.
            for gain, (part, x) in zip(self.gains, sorted(sides.items(), reverse=True)):
                x = x.to(wide(x.dtype))
                n = bare.apply(part, x, {})
                above, below = (
                    _summed(y.transpose(0, 1).flatten(1, 2), gain)
                    for y in (x * n, n * n)
                )
                # A head that is all zeros keeps a finite gain.
                factor = above / below.clamp_min(torch.finfo(below.dtype).tiny)
                offset = 1.0 if self.norm.gain == "one_plus_dim" else 0.0
                gain.copy_(factor - offset)


def _summed(x: Tensor, gain: Tensor) -> Tensor:
    """Returns the sum of x [h n d] over all that shares a number of the gain, in the gain's shape."""
    if gain.ndim == 2:
        return x.sum(1) if gain.shape[1] > 1 else x.sum((1, 2))[:, None]
    return x.sum((0, 1)) if gain.ndim else x.sum()
