"""The choice of how a group of runs is computed."""

from __future__ import annotations

from collections.abc import Sequence

from qkeel.kernels.native import stacked_ops
from qkeel.lab.config import RunConfig
from qkeel.lab.stack.compiled_arithmetic import CompiledArithmetic
from qkeel.lab.stack.stacked_arithmetic import StackedArithmetic
from qkeel.lab.stack.what_runs_share import small, why_not_stacked
from qkeel.lab.training.arithmetic import Arithmetic, TorchArithmetic
from qkeel.lab.training.run_state import RunState


def choose_arithmetic(runs: Sequence[RunState]) -> Arithmetic:
    """Returns the fastest way to the numbers of these runs; its `reason` says why it is not a faster one.

    A run alone is computed by compiled operators wherever it would be in a stack: so it has the same bits there.
    """
    config = runs[0].config
    slow = why_not_compiled(config)
    if not slow:
        return CompiledArithmetic(runs)
    if len(runs) > 1 and not why_not_stacked(config):
        return StackedArithmetic(runs, slow)
    return TorchArithmetic(runs, slow)


def why_not_compiled(config: RunConfig) -> str:
    """The reason why compiled operators of stacks do not compute runs of a configuration; empty where they do."""
    if reason := why_not_stacked(config):
        return reason
    if not small(config):
        return "the model is so large that its products fill a core"
    return "" if stacked_ops.ready() else "the compiled operators are off or not available here"
