"""The errors that qkeel raises. Each is a QkeelError and also the matching built-in error.

Every message says what was expected, what was given, and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator


class QkeelError(Exception):
    """Base class of every error that qkeel raises on purpose."""


class InvalidValueError(QkeelError, ValueError):
    """A value is outside its range, or values do not fit together."""


class InvalidTypeError(QkeelError, TypeError):
    """A value has the wrong type or dtype."""


class ShapeError(InvalidValueError):
    """A tensor has the wrong shape."""


class NonFiniteError(QkeelError, ArithmeticError):
    """A value is NaN or infinite where only finite numbers make sense."""


class UnknownNameError(QkeelError, KeyError):
    """A name is unknown; the message suggests the nearest known names."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class RefusedError(QkeelError, NotImplementedError):
    """A request cannot be carried out exactly, so it is not carried out at all."""


class NoAttentionError(RefusedError):
    """No attention was seen in a forward pass."""


class DataError(QkeelError, OSError):
    """A corpus or file cannot be read or is too small."""


class RunDirectoryError(QkeelError, OSError):
    """A run directory belongs to another run, is damaged, is in use or is not writable."""


class RunInUseError(RunDirectoryError):
    """Another process works in the directory."""


class DamagedFileError(RunDirectoryError):
    """A file of a run has changed since it was written; the message names the file and, if possible, the line."""


class AlreadyAppliedError(QkeelError, RuntimeError):
    """The same change was applied twice."""


class MissingLibraryError(QkeelError, ImportError):
    """A library that is needed cannot be imported; the message says how to install it."""


@contextlib.contextmanager
def needed(what: str, pip: str) -> Iterator[None]:
    """A context for importing an external library that `what` needs.

    >>> with needed("it", "wandb"):
    ...     import wandb_
    Traceback (most recent call last):
    qkeel.errors.MissingLibraryError: it needs a library that cannot be imported (No module named 'wandb_'): pip install wandb

    Raises: MissingLibraryError if an import fails; it has the words of the error, which name what is missing.
    """
    try:
        yield
    except ImportError as error:
        # Something is missing, or it is there in another version than it should be.
        is_missing = isinstance(error, ModuleNotFoundError)
        command = "pip install" if is_missing else "pip install --upgrade"
        raise MissingLibraryError(
            f"{what} needs a library that cannot be imported ({error}): {command} {pip}"
        ) from error


@contextlib.contextmanager
def reported(
    said: str, advice: str = "", error: type[QkeelError] = RunDirectoryError
) -> Iterator[None]:
    """A context that converts an operating system error into a qkeel error, which says what was tried, the reason and
    what to do.

    An error that is already a qkeel error (RunDirectoryError is both) is passed on unchanged.

    >>> with reported("cannot read notes.txt"):
    ...     raise OSError(13, "Permission denied")
    Traceback (most recent call last):
    qkeel.errors.RunDirectoryError: cannot read notes.txt: Permission denied
    """
    try:
        yield
    except OSError as failure:
        if isinstance(failure, QkeelError):
            raise
        raise error(f"{said}: {failure.strerror or failure}{advice}") from failure


# How many names of a table a message lists in addition to near names, and at most.
_FEW, _MOST = (
    10,
    40,
)


def unknown(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """Returns the error for a name that is not in a table; it lists the nearest names, and all names if there are few.

    >>> print(unknown("remedy", "qknorm", ["qk_norm", "softcap"]))
    unknown remedy 'qknorm'. Did you mean 'qk_norm'? Known: qk_norm, softcap
    >>> print(unknown("layer", "norm1", ["norm_1", *"abcdefghij"]))
    unknown layer 'norm1'. Did you mean 'norm_1'?
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    if not near or len(names) <= _FEW:
        ellipsis = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        hint += f" Known: {', '.join(names[:_MOST]) or '(none)'}{ellipsis}"
    return UnknownNameError(f"unknown {kind} {str(name)!r}.{hint}")


def check_known(kind: str, name: object, known: Collection[str]) -> None:
    """Raises UnknownNameError, as built by `unknown`, unless a name is in a table.

    >>> check_known("remedy", "softcap", ["qk_norm", "softcap"])
    """
    # Not a table, where a list could not be looked up.
    if name not in tuple(known):
        raise unknown(kind, name, known)


def check(holds: bool, expected: str, got: object) -> None:
    """Raises InvalidValueError, which states what was expected and what was given, unless a condition is true.

    >>> check(1 > 0, "a cap above 0", 1)
    """
    if not holds:
        raise InvalidValueError(f"expected {expected}, got {got}")


_NOT_THE_USERS = (
    "qkeel",
    "torch",
    "functools",
    "contextlib",
    "transformers",
    "accelerate",
    "lightning",
)


class QkeelWarning(UserWarning):
    """A warning from qkeel, for example about an internal fault after which qkeel switches itself off."""


class AlarmWarning(QkeelWarning):
    """A warning that attention is about to go wrong; the message says where, how fast, and what to do."""


def caution(message: str, kind: type[QkeelWarning] = QkeelWarning) -> None:
    """Warns without ever stopping the caller; if warnings are treated as errors, the message is logged to `qkeel`
    instead.

    The warning points to the line of the user's program that led here, not to a line in qkeel or torch.
    """
    # The line of the user's program that led here, not one in qkeel or torch, which nobody can change.
    frame = sys._getframe(1)
    while (
        frame.f_back is not None
        and (frame.f_globals.get("__name__") or "").partition(".")[0] in _NOT_THE_USERS
    ):
        frame = frame.f_back
    location = {
        "filename": frame.f_code.co_filename,
        "lineno": frame.f_lineno,
        "module": frame.f_globals.get("__name__"),
    }
    try:
        warnings.warn_explicit(
            message,
            kind,
            **location,
            registry=frame.f_globals.setdefault("__warningregistry__", {}),
        )
    except QkeelWarning:
        logging.getLogger("qkeel").warning(message)
