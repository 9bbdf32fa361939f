"""The constant scale of an attention site."""

from __future__ import annotations

import math

import torch

from qkeel.errors import RefusedError
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, InverseSqrt
from qkeel.spec.logits import Scale


def base_spec(site: AttentionSite) -> AttentionSpec:
    """Returns the spec of a site, with a fixed scale that equals 1/√d replaced by InverseSqrt."""
    if site.spec.scale.kind != "fixed":
        return site.spec
    usual = math.isclose(
        constant_factor(site.spec.scale, site.head_dim),
        max(1, site.head_dim) ** -0.5,
        rel_tol=1e-6,
    )
    return site.spec.replace(scale=InverseSqrt()) if usual else site.spec


def constant_factor(scale: Scale, head_dim: int) -> float:
    """Returns a constant scale as a number, and refuses learned and position-dependent scales."""
    if scale.kind == "learned" or scale.follows_position:
        raise RefusedError(
            f"expected a scale that is one number, got {scale.formula()}; give the model a fixed scale"
        )
    return float(scale.factor(torch.zeros(1, 1), head_dim, {}))
