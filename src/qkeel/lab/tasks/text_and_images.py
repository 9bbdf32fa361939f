"""Images and text in one sequence: patches of images are tokens after those of text, and all are predicted."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from qkeel.errors import DataError, InvalidValueError
from qkeel.lab.config import ImagesConfig, RunConfig
from qkeel.lab.data.corpus import batch, heldout, load
from qkeel.lab.data.images import Pictures, grey, load_pictures, patches
from qkeel.lab.model.build_model import build_decoder
from qkeel.lab.tasks.task import Examples, Task
from qkeel.nn import FusedEmbedding

TEXT, NEAR_IMAGE, CAPTION, IMAGE = range(4)
BEGIN = 256  # the token before an image; its codes follow in the vocabulary
MAX_CODES = 65536


@final
class FusedTask(Task):
    """Text alone, or an image with its caption in either order and then text; the next token of everything.

    Targets are text without an image, text along with one, a caption, an image (with the token before it).
    An image of a canvas is row by row of patches; a patch is a code: its pixels rounded to a few grey levels.

    Source: early fusion with loss on all tokens as in Chameleon, arXiv 2405.09818.
    """

    kinds = ("text", "beside", "caption", "image")
    classes = ("text", "image")

    def __init__(self, config: RunConfig) -> None:
        self.config, self.images = config, config.images
        self.text = load(config.data)
        if self.text.loss_unit != "byte":
            raise DataError(f"a caption is bytes, so the text with it must be too; {config.data.source} holds tokens")
        self.pictures = load_pictures(self.images.images, self.images.image_size)
        self.codes = _codes(self.pictures, self.images)
        self._captions = [(caption + "\n").encode() for caption in self.pictures.captions]
        self.train, self.held = (np.flatnonzero(side) for side in (~self.pictures.held, self.pictures.held))
        self._check_room()
        share = self.images.image_share
        self.trained = self.kinds[:1] if share == 0 else self.kinds[1:] if share == 1 else self.kinds
        digest = hashlib.sha256((self.text.sha256 + self.pictures.sha256).encode()).hexdigest()
        name = f"{self.text.name} and {self.pictures.name}"
        size = BEGIN + 1 + self.images.levels**self.images.patch**2
        self.corpus = dataclasses.replace(self.text, name=name, vocab_size=size, loss_unit="token", sha256=digest)

    def _check_room(self) -> None:
        config, room = self.images, self.config.data.context
        longest = max(map(len, self._captions)) + config.canvas - 1
        tokens = 1 + config.canvas * (config.image_size // config.patch) ** 2
        if tokens + longest > room + 1:
            raise InvalidValueError(
                f"a canvas of {config.canvas} images takes {tokens} tokens and the longest caption {longest}; expected "
                f"a context of at least {tokens + longest - 1}, got {room}. Give a longer --context, a smaller "
                "--canvas or a larger --patch"
            )

    def batch(self, seed: int, step: int) -> Examples:
        """`image_share` of the sequences hold an image; the text is that of a run on text alone."""
        config, data = self.images, self.config.data
        windows = batch(self.text, data, seed, step)
        rng = np.random.default_rng((seed, step, 1))
        count = int(config.image_share * data.batch + rng.random())
        rows = []
        for i, window in enumerate(windows):
            several, first = rng.integers(1, config.canvas + 1), rng.random() < config.image_first
            which = rng.choice(self.train, several)
            rows.append(self._row(window, which if i < count else (), first))
        return _examples(rows)

    def heldout(self, count: int) -> Examples:
        """Half with an image, half of those image first, canvases of each size in turn: one probe for every mix."""
        windows = heldout(self.text, self.config.data.context, count)
        rows, used = [], 0
        for i, window in enumerate(windows):
            several = 0 if i % 2 else 1 + (i // 4) % self.images.canvas
            which = self.held[np.arange(used, used + several) % len(self.held)]
            rows.append(self._row(window, which, i % 4 == 0))
            used += several
        return _examples(rows)

    def _row(self, text: np.ndarray, which: Sequence[int] | np.ndarray, first: bool) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and kinds of one sequence, as long as its text is."""
        if not len(which):
            return text, np.full(len(text), TEXT)
        canvas = np.concatenate([self.codes[i] for i in which], axis=1).ravel()
        picture = np.concatenate([[BEGIN], BEGIN + 1 + canvas])
        caption = np.frombuffer(b" ".join(self._captions[i].strip() for i in which) + b"\n", np.uint8)
        pair = ((picture, IMAGE), (caption, CAPTION)) if first else ((caption, CAPTION), (picture, IMAGE))
        parts = (*pair, (text, NEAR_IMAGE))
        tokens = np.concatenate([part for part, _ in parts])[: len(text)]
        return tokens, np.concatenate([np.full(len(part), kind) for part, kind in parts])[: len(text)]

    def input_classes(self, inputs: Tensor) -> Tensor:
        return (inputs >= BEGIN).long()

    def build(self, generator: torch.Generator) -> nn.Module:
        model = build_decoder(self.config.model, self.corpus.vocab_size, self.config.data.context)
        deviation = math.sqrt(self.images.image_variance)
        if self.images.image_input == "patches":
            model.embedding = FusedEmbedding(model.embedding, self._pixels())
        model.init_weights(generator)
        with torch.no_grad():
            model.embedding.weight[BEGIN:].mul_(deviation)
            if isinstance(model.embedding, FusedEmbedding):
                model.embedding.patch.weight.mul_(deviation)
        return model

    def _pixels(self) -> Tensor:
        """The pixels of each code [codes p], standardised over the patches of the training images."""
        levels, width = self.images.levels, self.images.patch**2
        codes = np.arange(levels**width)
        pixels = ((codes[:, None] // levels ** np.arange(width)) % levels + 0.5) / levels
        seen = pixels[self.codes[self.train].ravel()]
        return torch.from_numpy(((pixels - seen.mean()) / (seen.std() or 1.0)).astype(np.float32))


def _codes(pictures: Pictures, config: ImagesConfig) -> np.ndarray:
    """The code of every patch [n rows columns]: Σ level_i · levels^i over its pixels."""
    width = config.patch**2
    if config.levels**width > MAX_CODES:
        raise InvalidValueError(
            f"{config.levels} levels of {width} pixels make {config.levels**width:,} codes; expected at most "
            f"{MAX_CODES:,}. Give fewer --levels or a smaller --patch"
        )
    pixels = patches(grey(pictures.pixels), config.patch)
    level = np.minimum((pixels * config.levels).astype(np.int64), config.levels - 1)
    return level @ config.levels ** np.arange(width)


def _examples(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Examples:
    tokens, kinds = (torch.from_numpy(np.stack(part).astype(np.int64)) for part in zip(*rows))
    return Examples(tokens[:, :-1], tokens[:, 1:], kinds[:, 1:])
