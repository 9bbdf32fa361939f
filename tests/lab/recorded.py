"""What runs and studies have recorded, but for what depends on the machine and its load."""

import csv

from qkeel.records import RunDirectory

TIMES = ("cpu_seconds", "tokens_per_second", "mfu")


def timeless(record):
    return {name: value for name, value in record.items() if name not in TIMES}


def table(out):
    """The table.csv of a study."""
    with open(out / "table.csv", newline="") as file:
        return [timeless(row) for row in csv.DictReader(file)]


def numbers(directory):
    """The lines, the summary and the numbers of heads of a run."""
    place = (
        directory if isinstance(directory, RunDirectory) else RunDirectory(directory)
    )
    heads = (place.path / "heads.f32").read_bytes()
    return {
        "lines": list(map(timeless, place.metrics())),
        "summary": timeless(place.summary()),
        "heads": heads,
    }
