"""The tasks by name, and the simplest: the next token of text."""

from __future__ import annotations

import functools
from typing import final

import numpy as np
import torch
from torch import nn

from qkeel.lab.config import RunConfig
from qkeel.lab.data.corpus import batch, check_enough, heldout, load
from qkeel.lab.data.counted_bigrams import bigram_loss
from qkeel.lab.model.build_model import build_decoder
from qkeel.lab.tasks.image_classes import VisionTask
from qkeel.lab.tasks.task import Examples, Task
from qkeel.lab.tasks.text_and_images import FusedTask
from qkeel.lab.tasks.translation import TranslationTask


@final
class TextTask(Task):
    """The next token of text."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.corpus = load(config.data)
        check_enough(self.corpus, config.data, config.steps)

    def batch(self, seed: int, step: int) -> Examples:
        return _next_tokens(batch(self.corpus, self.config.data, seed, step))

    def heldout(self, count: int) -> Examples:
        return _next_tokens(heldout(self.corpus, self.config.data.context, count))

    def build(self, generator: torch.Generator) -> nn.Module:
        model = build_decoder(self.config.model, self.corpus.vocab_size, self.config.data.context)
        model.init_weights(generator)
        return model


def _next_tokens(windows: np.ndarray) -> Examples:
    tokens = torch.from_numpy(windows)
    return Examples(tokens[:, :-1], tokens[:, 1:])


_MOST_COUNTED = 1 << 22  # tokens of a run; counting more takes seconds


def counted_bigrams(config: RunConfig) -> float | None:
    """The held-out loss of pairs of tokens that are counted on the text that a run reads, in the unit of its losses.
    None where the task is not plain text, or the run is long.
    """
    size = config.steps * config.data.batch * config.data.context
    if config.data.task != "text" or config.data.needle or size > _MOST_COUNTED:
        return None
    plain = RunConfig(data=config.data, seed=config.seed, steps=config.steps, eval_sequences=config.eval_sequences)
    return _counted_bigrams(plain)


@functools.lru_cache(maxsize=64)  # runs of one seed read the same text
def _counted_bigrams(config: RunConfig) -> float:
    task = TextTask(config)
    held = task.heldout(config.eval_sequences)
    seen = [_windows(task.batch(config.seed, step)) for step in range(config.steps)]
    per_token = bigram_loss(np.concatenate(seen), _windows(held), task.corpus.vocab_size)
    return per_token * task.corpus.tokens_per_unit(held.targets.numpy())


def _windows(examples: Examples) -> np.ndarray:
    """Inputs and the last target, as they stood in the text [n t]."""
    return torch.cat([examples.inputs, examples.targets[:, -1:]], 1).numpy()


TASKS: dict[str, type[Task]] = {
    "text": TextTask,
    "multimodal": FusedTask,
    "vision": VisionTask,
    "translation": TranslationTask,
}


def load_task(config: RunConfig) -> Task:
    """The task of a resolved configuration. Raises: DataError for data that cannot be read or does not fit."""
    return TASKS[config.data.task](config)
