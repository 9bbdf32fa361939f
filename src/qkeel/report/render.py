"""`qkeel report`: the page of a set of directories.

`cli.run` writes a study's page again and again while it runs, `cli.run_messages` that of a watched run.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from qkeel.errors import InvalidTypeError, RunDirectoryError
from qkeel.records import write_text
from qkeel.records.disk import make_directory
from qkeel.report.html import render
from qkeel.report.study_page import study_page
from qkeel.report.study_runs import BASELINE, as_paths, read_study
from qkeel.report.watch_page import watch_page
from qkeel.report.watched_runs import is_watched, read_watched


def write(
    paths: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    baseline: str = BASELINE,
    refresh: float | None = None,
) -> Path:
    """Writes one self-contained HTML page about a study, a run, a watched model, or several of the same kind.

    Args:
        paths: directories written by `qkeel study`, `qkeel run` or `qkeel.watch`.
        out: the .html file to write; an existing file is replaced atomically.
        baseline: for a study, the remedy with which the other remedies are compared.
        refresh: seconds after which a browser loads the page again, for a page that is rewritten during a run.

    Returns:
        The path of the page.

    Raises:
        RunDirectoryError: a path is not the directory of a run or study, a file is damaged, or `out` cannot be written.

    >>> import tempfile, torch, qkeel
    >>> folder = Path(tempfile.mkdtemp())
    >>> with qkeel.watch(qkeel.nn.Attention(16, 2), sinks=[folder / "run"]) as monitor:
    ...     _ = monitor.model(torch.randn(1, 4, 16))
    >>> qkeel.report.write(folder / "run", folder / "report.html").name
    'report.html'
    """
    if not isinstance(out, (str, Path)):
        raise InvalidTypeError(
            f"expected a path for the page, got {type(out).__name__}; give one ending in .html"
        )
    target = Path(out)
    text = render(page(paths, baseline), refresh=refresh)
    make_directory(target.parent)
    # A folder's name may hold bytes that are no UTF-8.
    write_text(target, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return target


def page(
    paths: str | Path | Iterable[str | Path], baseline: str = BASELINE
) -> dict[str, object]:
    """Returns what the page about the directories shows; see `write`."""
    directories = as_paths(paths)
    watched = [path for path in directories if is_watched(path)]
    if not watched:
        return study_page(read_study(directories, baseline))
    studies = [path for path in directories if path not in watched]
    if studies:
        raise RunDirectoryError(
            f"expected either watched runs or studies, got {watched[0]}, which is watched, and {studies[0]}, which is "
            "not; create a page of each kind"
        )
    return watch_page(read_watched(watched))
