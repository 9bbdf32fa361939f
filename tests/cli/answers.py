"""What `qkeel presets`, `qkeel remedies` and `qkeel explain NAME` print, written by `python -m tests.cli.answers`."""

import json

from qkeel.cli.audit import explain
from qkeel.cli.report import ANSWERS
from qkeel.remedies.apply import remedies
from qkeel.spec import presets


def answers():
    """The file that qkeel.cli.report reads."""
    explained = {name: explain(name) for name in {**presets(), **remedies()}}
    made = {"presets": presets(), "remedies": remedies(), "explained": explained}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    ANSWERS.write_text(answers(), encoding="utf-8")
