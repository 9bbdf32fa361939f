"""`python -m experiments.predictions`: the verdict on each prediction, from the stored tables of its runs."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.predictions import edge_again, edge_of_chaos, step_spectra, transfer, transfer_again
from experiments.predictions.table import tables_of

Value = float | Sequence[float]
TRANSFER = {
    "order": "order: Kendall's τ of widths 32 and 64",
    "nearer": "nearer: τ of 32 and 64, minus τ of 16 and 64",
    "mup": "µP: what it adds to τ of 32 and 64",
    "advice": "advice: that of width 32 is right",
    "advice16": "advice16: that of width 16 is right",
}


def line(words: str, value: Value, verdict: str) -> str:
    """Returns a row of a Markdown table. Three numbers are a value and its interval, one is a count, and a number that
    stands by itself is a share of draws."""
    if not isinstance(value, Sequence):
        text = f"{value:.0%} of draws"
    elif len(value) == 1:
        text = f"{value[0]:.0f}"
    else:
        text = "{:.2f} ({:.2f} to {:.2f})".format(*value).replace("-", "−")
    return f"| {words} | {text} | **{verdict}** |"


def edge_lines() -> list[str]:
    """Returns the verdicts on the edge of chaos: first prediction, then second, each on its own seeds."""
    (_, first_rows), (_, again_rows) = tables_of("edge")
    first = edge_of_chaos.judged(first_rows)
    names = [name for name, *_ in edge_of_chaos.PREDICTED]
    lines = [line(f"{name}: {first[name]['words']}", first[name]["value"], first[name]["verdict"]) for name in names]
    new_rows = [row for row in again_rows if row["seed"] in edge_again.SEEDS]
    for name, words, value, verdict in edge_again.judged(new_rows):
        lines.append(line(f"{name}: {words}", value, verdict))
    return lines


def transfer_lines() -> list[str]:
    """Returns the verdicts on transfer: first prediction, then second."""
    (_, first_rows), (_, again_rows) = tables_of("transfer")
    first = transfer.judged(first_rows)
    lines = [line(words, first[name]["value"], first[name]["verdict"]) for name, words in TRANSFER.items()]
    for name, words, value, verdict in transfer_again.judged(again_rows):
        lines.append(line(f"{name}: {words}", [value] if name == "no gain" else value, verdict))
    return lines


def spectra_lines() -> list[str]:
    """Returns the verdicts on what a step adds to the weights."""
    verdicts = step_spectra.verdicts(step_spectra.judge(step_spectra.stored_rows()))
    return [f"| {' | '.join(columns)} |" for columns in verdicts]


# The page in notes/results that quotes the verdicts, and what computes them.
PREDICTIONS = {"edge-of-chaos": edge_lines, "transfer": transfer_lines, "step-spectra": spectra_lines}


def main() -> None:
    for page, lines in PREDICTIONS.items():
        print(f"{page} (experiments/notes/results/{page}.md)", *lines(), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
