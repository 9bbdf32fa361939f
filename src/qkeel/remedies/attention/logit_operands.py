"""The q and k of every product that a logit is a sum of, as one pass on the example shows them."""

from __future__ import annotations

import dataclasses

from jaxtyping import Float
from torch import Tensor

from qkeel.functional.norms import widest
from qkeel.patching.forward_passes import extra_pass
from qkeel.remedies.base import Target
from qkeel.sites.calls.scores import ScoresCall
from qkeel.sites.probe import copied, forward, undisturbed
from qkeel.sites.see.intercept import Interceptor, Sighting
from qkeel.sites.see.running_modules import Frame
from qkeel.sites.weights.autograd_walk import leaves_of, names_of, nodes_of, variable_of
from qkeel.spec import AttentionCall

ONE_LENGTH = 1e-3  # what a norm adds under its root changes lengths by less


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operand:
    """The q or k of one product of a site.

    `tables` are the parameters that it is itself, by views and indices alone, as relative positions are; none for
    what was made of the input. `width` is the number of its features that a logit is a sum over.
    """

    width: int
    lengths: Float[Tensor, "b h t"]
    tables: frozenset[str]

    def normed(self, over: str) -> bool:
        """True if all vectors of a head, or of all heads together, are of one length (or zero)."""
        if self.tables:
            return True
        lengths = self.lengths if over == "head" else self.lengths.square().sum(1, keepdim=True).sqrt()
        most = lengths.amax((0, 2))
        least = lengths.where(lengths > 0, most[None, :, None]).amin((0, 2))
        return bool((most - least <= ONE_LENGTH * most).all())


def logit_operands(target: Target) -> dict[str, list[tuple[Operand, Operand]]]:
    """The operands of every product that was seen in full, of the first call of each site, by the site's name."""
    model, found = target.model, dict[str, list[tuple[Operand, Operand]]]()
    names = names_of(model)

    def note(sighting: Sighting) -> None:
        if sighting.name in found:
            return
        call = sighting.call
        pairs = call.products if isinstance(call, ScoresCall) else ()
        pairs = ((call.q, call.k),) if isinstance(call, AttentionCall) else pairs
        read = [(_operand(q, sighting.frame, names), _operand(k, sighting.frame, names)) for q, k in pairs]
        found[sighting.name] = [(q, k) for q, k in read if q is not None and k is not None]

    args, kwargs = target.example
    with extra_pass(model), undisturbed(model):
        forward(model, Interceptor(model, note, probing=True, dispatch=True), copied(args), copied(kwargs))
    return found


def _operand(x: Tensor | None, frame: Frame, names: dict[int, str]) -> Operand | None:
    if x is None:
        return None
    leaves = None if x.grad_fn is None else leaves_of(x.grad_fn, nodes_of(frame.inputs))
    tables = frozenset(names.get(id(variable_of(leaf)), "") for leaf in leaves or ())
    return Operand(width=x.shape[-1], lengths=x.detach().to(widest(x.device)).norm(dim=-1), tables=tables)
