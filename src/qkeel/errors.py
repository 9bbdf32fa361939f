"""The errors qkeel raises. Each is a QkeelError and also the matching built-in.

Every message says what was expected, what came, and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator


class QkeelError(Exception):
    """Base class of every error that qkeel raises on purpose."""


class InvalidValueError(QkeelError, ValueError):
    """A value outside its range, or values that do not fit together."""


class InvalidTypeError(QkeelError, TypeError):
    """A value of the wrong type or dtype."""


class ShapeError(InvalidValueError):
    """A tensor of the wrong shape."""


class NonFiniteError(QkeelError, ArithmeticError):
    """NaN or infinity where only finite numbers make sense."""


class UnknownNameError(QkeelError, KeyError):
    """An unknown name; the message suggests the nearest known ones."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class RefusedError(QkeelError, NotImplementedError):
    """Something that cannot be done exactly, so it is not done at all."""


class NoAttentionError(RefusedError):
    """A forward pass in which no attention was seen."""


class DataError(QkeelError, OSError):
    """A corpus or file that cannot be read or is too small."""


class RunDirectoryError(QkeelError, OSError):
    """A run directory that belongs to another run, is damaged, in use or not writable."""


class DamagedFileError(RunDirectoryError):
    """A file of a run that has changed since it was written; the message names the file and, if possible, the line."""


class AlreadyAppliedError(QkeelError, RuntimeError):
    """The same change applied twice."""


class MissingLibraryError(QkeelError, ImportError):
    """Raised if another library is needed and cannot be imported; the message says how to install it."""


@contextlib.contextmanager
def needed(what: str, pip: str) -> Iterator[None]:
    """A context for importing an outside library that `what` needs.

    >>> with needed("the notebook sink", "ipython"):
    ...     import not_installed
    Traceback (most recent call last):
    qkeel.errors.MissingLibraryError: the notebook sink needs a library that is not installed: pip install ipython

    Raises: MissingLibraryError where one fails. If a library is installed but lacks one that it imports itself, the
        error names the latter.
    """
    try:
        yield
    except ImportError as error:
        there = not isinstance(error, ModuleNotFoundError)
        why = f"cannot be imported ({error}): pip install --upgrade" if there else "is not installed: pip install"
        home = _importer(error)
        if home and not there and error.name:
            pip = error.name
            why = f"is installed but broken: {home} imports {pip}, which is not installed: pip install"
        raise MissingLibraryError(f"{what} needs a library that {why} {pip}") from error


def _importer(error: ImportError) -> str:
    """The library whose own import failed; "" where it was the caller's."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][2:]  # after `needed` and its caller
    names = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames]
    return next((name for name in reversed(names) if name not in ("importlib", "")), "")


@contextlib.contextmanager
def reported(said: str, advice: str = "", error: type[QkeelError] = RunDirectoryError) -> Iterator[None]:
    """A context that turns an error of the operating system into one of qkeel's: what was tried, the reason, advice.

    An error that is qkeel's already (RunDirectoryError is both) passes unchanged.

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


_FEW, _MOST = 10, 40  # names of a table that a message lists beside near ones, and at all


def unknown(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not in a table: with the nearest names, and with all of them if they are few.

    >>> print(unknown("remedy", "qknorm", ["qk_norm", "softcap"]))
    unknown remedy 'qknorm'. Did you mean 'qk_norm'? Known: qk_norm, softcap
    >>> print(unknown("layer", "norm1", ["norm_1", *"abcdefghij"]))
    unknown layer 'norm1'. Did you mean 'norm_1'?
    """
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    if not near or len(names) <= _FEW:
        more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
        hint += f" Known: {', '.join(names[:_MOST]) or '(none)'}{more}"
    return UnknownNameError(f"unknown {kind} {str(name)!r}.{hint}")


def check_known(kind: str, name: object, known: Collection[str]) -> None:
    """Raise `unknown` unless a name is in a table.

    >>> check_known("remedy", "softcap", ["qk_norm", "softcap"])
    """
    if name not in tuple(known):  # not a table, where a list could not be looked up
        raise unknown(kind, name, known)


def check(holds: bool, expected: str, got: object) -> None:
    """Raise InvalidValueError, with what was expected and what was given, unless a condition holds.

    >>> check(1 > 0, "a cap above 0", 1)
    """
    if not holds:
        raise InvalidValueError(f"expected {expected}, got {got}")


_NOT_THE_USERS = ("qkeel", "torch", "functools", "contextlib", "transformers", "accelerate", "lightning")


class QkeelWarning(UserWarning):
    """A warning from qkeel, such as one about an internal fault after which it switches itself off."""


class AlarmWarning(QkeelWarning):
    """A warning that attention is about to go wrong; its message says where, how fast, and what to do."""


def caution(message: str, kind: type[QkeelWarning] = QkeelWarning) -> None:
    """Warn without ever stopping the caller: where warnings are errors, the message goes to the log `qkeel`.

    The warning names the line of the user's program that led here, not one in qkeel or torch.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
    place = {"filename": frame.f_code.co_filename, "lineno": frame.f_lineno, "module": frame.f_globals.get("__name__")}
    try:
        warnings.warn_explicit(message, kind, **place, registry=frame.f_globals.setdefault("__warningregistry__", {}))
    except QkeelWarning:
        logging.getLogger("qkeel").warning(message)
