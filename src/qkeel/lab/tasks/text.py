"""The tasks by name, and the simplest: the next token of text."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import nn

from qkeel.lab.config import RunConfig
from qkeel.lab.data.corpus import batch, check_enough, heldout, load
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


TASKS: dict[str, type[Task]] = {
    "text": TextTask,
    "multimodal": FusedTask,
    "vision": VisionTask,
    "translation": TranslationTask,
}


def load_task(config: RunConfig) -> Task:
    """The task of a resolved configuration. Raises: DataError for data that cannot be read or does not fit."""
    return TASKS[config.data.task](config)
