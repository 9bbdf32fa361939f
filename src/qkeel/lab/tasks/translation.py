"""Translation of text into a second language that is made from it, by a small encoder–decoder."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import final

import numpy as np
import torch
from torch import nn

from qkeel.errors import DataError
from qkeel.lab.config import RunConfig
from qkeel.lab.data.corpus import heldout, load, spread
from qkeel.lab.data.second_language import translated
from qkeel.lab.model.build_model import build_translator
from qkeel.lab.tasks.task import Examples, Task

BEGIN = 256  # the token that a translation begins with


@final
class TranslationTask(Task):
    """The next byte of a translation, given its source and the bytes before: loss in nats per byte of translations.

    Training knows `pairs` texts of `context` bytes, spread evenly over the training part: few, as in the setting that
    QK-norm was made for. Held-out pairs are of held-out text. Inputs are a source, BEGIN and the translation.

    Source: Henry et al. 2020, arXiv 2010.04245, for low-resource translation; the second language is our own.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        text = load(config.data)
        if text.loss_unit != "byte":
            raise DataError(f"a translation is made of bytes of text; {config.data.source} holds tokens")
        self._pairs = _examples(spread(text.train, config.data.context - 1, config.data.pairs))
        self._heldout = heldout(text, config.data.context - 1, config.eval_sequences)
        digest = hashlib.sha256(text.sha256.encode() + self._pairs.targets.numpy().astype(np.uint8).tobytes())
        self.corpus = dataclasses.replace(text, vocab_size=BEGIN + 1, sha256=digest.hexdigest())

    def batch(self, seed: int, step: int) -> Examples:
        count = len(self._pairs.inputs)
        which = torch.from_numpy(np.random.default_rng((seed, step)).integers(0, count, self.config.data.batch))
        return Examples(self._pairs.inputs[which], self._pairs.targets[which])

    def heldout(self, count: int) -> Examples:
        return _examples(self._heldout[:count])

    def build(self, generator: torch.Generator) -> nn.Module:
        model = build_translator(self.config.model, self.corpus.vocab_size, self.config.data.context)
        model.init_weights(generator)
        return model


def _examples(sources: np.ndarray) -> Examples:
    """Pairs of sources [n t]: inputs [n 2t] and targets [n t]."""
    second = [np.frombuffer(translated(row.astype(np.uint8).tobytes()), np.uint8) for row in sources]
    targets = np.stack(second).astype(np.int64)
    begin = np.full((len(sources), 1), BEGIN)
    return Examples(
        torch.from_numpy(np.concatenate([sources, begin, targets[:, :-1]], axis=1)), torch.from_numpy(targets)
    )
