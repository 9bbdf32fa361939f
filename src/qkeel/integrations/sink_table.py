"""Sinks by name, for the command line: `wandb:project=gpt`, `tensorboard+log`."""

from __future__ import annotations

import inspect

from qkeel.errors import InvalidValueError, unknown
from qkeel.integrations.mlflow import MLflowSink
from qkeel.integrations.tensorboard import TensorBoardSink
from qkeel.integrations.trackio import TrackioSink
from qkeel.integrations.wandb import WandbSink
from qkeel.monitor import LoggingSink, RunDirectorySink, Sink
from qkeel.registry import Term, lookup, parse

SINKS: dict[str, type[Sink]] = {
    "directory": RunDirectorySink,
    "log": LoggingSink,
    "mlflow": MLflowSink,
    "tensorboard": TensorBoardSink,
    "trackio": TrackioSink,
    "wandb": WandbSink,
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
    """Several sinks, joined by `+`.

    >>> [type(one).__name__ for one in sinks("log+directory:path=runs/a")]
    ['LoggingSink', 'RunDirectorySink']
    """
    return tuple(map(_build, parse(text)))


def _build(term: Term) -> Sink:
    cls = lookup("sink", SINKS, term.name)
    known = list(inspect.signature(cls).parameters)
    for key in term.options:
        if key not in known:
            raise unknown(f"option of {term.name}", key, known)
    return cls(**{key: str(value) for key, value in term.options.items()})  # type: ignore[arg-type]  # all are texts
