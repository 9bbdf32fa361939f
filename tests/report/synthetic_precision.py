"""The rows of a precision study, made up by a rule of their own: errors in proportion to the logit."""

from __future__ import annotations

import math

Row = dict[str, float | str]
UNITS = {"fp32": 1e-7, "bf16": 1e-3}


def measured() -> tuple[list[Row], list[Row]]:
    """Every size, and the thresholds at 0.25 nats."""
    rows: list[Row] = []
    thresholds: list[Row] = []
    for data in ("spread", "shifted"):
        for remedy, size in (("none", 1.0), ("qk_norm", 0.01)):
            for name, unit in UNITS.items():
                about: Row = {"data": data, "remedy": remedy, "format": name, "kernel": "fused"}
                for logit in (10.0, 100.0, 1000.0, 10_000.0):
                    error = {"logit_error": unit * logit * size, "predicted_error": 0.9 * unit * logit * size}
                    sizes = {"size": logit, "max_logit": logit * size}
                    rows.append({**about, **sizes, **error, "output_error": unit, "flipped": 0.0, "overflow": 0.0})
                over = 250.0 if (name, remedy) == ("bf16", "none") else math.nan
                found: Row = {"predicted": over / 0.9, "logit": over, "output": math.nan, "overflow": math.nan}
                thresholds.append({**about, **found})
    return rows, thresholds
