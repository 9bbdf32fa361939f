"""The commands of `qkeel`, and the text of `qkeel --help`: literal tables that wait for no library; exit codes."""

from __future__ import annotations

import shlex
import sys
import textwrap

from qkeel.lab.studies import STUDIES

# Exit codes, and the command line as it was typed.

OK = 0
FAILED = 1  # a run failed
USAGE = 2  # wrong usage or bad input
COLLAPSED = 3  # with --fail-on-collapse
INTERRUPTED = 130


def command_line() -> str:
    """The command line as typed, quoted for a shell."""
    return shlex.join(["qkeel", *sys.argv[1:]])


HELP_ALL = "--help-all"  # as --help, with the options that few need

# Name, as typed -> where it is in qkeel.cli and its line in the list of commands. A module is imported when its command
# is called.
COMMANDS = {
    "run": (
        "run:run",
        "Train once, recording the logits of every head; the same command resumes it after an interruption.",
    ),
    "study precision": (
        "run:study_precision",
        "Compute the same attention in float64, fp32, bf16, fp16 and with q and k in fp8, over logits of growing size.",
    ),
    "merge": (
        "run:merge",
        "Merge directories of one study that ran on several machines into a new one; the sources do not change.",
    ),
    "report": ("report:report", "Write one self-contained HTML page about studies, runs or watched models."),
    "watch": (
        "watch:watch",
        "Run a training script unchanged and watch the attention of what it trains; the exit code is the script's.",
    ),
    "recommend": (
        "run:recommend",
        "Print the logits to expect from a configuration and the gain of each remedy, based on measured runs.",
    ),
    "replay": (
        "inspect:replay",
        "Print what a policy of the autopilot would have done on a recorded run, when and why.",
    ),
    "check": (
        "inspect:check",
        "Say in one sentence whether the attention of a run or a checkpoint is healthy.",
    ),
    "figures": ("report:figures", "Write the figures of a study or a watched run for a paper, as PDF, SVG or PNG."),
    "scan": (
        "inspect:scan",
        "Read a checkpoint without running it: per layer and head, norms of the q and k weights and the logits they "
        "allow.",
    ),
    "export": ("inspect:export", "Write the records of a run as tables, CSV or Parquet."),
    "convert": (
        "inspect:convert",
        "Write a checkpoint whose queries and keys are normed as a Qwen3, OLMo 2 or Gemma 3, with the same outputs.",
    ),
    "explain": (
        "report:explain_command",
        "Print the formula and source of a preset or remedy, or what a recorded number is.",
    ),
    "presets": ("report:list_presets", "List the published attention recipes."),
    "remedies": ("report:list_remedies", "List the remedies."),
    "completion": ("app:completion", "Print the script that completes commands and options in bash, zsh or fish."),
    "config": ("run:print_config", "Print the configuration that a recipe and flags make, as a TOML recipe."),
    "bench": ("inspect:bench", "Time every attention kernel on this machine, side by side."),
}

# The groups of `qkeel --help`, the first first; a study that no group names is one of Compare.
GROUPS = {
    "Watch": ("watch", "report", "export", "figures"),
    "Fix": ("remedies", "explain", "recommend", "replay"),
    "Audit": ("check", "scan", "convert", "presets"),
    "Compare": ("demo", "run", "study lr", "study precision", "merge"),
    "Maintain": ("config", "bench", "completion"),
}

# Name -> what people type, shown at the end of the command's help; of other studies it is `example`'s line.
EXAMPLES = {
    "bench": "qkeel bench --size quick",
    "check": "qkeel check qkeel-runs/train --table",
    "figures": "qkeel figures qkeel-runs/train --out figures",
    "completion": "qkeel completion bash > ~/.local/share/bash-completion/completions/qkeel",
    "config": "qkeel config --steps 500 --d-model 128 > recipe.toml",
    "convert": "qkeel convert llama-with-norms --to qwen3 --out qwen3",
    "demo": "qkeel demo --out demo --jobs 2",
    "explain": "qkeel explain lalr:tau=0.1",
    "export": "qkeel export qkeel-runs/train --to parquet",
    "merge": "qkeel merge part1 part2 --out whole",
    "presets": "qkeel presets",
    "recommend": "qkeel recommend --d-model 128 --n-layers 4 --n-heads 8 --lr 0.1",
    "remedies": "qkeel remedies",
    "replay": "qkeel replay qkeel-runs/train",
    "report": "qkeel report qkeel-runs/train -o page.html",
    "run": "qkeel run --steps 500 --remedy qk_norm --out runs/a",
    "scan": "qkeel scan model.safetensors --every-head",
    "study": "qkeel study lr --remedies none qk_norm --lrs 0.01 0.1 --dry-run",
    "study extrapolation": "qkeel study extrapolation --forms baseline --train-length 64 --test-lengths 64 512",
    "study lr": "qkeel study lr --remedies none qk_norm --lrs 0.01 0.1 --seeds 0 1",
    "study mla": "qkeel study mla --remedies none --lrs 0.01 0.1 --dry-run",
    "study multimodal": "qkeel study multimodal --remedies none qk_norm --mixes text --lrs 0.01 --dry-run",
    "study precision": "qkeel study precision --remedies none --out precision",
    "watch": "qkeel watch --sink tensorboard -- python train.py",
}


def commands() -> dict[str, tuple[str, str]]:
    """Returns COMMANDS and a command for each study: `qkeel demo`, `qkeel study NAME` for the others."""
    studies = {"demo" if name == "demo" else f"study {name}": (name, line) for name, (_, line) in STUDIES.items()}
    found = COMMANDS | {command: (f"run:{name}", line) for command, (name, line) in studies.items()}
    return {command: (f"qkeel.cli.{place}", line) for command, (place, line) in found.items()}


def example(command: str) -> str:
    """Returns an example of a command; a study that has none in EXAMPLES gets one that only prints its plan."""
    return EXAMPLES.get(command, f"qkeel {command} --dry-run")


def group(command: str) -> str:
    """Returns the group of `qkeel --help` that lists a command."""
    return next((name for name, members in GROUPS.items() if command in members), "Compare")


def overview() -> str:
    """Returns the text of `qkeel --help`: commands by purpose, each with one line, and what to type first."""
    lines = {command: line for command, (_, line) in commands().items()}
    width = max(map(len, lines)) + 4
    parts = []
    for name, members in GROUPS.items():
        own = [*members, *sorted(c for c in lines if c not in members and group(c) == name)]
        rows = (f"  {command:<{width - 2}}{lines[command]}" for command in own)
        parts += ["", f"{name}:", *(textwrap.fill(row, 100, subsequent_indent=" " * width) for row in rows)]
    first = (EXAMPLES[name] for name in ("demo", "watch", "report"))
    return "\n".join(
        [
            "Usage: qkeel COMMAND [OPTIONS]",
            "",
            "Keeps attention logits on an even keel. qkeel COMMAND --help says more of a command.",
            *parts,
            "",
            "Examples:",
            *(f"  {line}" for line in first),
        ]
    )
