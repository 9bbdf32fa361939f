"""Tasks: predicting the next token of text, classes of images, text with images, and translation.

Shapes: n examples, t tokens, p values per patch, rows and columns of patches.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from qkeel.errors import DataError, InvalidValueError
from qkeel.lab.build_run import build_decoder, build_translator, build_vit
from qkeel.lab.config import ImagesConfig, RunConfig
from qkeel.lab.images import WORDS, Digits, load_digits, patches
from qkeel.lab.second_language import translated
from qkeel.lab.text import Corpus, batch, heldout, load, spread
from qkeel.nn import FusedEmbedding

# The interface of tasks.


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs [n t] (tokens) or [n t p] (patches), targets [n t] or [n], and the kinds of targets [n t], if any."""

    inputs: Tensor
    targets: Tensor
    kinds: Tensor | None = None

    def to(self, device: torch.device) -> Examples:
        """Returns the examples on a device."""
        parts = [
            x if x is None else x.to(device, non_blocking=True) for x in self._all()
        ]
        return Examples(*parts)  # type: ignore[arg-type]

    def split(self, count: int) -> list[Examples]:
        """Returns pieces of `count` examples."""
        parts = [
            [None] * len(self.inputs) if x is None else x.split(count)
            for x in self._all()
        ]
        return [Examples(*piece) for piece in zip(*parts)]  # type: ignore[arg-type]

    def _all(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.inputs, self.targets, self.kinds


class Task(abc.ABC):
    """The data and model of a resolved configuration.

    kinds: the kinds of targets. trained: the kinds used in training. classes: the classes of input tokens; see
    `input_classes`. classifies: whether answers are right or wrong, so that accuracy is recorded.
    """

    kinds: Sequence[str] = ()
    trained: Sequence[str] = ()
    classes: Sequence[str] = ()
    classifies: bool = False
    corpus: Corpus

    @abc.abstractmethod
    def __init__(self, config: RunConfig) -> None:
        """Loads the data.

        Raises:
            DataError: the data cannot be read or does not fit the configuration.
        """

    @abc.abstractmethod
    def batch(self, seed: int, step: int) -> Examples:
        """Returns the examples of a step, as a function of (seed, step) alone."""

    @abc.abstractmethod
    def heldout(self, count: int) -> Examples:
        """Returns at most `count` held-out examples, the same for every run."""

    @abc.abstractmethod
    def build(self, generator: torch.Generator) -> nn.Module:
        """Builds the model with its initial weights."""

    def input_classes(self, inputs: Tensor) -> Tensor:
        """Returns the class of each input token [n t], as an index into `classes`."""
        return torch.zeros(inputs.shape[:2], dtype=torch.long, device=inputs.device)

    def decoded(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Returns what is measured once, after training, because it needs the model's own output token by token."""
        return {}


@final
class VisionTask(Task):
    """Classification of digits by a small vision transformer. Each token is a patch, and pixels are standardised."""

    classifies = True

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        digits = load_digits()
        train = digits.pixels[~digits.held]
        tokens = patches(
            (digits.pixels - train.mean()) / float(train.std()), config.images.patch
        )
        self._patches = torch.from_numpy(
            tokens.reshape(len(tokens), -1, tokens.shape[-1]).astype(np.float32)
        )
        self._labels = torch.from_numpy(digits.labels)
        # Images are held out by content, so that copies of an image are on one side.
        self._sides = [np.flatnonzero(side) for side in (~digits.held, digits.held)]
        flat = [self._patches[side].flatten(0, 1).numpy() for side in self._sides]
        self.corpus = Corpus(
            name="digits",
            vocab_size=len(WORDS),
            loss_unit="image",
            sha256=digits.sha256,
            train=flat[0],
            heldout=flat[1],
            ends=np.array([len(flat[1])]),
        )

    def batch(self, seed: int, step: int) -> Examples:
        return self._examples(
            np.random.default_rng((seed, step)).choice(
                self._sides[0], self.config.data.batch
            )
        )

    def heldout(self, count: int) -> Examples:
        """Returns evenly spaced held-out examples, so that every class occurs."""
        held = self._sides[1]
        return self._examples(
            held[np.linspace(0, len(held) - 1, min(count, len(held))).astype(np.int64)]
        )

    def build(self, generator: torch.Generator) -> nn.Module:
        count, width = self._patches.shape[1:]
        model = build_vit(self.config.model, self.corpus.vocab_size, count, width)
        model.init_weights(generator)
        return model

    def _examples(self, which: np.ndarray) -> Examples:
        indices: Tensor = torch.from_numpy(which)
        return Examples(self._patches[indices], self._labels[indices])


# Images and text in one sequence.

TEXT, NEAR_IMAGE, CAPTION, IMAGE = range(4)
# The token before an image; the codes of patches follow it in the vocabulary.
BEGIN = 256
MAX_CODES = 65536


@final
class FusedTask(Task):
    """Predicts the next token of text alone, or of an image and its caption, in either order, followed by text.

    The kinds of targets are text without an image, text next to an image, a caption, and an image with the token before
    it. An image is read row by row, and each patch is one code, with its pixels rounded to a few grey levels.

    Source: early fusion with loss on all tokens as in Chameleon, arXiv 2405.09818.
    """

    kinds = ("text", "beside", "caption", "image")
    classes = ("text", "image")

    def __init__(self, config: RunConfig) -> None:
        self.config, self.images = config, config.images
        self.text = load(config.data)
        if self.text.loss_unit != "byte":
            raise DataError(
                f"captions are bytes, so the text must also be bytes; {config.data.source} contains tokens"
            )
        self.digits = load_digits()
        self.codes = _codes(self.digits, self.images)
        self.train, self.held = (
            np.flatnonzero(side) for side in (~self.digits.held, self.digits.held)
        )
        self._check_room()
        share = self.images.image_share
        self.trained = (
            self.kinds[:1]
            if share == 0
            else self.kinds[1:]
            if share == 1
            else self.kinds
        )
        digest = hashlib.sha256(
            (self.text.sha256 + self.digits.sha256).encode()
        ).hexdigest()
        name = f"{self.text.name} and digits"
        size = BEGIN + 1 + self.images.levels**self.images.patch**2
        self.corpus = dataclasses.replace(
            self.text, name=name, vocab_size=size, loss_unit="token", sha256=digest
        )

    def _check_room(self) -> None:
        config, room = self.images, self.config.data.context
        # Words are joined by spaces, and the caption ends with a line end.
        longest = (max(map(len, WORDS)) + 1) * config.canvas
        tokens = 1 + config.canvas * self.codes[0].size
        if tokens + longest > room + 1:
            raise InvalidValueError(
                f"a canvas of {config.canvas} images needs {tokens} tokens and the longest caption {longest}; expected "
                f"a context of at least {tokens + longest - 1}, got {room}. Give a longer --context, a smaller "
                "--canvas or a larger --patch"
            )

    def batch(self, seed: int, step: int) -> Examples:
        """Returns sequences of which a share `image_share` has an image; the text is the same as without images."""
        config, data = self.images, self.config.data
        windows = batch(self.text, data, seed, step)
        # A generator of its own, so that the text is the same with and without images.
        rng = np.random.default_rng((seed, step, 1))
        # Rounded up or down at random: on average, the share of sequences with an image is as asked for.
        count = int(config.image_share * data.batch + rng.random())
        rows = []
        for i, window in enumerate(windows):
            several, first = rng.integers(1, config.canvas + 1), rng.random() < 0.5
            which = rng.choice(self.train, several)
            rows.append(self._row(window, which if i < count else (), first))
        return _examples(rows)

    def heldout(self, count: int) -> Examples:
        """Returns sequences of which half have an image, in both orders and with all canvas sizes, for every mix."""
        windows = heldout(self.text, self.config.data.context, count)
        rows, used = [], 0
        for i, window in enumerate(windows):
            several = 0 if i % 2 else 1 + (i // 4) % self.images.canvas
            which = self.held[np.arange(used, used + several) % len(self.held)]
            rows.append(self._row(window, which, i % 4 == 0))
            used += several
        return _examples(rows)

    def _row(
        self, text: np.ndarray, which: Sequence[int] | np.ndarray, first: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens and kinds of one sequence, which is as long as its text."""
        if not len(which):
            return text, np.full(len(text), TEXT)
        canvas = np.concatenate([self.codes[i] for i in which], axis=1).ravel()
        picture = np.concatenate([[BEGIN], BEGIN + 1 + canvas])
        words = " ".join(WORDS[self.digits.labels[i]] for i in which)
        caption = np.frombuffer(f"{words}\n".encode(), np.uint8)
        pair = (
            ((picture, IMAGE), (caption, CAPTION))
            if first
            else ((caption, CAPTION), (picture, IMAGE))
        )
        parts = (*pair, (text, NEAR_IMAGE))
        tokens = np.concatenate([tokens_of_kind for tokens_of_kind, _ in parts])[
            : len(text)
        ]
        return tokens, np.concatenate(
            [np.full(len(tokens_of_kind), kind) for tokens_of_kind, kind in parts]
        )[: len(text)]

    def input_classes(self, inputs: Tensor) -> Tensor:
        return (inputs >= BEGIN).long()

    def build(self, generator: torch.Generator) -> nn.Module:
        model = build_decoder(
            self.config.model, self.corpus.vocab_size, self.config.data.context
        )
        deviation = math.sqrt(self.images.image_variance)
        if self.images.image_input == "patches":
            model.embedding = FusedEmbedding(model.embedding, self._pixels())
        model.init_weights(generator)
        # Every row was drawn with a variance of 1.
        with torch.no_grad():
            model.embedding.weight[BEGIN:].mul_(deviation)
            if isinstance(model.embedding, FusedEmbedding):
                model.embedding.patch.weight.mul_(deviation)
        return model

    def _pixels(self) -> Tensor:
        """Returns the pixels of each code [codes p], standardised over the patches of the training images."""
        levels, width = self.images.levels, self.images.patch**2
        codes = np.arange(levels**width)
        # The middle of its range stands for a level.
        pixels = (
            (codes[:, None] // levels ** np.arange(width)) % levels + 0.5
        ) / levels
        trained_pixels = pixels[self.codes[self.train].ravel()]
        return torch.from_numpy(
            ((pixels - trained_pixels.mean()) / trained_pixels.std()).astype(np.float32)
        )


def _codes(digits: Digits, config: ImagesConfig) -> np.ndarray:
    """Returns the code of every patch [n rows columns]: Σ level_i · levels^i over its pixels."""
    width = config.patch**2
    if config.levels**width > MAX_CODES:
        raise InvalidValueError(
            f"{config.levels} levels for {width} pixels make {config.levels**width:,} codes; expected at most "
            f"{MAX_CODES:,}. Give fewer --levels or a smaller --patch"
        )
    pixels = patches(digits.pixels, config.patch)
    # White, which is 1, belongs to the highest level.
    level = np.minimum((pixels * config.levels).astype(np.int64), config.levels - 1)
    return level @ config.levels ** np.arange(width)


def _examples(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Examples:
    tokens, kinds = (
        torch.from_numpy(np.stack(column).astype(np.int64)) for column in zip(*rows)
    )
    return Examples(tokens[:, :-1], tokens[:, 1:], kinds[:, 1:])


# The first token of every translation.
BEGIN_TRANSLATION = 256


@final
class TranslationTask(Task):
    """Translation into a synthetic second language by a small encoder–decoder, with a loss per byte of the translation.

    Training uses `pairs` texts of `context` bytes, evenly spaced over the training part. Their number is small, as in
    the setting for which QK-norm was proposed. Held-out pairs come from held-out text. The inputs consist of a source
    text, the token BEGIN and the translation.

    Source: Henry et al. 2020, arXiv 2010.04245, for low-resource translation; the second language is our own.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        text = load(config.data)
        if text.loss_unit != "byte":
            raise DataError(
                f"translation needs text as bytes; {config.data.source} contains tokens"
            )
        self._pairs = _translation_examples(
            spread(text.train, config.data.context - 1, config.data.pairs)
        )
        self._heldout = heldout(text, config.data.context - 1, config.eval_sequences)
        digest = hashlib.sha256(
            text.sha256.encode()
            + self._pairs.targets.numpy().astype(np.uint8).tobytes()
        )
        self.corpus = dataclasses.replace(
            text, vocab_size=BEGIN_TRANSLATION + 1, sha256=digest.hexdigest()
        )

    def batch(self, seed: int, step: int) -> Examples:
        count = len(self._pairs.inputs)
        rng = np.random.default_rng((seed, step))
        which = torch.from_numpy(rng.integers(0, count, self.config.data.batch))
        return Examples(self._pairs.inputs[which], self._pairs.targets[which])

    def heldout(self, count: int) -> Examples:
        return _translation_examples(self._heldout[:count])

    def decoded(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Returns the BLEU of greedy decoding, if sacrebleu is installed; `pip install sacrebleu`."""
        try:
            import sacrebleu  # pyright: ignore[reportMissingImports]
        except ImportError:
            return {}
        length = self.config.data.context
        # All positions stand in the sequence from the start: those of queries in cross-attention count from its end.
        tokens = examples.inputs.clone()
        tokens[:, length + 1 :] = 0
        translation = torch.zeros_like(examples.targets)
        for i in range(length):
            translation[:, i] = model(tokens)[:, i, :BEGIN_TRANSLATION].argmax(-1)
            # What is still to come is 0, and not yet visible.
            tokens[:, length + 1 :] = translation[:, :-1]
        translations, references = _texts(translation), _texts(examples.targets)
        return {
            "val_bleu": float(sacrebleu.corpus_bleu(translations, [references]).score)
        }

    def build(self, generator: torch.Generator) -> nn.Module:
        model = build_translator(
            self.config.model, self.corpus.vocab_size, self.config.data.context
        )
        model.init_weights(generator)
        return model


def _texts(tokens: Tensor) -> list[str]:
    """Returns each row of bytes as text; Latin-1 has a character for every byte, so no translation is unreadable."""
    return [bytes(row).decode("latin-1") for row in tokens.tolist()]


def _translation_examples(sources: np.ndarray) -> Examples:
    """Pairs sources [n t] with their translations, as inputs [n 2t] and targets [n t]."""
    translations = [
        np.frombuffer(translated(row.astype(np.uint8).tobytes()), np.uint8)
        for row in sources
    ]
    targets = np.stack(translations).astype(np.int64)
    begin = np.full((len(sources), 1), BEGIN_TRANSLATION)
    return Examples(
        torch.from_numpy(
            np.concatenate(
                [
                    sources,
                    begin,
                    targets[:, :-1],
                ],
                axis=1,
            )
        ),
        torch.from_numpy(targets),
    )


@final
class TextTask(Task):
    """Predicts the next token of text."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.corpus = load(config.data)

    def batch(self, seed: int, step: int) -> Examples:
        return _next_tokens(batch(self.corpus, self.config.data, seed, step))

    def heldout(self, count: int) -> Examples:
        return _next_tokens(heldout(self.corpus, self.config.data.context, count))

    def build(self, generator: torch.Generator) -> nn.Module:
        model = build_decoder(
            self.config.model, self.corpus.vocab_size, self.config.data.context
        )
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
    """Returns the task of a resolved configuration.

    Raises:
        DataError: the data cannot be read or does not fit the configuration.
    """
    return TASKS[config.data.task](config)
