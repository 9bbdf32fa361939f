"""AUDIT: reads a checkpoint head by head without running it, and explains a model's attention by experiment.

The files by command:

    check                is it healthy? Of a model in one pass (one_pass): visibility, config_differences, saturation,
                         output_gates; with sees=: sees, allowed_inputs
    scan                 what logits do a checkpoint's weights allow? checkpoint_config: its sizes; checkpoint_heads: the
                         rows of each head; logit_bounds: the bounds
    explain              what does each layer compute? norm_evidence: its norms and rotations; recipes: the answer
    maps                 attention_maps
"""

from qkeel.audit.allowed_inputs import Documents, Window
from qkeel.audit.check import check
from qkeel.audit.checkpoint_config import Geometry
from qkeel.audit.checkpoint_heads import Unknown
from qkeel.audit.explain import explain
from qkeel.audit.logit_bounds import SiteReport
from qkeel.audit.maps import AttentionMaps, attention_maps
from qkeel.audit.recipes import Explanation, NormRecipe, Rotation, SiteRecipe
from qkeel.audit.scan import Scan, TensorReport, as_json, scan, table
from qkeel.deprecation import earlier_name

__all__ = [
    "AttentionMaps",
    "Documents",
    "Explanation",
    "Geometry",
    "NormRecipe",
    "Rotation",
    "Scan",
    "SiteRecipe",
    "SiteReport",
    "TensorReport",
    "Unknown",
    "Window",
    "as_json",
    "attention_maps",
    "check",
    "explain",
    "scan",
    "table",
]


def __getattr__(name: str) -> object:
    if earlier_name(__name__, name, {"explain_model": "explain"}) == "explain":
        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
