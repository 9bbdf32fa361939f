"""The description of what is watched, as plain data for the sinks."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import sys
from collections.abc import Sequence

import torch
from torch import nn

from qkeel import dist
from qkeel.heads.site import AttentionSite, Missed
from qkeel.monitor.cadence import Cadence
from qkeel.records.made_on import made_on
from qkeel.version import VERSION


def about(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    missed: Sequence[Missed],
    optimizer: torch.optim.Optimizer | None,
    cadence: Cadence,
) -> dict[str, object]:
    """Model, sites, optimizer, cadence, versions and command, as plain data.

    Args:
        model: what is watched; an nn.ModuleDict of several.
        sites: the attentions that are watched.
        missed: those that are not understood.
        optimizer: what steps the model, if that is known.
        cadence: which steps are measured.
    """
    parameters = list(model.parameters())
    models = [*model.children()] if type(model) is nn.ModuleDict else [model]
    return {
        "model": " and ".join(dict.fromkeys(type(one).__name__ for one in models)),
        "parameters": sum(p.numel() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
        "sites": site_facts(sites),
        "missed": [dataclasses.asdict(one) for one in missed],
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "cadence": repr(cadence),
        "processes": dist.world(),
        "versions": {
            "qkeel": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **made_on(),
        "command": shlex.join(sys.argv),
    }


def site_facts(sites: Sequence[AttentionSite]) -> list[dict[str, object]]:
    """Name, geometry, and whether the weights are known, of each site."""
    return [
        {
            "name": site.name,
            "n_heads": site.n_heads,
            "n_kv_heads": site.n_kv_heads,
            "head_dim": site.head_dim,
            "weights": _weights(site),
        }
        for site in sites
    ]


def _weights(site: AttentionSite) -> str:
    if not site.terms:
        return f"unknown: {site.why}"
    return f"not confirmed: {site.unverified}" if site.unverified else "known"
