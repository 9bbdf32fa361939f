"""FIX: remedies by name, applied in one line and undone in one line.

The files by remedy:

    apply, apply_now     `qkeel.apply`; the checks, the order and the undo of remedies on known attention. next_pass:
                         remedies that wait for a pass which shows it
    table, base          the table of remedies and the parser of spec strings; what a remedy and its target are
    one_slot             a cap, a scale or a normalizer in the spec (spec_remedy, foreign_attention, changed_call)
    qk_norm, qkv_norm    norms of queries and keys (insert_norms, head_norms, added_parameters)
    lalr, qk_weights     steps of query and key weights (step_remedy, optimizer_steps, optimizer_trials, head_weights)
    qk_clip              weights of heads over a threshold (logit_factors, shared_maxima, head_rows)
    sigma_reparam, output_gate, output_head, residual_branches (pre_norm_blocks)
    active, idle_steps, untrained_parameters, weights_in_use
                         what is active, and what keeps a remedy from acting
    saved_state          states in the optimizer's checkpoints; processes: models that several processes train
    retrofit             norms for a trained model, fitted so that it computes what it did; its export
"""

import sys
from types import ModuleType

from qkeel.remedies.apply import (
    ALIASES,
    REMEDIES,
    Note,
    apply,
    canonical,
    note,
    parse,
    remedies,
)
from qkeel.remedies.base import Remedy, Target

__all__ = [
    "ALIASES",
    "REMEDIES",
    "Note",
    "Remedy",
    "Target",
    "apply",
    "canonical",
    "note",
    "parse",
    "remedies",
]


class _Room(ModuleType):
    # The public name qkeel.remedies is both this package and the function that lists what is in it.
    def __call__(self) -> dict[str, str]:
        return remedies()


sys.modules[__name__].__class__ = _Room
