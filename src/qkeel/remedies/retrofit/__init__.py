"""Changes trained models: inserts norms with fitted gains, folds factors into weights, and exports checkpoints."""

from qkeel.remedies.retrofit.export_model import SHAPES, convert, export
from qkeel.remedies.retrofit.fold import Folded, fold
from qkeel.remedies.retrofit.insert import Retrofit, RetrofitConfig, retrofit
from qkeel.remedies.retrofit.report import Gap, RetrofitReport

__all__ = [
    "SHAPES",
    "RetrofitConfig",
    "Folded",
    "Gap",
    "Retrofit",
    "RetrofitReport",
    "convert",
    "export",
    "fold",
    "retrofit",
]
