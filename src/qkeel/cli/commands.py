"""The commands of `qkeel`, the text of `qkeel --help` and the exit codes, as literal tables that import no library."""

from __future__ import annotations

import functools
import shlex
import sys
import textwrap
from pathlib import Path

from qkeel.lab.studies import STUDIES

# Exit codes, and the command line as it was typed.

OK = 0
# a run failed.
FAILED = 1
# Wrong usage or bad input.
USAGE = 2
# With --fail-on-collapse.
COLLAPSED = 3
# a check could not decide.
UNDECIDED = 4
INTERRUPTED = 130


def command_line() -> str:
    """The command line as typed, quoted for a shell."""
    return shlex.join(["qkeel", *sys.argv[1:]])


# Like --help, but including options that few users need.
HELP_ALL = "--help-all"

# Name, as typed -> where it is in qkeel.cli. A module is imported when its command is called.
COMMANDS = {
    "run": "run:run",
    "report": "report:report",
    "watch": "watch:watch",
    "check": "audit:check",
    "figures": "report:figures",
    "scan": "audit:scan",
    "export": "audit:export",
    "convert": "audit:convert",
    "explain": "report:explain_command",
    "presets": "report:list_presets",
    "remedies": "report:list_remedies",
}

# The groups of `qkeel --help`, in order; a study that is listed in no group belongs to Compare.
GROUPS = {
    "Watch": ("watch", "report", "export", "figures"),
    "Fix": ("remedies", "explain"),
    "Audit": ("check", "scan", "convert", "presets"),
    "Compare": ("demo", "run", "study lr"),
}

# Name -> an example command, shown at the end of the command's help; studies not listed here use the one of `example`.
EXAMPLES = {
    "check": "qkeel check qkeel-runs/train --table",
    "figures": "qkeel figures qkeel-runs/train --out figures",
    "convert": "qkeel convert llama-with-norms --to qwen3 --out qwen3",
    "demo": "qkeel demo --out demo --jobs 2",
    "explain": "qkeel explain lalr:tau=0.1",
    "export": "qkeel export qkeel-runs/train --to parquet",
    "presets": "qkeel presets",
    "remedies": "qkeel remedies",
    "report": "qkeel report qkeel-runs/train -o page.html",
    "run": "qkeel run --steps 500 --remedy qk_norm --out runs/a",
    "scan": "qkeel scan model.safetensors --every-head",
    "study": "qkeel study lr --remedies none qk_norm --lrs 0.01 0.1 --dry-run",
    "study extrapolation": "qkeel study extrapolation --forms baseline --train-length 64 --test-lengths 64 512",
    "study lr": "qkeel study lr --remedies none qk_norm --lrs 0.01 0.1 --seeds 0 1",
    "study mla": "qkeel study mla --remedies none --lrs 0.01 0.1 --dry-run",
    "study multimodal": "qkeel study multimodal --remedies none qk_norm --mixes text --lrs 0.01 --dry-run",
    "watch": "qkeel watch --sink tensorboard -- python train.py",
}


def commands() -> dict[str, tuple[str, str]]:
    """Returns the location and the summary of each command: those in COMMANDS, `qkeel demo` and `qkeel study NAME`."""
    places = {
        command: (f"qkeel.cli.{location}", _summary(*location.split(":")))
        for command, location in COMMANDS.items()
    }
    for name, study in STUDIES.items():
        command = "demo" if name == "demo" else f"study {name}"
        places[command] = f"qkeel.cli.run:{name}", study.line
    return places


@functools.cache
def _summary(module: str, name: str) -> str:
    """Returns the first line of a command's docstring, read from the file because an import would load torch."""
    # Read, not imported: the help of all commands would wait for torch.
    text = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    docstring = text.partition(f"\ndef {name}(")[2].partition('"""')[2]
    return docstring.partition("\n")[0].removesuffix('"""')


def example(command: str) -> str:
    """Returns an example of a command; if EXAMPLES has none, the example is a study that only prints its plan."""
    return EXAMPLES.get(command, f"qkeel {command} --dry-run")


def group(command: str) -> str:
    """Returns the group of `qkeel --help` that lists a command."""
    return next(
        (name for name, members in GROUPS.items() if command in members), "Compare"
    )


def overview() -> str:
    """Returns the text of `qkeel --help`: the commands by purpose, with one line each, and examples to start with."""
    lines = {command: line for command, (_, line) in commands().items()}
    width = max(map(len, lines)) + 4
    parts = [
        "Usage: qkeel COMMAND [OPTIONS]",
        "",
        "Keeps attention logits on an even keel. For help on a command: qkeel COMMAND --help",
    ]
    for name, members in GROUPS.items():
        unlisted = [c for c in lines if c not in members and group(c) == name]
        parts += ["", f"{name}:"]
        for command in (*members, *sorted(unlisted)):
            row = f"  {command:<{width - 2}}{lines[command]}"
            parts.append(textwrap.fill(row, 100, subsequent_indent=" " * width))
    parts += ["", "Examples:"]
    parts += [f"  {EXAMPLES[name]}" for name in ("demo", "watch", "report")]
    return "\n".join(parts)
