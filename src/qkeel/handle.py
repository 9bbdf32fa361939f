"""A handle undoes a change, either with `handle.remove()` or as a context manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar

from qkeel.errors import InvalidValueError

T = TypeVar("T")

# Tensors and numbers by name, as they are stored in a checkpoint.
State = dict[str, Any]


class Handle:
    """An object that undoes one change, once; also a context manager.

    `undo` is called by the first `remove()`; later calls do nothing. A change whose state must be saved in checkpoints
    (initial norms, power-iteration vectors) provides `state` and `load`.
    """

    # What was changed, in a few words.
    about = ""

    def __init__(
        self,
        undo: Callable[[], None],
        *,
        state: Callable[[], State] | None = None,
        load: Callable[[State], None] | None = None,
    ) -> None:
        self._undo: Callable[[], None] | None = undo
        self._state = state
        self._load = load

    def __repr__(self) -> str:
        """A short description: the kind of change, and whether it is active."""
        of = f" of {self.about}" if self.about else ""
        return f"<{type(self).__name__}{of}: {'active, remove() undoes it' if self.active else 'removed'}>"

    @property
    def active(self) -> bool:
        """Returns whether the change is still active."""
        return self._undo is not None

    def remove(self) -> None:
        """Undoes the change; further calls do nothing."""
        # Cleared first, as what `undo` calls may call `remove` again.
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def state(self) -> State:
        """Returns the tensors, by name, that must be saved so that training can be resumed bit-identically."""
        return self._state() if self._state else {}

    def load(self, state: State) -> None:
        """Restores what `state()` returned.

        Raises:
            InvalidValueError: the state is that of another model or of another change.
        """
        if self._load:
            self._load(state)
        else:
            check_taken(state, (), self.about or "this change")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def under(head: str, state: Mapping[str, T]) -> dict[str, T]:
    """Returns the part of a state whose names begin with `head`, keyed by the rest of each name.

    >>> under("a/", {"a/x": 1, "b/x": 2})
    {'x': 1}
    """
    return {
        name[len(head) :]: value
        for name, value in state.items()
        if name.startswith(head)
    }


def check_taken(state: Mapping[str, object], taken: Iterable[str], what: str) -> None:
    """Raises InvalidValueError if a state has entries that `what` would ignore."""
    left = sorted(state.keys() - set(taken))
    if left:
        ellipsis = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise InvalidValueError(
            f"the state holds {left[0]!r}{ellipsis}, which {what} does not have; load the state of the same model and "
            "remedy"
        )


def compose(handles: Iterable[Handle]) -> Handle:
    """Returns one handle for several handles, which removes them in reverse order, the last change first.

    >>> order = []
    >>> compose(Handle(lambda name=name: order.append(name)) for name in "ab").remove()
    >>> order
    ['b', 'a']
    """
    parts = list(handles)

    def undo() -> None:
        # The last change was made on top of the others, so it goes first.
        for part in reversed(parts):
            part.remove()

    def state() -> State:
        return {
            f"{i}.{k}": v
            for i, part in enumerate(parts)
            for k, v in part.state().items()
        }

    def load(values: State) -> None:
        states = [under(f"{i}.", values) for i in range(len(parts))]
        taken = (f"{i}.{name}" for i, state in enumerate(states) for name in state)
        check_taken(values, taken, f"a change that consists of {len(parts)} parts")
        for part, state in zip(parts, states):
            part.load(state)

    return Handle(undo, state=state, load=load)


def with_hook(handle: Handle, remove: Callable[[], None]) -> Handle:
    """Returns a handle that removes something else before the change of `handle`, whose state it keeps."""

    def undo() -> None:
        remove()
        handle.remove()

    return Handle(undo, state=handle.state, load=handle.load)
