"""Records as tables: frames of named columns, what they become in pandas, polars, CSV and Parquet, and figures."""

from qkeel.frames.frame import Foreign, Frame, heads_frame, steps_frame
from qkeel.frames.table_files import TABLE_FORMATS, TableFiles

__all__ = ["TABLE_FORMATS", "Foreign", "Frame", "TableFiles", "heads_frame", "steps_frame"]
