"""The numbers by modality of every mix, remedy and learning rate, as one table."""

from __future__ import annotations

from collections.abc import Callable

from qkeel.report.html.formats import loss, number, rate
from qkeel.report.html.markup import NOTHING, Markup, cell, columns, join, table, table_row, words
from qkeel.report.html.page import note
from qkeel.report.study.collect import RunData, StudyData
from qkeel.report.study.compare import Spread, spread
from qkeel.report.study.tables import swatch


def _at_end(name: str) -> Callable[[RunData], float | None]:
    return lambda run: run.metrics[-1].get(name)


def _ratio(above: str, below: str) -> Callable[[RunData], float | None]:
    def read(run: RunData) -> float | None:
        top, bottom = (run.metrics[-1].get(name) for name in (above, below))
        return top / bottom if top is not None and bottom else None

    return read


def _row(name: str) -> Callable[[RunData], float | None]:
    return lambda run: (run.row or {}).get(name)


_COLUMNS: dict[str, tuple[Callable[[RunData], float | None], Callable[[float], str]]] = {
    "Image loss": (_at_end("val_loss/image"), loss),
    "Caption loss": (_at_end("val_loss/caption"), loss),
    "Text loss": (_at_end("val_loss/text"), loss),
    "Queries, image / text": (_ratio("query_norm/image", "query_norm/text"), "{:.2f}".format),
    "Keys, image / text": (_ratio("key_norm/image", "key_norm/text"), "{:.2f}".format),
    "Text's weight on images, / even": (
        _ratio("attention_mass/text>image", "uniform_mass/text>image"),
        "{:.2f}".format,
    ),
    "Images' weight on text, / even": (_ratio("attention_mass/image>text", "uniform_mass/image>text"), "{:.2f}".format),
    "Largest logit": (_row("max_logit"), number),
    "Entropy at the end": (_row("end_entropy"), number),
    "Alarm step": (_row("alarm_step"), number),
    "Last block's norm, images": (_at_end("last_block_norm/image"), number),
}


def by_modality(study: StudyData) -> Markup:
    """Returns a table with one line per mix, remedy and rate: means over seeds with the range below."""
    lines = []
    for name, part in (study.parts() or {"": study}).items():
        for remedy in study.remedies:
            for lr in part.lrs():
                runs = [r for r in part.runs if (r.remedy, r.lr) == (remedy, lr) and r.row is not None and r.metrics]
                if runs:
                    lines.append(_line(study, name, (remedy, lr), runs))
    if not lines:
        return Markup("")
    text = (
        "Means over seeds with the range below, measured on one fixed batch that is the same for every mix. Even: the "
        "weight if attention treated all visible keys alike. A high loss on a kind of data that the mix never "
        "trains on has that reason alone."
    )
    head = [*columns("Mix", "Remedy", kind="text"), *columns("LR", *_COLUMNS)]
    return join([note(text), table("By modality", head, lines, sortable=True)])


def _line(study: StudyData, mix: str, at: tuple[str, float], runs: list[RunData]) -> Markup:
    remedy, lr = at
    cells = [words(swatch(study, remedy)), cell(rate(lr), lr)]
    for read, write in _COLUMNS.values():
        values = [value for run in runs if (value := read(run)) is not None]
        cells.append(_cell(spread(values), write, len(runs)) if values else NOTHING)
    return table_row(mix, *cells)


def _cell(total: Spread, write: Callable[[float], str], runs: int) -> Markup:
    small = f"{write(total.low)} to {write(total.high)}" if total.n > 1 else ""
    if total.n < runs:
        small += f"{'; ' if small else ''}{total.n} of {runs} runs"
    return cell(write(total.mean), total.mean, small)
