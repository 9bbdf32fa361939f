"""Constructors with options of any kind."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.hostile import NUMBERS, numbers, plain, texts
from tests.fuzz.hunt import Hunt

from qkeel import spec
from qkeel.lab import Grid, LongContexts, RunConfig
from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig
from qkeel.spec.norm import Norm

# Constructors of the slots, the modules' sizes and the configurations, with options of any kind.


_object_SLOTS = [name for name in spec.__all__ if isinstance(getattr(spec, name), type)]
BUILT: dict[str, type] = {
    **{
        name: getattr(spec, name)
        for name in _object_SLOTS
        if dataclasses.is_dataclass(getattr(spec, name))
        and name not in ("AttentionCall", "AttentionSpec")
    },
    **{
        cls.__name__: cls
        for cls in (RunConfig, DataConfig, ImagesConfig, ModelConfig, OptimConfig)
    },
    **{cls.__name__: cls for cls in (Grid, LongContexts)},
}
_object_WORDS = [
    "head",
    "layer",
    "q",
    "k",
    "qk",
    "qkv",
    "none",
    "dim",
    "one_plus_dim",
    "head_dim",
    "scalar",
]
_object_WORDS += ["both", "power"]


def built_objects_inputs() -> SearchStrategy[tuple[str, dict[str, Any]]]:
    """A class and options for some of its fields, each of a kind the field's default has or of any."""
    return st.sampled_from(sorted(BUILT)).flatmap(_object_of)


def _object_of(name: str) -> SearchStrategy[tuple[str, dict[str, Any]]]:
    """Options of a class. Slots take what their annotations say; configurations, which files give, take anything."""
    any_kind = name not in _object_SLOTS
    fields = {
        f.name: _object_value(f, any_kind)
        for f in dataclasses.fields(BUILT[name])
        if f.init
    }
    known = {f: values for f, values in fields.items() if values is not None}
    needed = {
        f.name
        for f in dataclasses.fields(BUILT[name])
        if f.init and _object_required(f)
    }
    optional = {n: known[n] for n in known.keys() - needed}
    return st.tuples(
        st.just(name),
        st.fixed_dictionaries({n: known[n] for n in needed}, optional=optional),
    )


def _object_required(field: dataclasses.Field[Any]) -> bool:
    return (
        field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    )


def _object_value(
    field: dataclasses.Field[Any], any_kind: bool
) -> SearchStrategy[Any] | None:
    words = st.one_of(st.sampled_from(_object_WORDS), texts())
    kind, free = str(field.type), [plain()] if any_kind else []
    none = [st.none()] if "None" in kind else []
    if isinstance(field.default, bool) or kind == "bool":
        return st.one_of(st.booleans(), *free)
    if "float" in kind or "int" in kind:
        whole = st.one_of(st.sampled_from(NUMBERS), st.integers(-10, 100))
        several = [st.lists(numbers(), max_size=3)] if "Sequence" in kind else []
        return st.one_of(
            *several or [numbers() if "float" in kind or any_kind else whole],
            *none,
            *free,
        )
    if "str" in kind or "Literal" in kind or isinstance(field.default, str):
        several = [st.lists(words, max_size=3)] if "Sequence" in kind else []
        return st.one_of(*several or [words], *none, *free)
    return plain() if any_kind else None


def check_built_objects(case: tuple[str, dict[str, Any]]) -> None:
    """Makes the object; one that is made can be printed, copied, and used for what it is."""
    name, options = case
    made = BUILT[name](**options)
    repr(made)
    hash(made) if name in _object_SLOTS else None
    if isinstance(made, RunConfig):
        assert RunConfig.from_dict(made.to_dict()) == made
        assert len(made.run_id) == 12
    if isinstance(made, Norm):
        spec.AttentionSpec(norm=made).explain()


CLASSES: dict[str, Hunt] = {
    "objects": Hunt(inputs=built_objects_inputs, check=check_built_objects),
}
