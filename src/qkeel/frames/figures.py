"""Figures by matplotlib: lines of each layer over the steps, a map of heads, a forecast."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkeel.errors import needed
from qkeel.frames.frame import Foreign

_NAMED = 8  # lines that a key names; more are coloured by their depth


def axes(given: Foreign = None) -> Foreign:
    """Returns the matplotlib Axes to draw on: those given, or those of a new figure.

    Raises: MissingLibraryError if matplotlib is not installed.
    """
    if given is not None:
        return given
    with needed("plot()", "'qkeel[plot]'"):
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    return pyplot.subplots(layout="constrained")[1]


def draw_lines(ax: Foreign, steps: np.ndarray, values: np.ndarray, names: Sequence[str], label: str) -> None:
    """Draws one line per column of values [n k] over the steps [n], on a log axis where values differ 30-fold."""
    from matplotlib import colormaps  # pyright: ignore[reportMissingImports]

    colours = colormaps["viridis"](np.linspace(0, 0.9, max(len(names), 2)))
    for column, name, colour in zip(values.T, names, colours, strict=False):
        ax.plot(steps, column, color=colour, label=name, marker="." if len(steps) < 3 else None)
    if len(names) <= _NAMED:
        ax.legend()
    else:
        ax.set_title(f"from {names[0]} (dark) to {names[-1]} (light)", fontsize="medium")
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() > 30 * finite.min():
        ax.set_yscale("log")
    ax.set(xlabel="optimizer step", ylabel=label)


def draw_heads(ax: Foreign, values: np.ndarray, names: Sequence[str], label: str) -> None:
    """Draws a map of one record [layers heads]; heads that a layer does not have stay empty."""
    image = ax.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis")
    ax.figure.colorbar(image, ax=ax, label=label)
    if len(names) <= 3 * _NAMED:
        ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="head", ylabel="layer")
    ax.xaxis.get_major_locator().set_params(integer=True)


def draw_forecast(
    ax: Foreign, threshold: float, now: tuple[float, float], ahead: tuple[float, float, float], farthest: float
) -> None:
    """Draws the threshold and where it is passed: from `now`, step and value, to the steps low, likeliest, high.

    Args:
        ax: the Axes. threshold: the logit. now: step and value of the last record.
        ahead: the steps, infinite where they are not in this run. farthest: the last step that the axis shows.
    """
    low, step, high = ahead
    ax.axhline(threshold, color="0.5", linestyle=":")
    if np.isfinite(step):
        ax.plot([now[0], step], [now[1], threshold], color="C3", linestyle="--", label="forecast")
        ax.axvspan(low, high if np.isfinite(high) else step, color="C3", alpha=0.15, label="90 % interval")
    ax.set_xlim(right=min(ax.get_xlim()[1], farthest))
    ax.legend()
