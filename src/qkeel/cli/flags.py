"""Flags as views of the configuration dataclasses: names, types, choices and help come from there."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import docstring_parser
from cyclopts import Parameter

from qkeel.cli.commands import HELP_ALL
from qkeel.errors import InvalidValueError
from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig, RunConfig
from qkeel.lab.studies.multimodal import BASE
from qkeel.options import annotations
from qkeel.records.strict_toml import read_toml, toml_line

Settings = dict[str, Any]  # a TOML table: numbers, text, booleans, lists and tables by name
Flag = tuple[str, object, Parameter]  # its name, its type, and how it is shown
_SECTIONS: dict[str, tuple[type, str]] = {
    "": (RunConfig, "Run"),
    "data": (DataConfig, "Data"),
    "optim": (OptimConfig, "Optimizer"),
    "model": (ModelConfig, "Model"),
    "images": (ImagesConfig, "Images"),
}
# What `--help` shows; the rest is for `--help-all`, and for recipes.
_COMMON = {
    *("data", "task", "context", "batch", "images"),
    *("d_model", "n_layers", "n_heads", "attention", "position", "block"),
    *("optimizer", "lr", "warmup", "schedule", "remedy", "steps", "seed", "device", "dtype", "log_every"),
}
_RENAMED = {("data", "source"): "data", ("optim", "name"): "optimizer"}


# Flag attribute -> (section, field).
_ENTRIES: dict[str, tuple[str, str]] = {
    _RENAMED.get((section, field), field): (section, field)
    for section, (cls, _) in _SECTIONS.items()
    for field, kind in annotations(cls).items()
    if not dataclasses.is_dataclass(kind)
}


def view(without: Collection[tuple[str, str]] = (), more: Iterable[Flag] = (), several: Collection[str] = ()) -> type:
    """Returns a dataclass of flags, None where not given: one per plain field of RunConfig and its parts, and more.

    Those of `several` take a list of values.
    """
    docs = {section: _documents(cls) for section, (cls, _) in _SECTIONS.items()}
    flags = list(more)
    for flag, (section, field) in _ENTRIES.items():
        if (section, field) not in without:
            cls, group = _SECTIONS[section]
            shown = _parameter(flag, cls, field, group, docs[section][field], flag in several)
            flags.append((flag, _kind(cls, field, flag in several), shown))
    fields = [(flag, Annotated[_optional(kind), shown], dataclasses.field(default=None)) for flag, kind, shown in flags]
    made = dataclasses.make_dataclass("RunFlags", fields, frozen=True, kw_only=True)
    made.__module__ = __name__  # else it passes for a built-in type
    return made


def _kind(cls: type, field: str, several: bool) -> object:
    """The type of a field's flag: a list of the field's where it may be given several times, of which none is None."""
    kind: Any = annotations(cls)[field]
    alone = typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
    return list[alone] if several else kind


def _parameter(flag: str, cls: type, field: str, group: str, line: str, several: bool) -> Parameter:
    default = next(f.default for f in dataclasses.fields(cls) if f.name == field)
    shown = "" if default is None else f" [default: {str(default).lower() if default is False else default}]"
    dashed = flag.replace("_", "-")
    negative = f"--no-{dashed}" if isinstance(default, bool) else None
    made = Parameter(
        name=f"--{dashed}",
        group=group,
        help=line + shown,
        show_default=False,
        negative=negative,
        show=flag in _COMMON or HELP_ALL in sys.argv,
    )
    if not several:
        return made
    more = Parameter(help=f"{line} Several values stand side by side.{shown}", negative_iterable=())
    return Parameter.combine(made, more, Parameter(consume_multiple=True))


@functools.cache  # the command of each study asks for the same five
def _documents(cls: type) -> dict[str, str]:
    parsed = docstring_parser.parse_from_object(cls)
    said = {p.arg_name: " ".join((p.description or "").split()) for p in parsed.params}
    return said | {"remedy": "Spec string of the remedy, like lalr:tau=0.1+qk_clip."}


def _optional(kind: object) -> object:
    return kind if isinstance(kind, types.UnionType) else typing.Optional[kind]  # noqa: UP045 - of a Literal too


def configure(flags: object, recipe: Path | None, base: RunConfig | None = None) -> tuple[RunConfig, Settings]:
    """Returns the configuration of a recipe with flags over it and `base` under it, and the recipe's [study] table."""
    values = _over(base.to_dict() if base else {}, {} if recipe is None else read_toml(recipe))
    study = values.pop("study", {})
    for flag, (section, field) in _ENTRIES.items():
        given = vars(flags).get(flag)
        given = given[0] if isinstance(given, list) else given  # several values are a grid's, which has them over this
        if given is not None:
            (values.setdefault(section, {}) if section else values)[field] = given
    if not isinstance(study, dict):
        raise InvalidValueError(f"expected [study] to be a table, got {study!r}; write it as [study] and lines below")
    return RunConfig.from_dict(values), study


def starting(flags: object) -> RunConfig | None:
    """Returns the configuration under flags and recipe, by the task that the flags name; None for the defaults."""
    task = vars(flags).get("task")
    if task == "vision":
        return RunConfig(model=ModelConfig(attention="vit"), data=DataConfig(task="vision", batch=32))
    return BASE if task == "multimodal" else None


def _over(values: Settings, more: Settings) -> Settings:
    """Nested values, with others in place of those of the same name."""
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(values.get(key), dict)
        values[key] = _over(values[key], value) if both else value
    return values


def as_toml(config: RunConfig) -> str:
    """Returns the configuration as a recipe, without what is not set."""
    values = config.to_dict()
    lines = [toml_line(k, v) for k, v in values.items() if not isinstance(v, dict) and v is not None]
    for section, table in values.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{section}]", *(toml_line(k, v) for k, v in table.items() if v is not None)]
    return "\n".join(lines)
