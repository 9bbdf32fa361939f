"""AUDIT: a checkpoint read head by head without running it; a model's attention explained by experiment."""

from qkeel.audit.check import check
from qkeel.audit.explain.explain import explain_model
from qkeel.audit.explain.recipe import Explanation, NormRecipe, SiteRecipe
from qkeel.audit.explain.responses import Rotation
from qkeel.audit.scan.geometry import Geometry
from qkeel.audit.scan.head_bounds import SiteReport
from qkeel.audit.scan.scan import Scan, TensorReport, scan
from qkeel.audit.scan.scan_table import as_json, table
from qkeel.audit.scan.weight_layouts import Unknown

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
    "check",
    "explain_model",
    "scan",
    "table",
]
