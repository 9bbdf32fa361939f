"""The commit that a record names is the one that git says is checked out."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qkeel.records.run_directory import made_on


@pytest.mark.skipif(shutil.which("git") is None, reason="git makes the repositories")
def test_the_commit_is_what_git_has_checked_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)

    def git(*words: str, at: Path) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *who, *words], cwd=at, capture_output=True, text=True, check=True).stdout.strip()

    def seen(at: Path) -> str | None:
        monkeypatch.chdir(at)
        return made_on().get("commit")

    main, deep, tree = tmp_path / "main", tmp_path / "main" / "a" / "b", tmp_path / "tree"
    deep.mkdir(parents=True)
    assert seen(deep) is None  # no repository at all
    git("init", "--quiet", at=main)
    assert seen(deep) is None  # nothing is committed yet
    git("commit", "--quiet", "--allow-empty", "-m", "one", at=main)
    first = git("rev-parse", "HEAD", at=main)[:12]
    assert seen(deep) == first
    git("pack-refs", "--all", at=main)
    assert seen(deep) == first
    git("worktree", "add", "--quiet", "-b", "side", str(tree), at=main)
    git("commit", "--quiet", "--allow-empty", "-m", "two", at=tree)
    second = git("rev-parse", "HEAD", at=tree)[:12]
    assert (seen(tree), seen(main)) == (second, first)
    git("checkout", "--quiet", "--detach", second, at=main)
    assert seen(deep) == second
    (main / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    assert seen(deep) is None
