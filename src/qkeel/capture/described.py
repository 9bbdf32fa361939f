"""Reads the calls of sites that are described by hand, because they cannot be observed: custom operators, sparse kernels."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from qkeel.capture.calls import fewest_keys
from qkeel.errors import InvalidValueError, ShapeError, check
from qkeel.patching.guards import Guarded, in_this_thread
from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.torch_state import recomputing
from qkeel.spec import AttentionCall
from qkeel.spec.call import make_call

# Letters, some of them in parentheses
_LAYOUT = r"(\w|\(\w( \w)*\))( (\w|\(\w( \w)*\)))*"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """A rule for reading q or k from the output of a submodule of the site's module.

    `layout` names the dimensions of the output: b batch, h heads, t tokens, d head_dim. Letters that share a dimension
    are in parentheses, slowest first. The letter n stands for adjacent parts, as in a fused projection; there are
    `parts` of them, and this reading uses number `part`. For example, "b t (n h d)" has q, k and v one after the other,
    and "b t (h n d)" has them interleaved. `then` is the function that the module applies to [b h t d] before the
    scores; `normed` says whether that function includes a norm.
    """

    module: str
    layout: str = "b t (h d)"
    part: int = 0
    parts: int = 1
    then: Callable[[Tensor], Tensor] | None = None
    normed: bool = False

    def __post_init__(self) -> None:
        letters = "".join(self.groups)
        known = set("dt") <= set(letters) <= set("bhtdn") and len(set(letters)) == len(
            letters
        )
        if not known or not re.fullmatch(_LAYOUT, self.layout):
            raise InvalidValueError(
                f"expected a layout of b h t d (and n) such as 'b t (h d)', got {self.layout!r}"
            )
        check(
            0 <= self.part < self.parts,
            f"part 0 to {self.parts - 1} of {self.parts}",
            self.part,
        )

    @property
    def groups(self) -> list[str]:
        """The letters in each dimension."""
        return [
            group.replace(" ", "")
            for group in re.findall(r"(?<=\()[^)]*|\w(?![^(]*\))", self.layout)
        ]

    @property
    def dims(self) -> int:
        """The number of dimensions of the output."""
        return len(self.groups)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Description:
    """A description of a site that cannot be observed; see `qkeel.sites.describe`."""

    query: Reading | Callable[..., Tensor]
    key: Reading | Callable[..., Tensor]
    causal: bool
    mask: Callable[..., Tensor | None] | None


# An `AttentionSite` with a description; the capture knows sites only by these.
DescribedSite = Any


def arranged(
    x: Shaped[Tensor, ...], reading: Reading, heads: int
) -> Shaped[Tensor, "b h t d"]:
    """Returns a module's output, which has the layout of the reading, rearranged to [b h t d].

    Raises:
        ShapeError: the output has a different layout.
    """
    expected = f"expected {reading.module}'s output as [{reading.layout}] with {heads} heads, got {tuple(x.shape)}"
    if x.ndim != reading.dims:
        raise ShapeError(expected)
    fixed, shape = {"h": heads, "n": reading.parts}, list[int]()
    for size, group in zip(x.shape, reading.groups):
        fixed_size = math.prod([fixed.get(letter, 1) for letter in group])
        if size % fixed_size or (group in fixed and size != fixed_size):
            raise ShapeError(expected)
        shape += [fixed.get(letter, size // fixed_size) for letter in group]
    letters = "".join(reading.groups)
    x = x.reshape(shape)
    if "n" in letters:
        x = x.select(letters.index("n"), reading.part)
        letters = letters.replace("n", "")
    for letter in "hb":
        if letter not in letters:
            x, letters = x[None], letter + letters
    if x.shape[letters.index("h")] != heads:
        raise ShapeError(expected)
    return x.permute([letters.index(letter) for letter in "bhtd"])


class DescribedSiteHooks:
    """Hooks on the modules of a described site, installed by `attach`. After each call of the site's module, they call
    `report` with the site and a function that returns the attention call."""

    def __init__(
        self,
        site: DescribedSite,
        report: Callable[[DescribedSite, Callable[[], AttentionCall]], None],
        guard: Guarded,
    ) -> None:
        assert site.description is not None
        self.site, self.description = site, site.description
        self._report, self._guard = report, guard
        self._outputs: dict[str, Tensor] = {}

    def attach(self, undo: ExitStack) -> None:
        """Installs hooks on the modules until `undo` is closed."""
        undo.callback(self._outputs.clear)
        for reading in (self.description.query, self.description.key):
            if isinstance(reading, Reading):
                layer = self.site.module.get_submodule(reading.module)
                keep = functools.partial(self._guard, self._keep, reading.module)
                undo.callback(layer.register_forward_hook(in_this_thread(keep)).remove)
        finish = in_this_thread(functools.partial(self._guard, self._finish))
        hook = self.site.module.register_forward_hook(finish, with_kwargs=True)
        undo.callback(hook.remove)

    def _keep(self, name: str, module: nn.Module, args: object, output: Tensor) -> None:
        # Gradient checkpointing runs the module again in the backward pass, which is no further call of the model.
        if not torch.compiler.is_compiling() and not recomputing():
            self._outputs[name] = output

    def _finish(
        self, module: nn.Module, args: Args, kwargs: Kwargs, output: object
    ) -> None:
        if torch.compiler.is_compiling() or recomputing():
            return
        outputs, site, description = dict(self._outputs), self.site, self.description
        self._outputs.clear()

        def value(reading: Reading | Callable[..., Tensor], heads: int) -> Tensor:
            if not isinstance(reading, Reading):
                return reading(module, *args, **kwargs)
            if reading.module not in outputs:
                raise InvalidValueError(
                    f"{reading.module} did not run in this call of {site.name!r}; describe it in another way"
                )
            x = arranged(outputs[reading.module], reading, heads)
            return x if reading.then is None else reading.then(x)

        def call() -> AttentionCall:
            q = value(description.query, site.n_heads)
            k = value(description.key, site.n_kv_heads)
            mask = None
            if description.mask is not None:
                mask = description.mask(module, *args, **kwargs)
            k = fewest_keys(k)
            return make_call(site.spec, q, k, k, causal=description.causal, mask=mask)

        self._report(site, call)
