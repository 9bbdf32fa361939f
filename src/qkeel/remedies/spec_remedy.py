"""Base class for remedies that change the attention spec of any model, together with the reasons a site cannot be
changed."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator
from typing import Literal

from qkeel.errors import InvalidValueError, RefusedError
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.nn.attention import SpecModule
from qkeel.remedies.added_parameters import change_parameters
from qkeel.remedies.base import Remedy, Target, compose_all
from qkeel.remedies.changed_call import PlacedChange, changed
from qkeel.remedies.foreign_attention import change_calls
from qkeel.sites.site import AttentionSite, is_normed
from qkeel.spec import AttentionSpec, InverseSqrt
from qkeel.spec.logits import Scale
from qkeel.spec.norm import Norm
from qkeel.spec.slot import ParameterSizes

# Refusals. Each function returns the reason why a site's attention cannot be changed, with what to do instead, or None.

_OTHER_REMEDIES = (
    "use kind=rms or l2 with over=head and gain=none or scalar where attention is one of torch's fused functions "
    "(attn_implementation='sdpa'), or qk_clip or lalr, which need no norm"
)
SlotName = Literal["cap", "normalizer", "scale"]


def refuse_unseen(site: AttentionSite) -> Refusal | None:
    """Refuses attention whose call cannot be replaced."""
    if site.description is not None:
        return Refusal(
            "its attention runs inside torch.jit.script, torch.func.vmap or a custom function, and can't be changed "
            "there",
            "use a remedy that changes steps or weights (qk_clip, lalr), or build the model with qkeel.nn",
        )
    if not site.n_heads:
        # As of an expert without tokens, whose scores don't say which of their dimensions is empty.
        return Refusal(site.why, "give a batch in which every layer receives some")
    return None


def refuse_heads(reason: str) -> RefusedError:
    """Refuses q or k if no module outputs them as complete heads, as in MLA from other libraries, where the rotated
    keys are computed separately."""
    return RefusedError(str(Refusal(reason, _OTHER_REMEDIES)))


def refuse_norm(site: AttentionSite, norm: Norm) -> Refusal | None:
    """Refuses q and k that are already normed, and norms that would follow a rotation but do not commute with it."""
    if is_normed(site):
        return Refusal(
            "q and k are already normed", "remove that norm first, or keep it"
        )
    if (
        not norm.commutes_with_rotation
        and site.spec.position.order == "rotate_then_norm"
    ):
        return Refusal(
            "its norm would come after the rotation, and a mean or a gain per dimension there makes scores depend on "
            "more than the distance",
            "use kind=rms or l2 with gain none, scalar or head, or build the model with order='norm_then_rotate'",
        )
    return None


def refuse_scale(scale: Scale) -> Refusal | None:
    """Refuses unit vectors if the scale is not 1/√d, up to a position-dependent factor."""
    if scale.base == InverseSqrt():
        return None
    return Refusal(
        f"unit vectors need their own scale in place of 1/√d, and this site has the scale {scale.base.formula()}",
        "use qk_norm or key_norm with kind=rms, which keeps the scale, or build the model with the spec you want",
    )


def refuse_taken(site: AttentionSite, slot: SlotName) -> Refusal | None:
    """Refuses a slot that is in use: a cap, a position-dependent factor, or weights other than those of a softmax."""
    spec = site.spec
    if slot == "cap" and spec.cap.kind != "none":
        return Refusal(
            f"logits are already capped ({spec.cap.formula()})", "remove that cap first"
        )
    if slot == "scale" and spec.scale.follows_position:
        return Refusal(
            f"logits are already scaled by position ({spec.scale.formula()})",
            "remove that first",
        )
    if slot == "normalizer" and spec.normalizer.kind != "softmax":
        return Refusal(
            f"its attention weights are already {spec.normalizer.formula()} instead of a softmax",
            "first remove the remedy that produces them, or keep them",
        )
    return None


# Remedies that change a site's spec. qkeel's own modules have a spec; in other modules the attention call is replaced.

# On one of qkeel's own modules: its original spec, and the active changes.
_CHANGES = "_qkeel_changes"


class ChangeSpec(Remedy):
    """Gives each site a new spec, whose parameters are added to the site's module and to the optimizer.

    qkeel's own modules have a spec. In any other module the attention call is replaced while the module's forward runs.
    """

    changes_spec = True

    __slots__ = ()

    @abc.abstractmethod
    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        """Returns the spec changed by this remedy."""

    def supports(self, site: AttentionSite) -> Refusal | None:
        if isinstance(site.module, SpecModule):
            return None
        return refuse_unseen(site)

    def apply(self, target: Target) -> Handle:
        own_sites: list[AttentionSite] = []
        foreign_sites: list[AttentionSite] = []
        for site in target.sites:
            is_own = isinstance(site.module, SpecModule)
            (own_sites if is_own else foreign_sites).append(site)
        return compose_all(
            itertools.chain(
                (self.change_own(site, target) for site in own_sites),
                self.change_others(target, foreign_sites),
            )
        )

    def change_others(
        self, target: Target, sites: list[AttentionSite]
    ) -> Iterator[Handle]:
        """Changes sites of modules from other libraries."""
        yield from change_calls((self, target.train_length), target, sites)

    def change_own(self, site: AttentionSite, target: Target) -> Handle:
        """Replaces the spec of one of qkeel's own modules."""
        module = site.module
        assert isinstance(module, SpecModule)
        base, changes = module.__dict__.get(_CHANGES, (module.spec, []))
        mine: PlacedChange = (self, target.train_length)
        new = changed(module.spec, [mine])
        geometry = ParameterSizes(
            n_heads=site.n_heads, n_kv_heads=site.n_kv_heads, head_dim=site.head_dim
        )
        undo_parameters = change_parameters(target, site, module.spec, new, geometry)
        # On the module itself, so that a copy of the model keeps what it has.
        module.__dict__[_CHANGES] = (base, [*changes, mine])
        module.spec = new

        def undo() -> None:
            # Replay from the original spec, because another remedy may have changed a slot since, even the same slot.
            _, active = module.__dict__[_CHANGES]
            remaining = [change for change in active if change is not mine]
            module.spec = changed(base, remaining)
            module.__dict__[_CHANGES] = (base, remaining)
            if not remaining:
                del module.__dict__[_CHANGES]
            undo_parameters.remove()

        return Handle(undo)


def known_length(
    length: int | None, train_length: int | None, use: str, otherwise: str = ""
) -> int:
    """Returns the L of a formula: the remedy's option, or else the training length. `use` describes what needs L."""
    tokens = length or train_length
    if tokens is None:
        raise InvalidValueError(
            f"{use}: give L, as length=512 in the remedy or as qkeel.apply(..., train_length=512){otherwise}"
        )
    return tokens
