"""Remedies that change what attention computes: another object in a slot of the site's spec."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from torch import nn

from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.nn.core import SpecModule
from qkeel.remedies.base import Remedy, Target, compose_all
from qkeel.remedies.exchange import exchange_calls
from qkeel.remedies.parameters import change_parameters
from qkeel.remedies.seam import Change, changed
from qkeel.sites.find import is_normed
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, Softmax
from qkeel.spec.slot import Geometry

PER_DIM = ("dim", "one_plus_dim", "head_dim")  # gains that treat a head's dimensions differently
_CHANGES = "_qkeel_changes"  # on an own module: the spec it was built with, and the changes in force


class ChangeSpec(Remedy):
    """Gives each site a new spec; parameters it needs live on the site's module and join the optimizer.

    An own module has a spec of its own. In any other the attention call is exchanged while its forward runs.
    """

    __slots__ = ()

    @abc.abstractmethod
    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        """The spec with this remedy in it."""

    def supports(self, site: AttentionSite) -> Refusal | None:
        if isinstance(site.module, SpecModule):
            return None
        return refuse_unseen(site)

    def apply(self, target: Target) -> Handle:
        own = [site for site in target.sites if isinstance(site.module, SpecModule)]
        others = [site for site in target.sites if not isinstance(site.module, SpecModule)]
        return compose_all(self._handles(target, own, others))

    def _handles(self, target: Target, own: list[AttentionSite], others: list[AttentionSite]) -> Iterator[Handle]:
        for site in own:
            yield self.change_own(site, target)
        yield from self.change_others(target, others)

    def change_others(self, target: Target, sites: list[AttentionSite]) -> Iterator[Handle]:
        """What is done at sites that are no modules of qkeel's."""
        yield from exchange_calls((self, target.train_length), target, sites)

    def change_own(self, site: AttentionSite, target: Target) -> Handle:
        """Another spec for one of qkeel's own modules."""
        module = site.module
        assert isinstance(module, SpecModule)
        base, changes = module.__dict__.get(_CHANGES, (module.spec, []))
        mine: Change = (self, target.train_length)
        new = changed(module.spec, [mine])
        geometry = Geometry(n_heads=site.n_heads, n_kv_heads=site.n_kv_heads, head_dim=site.head_dim)
        undo_parameters = change_parameters(target, site, module.spec, new, geometry)
        module.__dict__[_CHANGES] = (base, [*changes, mine])
        module.spec = new

        def undo() -> None:
            # Anew from the first spec: another remedy may have changed a slot since, this one's even, and stays.
            _, now = module.__dict__[_CHANGES]
            rest = [change for change in now if change is not mine]
            module.spec = changed(base, rest)
            module.__dict__[_CHANGES] = (base, rest)
            if not rest:
                del module.__dict__[_CHANGES]
            undo_parameters.remove()

        return Handle(undo)


def settle(module: nn.Module) -> None:
    """The spec that an own module has now is its own, whatever changes made it."""
    module.__dict__.pop(_CHANGES, None)


def refuse_unseen(site: AttentionSite) -> Refusal | None:
    """Why the calls of a module cannot be exchanged, if that is known beforehand."""
    if site.description is not None or site.below:
        return Refusal(
            "its attention runs inside torch.jit.script, torch.func.vmap or a function of its own, where it can't be "
            "changed",
            "use a remedy of steps or weights (qk_clip, lalr), or build the model with qkeel.nn",
        )
    return None


def refuse_norm(site: AttentionSite, *, per_dim: bool) -> Refusal | None:
    """Why q and k of a site cannot be normed, if so. `per_dim`: the norm treats a head's dimensions differently."""
    if is_normed(site):
        return Refusal("q and k are normed already", "remove that norm first, or leave it be")
    if per_dim and site.spec.position.order == "rotate_then_norm":
        return Refusal(
            "its norm would come after the rotation, and a mean or a gain per dimension there makes scores depend on "
            "more than the distance",
            "use kind=rms or l2 with gain none, scalar or head, or build the model with order='norm_then_rotate'",
        )
    return None


def refuse_normalizer(site: AttentionSite) -> Refusal | None:
    """Why a site takes no other normaliser, if so."""
    if isinstance(site.spec.normalizer, Softmax):
        return None
    return Refusal(
        f"its weights are {site.spec.normalizer.formula()} already, not a softmax",
        "remove the remedy that made them so first, or leave them be",
    )
