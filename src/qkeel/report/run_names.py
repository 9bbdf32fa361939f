"""Names of runs by the settings in which their configurations and commands differ."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

_MOST = 3  # settings of a name
_LEFT_OUT = frozenset({"crc32", "kind", "sites", "missed", "fields", "seed", "remedy", "versions", "step"})


def differences(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns for each of several runs the settings that are not alike in all, by name; "" where nothing differs.

    >>> differences([{"optim": {"name": "adamw", "momentum": 0.9}}, {"optim": {"name": "muon", "momentum": 0.9}}])
    ['name adamw', 'name muon']
    >>> differences([{"command": "train.py --lr 3e-2"}, {"command": "train.py --lr 3e-3 --compile"}])
    ['--lr 3e-2', '--compile, --lr 3e-3']
    """
    flat = [dict(_flat(one)) for one in settings]
    names = sorted({name for one in flat for name in one})
    apart = [name for name in names if len({one.get(name) for one in flat}) > 1]
    return [", ".join([_said(name, one[name]) for name in apart if one.get(name) is not None][:_MOST]) for one in flat]


def _said(name: str, value: str | None) -> str:
    return f"{name.rpartition('.')[2]} {value}".strip()


def _flat(settings: Mapping[str, object], under: str = "") -> Iterator[tuple[str, str | None]]:
    for name, value in settings.items():
        if name in _LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{under}{name}.")
        elif name == "command":
            yield from _options(str(value))
        else:
            yield f"{under}{name}", None if value is None else str(value)


def _options(command: str) -> Iterator[tuple[str, str]]:
    """The options of a command line with their values."""
    try:
        words = shlex.split(command)
    except ValueError:
        return
    for word, after in zip(words, [*words[1:], ""]):
        if word.startswith("--") and word != "--":
            name, _, value = word.partition("=")
            if name not in ("--out", "--jobs"):
                yield name, value or ("" if after.startswith("-") else after)
