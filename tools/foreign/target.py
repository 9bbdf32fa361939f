"""Target: one model of a package, tiny and with random weights, and how its scores are to be read."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tools.foreign.reference import Example, Shape

IMAGE, TOKENS, VOCAB = 32, 7, 40
Made = tuple[nn.Module, Example]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One row of a table.

    Args:
        package: the name by which the package is installed.
        name: what the row is called: the model and its variant.
        make: the model, and arguments with which its forward runs.
        attentions: how many attention calls a forward pass makes, counted in the package's source.
        shape: how the scores are to be read.
        double: whether the model runs in float64.
    """

    package: str
    name: str
    make: Callable[[], Made]
    attentions: int
    shape: Shape
    double: bool = True


def built(
    path: str, example: Callable[[], Example], *args: Any, **options: Any
) -> Callable[[], Made]:
    """A function that makes the class `path`, "module:Class", with these options, and then an example of its input."""
    module, _, name = path.partition(":")
    return lambda: (
        getattr(importlib.import_module(module), name)(*args, **options),
        example(),
    )


def image(side: int = IMAGE, channels: int = 3, batch: int = 2) -> Example:
    """A batch of images."""
    return (torch.randn(batch, channels, side, side),), {}


def text(length: int = TOKENS, batch: int = 2) -> Example:
    """A batch of token numbers; the first few, which stand for padding and the like, left out."""
    return (torch.randint(5, VOCAB, (batch, length)),), {}


def given(*args: Any, **kwargs: Any) -> Example:
    """These arguments."""
    return args, kwargs


def another(example: Example) -> Example:
    """Other numbers in the same shapes; whole numbers from the same range, masks as they are."""

    def other(x: Any) -> Any:
        if isinstance(x, Tensor):
            if x.is_floating_point():
                return torch.randn_like(x)
            if x.dtype != torch.bool and x.ndim > 1 and int(x.min()) > 1:
                return torch.randint(int(x.min()), int(x.max()) + 1, x.shape)
        if isinstance(x, (tuple, list)):
            return type(x)(other(y) for y in x)
        return x

    return other(example[0]), {k: other(v) for k, v in example[1].items()}


def settled(model: nn.Module, example: Example) -> nn.Module:
    """The model after its batch norms have seen the example: with weights at random their averages would not fit."""
    norms = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        if norms:
            model(*example[0], **example[1])
    return model.eval()


def uneven(model: nn.Module) -> nn.Module:
    """The model in evaluation with weights large enough for uneven attention, none of them zero."""
    model.eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point() or not p.numel():
                continue
            if p.ndim >= 2:
                nn.init.normal_(
                    p,
                    std=min(0.3, (1.7 if p.ndim == 2 else 2.5) / p[:1].numel() ** 0.5),
                )
            elif name.endswith("bias"):
                p.add_(0.1 * torch.randn_like(p))
            elif not bool(p.any()):
                p.fill_(1.0)
    return model


def with_torchvision() -> None:
    """Lets torchvision be imported where its compiled operators do not load: the two that an import asks for get a
    name."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        _KEPT.append(library)
        for name in ("nms", "qnms"):
            library.define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        importlib.import_module("torchvision")


_KEPT: list[torch.library.Library] = []
