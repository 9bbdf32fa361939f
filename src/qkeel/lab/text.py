"""Text data: sources, a corpus of tokens, and batches.

Shapes: n windows, t tokens per window.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from qkeel.errors import DataError, reported
from qkeel.lab.config import DataConfig
from qkeel.records.disk import read_file

# Sources of documents: CPython's standard library, files and folders.

TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".tex",
    ".html",
    ".csv",
    ".json",
    ".c",
    ".h",
    ".cpp",
    ".js",
    ".ts",
)
_NOT_STDLIB = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


def read_documents(source: str) -> tuple[bytes, ...]:
    """Reads the documents of any source other than a .bin file; see DataConfig.source.

    >>> len(read_documents("stdlib")) > 100
    True
    """
    return BUILT_IN[source]() if source in BUILT_IN else tuple(_files(source))


def read_bytes(path: Path) -> bytes:
    """Reads one file; raises DataError if that fails."""
    return read_file(path, DataError)


def _stdlib() -> tuple[bytes, ...]:
    root = sysconfig.get_path("stdlib")
    paths: list[str] = []
    for folder, folders, names in os.walk(root):
        # File systems list in any order, and the corpus is to be the same everywhere.
        folders[:] = sorted(f for f in folders if f not in _NOT_STDLIB)
        paths.extend(
            os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")
        )
    return (*(read_bytes(Path(path)) for path in paths), *_topics())


def _topics() -> tuple[bytes, ...]:
    try:
        from pydoc_data import topics
    except ImportError as error:  # some distributions package Python without pydoc_data
        raise DataError(
            "this Python has no pydoc_data, so the corpus 'topics' is not available"
        ) from error
    return tuple(topics.topics[name].encode() for name in sorted(topics.topics))


BUILT_IN: dict[str, Callable[[], tuple[bytes, ...]]] = {
    "stdlib": functools.cache(_stdlib),
    "topics": functools.cache(_topics),
}


def _files(source: str) -> Iterator[bytes]:
    path = Path(source).expanduser()
    if path.is_dir():
        paths = sorted(
            p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file()
        )
        if not paths:
            raise DataError(
                f"{source} contains no text files; expected names that end in {', '.join(TEXT_SUFFIXES)}"
            )
    elif path.exists():
        paths = [path]
    else:
        near = difflib.get_close_matches(source, BUILT_IN, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"cannot find corpus {source!r}: there is no such file or folder.{hint} Expected {', '.join(BUILT_IN)} or "
            "a path."
        )
    for file in paths:
        text = read_bytes(file)
        if b"\0" in text:
            raise DataError(
                f"{file} contains NUL bytes, so it is not text; expected UTF-8 text, or tokens in a .bin file"
            )
        yield text


# A corpus of tokens, split by file, and batches that depend on (seed, step) alone.

# Share of the bytes that is held out.
HELD_OUT = 0.1
# Of the files that nanoGPT writes.
_TOKENS = np.dtype("<u2")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Training and held-out tokens; `sha256` covers both parts and where they are separated.

    `ends` are the ends of the held-out documents; a .bin file counts as one document.
    """

    name: str
    vocab_size: int
    loss_unit: Literal["byte", "token", "image"]
    sha256: str
    train: np.ndarray
    heldout: np.ndarray
    ends: np.ndarray


def load(config: DataConfig) -> Corpus:
    """Loads the corpus of `config`; a process reads the corpus again only when its files change.

    Raises:
        DataError: the corpus cannot be read, is shorter than the context, or has tokens outside the vocabulary.

    >>> corpus = load(DataConfig(source="stdlib"))  # Python's standard library
    >>> corpus.loss_unit, len(corpus.train) > 1_000_000
    ('byte', True)
    """
    # The stamp is part of the cache key, so a changed file is read again.
    corpus = _load(config.source, config.vocab_size, stamp(config.source))
    for side, tokens in (("training", corpus.train), ("held-out", corpus.heldout)):
        if len(tokens) <= config.context:
            raise DataError(
                f"the {side} part of {config.source} has {len(tokens)} {corpus.loss_unit}s; expected more than the "
                f"context, {config.context}. Give more text or a shorter context."
            )
    return corpus


def batch(corpus: Corpus, config: DataConfig, seed: int, step: int) -> np.ndarray:
    """Returns the training windows of a step, int64 [batch, context + 1], as a function of (seed, step) alone.

    >>> config = DataConfig(source="stdlib", context=8, batch=2)
    >>> batch(load(config), config, seed=0, step=0).shape
    (2, 9)
    """
    starts = np.random.default_rng((seed, step)).integers(
        0,
        len(corpus.train) - config.context,
        config.batch,
    )
    return _windows(corpus.train, starts, config.context)


def heldout(corpus: Corpus, context: int, sequences: int) -> np.ndarray:
    """Returns evenly spaced held-out windows, int64 [n, context + 1], the same for every run; n ≤ sequences.

    >>> config = DataConfig(source="stdlib")
    >>> heldout(load(config), context=8, sequences=4).shape
    (4, 9)
    """
    return spread(corpus.heldout, context, sequences)


def spread(tokens: np.ndarray, context: int, sequences: int) -> np.ndarray:
    """Returns evenly spaced windows of tokens, int64 [n, context + 1]; n ≤ sequences.

    Neighbouring windows may share their last and first token or two.

    >>> spread(np.arange(10), context=2, sequences=2).tolist()
    [[2, 3, 4], [6, 7, 8]]
    """
    room = len(tokens) - context
    # No more than have inputs of their own.
    count = min(sequences, max(1, room // context))
    starts = ((np.arange(count) + 0.5) / count * room).astype(np.int64)
    return _windows(tokens, starts, context)


def long_texts(corpus: Corpus, context: int, sequences: int) -> np.ndarray:
    """Returns evenly spaced held-out windows, int64 [n, context + 1], each within one document; n ≤ sequences.

    Windows overlap by at most one token, the last token of a window, which is only a target.

    Raises:
        DataError: no held-out document is longer than the context.
    """
    begins = np.concatenate([[0], corpus.ends[:-1]])
    starts = np.concatenate(
        [
            np.arange(a, b - context, context)
            for a, b in zip(begins, corpus.ends, strict=True)
        ]
    )
    if not len(starts):
        raise DataError(
            f"no held-out document of {corpus.name} has more than {context} {corpus.loss_unit}s; the longest has "
            f"{int((corpus.ends - begins).max())}; give longer documents or a shorter context to test"
        )
    count = min(sequences, len(starts))
    return _windows(
        corpus.heldout,
        starts[((np.arange(count) + 0.5) / count * len(starts)).astype(np.int64)],
        context,
    )


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def split(texts: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Splits texts into training and held-out texts by the hash of their content; duplicates are removed.

    Texts are held out in the order of their hashes as long as they fit into a tenth of the bytes. If that yields less
    than half of the tenth (because there are few texts or one text dominates), the last tenth of each text is held out
    instead.

    >>> training, held_out = split([b"a" * n for n in range(1, 40)])
    >>> len(training) + len(held_out)
    39
    """
    # Copies of one text on both sides would make the held-out loss a training loss.
    unique = {hashlib.sha256(text).digest(): text for text in texts if text}
    budget = HELD_OUT * sum(map(len, unique.values()))
    held: set[bytes] = set()
    size = 0
    # By hash, so that the split does not depend on names or order.
    for digest in sorted(unique):
        # A text that does not fit is passed over, so that a smaller one may fill the rest.
        if size < 0.9 * budget and size + len(unique[digest]) <= budget:
            held.add(digest)
            size += len(unique[digest])
    if size < budget / 2:
        cuts = [
            (text, len(text) - round(HELD_OUT * len(text))) for text in unique.values()
        ]
        return [text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]
    return [t for d, t in unique.items() if d not in held], [
        t for d, t in unique.items() if d in held
    ]


def stamp(source: str) -> tuple[tuple[str, int, int], ...]:
    """Returns a value that changes when the files of the source change."""
    path = Path(source).expanduser()
    if source in BUILT_IN:
        return ()
    try:
        # A token file is read together with the val.bin beside it.
        files = (
            sorted(path.rglob("*"))
            if path.is_dir()
            else [*path.parent.glob("*.bin"), *[path] * path.exists()]
        )
    except OSError as error:  # e.g. a name that is too long
        raise DataError(
            f"cannot use {source!r}: {error.strerror}. Give an existing file or folder."
        ) from error
    stats = ((str(file), file.stat()) for file in files)
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@functools.lru_cache(maxsize=4)
def _load(
    source: str, vocab_size: int | None, stamp: tuple[tuple[str, int, int], ...]
) -> Corpus:
    path = Path(source).expanduser()
    if source not in BUILT_IN and (
        path.suffix == ".bin" or (path / "train.bin").is_file()
    ):
        return _tokens(path, vocab_size)
    train, held = split(read_documents(source))
    if not train:
        raise DataError(f"{source} is empty; expected text")
    parts = [np.frombuffer(b"".join(texts), dtype=np.uint8) for texts in (train, held)]
    return _corpus(
        path.name or source,
        "byte",
        parts,
        vocab_size or 256,
        [len(text) for text in held],
    )


def _tokens(path: Path, vocab_size: int | None) -> Corpus:
    """Reads token files: train.bin with val.bin, as nanoGPT writes them, or one file whose last tenth is held out."""
    path = path / "train.bin" if path.is_dir() else path
    validation = path.with_name("val.bin")
    tokens = _read_bin(path)
    if path.name == "train.bin" and validation.is_file():
        parts = [tokens, _read_bin(validation)]
    else:
        cut = len(tokens) - round(HELD_OUT * len(tokens))
        parts = [tokens[:cut], tokens[cut:]]
    return _corpus(
        path.name,
        "token",
        parts,
        vocab_size or int(tokens.max()) + 1,
    )


def _read_bin(path: Path) -> np.ndarray:
    with reported(
        f"cannot read {path}", ". Expected a file of uint16 tokens.", DataError
    ):
        size = path.stat().st_size
        if size == 0 or size % _TOKENS.itemsize:
            raise DataError(
                f"{path} has {size} bytes; expected a positive multiple of {_TOKENS.itemsize}, as tokens are uint16"
            )
        # Mapped, so that a batch reads its windows alone.
        return np.asarray(np.memmap(path, dtype=_TOKENS, mode="r"))


def _corpus(
    name: str,
    unit: Literal["byte", "token"],
    parts: list[np.ndarray],
    vocab_size: int,
    lengths: Sequence[int] | None = None,
) -> Corpus:
    largest = max(int(tokens.max(initial=0)) for tokens in parts)
    if largest >= vocab_size:
        raise DataError(
            f"{name} has token {largest}; expected tokens below the vocabulary size, {vocab_size}. "
            f"Set vocab_size to at least {largest + 1}, or use the right file."
        )
    # Lengths first: the same tokens with the border elsewhere are another corpus.
    digest = hashlib.sha256(f"{unit} {len(parts[0])} {len(parts[1])}\n".encode())
    for tokens in parts:
        digest.update(memoryview(np.ascontiguousarray(tokens)))  # type: ignore[arg-type]
    train, held = parts
    return Corpus(
        name=name,
        vocab_size=vocab_size,
        loss_unit=unit,
        sha256=digest.hexdigest(),
        train=train,
        heldout=held,
        ends=np.cumsum(lengths or [len(held)]),
    )
