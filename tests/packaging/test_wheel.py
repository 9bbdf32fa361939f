"""The wheel holds all a user needs and imports where only it is installed."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_holds_code_typing_marker_licence_and_chart_library(
    wheel,
):
    names = zipfile.ZipFile(wheel).namelist()
    assert any(n.endswith("plot.min.js.xz") for n in names)
    assert any("LICENSE" in n for n in names)
    assert "qkeel/py.typed" in names
    assert {
        "qkeel/kernels/norm_rope/norm_rope.cpp",
        "qkeel/kernels/native/source/rows.h",
    } <= set(names)
    entry_points = next(n for n in names if n.endswith("entry_points.txt"))
    assert (
        "qkeel = qkeel.__main__:main"
        in zipfile.ZipFile(wheel).read(entry_points).decode()
    )
    assert not any(n.startswith(("tests/", "benchmarks/", "docs/")) for n in names)


@pytest.mark.slow  # half of it is the import of torch
def test_the_installed_wheel_imports_and_attends(wheel, tmp_path):
    target = tmp_path / "site"
    # All that installing a wheel of pure Python does.
    zipfile.ZipFile(wheel).extractall(target)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import qkeel, torch; "
        "assert qkeel.__file__.startswith(sys.argv[1]), qkeel.__file__; "
        "q = torch.randn(1, 2, 4, 8); print(qkeel.attention(q, q, q, spec=qkeel.preset('llama4')).shape)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.stdout.strip() == "torch.Size([1, 2, 4, 8])", run.stderr[-2000:]


@pytest.mark.slow
def test_the_source_distribution_is_of_a_megabyte_at_most_and_can_be_installed(
    tmp_path,
):
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    subprocess.run([*command, "--outdir", str(tmp_path), str(ROOT)], check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.stat().st_size <= 1_000_000
    options = ["--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site")]
    command = [sys.executable, "-m", "pip", "install", *options, str(archive)]
    subprocess.run(command, check=True)
    code = """
from qkeel.lab.images import load_digits
from qkeel.report import html
page = {"template": "study.html", "title": "t", "meta": "", "lead": "", "cautions": [], "charts": [], "data": None}
text = html.render({**page, "table": None, "facts": {}, "again": "", "made": ""})
print(html.__file__, len(load_digits().pixels), "</html>" in text)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert run.stdout.split()[1:] == ["1797", "True"], run.stderr[-2000:]
    assert run.stdout.startswith(str(tmp_path))


def test_one_version_everywhere():

    import qkeel

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert project["version"] == qkeel.__version__
    assert f"version: {qkeel.__version__}" in citation


# Where the package that is imported has another name.
DISTRIBUTIONS = {
    "mlflow": "mlflow_skinny",
}
# By torch; a stub for types; there in every notebook.
BROUGHT = {
    "triton",
    "_typeshed",
    "IPython",
}
OURS = {"dev", "docs", "bench", "cross"}  # extras for work on qkeel itself


def test_every_package_that_is_imported_is_declared_for_users():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *(line for name in extras.keys() - OURS for line in extras[name]),
    ]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}
    text = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    code = re.sub(r'"""(.|\n)*?"""', "", text)
    pattern = r"^ *(?:import (\w+)|from (\w+)\S* import) ?"
    names = {a or b for a, b in re.findall(pattern, code, re.MULTILINE)}
    imported = {
        DISTRIBUTIONS.get(name, name)
        for name in names - sys.stdlib_module_names - {"qkeel"}
    }
    assert imported - BROUGHT <= declared
