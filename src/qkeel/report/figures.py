"""Figures of a study, a watched run or attention maps for a paper, drawn with matplotlib."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from qkeel.errors import InvalidValueError, RunDirectoryError, check_known, needed
from qkeel.frames import Foreign, tables
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.records import fold_heads
from qkeel.records.disk import make_directory
from qkeel.report.compare import Cell, cells
from qkeel.report.html import rate
from qkeel.report.study_runs import BASELINE, StudyData, as_paths, read_study
from qkeel.report.watch_page import short_names
from qkeel.report.watched_runs import Watched, is_watched, read_watched

FORMATS = ("pdf", "svg", "png")
# Inches: one column of a two-column page.
WIDTH = 3.3
# Height / width.
_RATIO = 0.68
# Colours of Okabe and Ito (2008), which red-green colour-blind readers can distinguish.
_COLOURS = (
    "#5a6169",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#b65a94",
    "#d99a00",
    "#56b4e9",
    "#7a5230",
)
_STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # embeds TrueType fonts, which journals require
    "svg.fonttype": "none",
    "svg.hashsalt": "qkeel",  # makes files reproducible
}
# With its date in it, a figure that is drawn again from the same records would be a different file.
_UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}


def figures(
    path: str | Path | Mapping[str, object],
    out: str | Path,
    *,
    formats: Sequence[str] = ("pdf", "svg"),
    width: float = WIDTH,
    baseline: str = BASELINE,
) -> list[Path]:
    """Writes the figures of a study, a lab run, a watched run or attention maps, and returns the files.

    The figures of a watched run show the largest logit, the entropy and the norms of queries and keys of each layer
    over the steps, and a heat map of the last record. The figures of a study show the held-out loss and the largest
    logit against the learning rate (with ranges over seeds), the largest logit over the steps at each rate, and the
    gains over a baseline (with 95 % intervals). Of attention maps there is one figure a layer, with all heads of the
    batch's first sample.

    Args:
        path: a directory written by `qkeel watch`, `qkeel run` or `qkeel study`, or what `qkeel.attention_maps`
            returns.
        out: the output folder.
        formats: one or more of pdf, svg and png.
        width: the width of a figure in inches.
        baseline: for a study, the remedy relative to which gains are computed.

    Raises:
        MissingLibraryError: matplotlib is not installed.
        UnknownNameError: a format is unknown.
        InvalidValueError: the width is out of range.
        RunDirectoryError: nothing has been recorded, or the files cannot be read.
    """
    check_settings(formats, width)
    from matplotlib import rc_context  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    written = []
    with rc_context(_STYLE):
        if isinstance(path, Mapping):
            drawn = _of_maps(path, width)
        else:
            (directory,) = as_paths(path)
            on_axes = (
                _of_watched(read_watched([directory])[0])
                if is_watched(directory)
                else _of_study(read_study(directory, baseline))
            )
            # Not through pyplot, which would choose a window system and keep every figure until it is closed.
            blank = functools.partial(
                Figure, figsize=(width, _RATIO * width), layout="constrained"
            )
            drawn = _on_axes(on_axes, blank)
        for name, figure in drawn:
            make_directory(Path(out))
            for file_format in formats:
                target = Path(out) / f"{name}.{file_format}"
                figure.savefig(target, dpi=300, metadata=_UNDATED[file_format])
                written.append(target)
    if not written:
        raise RunDirectoryError(
            f"{path} has no records to draw; wait until the run has recorded something, or give another directory"
        )
    return written


def check_settings(formats: Sequence[str], width: float) -> None:
    """Raises an error if figures in these formats and this width cannot be drawn, before anything is read."""
    for file_format in formats:
        check_known("format of figures", file_format, FORMATS)
    if not 0.5 <= width <= 50:
        raise InvalidValueError(
            f"expected a width from 0.5 to 50 inches, got {width:g}"
        )
    with needed("figures", "matplotlib"):
        import matplotlib as mpl  # pyright: ignore[reportMissingImports]  # noqa: F401


def _of_maps(maps: Foreign, width: float) -> Iterator[tuple[str, Foreign]]:
    for layer in maps:
        # Quoted, so that no two layers share a file, and none lies in another folder.
        name = f"attention_{quote(layer, safe='#')}".removesuffix("_")
        yield name, maps.plot(layer, width=width)


def _on_axes(drawings: Drawing, blank: Foreign) -> Iterator[tuple[str, Foreign]]:
    """Yields the name of each figure, and the figure with the drawing on its axes."""
    for name, draw in drawings:
        figure = blank()
        draw(figure.subplots())
        yield name, figure


# The name of a figure, and a function that draws it on Axes.
Drawing = Iterator[tuple[str, Foreign]]


def _of_watched(run: Watched) -> Drawing:
    names = [
        f"layer {name}" if name.isdigit() else name for name in short_names(run.layers)
    ]
    labels = {
        "max_logit": "largest attention logit (nats)",
        "entropy": "attention entropy (nats)",
        "query_norm": "mean norm of queries",
        "key_norm": "mean norm of keys",
    }

    def draw(ax: Foreign, field: str) -> None:
        lines = fold_heads(field, run.heads.values[field])
        tables.draw_lines(ax, np.array(run.steps), lines, names, labels[field])
        if field == "max_logit":
            _draw_alarm(ax)

    fields = [name for name in labels if run.records and name in run.measured()]
    for field in fields:
        yield field, functools.partial(draw, field=field)
    if "max_logit" in fields:
        label, last = f"largest logit at step {run.steps[-1]:,}", run.heads.values
        yield (
            "heads",
            lambda ax: tables.draw_heads(ax, last["max_logit"][-1], names, label),
        )


def _draw_alarm(ax: Foreign) -> None:
    ax.axhline(ALARM_THRESHOLD, color="#b3261e", linewidth=0.7, linestyle=":")


def _of_study(study: StudyData) -> Drawing:
    """Yields the figures of a study or, if it has parts, of its first part."""
    first_part = next(iter(study.parts().values()))
    table = cells(first_part)
    if len(first_part.lrs()) > 1:
        loss = f"held-out loss ({study.loss_unit()})"
        yield (
            "val_loss_by_lr",
            lambda ax: _by_rate(ax, study, table, "val_loss", loss, log=False),
        )
        yield (
            "max_logit_by_lr",
            lambda ax: _by_rate(
                ax, study, table, "max_logit", "largest logit (nats)", log=True
            ),
        )
    for lr in sorted({run.lr for run in first_part.runs if run.metrics}):
        yield (
            # The page's minus sign is not ASCII; a file's name gets a hyphen.
            f"max_logit_lr_{rate(lr).replace(chr(0x2212), '-')}",
            lambda ax, lr=lr: _courses(ax, first_part, lr),
        )
    judged = [
        cell for cell in table if cell.gain is not None and cell.gain.effect is not None
    ]
    if judged:
        yield "gains", lambda ax: _gains(ax, study, judged)


def _colour(study: StudyData, remedy: str) -> str:
    return _COLOURS[study.remedies.index(remedy) % len(_COLOURS)]


def _by_rate(
    ax: Foreign,
    study: StudyData,
    table: Sequence[Cell],
    field: str,
    label: str,
    *,
    log: bool,
) -> None:
    """Draws means over seeds with their ranges."""
    for remedy in study.remedies:
        seeds = {c.lr: [*c.values(field).values()] for c in table if c.remedy == remedy}
        seeds = {lr: values for lr, values in seeds.items() if values}
        means = [np.mean(values) for values in seeds.values()]
        ends = [[end(values) for values in seeds.values()] for end in (min, max)]
        if seeds:
            rates, colour = list(seeds), _colour(study, remedy)
            ax.plot(
                rates, means, marker="o", markersize=2.5, color=colour, label=remedy
            )
            ax.fill_between(rates, *ends, color=colour, alpha=0.15, linewidth=0)
    ax.set_xscale("log")
    # Rates that are near each other would share a label of the axis's own choice.
    ticks = sorted({cell.lr for cell in table})
    ax.set_xticks(ticks, [rate(lr) for lr in ticks])
    ax.minorticks_off()
    if log:
        ax.set_yscale("log")
    ax.set(xlabel="learning rate", ylabel=label)
    ax.legend()


def _courses(ax: Foreign, study: StudyData, lr: float) -> None:
    """Draws the largest logit of each run at a rate, with one colour per remedy."""
    named: set[str] = set()
    for run in study.runs:
        points = [
            (int(m["step"]), m["max_logit"])
            for m in run.metrics
            if m.get("max_logit") is not None
        ]
        if run.lr == lr and points:
            # matplotlib leaves lines without a label out of the legend, so that each remedy appears there once.
            label = "" if run.remedy in named else run.remedy
            named.add(run.remedy)
            ax.plot(
                *zip(*points),
                color=_colour(study, run.remedy),
                linewidth=0.8,
                label=label,
            )
    _draw_alarm(ax)
    ax.set_yscale("log")
    ax.set(
        xlabel="optimizer step", ylabel="largest logit (nats)", title=f"LR {rate(lr)}"
    )
    ax.legend()


def _gains(ax: Foreign, study: StudyData, table: Sequence[Cell]) -> None:
    """Draws gains with 95 % intervals, with one line per remedy and rate, grouped by remedy."""
    # From the bottom of the figure to its top.
    ordered = table[::-1]
    for y, cell in enumerate(ordered):
        gain, colour = cell.gain, _colour(study, cell.remedy)
        assert gain is not None
        assert gain.effect is not None
        # Gains that are equal in all seeds have no spread and so no finite interval.
        if np.isfinite(gain.effect.high):
            ax.plot([gain.effect.low, gain.effect.high], [y, y], color=colour)
        ax.plot([gain.mean], [y], marker="o", markersize=3, color=colour)
    ax.axvline(0, color="0.5", linewidth=0.6)
    ax.set_yticks(
        range(len(ordered)),
        [f"{cell.remedy}, LR {rate(cell.lr)}" for cell in ordered],
        fontsize=6,
    )
    ax.set_xlabel(
        f"held-out loss of {study.baseline}\nminus that of the remedy ({study.loss_unit()})"
    )
