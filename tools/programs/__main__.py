"""`python -m tools.programs`: runs the programs of the table, and writes the page.

A program runs plain, under `qkeel watch`, at a hot rate under `qkeel watch`, and there with `--autopilot`. Results are
kept, so that a part can be run at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.programs.table import PROGRAMS, Program

MODES = ("plain", "watch", "hot", "autopilot")
SHIMS = Path(__file__).parent / "shims"

_INTRODUCTION = """# Training programs

Training programs of others were run as they are, without a changed line, plain and under `qkeel watch`; then at a
rate that is too high, under `qkeel watch` and with `--autopilot`. `python -m tools.programs` runs them and writes this
page. It
takes checkouts of the repositories from the folder that `QKEEL_PROGRAMS` names.

- *losses*: how many losses went backward in the plain run, and whether the watched run had the same ones, to the bit.
- *found*: layers of attention that the watched run recorded, by the largest logit of its last record.
- *hot*: the largest logit on record at the high rate, without the autopilot and with it, and what the autopilot did.

A commit of transformers is that of a checkout, since its package has no examples. *Needs* says what a program was given
around it: `tools/programs/data.py` writes the data and `tools/programs/shims` has the rest.
"""


class Runs:
    """The runs of one program in a folder for all of them."""

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        self.name, self.program, self.given = name, PROGRAMS[name], given
        self.label = re.sub(r"\W+", "-", name)
        self.file = given.work / f"{self.label}.json"
        self.found = self.kept()

    def kept(self) -> dict[str, Any]:
        """The results of runs so far."""
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def filled(self, text: str, out: Path) -> str:
        places = {
            "out": out,
            "data": self.given.checkouts / "data",
            "checkouts": self.given.checkouts,
        }
        return text.format_map({name: str(path) for name, path in places.items()})

    def environment(self, out: Path, losses: Path | None) -> dict[str, str]:
        own = {
            name: self.filled(value, out) for name, value in self.program.env.items()
        }
        path = os.pathsep.join(filter(None, (str(SHIMS), own.get("PYTHONPATH", ""))))
        ours = {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.given.work / "datasets"),
            "TOKENIZERS_PARALLELISM": "false",
            **({} if losses is None else {"QKEEL_LOSSES": str(losses)}),
        }
        return {**os.environ, **ours, **own, "PYTHONPATH": path}

    def prepare(self) -> None:
        done = self.given.work / f"{self.label}.prepared"
        if not self.program.prepare or done.exists():
            return
        words = [self.given.python, *shlex.split(self.program.prepare)]
        env = self.environment(self.given.work, None)
        subprocess.run(
            words,
            cwd=self.given.checkouts / self.program.home,
            env=env,
            check=True,
            timeout=300,
        )
        done.touch()

    def run(self, mode: str, *options: str) -> dict[str, Any]:
        """Runs the program once, watched with more options if any; its exit code, losses, and what the run directory
        says."""
        out, run = (
            self.given.work / f"{self.label}-{mode}{end}" for end in ("", ".qkeel")
        )
        for folder in (out, run):
            shutil.rmtree(folder, ignore_errors=True)
        out.mkdir(parents=True)
        losses = self.given.work / f"{self.label}-{mode}.losses"
        for file in losses.parent.glob(f"{losses.name}*"):
            file.unlink()
        rate = self.program.hot if mode in ("hot", "autopilot") else self.program.normal
        words = [
            self.filled(word, out)
            for word in shlex.split(f"{self.program.command} {rate}")
        ]
        watch = [
            self.given.python,
            "-m",
            "qkeel",
            "watch",
            *(["--autopilot"] if mode == "autopilot" else []),
            *options,
        ]
        before = (
            [self.given.python]
            if mode == "plain"
            else [*watch, "--out", str(run), "--", "python"]
        )
        begun = time.monotonic()
        with open(
            self.given.work / f"{self.label}-{mode}.log", "w", encoding="utf-8"
        ) as log:
            try:
                code: int | str = subprocess.run(
                    [*before, *words],
                    cwd=self.given.checkouts / self.program.home,
                    env=self.environment(out, losses),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=max(self.given.timeout, self.program.seconds),
                ).returncode
            except subprocess.TimeoutExpired:
                code = "time is over"
        return {
            "code": code,
            "seconds": round(time.monotonic() - begun, 1),
            "losses": [
                x
                for file in sorted(losses.parent.glob(f"{losses.name}*"))
                for x in file.read_text().split()
            ],
            **_recorded(run),
        }

    def all(self, modes: Sequence[str]) -> None:
        self.prepare()
        for mode in modes:
            if mode in ("hot", "autopilot") and self.program.hot is None:
                continue
            found = self.run(mode)
            self.found = {**self.kept(), mode: found}
            self.file.write_text(json.dumps(self.found))
            shown = {key: x if key != "losses" else len(x) for key, x in found.items()}
            print(self.name, mode, shown, flush=True)
            if mode == "plain" and found["code"] != 0:
                break


def _recorded(run: Path) -> dict[str, Any]:
    """What the records of a run say; nothing if there are none."""
    import numpy as np

    import qkeel

    if not (run / "heads.json").exists():
        return {}
    loaded = qkeel.load(run)
    tops = np.nanmax(loaded.history.heads["max_logit"], axis=(1, 2))
    kept = ("event", "step", "action", "site", "rule", "text")
    return {
        "records": len(tops),
        "layers": len(loaded.history.layers),
        "largest": float(tops.max()),
        "last": float(tops[-1]),
        "events": [
            {name: event[name] for name in kept if name in event}
            for event in loaded.events
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for; 1 where a program does not end as it does alone."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.programs", description=__doc__
    )
    parser.add_argument(
        "names", nargs="*", default=[], help="of the table; all without any"
    )
    parser.add_argument(
        "--checkouts",
        type=Path,
        default=os.environ.get("QKEEL_PROGRAMS"),
        help="one folder for each",
    )
    parser.add_argument(
        "--work", type=Path, default=Path("programs"), help="where the runs go"
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="an interpreter that has the programs' libraries",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds of one run"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("experiments/notes/internals/programs.md")
    )
    given = parser.parse_args(arguments)
    if given.checkouts is None:
        parser.error(
            "expected --checkouts or QKEEL_PROGRAMS: the folder that holds a checkout of each repository"
        )
    given.checkouts, given.work = given.checkouts.absolute(), given.work.absolute()
    given.work.mkdir(parents=True, exist_ok=True)
    runs = [Runs(name, given) for name in given.names or PROGRAMS]
    for one in runs:
        one.all(given.modes)
    every = [Runs(name, given) for name in PROGRAMS]
    given.out.write_text(page(every))
    return int(any(differs(one.found) for one in every))


def differs(found: dict[str, Any]) -> bool:
    """Whether the watched run is not the plain one."""
    plain, watched = found.get("plain", {}), found.get("watch", {})
    return bool(plain and watched) and any(
        plain[key] != watched[key] for key in ("code", "losses")
    )


def page(runs: Sequence[Runs]) -> str:
    """The page of what was run so far."""
    lines = [
        _INTRODUCTION,
        "| program | source | losses | found | hot: largest logit | autopilot: largest logit | what it did | needs |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(one) for one in runs if one.found.get("plain", {}).get("code") == 0),
    ]
    if failed := [
        one for one in runs if one.found.get("plain", {}).get("code", 0) != 0
    ]:
        lines += ["", "These did not run to their end without qkeel either:", ""]
        lines += [f"- {one.name}: {one.found['plain']['code']}" for one in failed]
    if waiting := [one.name for one in runs if not one.found]:
        lines += ["", f"Not run so far: {'; '.join(waiting)}."]
    lines += [
        "",
        "## Commands",
        "",
        "Under `qkeel watch --out RUN -- python …` or, plain, `python …`:",
        "",
    ]
    for one in runs:
        if one.found:
            hot = f"  # hot: {one.program.hot}" if one.program.hot else ""
            command = _shown(
                f"{one.program.command} {one.program.normal}".strip(), one.program
            )
            lines += [
                f"**{one.name}**, in `{one.program.home}`:",
                "",
                "```text",
                f"python {command}{hot}",
                "```",
                "",
            ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _shown(command: str, program: Program) -> str:
    return command.format_map({"out": "OUT", "data": "DATA", "checkouts": "CHECKOUTS"})


def _row(one: Runs) -> str:
    plain, watched = one.found["plain"], one.found.get("watch", {})
    same = (
        "not watched so far"
        if not watched
        else "to the bit"
        if not differs(one.found)
        else f"differ, exit {watched['code']}"
    )
    largest = [
        _number(one.found.get(mode, {}).get("largest")) for mode in ("hot", "autopilot")
    ]
    acted = [
        event
        for event in one.found.get("autopilot", {}).get("events", [])
        if event["event"] == "decision"
    ]
    did = ", ".join(
        dict.fromkeys(f"{event['action']} at step {event['step']}" for event in acted)
    )
    found = (
        f"{watched['layers']}, {_number(watched['last'])}"
        if watched.get("layers")
        else "nothing"
        if watched
        else ""
    )
    losses = f"{len(plain['losses'])}, {same}"
    cells = [
        one.name,
        one.program.source,
        losses,
        found,
        *largest,
        did,
        one.program.needs,
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
