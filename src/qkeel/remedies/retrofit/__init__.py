"""Trained models: norms put in with their gains fitted, factors folded into weights, checkpoints in another shape."""

from qkeel.remedies.retrofit.fold import Folded, fold

__all__ = ["Folded", "fold"]
