"""Cases that once ended in a traceback, a hang, a file outside the directory or silence; each is now told."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fuzz.classes import CLASSES

from qkeel.errors import QkeelError

_NTK = {"groups": 1, "shared": 1, "t": 1, "s": 5, "d": 2, "values": 0, "mask": "full", "dtype": "bf16", "large": 0.0}
REFUSED: list[tuple[str, Any]] = [
    ("kernels", {"spec": "dynamic_ntk", **_NTK, "seed": 0}),  # NaN in silence
    ("checkpoint-configs", ({"head_dim": [None]}, None, "qwen3")),
    ("checkpoint-configs", ({"model_type": []}, None, "scan")),
    ("checkpoint-configs", ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, None, "scan")),
    ("checkpoint-configs", ({}, ("config.json", ("pipe",)), "scan")),
    ("checkpoint-configs", ({}, ("model-1.safetensors", ("device",)), "scan")),
    ("json", (b"[" * 2000, "config.json")),
    ("json", (b"9" * 5000, "config.json")),
    ("json", (b'{"step": 1, "step": 2}', "metrics.jsonl")),
    ("json", (b'{"runs": [{"run_id": "a", "remedy": "none", "lr": "fast", "seed": 0}]}', "study.json")),
    ("safetensors", (b'{"a": {"dtype": "XX", "shape": [4, 4], "data_offsets": [0, 64]}}', 64)),
    ("safetensors", (b'{"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0.0, 64.0]}}', 64)),
    ("safetensors", (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]}}', 20)),
    ("safetensors", (b'{"__metadata__": {"a": 1}}', 0)),
    *[
        ("study-plans", (None, name))
        for name in ('"../../elsewhere"', '"/elsewhere"', '".."', '"a/b"', '"a\\\\u0000b"')
    ],
    ("study-plans", (("loop",), None)),
    ("watched-runs", [(18, ("hole",))]),
    ("heads", ("heads.f32", ("folder",), 3)),
    ("data", ("a.txt", b"text", ("device",), 0)),
    ("data", ("a.bin#uint8", b"text", ("hole",), 0)),
    ("recipes", "a = " + "[" * 2000),
    ("recipes", "seed = " + "9" * 5000),
    ("resumed-runs", (0, ("folder",))),
    ("study-plans", (("value", [5], "null"), None)),
    ("objects", ("RunConfig", {"seed": 2**64})),
    ("objects", ("LongContexts", {"sequences": None})),
    ("objects", ("LongContexts", {"test_lengths": ["512"]})),
    ("objects", ("Grid", {"remedies": ["none"], "lrs": ["fast"], "seeds": [0]})),
]
RIGHT: list[tuple[str, Any]] = [
    ("spec-strings", ("terms", "0\r:")),
    ("resumed-runs", (1, ("text", "{}"))),
    ("resumed-runs", (29, ("lose", [59]))),
    ("recipes", '[data]\nsource = "a\\nb\\u007F\\t\\"\\\\"'),
    ("command-lines", ["report", ".", "-o", "/dev/null"]),
    ("command-lines", ["config", "--recipe", "."]),
]


@pytest.mark.parametrize(("name", "case"), REFUSED)
def test_what_was_a_traceback_is_a_clear_error(name: str, case: Any) -> None:
    with pytest.raises(QkeelError, match=r"\w+"):
        CLASSES[name].check(case)


@pytest.mark.parametrize(("name", "case"), RIGHT)
def test_what_was_wrong_is_right(name: str, case: Any) -> None:
    CLASSES[name].check(case)
