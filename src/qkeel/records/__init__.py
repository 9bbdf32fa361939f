"""The records on disk: names, units and shapes of every recorded number, and how it is written and read. No torch
here: the report reads runs on machines that have none."""

from qkeel.records.files import append_line, read_json, read_lines, write_bytes, write_json, write_text
from qkeel.records.heads_file import HeadRecorder, Heads, fold_heads, read_heads
from qkeel.records.names_and_units import (
    CLASS_FIELDS,
    EXTRAPOLATION_COLUMNS,
    HEAD_FIELDS,
    NON_FINITE,
    STEP_FIELDS,
    TABLE_COLUMNS,
    TASK_FIELDS,
    VALUE_FIELDS,
    Field,
    HeadField,
    explain_field,
    field_unit,
    head_field,
    layer_fields,
)
from qkeel.records.rundir import RunDirectory, RunStatus, fresh_directory

__all__ = [
    "CLASS_FIELDS",
    "EXTRAPOLATION_COLUMNS",
    "HEAD_FIELDS",
    "NON_FINITE",
    "STEP_FIELDS",
    "TABLE_COLUMNS",
    "TASK_FIELDS",
    "VALUE_FIELDS",
    "Field",
    "HeadField",
    "HeadRecorder",
    "Heads",
    "RunDirectory",
    "RunStatus",
    "append_line",
    "explain_field",
    "field_unit",
    "fold_heads",
    "fresh_directory",
    "head_field",
    "layer_fields",
    "read_heads",
    "read_json",
    "read_lines",
    "write_bytes",
    "write_json",
    "write_text",
]
