"""Byte pairs learned from the training part of a text, written as token files that the lab reads."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.trainers import BpeTrainer

from qkeel.lab.text import read_documents, split

LEARNED_FROM = 1 << 22  # bytes to learn from: more change few tokens and take longer
# A word with its leading space, a digit, punctuation, white space: no token crosses these borders.
PATTERN = r" ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z_0-9]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenFiles:
    """The folder with train.bin and val.bin, and the number of bytes of each token."""

    path: Path
    lengths: np.ndarray

    def per_byte(self, tokens: np.ndarray) -> float:
        """The number of tokens per byte of these tokens, which converts a loss per token into a loss per byte."""
        return tokens.size / float(self.lengths[tokens].sum())


def write_tokens(source: str, vocab_size: int, folder: Path) -> TokenFiles:
    """Writes train.bin and val.bin (uint16) of a text, as the same documents are split for bytes.

    Source: Sennrich et al. 2016, arXiv 1508.07909; applied to bytes by Radford et al. 2019 (GPT-2).
    """
    sides = split(read_documents(source).texts)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Split(Regex(PATTERN), "isolated")
    alphabet = [chr(i) for i in range(256)]  # latin-1 maps each byte to one character, so every text is valid
    trainer = BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_first(sides[0]), trainer)
    lengths = np.ones(vocab_size, np.int64)
    for token, number in tokenizer.get_vocab().items():
        lengths[number] = len(token)
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in zip(("train.bin", "val.bin"), sides):
        encoded = tokenizer.encode_batch_fast([text.decode("latin-1") for text in texts])
        np.concatenate([np.array(line.ids, "<u2") for line in encoded]).tofile(folder / name)
    (folder / "tokenizer.sha256").write_text(hashlib.sha256(tokenizer.to_str().encode()).hexdigest())
    return TokenFiles(folder, lengths)


def _first(texts: Sequence[bytes]) -> Iterator[str]:
    """Yields the first texts up to LEARNED_FROM bytes in total, the last one truncated."""
    room = LEARNED_FROM
    for text in texts:
        yield text[:room].decode("latin-1")
        room -= len(text)
        if room <= 0:
            break
