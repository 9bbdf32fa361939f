"""The latent-attention study: which remedies hold logits that are products of three matrices, under which optimizer."""

from __future__ import annotations

from qkeel.lab.plan.plan import Grid, Study, parts

DEFAULT = Grid(
    remedies=("none", "qk_norm", "qk_clip:threshold=30", "lalr:tau=0.1", "qk_lr:factor=0.1"),
    lrs=(0.01, 0.1, 0.3),
    seeds=(0, 1, 2),
    blocks=("mla", "mha"),
    optimizers=("adamw", "muon"),
)
# Source: Anson & Aitchison 2025, arXiv 2511.21377, section 4: remedies on MHA and MLA under Muon.
STUDY = Study(
    about="Latent and multi-head attention × AdamW and Muon × remedies × learning rates × seeds.",
    grid=DEFAULT,
    runs=parts,
)
