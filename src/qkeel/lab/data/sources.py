"""Sources of documents: CPython's own sources, files, folders, text columns, the hub."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from qkeel.errors import DataError
from qkeel.records.regular_files import read_regular, refuse_irregular
from qkeel.records.strict_json import json_value

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex", ".html", ".csv", ".json", ".c", ".h", ".cpp", ".js", ".ts")
_NOT_STDLIB = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True, slots=True)
class Documents:
    """Named texts as bytes. A corpus is split between documents, never inside one, when there are several."""

    name: str
    texts: tuple[bytes, ...]


def read_documents(source: str) -> Documents:
    """The documents of a source other than a .bin file; see DataConfig.source."""
    if source in BUILT_IN:
        return BUILT_IN[source]()
    if source.startswith("hf:"):
        return _hub(source)
    place, _, column = source.partition("#")
    suffix = Path(place).suffix
    if suffix in (".jsonl", ".parquet"):
        texts = _rows(Path(place), column or "text")
    else:
        place, texts = source, _files(source)
    return Documents(Path(place).name or place, tuple(texts))


def read_bytes(path: Path) -> bytes:
    """The bytes of one file, or a DataError."""
    return read_regular(path, DataError, most=None)


def _stdlib() -> Documents:
    root = sysconfig.get_path("stdlib")
    paths: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in _NOT_STDLIB)
        paths.extend(os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))
    return Documents("stdlib", (*(read_bytes(Path(path)) for path in paths), *_topics().texts))


def _topics() -> Documents:
    try:
        from pydoc_data import topics
    except ImportError as error:  # some distributions ship Python without its reference texts
        raise DataError("this Python comes without pydoc_data, so there is no corpus 'topics'") from error
    return Documents("topics", tuple(topics.topics[name].encode() for name in sorted(topics.topics)))


BUILT_IN: dict[str, Callable[[], Documents]] = {"stdlib": functools.cache(_stdlib), "topics": functools.cache(_topics)}


def _files(source: str) -> Iterator[bytes]:
    path = Path(source).expanduser()
    if path.is_dir():
        paths = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not paths:
            raise DataError(f"{source} holds no text file; expected names that end in {', '.join(TEXT_SUFFIXES)}")
    elif path.exists():
        paths = [path]
    else:
        paths = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not paths:
            raise _missing(source)
    for file in paths:
        text = read_bytes(file)
        if b"\0" in text:
            raise DataError(f"{file} holds NUL bytes, so it is not text; expected UTF-8 text, or .bin for tokens")
        yield text


def _missing(source: str) -> DataError:
    near = difflib.get_close_matches(source, BUILT_IN, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return DataError(
        f"no corpus {source!r}: no such file, folder or glob match.{hint} "
        f"Expected {', '.join(BUILT_IN)}, hf:NAME or a path."
    )


def _rows(path: Path, column: str) -> Iterator[bytes]:
    if not path.exists():
        raise _missing(str(path))
    values = _parquet(path, column) if path.suffix == ".parquet" else _jsonl(path, column)
    return _texts(values, f"column {column!r} of {path}")


def _texts(values: Iterable[object], what: str) -> Iterator[bytes]:
    for number, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise DataError(f"expected text in {what}, got {type(value).__name__} in row {number}")
        yield value.encode()


def json_rows(path: Path) -> Iterator[tuple[str, object]]:
    """The values of a .jsonl file, one a line, each with where it stands; a line that is not JSON is a DataError."""
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            if line.strip():
                yield where, json_value(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON ({error}); expected one object a line") from error


def _jsonl(path: Path, column: str) -> Iterator[object]:
    for where, row in json_rows(path):
        if not isinstance(row, dict) or column not in row:
            has = ", ".join(sorted(row)) if isinstance(row, dict) else type(row).__name__
            raise _no_column(where, column, has)
        yield row[column]


def _parquet(path: Path, column: str) -> list[object]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError("reading .parquet needs pyarrow: pip install 'qkeel[data]'") from error
    refuse_irregular(path, DataError)
    try:
        names = parquet.read_schema(path).names
        if column not in names:
            raise _no_column(str(path), column, ", ".join(names))
        return parquet.read_table(path, columns=[column])[column].to_pylist()
    except (ArrowException, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read {path} as parquet: {error}") from error


def _no_column(where: str, column: str, has: str) -> DataError:
    return DataError(f"{where} has no column {column!r}; it has: {has}. Name the text column as PATH#COLUMN.")


def _hub(source: str) -> Documents:
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError as error:
        raise DataError(f"{source} needs the datasets library: pip install 'qkeel[data]'") from error
    rest, _, column = source.removeprefix("hf:").partition("#")
    rest, _, split = rest.partition(":")
    try:
        rows = datasets.load_dataset(*rest.split("@", 1), split=split or "train")
    except Exception as error:  # the library raises errors of many kinds, all about the name or the network
        raise DataError(f"cannot load {source} (form: hf:NAME[@CONFIG][:SPLIT][#COLUMN]): {error}") from error
    column = column or "text"
    if column not in rows.column_names:
        raise DataError(f"{source} has no column {column!r}; it has: {', '.join(rows.column_names)}")
    return Documents(source, tuple(_texts(rows[column], f"column {column!r} of {source}")))
