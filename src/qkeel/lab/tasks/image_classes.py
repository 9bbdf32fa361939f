"""The class of an image from its patches, by a small vision transformer."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from qkeel.errors import DataError
from qkeel.lab.config import RunConfig
from qkeel.lab.data.corpus import Corpus
from qkeel.lab.data.images import load_pictures, patches
from qkeel.lab.model.build_model import build_vit
from qkeel.lab.tasks.task import Examples, Task


@final
class VisionTask(Task):
    """Classification; pixels are standardised over the training images. A token is a patch."""

    classifies = True

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        pictures = load_pictures(config.images.images, config.images.image_size)
        if len(pictures.classes) < 2:
            raise DataError(
                f"{config.images.images} has {len(pictures.classes)} classes; vision expects at least 2: a folder of "
                "one subfolder per class, digits or photos"
            )
        train = pictures.pixels[~pictures.held]
        deviation = float(train.std()) or 1.0
        tokens = patches((pictures.pixels - train.mean()) / deviation, config.images.patch)
        self._patches = torch.from_numpy(tokens.reshape(len(tokens), -1, tokens.shape[-1]).astype(np.float32))
        self._labels = torch.from_numpy(pictures.labels)
        self._sides = [np.flatnonzero(side) for side in (~pictures.held, pictures.held)]
        flat = [self._patches[side].flatten(0, 1).numpy() for side in self._sides]
        self.corpus = Corpus(
            name=pictures.name,
            vocab_size=len(pictures.classes),
            loss_unit="image",
            sha256=pictures.sha256,
            train=flat[0],
            heldout=flat[1],
            ends=np.array([len(flat[1])]),
        )

    def batch(self, seed: int, step: int) -> Examples:
        return self._examples(np.random.default_rng((seed, step)).choice(self._sides[0], self.config.data.batch))

    def heldout(self, count: int) -> Examples:
        """Evenly spaced, so that every class is among them."""
        held = self._sides[1]
        return self._examples(held[np.linspace(0, len(held) - 1, min(count, len(held))).astype(np.int64)])

    def build(self, generator: torch.Generator) -> nn.Module:
        count, width = self._patches.shape[1:]
        model = build_vit(self.config.model, self.corpus.vocab_size, count, width)
        model.init_weights(generator)
        return model

    def _examples(self, which: np.ndarray) -> Examples:
        place: Tensor = torch.from_numpy(which)
        return Examples(self._patches[place], self._labels[place])
