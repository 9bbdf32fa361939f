"""AUDIT: a checkpoint read head by head without running it."""

from qkeel.audit.geometry import Geometry
from qkeel.audit.heads import SiteReport
from qkeel.audit.layouts import Unknown
from qkeel.audit.scan import Scan, TensorReport, scan
from qkeel.audit.show import as_json, table

__all__ = ["Geometry", "Scan", "SiteReport", "TensorReport", "Unknown", "as_json", "scan", "table"]
