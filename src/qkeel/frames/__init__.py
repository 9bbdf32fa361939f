"""Records as tables: frames of named columns, their conversion to pandas, CSV and Parquet, and figures."""

from qkeel.frames.tables import (
    TABLE_FORMATS,
    Foreign,
    Frame,
    TableFiles,
    heads_frame,
    layers_frame,
    steps_frame,
)

__all__ = [
    "TABLE_FORMATS",
    "Foreign",
    "Frame",
    "TableFiles",
    "heads_frame",
    "layers_frame",
    "steps_frame",
]
