"""The table of classes of input that are fuzzed; a new class is a file with one Hunt and a line here."""

from __future__ import annotations

from tests.fuzz import (
    applied_remedies,
    built_objects,
    checkpoint_configs,
    command_lines,
    data_files,
    heads_files,
    json_texts,
    kernels_float64,
    modules_float64,
    recipes,
    resumed_runs,
    safetensors_headers,
    spec_strings,
    studies,
    study_plans,
    watched_runs,
)
from tests.fuzz.hunt import Hunt

CLASSES: dict[str, Hunt] = {
    "spec-strings": spec_strings.HUNT,
    "objects": built_objects.HUNT,
    "apply": applied_remedies.HUNT,
    "command-lines": command_lines.HUNT,
    "recipes": recipes.HUNT,
    "json": json_texts.HUNT,
    "safetensors": safetensors_headers.HUNT,
    "checkpoint-configs": checkpoint_configs.HUNT,
    "studies": studies.HUNT,
    "study-plans": study_plans.HUNT,
    "watched-runs": watched_runs.HUNT,
    "resumed-runs": resumed_runs.HUNT,
    "heads": heads_files.HUNT,
    "data": data_files.HUNT,
    "kernels": kernels_float64.HUNT,
    "modules": modules_float64.HUNT,
}
