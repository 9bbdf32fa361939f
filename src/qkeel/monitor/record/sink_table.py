"""Sinks by name, the same in Python and on the command line: `tensorboard`, `wandb:project=gpt`, `csv+log`."""

from __future__ import annotations

import importlib
import inspect
import os

from qkeel.errors import InvalidValueError, unknown
from qkeel.monitor.record.sinks import RunDirectorySink, Sink
from qkeel.registry import Term, parse

# Name -> where its class is; a module is imported when its sink is made.
SINKS = {
    "csv": "qkeel.integrations.csv_parquet:CSVSink",
    "directory": "qkeel.monitor.record.sinks:RunDirectorySink",
    "log": "qkeel.monitor.record.sinks:LoggingSink",
    "mlflow": "qkeel.integrations.mlflow:MLflowSink",
    "notebook": "qkeel.integrations.notebook:NotebookSink",
    "parquet": "qkeel.integrations.csv_parquet:ParquetSink",
    "tensorboard": "qkeel.integrations.tensorboard:TensorBoardSink",
    "trackio": "qkeel.integrations.trackio:TrackioSink",
    "wandb": "qkeel.integrations.wandb:WandbSink",
}


def sink(text: str) -> Sink:
    """One sink from a spec string.

    Args:
        text: a name of SINKS and its options: `wandb:project=gpt,mode=offline`.

    Raises: UnknownNameError for a name or an option that is not there; InvalidValueError for several sinks.

    >>> sink("directory:path=runs/a").asked.as_posix()
    'runs/a'
    """
    terms = parse(text)
    if len(terms) != 1:
        raise InvalidValueError(f"expected one sink, got {len(terms)} in {text!r}; give them one by one")
    return _build(terms[0])


def sinks(text: str) -> tuple[Sink, ...]:
    """Several sinks, joined by `+`; or the path of a run directory, which has a / in it or begins with a dot.

    >>> [type(one).__name__ for one in sinks("log+directory:path=runs/a")]
    ['LoggingSink', 'RunDirectorySink']
    >>> sinks("runs/a")[0].asked.as_posix()
    'runs/a'
    """
    place = text.partition(":")[0]
    if os.path.splitdrive(text)[0] or place.startswith(".") or any(c in place for c in "/\\"):
        return (RunDirectorySink(text),)
    return tuple(map(_build, parse(text)))


def _build(term: Term) -> Sink:
    if term.name not in SINKS:
        error = unknown("sink", term.name, SINKS)
        error.args = (f"{error}. A run directory of that name is ./{term.name}",)
        raise error
    module, _, name = SINKS[term.name].partition(":")
    cls: type[Sink] = vars(importlib.import_module(module))[name]
    known = list(inspect.signature(cls).parameters)
    for key in term.options:
        if key not in known:
            raise unknown(f"option of {term.name}", key, known)
    return cls(**{key: str(value) for key, value in term.options.items()})
