"""Byte-pair tokens, learned from the training part of a text: the same text always gives the same tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from qkeel.errors import DataError

LEARNED_FROM = 1 << 22  # bytes of the training part: more change few tokens and take longer
# A word with the space before it, a digit, signs, white space: no token goes over these borders.
PATTERN = r" ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z_0-9]+|\s+(?!\S)|\s+"
BYTES = 256  # tokens of one byte, so that any text can be written


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BytePairs:
    """Texts as tokens of several bytes: the bytes of each token, and the SHA-256 of vocabulary and merges."""

    parts: Sequence[Sequence[np.ndarray]]
    lengths: np.ndarray
    sha256: str


def byte_pairs(train: Sequence[bytes], held: Sequence[bytes], vocab_size: int) -> BytePairs:
    """Returns both parts of a corpus, text by text, in tokens that are learned from the first.

    Args:
        train: texts that tokens are learned from, the first 4 MiB of them. held: texts that have no say.
        vocab_size: number of tokens, at least 257; fewer are used where the text has no more pairs.

    Raises: DataError where the library tokenizers is missing, or for a vocabulary without room for pairs.

    Source: Sennrich et al. 2016, arXiv 1508.07909; on bytes: Radford et al. 2019 (GPT-2).
    """
    if not BYTES < vocab_size <= 1 << 16:
        raise DataError(f"expected a vocab_size of {BYTES + 1} to 65536 for tokens bpe, got {vocab_size}")
    try:
        from tokenizers import Regex, Tokenizer
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import Split
        from tokenizers.trainers import BpeTrainer
    except ImportError as error:
        raise DataError(
            "tokens bpe need the tokenizers library: pip install 'qkeel[hf]', or use tokens bytes"
        ) from error
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Split(Regex(PATTERN), "isolated")
    alphabet = [chr(i) for i in range(BYTES)]  # a byte is a character: no text is refused, none changed
    trainer = BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_first(train), trainer)
    lengths = np.ones(vocab_size, np.int64)
    for token, number in tokenizer.get_vocab().items():
        lengths[number] = len(token)
    sides = [tokenizer.encode_batch_fast([text.decode("latin-1") for text in side]) for side in (train, held)]
    parts = [[np.array(found.ids, np.uint16) for found in side] for side in sides]
    return BytePairs(parts, lengths, hashlib.sha256(tokenizer.to_str().encode()).hexdigest())


def _first(texts: Sequence[bytes]) -> list[str]:
    """The texts up to the limit, the last one cut."""
    found, left = [], LEARNED_FROM
    for text in texts:
        found.append(text[:left].decode("latin-1"))
        left -= len(text)
        if left <= 0:
            break
    return found
