"""`qkeel completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

from typing import Literal

from qkeel.cli.app import make_app
from qkeel.cli.exits import OK


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the script that completes commands and options in a shell.

    For bash: `qkeel completion bash > ~/.local/share/bash-completion/completions/qkeel`; for zsh a file `_qkeel` in a
    folder of $fpath; for fish ~/.config/fish/completions/qkeel.fish. A new shell knows it.

    Args:
        shell: The shell.
    """
    print(make_app([]).generate_completion(prog_name="qkeel", shell=shell))
    return OK
