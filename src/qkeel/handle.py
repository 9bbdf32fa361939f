"""How to undo a change: `handle.remove()`, or `with` around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self


class Handle:
    """Undoes one change, once. Also a context manager.

    `undo` is called by the first `remove()`; later calls do nothing. A change that
    carries state across a checkpoint (initial norms, power-iteration vectors) gives
    `state` and `load`.
    """

    def __init__(
        self,
        undo: Callable[[], None],
        *,
        state: Callable[[], dict[str, Any]] | None = None,
        load: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._undo: Callable[[], None] | None = undo
        self._state = state
        self._load = load

    @property
    def active(self) -> bool:
        """Whether the change is still in force."""
        return self._undo is not None

    def remove(self) -> None:
        """Undo the change; a second call does nothing."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def state(self) -> dict[str, Any]:
        """Tensors that must be saved for a bit-identical resume, by name."""
        return self._state() if self._state else {}

    def load(self, state: dict[str, Any]) -> None:
        """Put back what `state()` gave."""
        if self._load:
            self._load(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def compose(handles: Iterable[Handle]) -> Handle:
    """One handle for many; removed in reverse order, so the last change goes first."""
    parts = list(handles)

    def undo() -> None:
        for part in reversed(parts):
            part.remove()

    def state() -> dict[str, Any]:
        return {f"{i}.{k}": v for i, part in enumerate(parts) for k, v in part.state().items()}

    def load(values: dict[str, Any]) -> None:
        for i, part in enumerate(parts):
            head = f"{i}."
            part.load({k[len(head) :]: v for k, v in values.items() if k.startswith(head)})

    return Handle(undo, state=state, load=load)
