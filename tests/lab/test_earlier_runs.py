"""Runs of earlier versions, without checksums: read and gone on with, with one note."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
from tests.lab.recorded import numbers

from qkeel.errors import QkeelWarning
from qkeel.lab import RunConfig, Watcher, run
from qkeel.report.study.collect import collect


def as_before(place: Path) -> None:
    """Takes all checksums out of a run's files."""
    for path in [*place.glob("*.json"), *place.glob("*.jsonl")]:
        whole = path.suffix == ".json"
        texts = [path.read_text()] if whole else path.read_text().splitlines()
        values = [json.loads(text) for text in texts]
        for value in values:
            assert value.pop("crc32")
            value.pop("checksums", None)
            if path.name == "config.json":
                value["data"]["tokens"] = "bytes"  # a setting that there was
            if path.name == "metrics.jsonl":
                value["mfu"] = None
        path.write_text("".join(json.dumps(value, indent=2 if whole else None) + "\n" for value in values))
    (place / "heads.crc32").unlink()
    if (place / "DONE").exists():
        (place / "DONE").write_text("")
    path = place / "last" / "state.safetensors"
    with safetensors.safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
        about = json.loads(file.metadata()["qkeel"])
    del about["sizes"]
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, path, {"qkeel": json.dumps(about)})


def test_a_run_of_an_earlier_version_is_read_and_gone_on_with(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    steps = iter(range(100))
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path / "cut", watcher=Watcher(should_stop=lambda: next(steps) == 6))
    run(tiny(), tmp_path / "whole")
    whole = numbers(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "old")
    as_before(tmp_path / "old")
    as_before(tmp_path / "cut")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default", QkeelWarning)
        run(tiny(), tmp_path / "cut")
        assert collect(tmp_path / "old").runs[0].metrics == collect(tmp_path / "whole").runs[0].metrics
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "old") == whole
    assert [str(one.message).count("no checksums") for one in told] == [1, 1]  # of a resume, of a page
    assert '"crc32"' in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()[-1]
    assert not (tmp_path / "cut" / "heads.crc32").exists()
