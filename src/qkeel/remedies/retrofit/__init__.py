"""Trained models: norms put in with their gains fitted, factors folded into weights, checkpoints in another shape."""

from qkeel.remedies.retrofit.folding import Folded, fold
from qkeel.remedies.retrofit.shapes import SHAPES
from qkeel.remedies.retrofit.writing import convert, export

__all__ = ["SHAPES", "Folded", "convert", "export", "fold"]
