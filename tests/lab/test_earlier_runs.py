"""Runs of earlier versions, whose files have checksums: read and gone on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lab.recorded import numbers, timeless

from qkeel.lab import RunConfig, Watcher, run
from qkeel.report.study_runs import read_study


def as_before(place: Path) -> None:
    """Gives all files of a run a checksum."""
    for path in [*place.glob("*.json"), *place.glob("*.jsonl")]:
        whole = path.suffix == ".json"
        texts = [path.read_text()] if whole else path.read_text().splitlines()
        values = [{**json.loads(text), "crc32": "00000000"} for text in texts]
        for value in values:
            if path.name == "config.json":
                value["data"]["tokens"] = "bytes"  # a setting that there was
            if path.name == "metrics.jsonl":
                value["mfu"] = None
        path.write_text(
            "".join(
                json.dumps(value, indent=2 if whole else None) + "\n"
                for value in values
            )
        )
    (place / "heads.crc32").write_bytes(bytes(8))
    if (place / "DONE").exists():
        (place / "DONE").write_text(json.dumps({"heads.crc32": 8, "crc32": "00000000"}))


def test_a_run_of_an_earlier_version_is_read_and_gone_on_with(
    tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    steps = iter(range(100))
    with pytest.raises(KeyboardInterrupt):
        run(
            tiny(),
            tmp_path / "cut",
            watcher=Watcher(should_stop=lambda: next(steps) == 6),
        )
    run(tiny(), tmp_path / "whole")
    whole = numbers(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "old")
    as_before(tmp_path / "old")
    (tmp_path / "cut" / "heads.crc32").write_bytes(bytes(8))
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    config["data"]["tokens"] = "bytes"
    (tmp_path / "cut" / "config.json").write_text(json.dumps(config))
    run(tiny(), tmp_path / "cut")
    old, new = (
        read_study(tmp_path / name).runs[0].metrics for name in ("old", "whole")
    )
    assert list(map(timeless, old)) == list(map(timeless, new))
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "old") == whole
