"""Trained models: norms put in with their gains fitted, factors folded into weights, checkpoints in another shape."""

from qkeel.remedies.retrofit.folding import Folded, fold
from qkeel.remedies.retrofit.insert import Fitting, Retrofit, retrofit
from qkeel.remedies.retrofit.report import Gap, LayerGap, RetrofitReport
from qkeel.remedies.retrofit.shapes import SHAPES
from qkeel.remedies.retrofit.writing import convert, export

__all__ = [
    "SHAPES",
    "Fitting",
    "Folded",
    "Gap",
    "LayerGap",
    "Retrofit",
    "RetrofitReport",
    "convert",
    "export",
    "fold",
    "retrofit",
]
