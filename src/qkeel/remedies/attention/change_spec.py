"""Remedies that change what attention computes: another object in a slot of the site's spec."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from torch import nn

from qkeel.errors import InvalidValueError
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.nn.spec_module import SpecModule
from qkeel.remedies.attention.changed_call import Change, changed
from qkeel.remedies.attention.exchange_calls import exchange_calls
from qkeel.remedies.attention.refusals import refuse_unseen
from qkeel.remedies.attention.site_parameters import change_parameters
from qkeel.remedies.base import Remedy, Target, compose_all
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec
from qkeel.spec.slot import Geometry

_CHANGES = "_qkeel_changes"  # on an own module: the spec it was built with, and the changes in force


class ChangeSpec(Remedy):
    """Gives each site a new spec; parameters it needs live on the site's module and join the optimizer. One of
    qkeel's modules has a spec of its own. In any other the attention call is exchanged while its forward runs."""

    stacks = True
    changes_spec = True

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
        """Changes sites that are no modules of qkeel's."""
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
            # From the first spec again: another remedy may have changed a slot since, even this one's, and stays.
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


def known_length(length: int | None, train_length: int | None, use: str, otherwise: str = "") -> int:
    """L of a formula: the remedy's own option, or else the training length; `use` says what the formula does with L."""
    found = length or train_length
    if found is None:
        raise InvalidValueError(
            f"{use}: say L, as length=512 in the remedy or as qkeel.apply(..., train_length=512){otherwise}"
        )
    return found
