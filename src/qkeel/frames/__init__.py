"""Records as tables: frames of named columns, their conversion to pandas, CSV and Parquet, and figures.

`run_verdict` judges a recorded run, in the words of `metrics.verdict`.
"""

from qkeel.frames.tables import Foreign, Frame, heads_frame, steps_frame

__all__ = [
    "Foreign",
    "Frame",
    "heads_frame",
    "steps_frame",
]
