"""What runs on a push: its steps take what GitHub takes, and it runs on the versions of Python that are promised."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_workflows_are_what_github_takes_and_try_what_is_promised():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())[
        "jobs"
    ]
    steps = [step for job in jobs.values() for step in job["steps"]]
    for step in steps:
        given = step.get("with", {}).values()
        assert all(isinstance(value, str) for value in given), (
            f"{step}: a version or a list without quotes is no text"
        )
    run = " ".join(step.get("run", "") for step in steps)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    asked = re.findall(r"make (\w+)", run)
    assert {"check", "test", "docs"} <= set(asked) <= set(targets)
    assert "-m build" in run
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [
        one.rpartition(" :: ")[2]
        for one in project["classifiers"]
        if re.search(r":: 3\.\d+$", one)
    ]
    assert jobs["test"]["strategy"]["matrix"]["python"] == named
