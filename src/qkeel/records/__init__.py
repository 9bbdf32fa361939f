"""The records on disk: the name, unit and shape of every recorded value, and how it is written and read. This package
does not import torch, because the report reads runs on machines without torch.

    recorded_fields      every recorded name, with its unit, shape and meaning
    file_formats         the formats: JSON lines, and the binary file of numbers per head
    run_directory        the files of a run, who may write them, and how they are read after a crash
    disk                 atomic replacement, appends, locks
"""

from qkeel.records.disk import replace_file as write_bytes
from qkeel.records.file_formats import (
    HeadRecorder,
    Heads,
    append_line,
    common_steps,
    fold_heads,
    layer_values,
    read_heads,
    read_json,
    read_lines,
    read_object,
    write_json,
    write_text,
)
from qkeel.records.recorded_fields import (
    BLOCK_FIELDS,
    CLASS_FIELDS,
    EXTRAPOLATION_COLUMNS,
    HEAD_FIELDS,
    LAYER_TYPES,
    MONITOR_FIELDS,
    NON_FINITE,
    SINK_HEAD,
    STAGES,
    STEP_FIELDS,
    TABLE_COLUMNS,
    TASK_FIELDS,
    Field,
    HeadField,
    explain_field,
    head_field,
    layer_fields,
    of_layers,
)
from qkeel.records.run_directory import (
    OVER,
    TYPES_EVENT,
    RunDirectory,
    RunStatus,
    fresh_directory,
    layer_types,
)

__all__ = [
    "BLOCK_FIELDS",
    "CLASS_FIELDS",
    "EXTRAPOLATION_COLUMNS",
    "HEAD_FIELDS",
    "LAYER_TYPES",
    "MONITOR_FIELDS",
    "NON_FINITE",
    "SINK_HEAD",
    "STAGES",
    "STEP_FIELDS",
    "OVER",
    "TYPES_EVENT",
    "TABLE_COLUMNS",
    "TASK_FIELDS",
    "Field",
    "HeadField",
    "HeadRecorder",
    "Heads",
    "RunDirectory",
    "RunStatus",
    "append_line",
    "common_steps",
    "explain_field",
    "fold_heads",
    "fresh_directory",
    "head_field",
    "layer_fields",
    "layer_types",
    "layer_values",
    "of_layers",
    "read_heads",
    "read_json",
    "read_lines",
    "read_object",
    "write_bytes",
    "write_json",
    "write_text",
]
