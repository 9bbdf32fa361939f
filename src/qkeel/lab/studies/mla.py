"""The latent-attention study: which remedies hold logits that are products of three matrices, under which optimizer."""

from __future__ import annotations

from qkeel.lab.config import RunConfig
from qkeel.lab.plan import Grid, Plan, parts

DEFAULT = Grid(
    remedies=("none", "qk_norm", "qk_clip:threshold=30", "lalr:tau=0.1", "qk_lr:factor=0.1"),
    lrs=(0.01, 0.1, 0.3),
    seeds=(0, 1, 2),
    blocks=("mla", "mha"),
    optimizers=("adamw", "muon"),
)


def plan(base: RunConfig, grid: Grid | None) -> Plan:
    """Latent and multi-head attention × AdamW and Muon × remedies × rates × seeds.

    Source: Anson & Aitchison 2025, arXiv 2511.21377, section 4: remedies on MHA and MLA under Muon.
    """
    grid = grid or DEFAULT
    return Plan(name="mla", grid=grid, runs=parts(base, grid))
