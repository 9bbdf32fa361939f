"""Commands that need no torch: pages, figures, the lists of presets and remedies, and `qkeel explain NAME`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from qkeel.cli.commands import OK
from qkeel.cli.parameters import Several, Unset, is_function
from qkeel.errors import InvalidValueError, UnknownNameError
from qkeel.records import explain_field
from qkeel.report import write
from qkeel.report.figures import WIDTH, check_settings
from qkeel.report.figures import figures as draw

# `qkeel presets`, `qkeel remedies`, `qkeel explain NAME`: what names mean, printed without waiting for torch.

# Generated in advance by tests/cli/answers.py, because that imports torch, which takes seconds; a test compares them.
ANSWERS = Path(__file__).with_name("answers.json")


def list_presets() -> int:
    """List the published attention recipes."""
    return _print(answers()["presets"])


def list_remedies() -> int:
    """List the remedies."""
    return _print(answers()["remedies"])


def explain_command(name: str, /) -> int:
    """Print the formula and source of a preset or remedy, or the definition of a recorded metric.

    Args:
        name: A preset or remedy, with options if needed, like gemma2:cap=30 or lalr:tau=0.1, or a metric like
            sink_head_ratio.
    """
    explanation = answers()["explained"].get(name)
    with suppress(UnknownNameError):
        number = f"{name}: {explain_field(name)}"
        explanation = (
            number
            if explanation is None
            else f"{explanation}\n\nA recorded metric has the same name. {number}"
        )
    # a name with options, several names, or an unknown name.
    if explanation is None:
        from qkeel.cli.audit import explain

        explanation = explain(name)
    print(explanation)
    return OK


def answers() -> Mapping[str, Mapping[str, str]]:
    """Returns the summary lines of the presets and remedies, and the output of `explain` for each of them."""
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


def _print(names: Mapping[str, str]) -> int:
    width = max(map(len, names))
    for name, line in names.items():
        print(f"{name:<{width}}  {line}")
    return OK


# `qkeel report`: one HTML page about studies, runs or watched models.


def report(
    runs: Several[Path],
    /,
    *,
    output: Annotated[Path, Parameter(alias="-o")] = Path("report.html"),
    baseline: str = "none",
) -> int:
    """Write one self-contained HTML page about studies, runs or watched models.

    Args:
        runs: Directories of studies, of runs, or of watched models.
        output: The file to write.
        baseline: For a study, the remedy to compare the others with, like qk_norm.
    """
    write(runs, output, baseline=baseline)
    print(output)
    return OK


# `qkeel figures`: the figures of a study, a watched run or a model's attention as files for a paper.


def figures(
    run: Path,
    /,
    *,
    out: Unset[Path] = None,
    formats: Several[Literal["pdf", "svg", "png"]] = ["pdf", "svg"],  # noqa: B006 - read only
    width: float = WIDTH,
    baseline: str = "none",
    layers: Several[str] = [],  # noqa: B006 - read only
) -> int:
    """Write the figures of a study, a watched run or a model's attention for a paper, as PDF, SVG or PNG.

    Figures are drawn by matplotlib, which `pip install matplotlib` installs. The same data always produces identical
    files.

    Args:
        run: Directory of a study, of a run, or of a watched model; or module:function, where the function returns a
            model and a batch for it, whose attention maps are drawn.
        out: The folder to write to [default: NAME-figures].
        formats: One or more of pdf, svg and png.
        width: Width of a figure in inches; 3.3 is one column of a two-column page.
        baseline: For a study, the remedy relative to which gains are computed, like qk_norm.
        layers: With module:function, the layers whose attention is drawn, like h.0.attn; by default all.
    """
    check_settings(formats, width)
    source, name = run, run.resolve().name
    if is_function(run):
        # Here, because the commands of this file need no torch otherwise.
        from qkeel.audit import attention_maps
        from qkeel.cli.audit import of_model

        source = of_model(
            str(run),
            lambda model, batch: attention_maps(model, batch, layers=layers or None),
        )
        name = str(run).rpartition(":")[2]
    elif layers:
        raise InvalidValueError(
            f"expected module:function with --layers, got {run}: the maps are those of a model that runs"
        )
    for path in draw(
        source,
        out or Path(f"{name}-figures"),
        formats=formats,
        width=width,
        baseline=baseline,
    ):
        print(path)
    return OK
