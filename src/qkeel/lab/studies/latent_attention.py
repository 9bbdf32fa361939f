"""The latent-attention study: which remedies hold logits that are products of three matrices, under which optimizer."""

from __future__ import annotations

from typing import Literal

from qkeel.lab.plan import AXIS_OPTIONS, OPTIMIZERS, Grid, Option, Study, parts

DEFAULT = Grid(
    remedies=("none", "qk_norm", "qk_clip:threshold=30", "lalr:tau=0.1", "qk_lr:factor=0.1"),
    lrs=(0.01, 0.1, 0.3),
    seeds=(0, 1, 2),
    blocks=("mla", "mha"),
    optimizers=("adamw", "muon"),
)
# Source: Anson & Aitchison 2025, arXiv 2511.21377, section 4: remedies on MHA and MLA under Muon.
STUDY = Study(
    help="By default none, qk_norm, qk_clip:threshold=30, lalr:tau=0.1 and qk_lr:factor=0.1 at 0.01, 0.1 and 0.3. "
    "Finished runs are kept, killed ones resume, and the directory takes more of everything later.",
    grid=DEFAULT,
    runs=parts,
    options=(
        *AXIS_OPTIONS,
        Option("blocks", list[Literal["mla", "mha"]], "Attention: latent and multi-head [default: mla mha]."),
        OPTIMIZERS,
    ),
    decides=(("optim", "lr"), ("optim", "name"), ("model", "block")),
)
