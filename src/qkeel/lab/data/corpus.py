"""A corpus of tokens, split by file, and batches that are a function of (seed, step)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from qkeel.errors import DataError, reported
from qkeel.lab.config import DataConfig
from qkeel.lab.data.byte_pairs import byte_pairs
from qkeel.lab.data.needles import Needles, insert_needles
from qkeel.lab.data.sources import BUILT_IN, read_documents
from qkeel.registry import lookup

HELD_OUT = 0.1  # share of the bytes
_MOST_BYTES = 1 << 35  # of a file of tokens
BPE_TOKENS = 1024  # where no vocab_size is given
_TOKEN_KINDS = {"uint8": "u1", "uint16": "<u2"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Training and held-out tokens; `sha256` covers both and the cut between them.

    `ends` are those of the held-out documents; a .bin file counts as one document. `vocab_size` has room for needles,
    if there are any. Where tokens are several bytes, `lengths` has the bytes of each and `tokenizer` the SHA-256 of
    what makes them; losses are per byte then too.
    """

    name: str
    vocab_size: int
    loss_unit: Literal["byte", "token", "image"]
    sha256: str
    train: np.ndarray
    heldout: np.ndarray
    ends: np.ndarray
    needles: Needles | None = None
    lengths: np.ndarray | None = None
    tokenizer: str = ""

    @property
    def counted(self) -> str:
        """The name of what the parts are made of."""
        return self.loss_unit if self.lengths is None else "token"

    def tokens_per_unit(self, tokens: np.ndarray) -> float:
        """Returns the number of these tokens by that of their units: what makes a loss per token one per unit."""
        return 1.0 if self.lengths is None else tokens.size / float(self.lengths[tokens].sum())


def load(config: DataConfig) -> Corpus:
    """Reads the corpus of `config`; in one process each is read once while its files stay the same.

    Raises: DataError if it cannot be read, is shorter than the context, or has tokens outside the vocabulary.
    """
    corpus = _load(config.source, config.vocab_size, config.tokens, stamp(config.source))
    for part, tokens in (("training", corpus.train), ("held-out", corpus.heldout)):
        if len(tokens) <= config.context:
            raise DataError(
                f"the {part} part of {config.source} has {len(tokens)} {corpus.counted}s; expected more than the "
                f"context, {config.context}. Give more text or a shorter context."
            )
    if not config.needle:
        return corpus
    needles = Needles(first=corpus.vocab_size, keys=config.needle_keys)
    needles.check(config.context)
    return dataclasses.replace(corpus, vocab_size=needles.vocab_size, needles=needles)


def batch(corpus: Corpus, config: DataConfig, seed: int, step: int) -> np.ndarray:
    """The training windows of a step: int64 [batch, context + 1], a function of (seed, step) alone.

    Windows that come once lie side by side in the text, in an order of the seed; the last token of one is the first of
    its neighbour, so that each token is an input once and a target once.
    """
    if config.windows == "once":
        order = _order(seed, places(corpus, config))
        starts = order[step * config.batch : (step + 1) * config.batch] * config.context
        if len(starts) < config.batch:
            raise _too_few(corpus, config, step + 1)
    else:
        starts = np.random.default_rng((seed, step)).integers(0, len(corpus.train) - config.context, config.batch)
    windows = _windows(corpus.train, starts, config.context)
    if corpus.needles:
        several = round(config.needle * config.batch)
        windows[:several] = insert_needles(windows[:several], corpus.needles, np.random.default_rng((seed, step, 1)))
    return windows


def places(corpus: Corpus, config: DataConfig) -> int:
    """The number of windows that lie side by side in the training part."""
    return (len(corpus.train) - 1) // config.context


def check_enough(corpus: Corpus, config: DataConfig, steps: int) -> None:
    """Raises DataError where so many steps need more windows that come once than the text has."""
    if config.windows == "once" and steps * config.batch > places(corpus, config):
        raise _too_few(corpus, config, steps)


def _too_few(corpus: Corpus, config: DataConfig, steps: int) -> DataError:
    return DataError(
        f"{corpus.name} has {places(corpus, config):,} training windows of {config.context} {corpus.counted}s, and "
        f"{steps:,} steps of {config.batch} need {steps * config.batch:,} with windows once; take fewer steps, more "
        "text, or windows drawn"
    )


@functools.lru_cache(maxsize=16)
def _order(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, count)).permutation(count)


def heldout(corpus: Corpus, context: int, sequences: int) -> np.ndarray:
    """Held-out windows int64 [n, context + 1], evenly spaced, the same for every run; n ≤ sequences."""
    return spread(corpus.heldout, context, sequences)


def spread(tokens: np.ndarray, context: int, sequences: int) -> np.ndarray:
    """Windows of tokens int64 [n, context + 1], evenly spaced; n ≤ sequences, so that each has tokens of its own."""
    room = len(tokens) - context
    count = min(sequences, max(1, room // context))
    starts = ((np.arange(count) + 0.5) / count * room).astype(np.int64)
    return _windows(tokens, starts, context)


def long_texts(corpus: Corpus, context: int, sequences: int) -> np.ndarray:
    """Held-out windows int64 [n, context + 1], each inside one document, spread evenly; n ≤ sequences.

    They do not overlap but for the last token, which is only predicted.

    Raises: DataError if no held-out document is longer than the context.
    """
    begins = np.concatenate([[0], corpus.ends[:-1]])
    starts = np.concatenate([np.arange(a, b - context, context) for a, b in zip(begins, corpus.ends, strict=True)])
    if not len(starts):
        raise DataError(
            f"no held-out document of {corpus.name} has more than {context} {corpus.counted}s, the longest has "
            f"{int((corpus.ends - begins).max())}; give longer documents or a shorter context to test"
        )
    count = min(sequences, len(starts))
    return _windows(corpus.heldout, starts[((np.arange(count) + 0.5) / count * len(starts)).astype(np.int64)], context)


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def split(texts: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Training and held-out texts, by the hash of each file's content; copies of a file are left out.

    Files are held out in the order of their hashes while they fit in a tenth of the bytes. Where that finds
    less than half of the tenth (few files, or one that outweighs the rest), the last tenth of each is held out.
    """
    unique = {hashlib.sha256(text).digest(): text for text in texts if text}
    budget = HELD_OUT * sum(map(len, unique.values()))
    held: set[bytes] = set()
    size = 0
    for digest in sorted(unique):
        if size < 0.9 * budget and size + len(unique[digest]) <= budget:
            held.add(digest)
            size += len(unique[digest])
    if size < budget / 2:
        cuts = [(text, len(text) - round(HELD_OUT * len(text))) for text in unique.values()]
        return [text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]
    return [t for d, t in unique.items() if d not in held], [t for d, t in unique.items() if d in held]


def stamp(source: str) -> tuple[tuple[str, int, int], ...]:
    """A value that changes when the files behind the source do."""
    place = Path(source.partition("#")[0]).expanduser()
    try:
        if source in BUILT_IN or not place.exists():
            return ()
    except OSError as error:  # a name that is too long
        raise DataError(f"cannot use {source!r}: {error.strerror}. Name an existing file or folder.") from error
    files = sorted(place.rglob("*")) if place.is_dir() else [*place.parent.glob("*.bin"), place]
    stats = ((str(file), file.stat()) for file in files)
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@functools.lru_cache(maxsize=4)
def _load(source: str, vocab_size: int | None, tokens: str, stamp: tuple[tuple[str, int, int], ...]) -> Corpus:
    if _is_tokens(source):
        if tokens == "bpe":
            raise DataError(f"{source} holds tokens already; tokens bpe are made from text")
        place, _, kind = source.partition("#")
        return _tokens(Path(place).expanduser(), kind or "uint16", vocab_size)
    documents = read_documents(source)
    train, held = split(documents.texts)
    if not train:
        raise DataError(f"{source} is empty; expected text")
    if tokens == "bpe":
        made = byte_pairs(train, held, vocab_size or BPE_TOKENS)
        ends = [len(text) for text in made.parts[1]]
        parts = [np.concatenate(part) for part in made.parts]
        corpus = _corpus(documents.name, "byte", parts, len(made.lengths), ends)
        return dataclasses.replace(corpus, lengths=made.lengths, tokenizer=made.sha256)
    parts = [np.frombuffer(b"".join(part), dtype=np.uint8) for part in (train, held)]
    return _corpus(documents.name, "byte", parts, vocab_size or 256, [len(text) for text in held])


def _is_tokens(source: str) -> bool:
    place = Path(source.partition("#")[0]).expanduser()
    return source not in BUILT_IN and (place.suffix == ".bin" or (place / "train.bin").is_file())


def _tokens(path: Path, kind: str, vocab_size: int | None) -> Corpus:
    """Files as nanoGPT writes them: train.bin next to val.bin, or one file whose last tenth is held out."""
    path = path / "train.bin" if path.is_dir() else path
    other = path.with_name("val.bin")
    whole = _read_bin(path, kind)
    if path.name == "train.bin" and other.is_file():
        parts = [whole, _read_bin(other, kind)]
    else:
        cut = len(whole) - round(HELD_OUT * len(whole))
        parts = [whole[:cut], whole[cut:]]
    return _corpus(path.name, "token", parts, vocab_size or int(whole.max()) + 1)


def _read_bin(path: Path, kind: str) -> np.ndarray:
    dtype = np.dtype(lookup("kind of tokens", _TOKEN_KINDS, kind))
    with reported(f"cannot read {path}", f". Expected a file of {kind} tokens.", DataError):
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise DataError(
                f"{path} has {size} bytes; expected a positive multiple of {dtype.itemsize}: {kind} tokens. Say what "
                f"they are as {path.name}#uint8"
            )
        if size > _MOST_BYTES:
            raise DataError(
                f"{path} has {size >> 30} GiB; expected at most {_MOST_BYTES >> 30}, since all of a corpus is read for "
                "its hash and its largest token. Name a part of it."
            )
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _corpus(
    name: str,
    unit: Literal["byte", "token"],
    parts: list[np.ndarray],
    vocab_size: int,
    lengths: Sequence[int] | None = None,
) -> Corpus:
    largest = max(int(part.max(initial=0)) for part in parts)
    if largest >= vocab_size:
        raise DataError(
            f"{name} has token {largest}; expected tokens below the vocabulary size, {vocab_size}. "
            f"Give vocab_size {largest + 1} or more, or the right file."
        )
    digest = hashlib.sha256(f"{unit} {len(parts[0])} {len(parts[1])}\n".encode())
    for part in parts:
        digest.update(memoryview(np.ascontiguousarray(part)))  # type: ignore[arg-type]
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
