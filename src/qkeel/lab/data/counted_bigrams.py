"""The loss of counting: what pairs of tokens that a run has read predict of held-out text, without any training."""

from __future__ import annotations

import numpy as np


def bigram_loss(read: np.ndarray, heldout: np.ndarray, vocab_size: int) -> float:
    """Returns the mean loss, nats per token, of pairs counted in one text on another.

    P(b|a) = (c(ab) + u(a) · P(b)) / (c(a) + u(a)), with c(ab) how often b follows a, c(a) how often anything does, and
    u(a) how many different tokens do; P(b) = (c(b) + 1) / (n + vocabulary). It has no number to choose.

    Args:
        read: windows of tokens that the counts are of [n t]. heldout: windows that are predicted, all tokens but the
            first of each [n t].

    Source: Witten & Bell 1991, The zero-frequency problem, method C, interpolated with counts plus one.

    >>> round(bigram_loss(np.array([[0, 1, 0, 1, 0, 1]]), np.array([[0, 1, 0]]), 2), 3)
    0.162
    """
    first, second = read[:, :-1].ravel().astype(np.int64), read[:, 1:].ravel().astype(np.int64)
    pairs, counts = np.unique(first * vocab_size + second, return_counts=True)
    of_first = np.bincount(first, minlength=vocab_size)
    kinds = np.bincount(pairs // vocab_size, minlength=vocab_size)
    single = (np.bincount(second, minlength=vocab_size) + 1) / (len(second) + vocab_size)
    a, b = heldout[:, :-1].ravel().astype(np.int64), heldout[:, 1:].ravel().astype(np.int64)
    wanted = a * vocab_size + b
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    weight = np.maximum(of_first[a] + kinds[a], 1)
    known = (together + kinds[a] * single[b]) / weight
    return float(-np.log(np.where(of_first[a] > 0, known, single[b])).mean())
