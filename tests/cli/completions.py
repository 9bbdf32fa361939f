"""The scripts that complete `qkeel` in shells, made from its commands, and what its lists print; written by calling
this module: `python -m tests.cli.completions`."""

from __future__ import annotations

import json

from qkeel.cli.app import COMPLETIONS, make_app
from qkeel.cli.explain import made as made_answers
from qkeel.cli.names import ANSWERS

SHELLS = ("bash", "zsh", "fish")


def made() -> dict[str, str]:
    """The script of each shell, by its name."""
    app = make_app([])
    scripts = {shell: app.generate_completion(prog_name="qkeel", shell=shell).rstrip() + "\n" for shell in SHELLS}
    # zsh runs the file as the function: one that only defined another would complete nothing at the first Tab or later.
    scripts["zsh"] += '\n_cyclopts_qkeel "$@"\n'
    return scripts


def answers() -> str:
    """What names.py prints, as the file that it reads."""
    return json.dumps(made_answers(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    ANSWERS.write_text(answers(), encoding="utf-8")
    COMPLETIONS.mkdir(exist_ok=True)
    for shell, text in made().items():
        (COMPLETIONS / shell).write_text(text)
