"""AUDIT: a checkpoint read head by head without running it; a model's attention explained by experiment."""

from qkeel.audit.explain import explain_model
from qkeel.audit.geometry import Geometry
from qkeel.audit.heads import SiteReport
from qkeel.audit.layouts import Unknown
from qkeel.audit.recipe import Explanation, NormRecipe, SiteRecipe
from qkeel.audit.responses import Rotation
from qkeel.audit.scan import Scan, TensorReport, scan
from qkeel.audit.show import as_json, table

__all__ = [
    "Explanation",
    "Geometry",
    "NormRecipe",
    "Rotation",
    "Scan",
    "SiteRecipe",
    "SiteReport",
    "TensorReport",
    "Unknown",
    "as_json",
    "explain_model",
    "scan",
    "table",
]
