"""Trained models: norms put in with their gains fitted, factors folded into weights, checkpoints in another shape."""

from qkeel.remedies.retrofit.architectures import SHAPES
from qkeel.remedies.retrofit.export_model import convert, export
from qkeel.remedies.retrofit.fold import Folded, fold
from qkeel.remedies.retrofit.insert import Fitting, Retrofit, retrofit
from qkeel.remedies.retrofit.predictions import Gap, LayerGap, RetrofitReport

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
