"""The scripts that complete `qkeel` in shells, made from its commands and written by calling this module."""

from __future__ import annotations

from qkeel.cli.app import COMPLETIONS, make_app

SHELLS = ("bash", "zsh", "fish")


def made() -> dict[str, str]:
    """The script of each shell, by its name."""
    app = make_app([])
    scripts = {shell: app.generate_completion(prog_name="qkeel", shell=shell).rstrip() + "\n" for shell in SHELLS}
    # zsh runs the file as the function: one that only defined another would complete nothing at the first Tab or later.
    scripts["zsh"] += '\n_cyclopts_qkeel "$@"\n'
    return scripts


if __name__ == "__main__":
    COMPLETIONS.mkdir(exist_ok=True)
    for shell, text in made().items():
        (COMPLETIONS / shell).write_text(text)
