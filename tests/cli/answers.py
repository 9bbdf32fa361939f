"""What `qkeel presets`, `qkeel remedies` and `qkeel explain NAME` print, written by `python -m tests.cli.answers`."""

from __future__ import annotations

import json

from qkeel.cli.inspect import made
from qkeel.cli.report import ANSWERS


def answers() -> str:
    """The file that qkeel.cli.report reads."""
    return json.dumps(made(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    ANSWERS.write_text(answers(), encoding="utf-8")
