"""The place where records are made: system, cores, commit of the code around; no name of a machine or a person."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from qkeel.errors import QkeelError
from qkeel.records.regular_files import refuse_irregular


def made_on() -> dict[str, str]:
    """Returns "system", and "commit" where the current folder lies in a git repository.

    >>> sorted(made_on())[-1]
    'system'
    """
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    commit = _commit(Path.cwd())
    return {"system": system, **({"commit": commit} if commit else {})}


def _commit(folder: Path) -> str:
    """The commit that is checked out, from the files of git; "" where there is none or they cannot be read."""
    try:
        place = next((parent / ".git" for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
        if place is None:
            return ""
        if place.is_file():  # a work tree of its own
            place = Path(place.parent, _text(place).removeprefix("gitdir:").strip())
        head = _text(place / "HEAD").strip()
        if not head.startswith("ref:"):
            return head[:12]
        name, common = head.removeprefix("ref:").strip(), place
        if (place / "commondir").exists():
            common = Path(place, _text(place / "commondir").strip())
        if (common / name).exists():
            return _text(common / name).strip()[:12]
        packed = _text(common / "packed-refs").splitlines()
        return next((line.split()[0][:12] for line in packed if line.endswith(f" {name}")), "")
    except (OSError, ValueError, QkeelError):
        return ""


def _text(path: Path) -> str:
    refuse_irregular(path)
    return path.read_text(encoding="utf-8")
