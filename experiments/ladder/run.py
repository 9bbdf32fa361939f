"""`python -m experiments.ladder.run`: runs what is left of the plan, the smallest size first, and writes rows as runs
end.

    python -m experiments.ladder.run [--rung 0.13M …] [--seed 5000 …] [--arm none …] [--work FOLDER] [--results FOLDER]
    [--idle]
    python -m experiments.ladder.run --save-text library
    python -m experiments.ladder.run --device cuda --text library

A run that is in the results is never run again. SIGTERM or SIGINT: checkpoints are written and the process ends;
started again it goes on there, to the same numbers. Several processes can share a rung if each has its own seeds or
arms, and its own folders; join their rows with `cat`. Before the first run of a rung, the prediction from the rungs
below is written next to the results, and never changed. A machine with another Python reads the text from a folder
that `--save-text` writes. On a GPU the arithmetic is float32 as well, without TF32.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.files import commit, write_json
from experiments.ladder.byte_pairs import write_tokens
from experiments.ladder.plan import ARMS, AUTOPILOT, CORPUS, FIRST_SEED, QUESTIONS, RUNGS, Point, Question, units
from experiments.ladder.predict import predictions
from experiments.ladder.rows import RESULTS, Row, append, number, point, read
from qkeel.errors import DataError
from qkeel.lab import RunConfig, RunDirectory, Watcher
from qkeel.lab import run as train
from qkeel.lab.text import heldout, load, read_documents


class Stop:
    """Becomes true when the process is asked to end."""

    def __init__(self) -> None:
        self.asked = False
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


def step_aside() -> None:
    """Gives this process only the time that no other one wants: SCHED_IDLE on Linux, else the lowest priority."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        # Where the kernel groups processes by session, SCHED_IDLE ranks them within their group alone.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("19", encoding="ascii")
    elif sys.platform != "win32":
        os.nice(19)


def row(of: Point, directory: Path, per_byte: tuple[float, float] = (1.0, 1.0)) -> Row:
    """The line of a finished run; `per_byte` are the tokens per byte of the training and of the held-out text."""
    place = RunDirectory(directory)
    train_factor, heldout_factor = per_byte
    about, found, course = place.env(), place.summary(), list(place.metrics())
    touched = sum(1 for event in place.events() if "resumed" not in str(event.get("event", "")))
    return {
        **dataclasses.asdict(of),
        "steps": found["steps"],
        **{name: number(found[name] * heldout_factor) for name in ("val_loss", "init_loss")},
        **{name: number(found[name]) for name in ("max_abs_logit", "end_entropy")},
        "bigrams": number(about["counted_bigrams"] * heldout_factor),
        "collapsed": found["collapsed"],
        "diverged": found["steps"] < RUNGS[of.rung].steps or number(found["val_loss"]) is None,
        "logits": [number(line["max_abs_logit"]) for line in course],
        "losses": [number(line["train_loss"] * train_factor) for line in course[1:]],
        "acts": touched if of.arm == "autopilot" else 0,
        "cpu_seconds": found["cpu_seconds"],
        "parameters": about["n_parameters"],
        "commit": about.get("commit", ""),
        "device": about["device"],
        "cpu": about["cpu"],
        "kernels": "compiled" if about["compiled_kernels"] else "torch",
        "torch": about["torch"],
        "corpus": about["corpus"]["sha256"][:12],
    }


def folder(work: Path, of: Point) -> Path:
    """Where a run trains."""
    return work / of.rung / f"{of.arm}-{of.lr:g}-{of.seed}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What of the plan a process runs: these seeds and arms alone where any are named; and where it computes."""

    seeds: Sequence[int] = ()
    arms: Sequence[str] = ()
    device: str = "cpu"
    text: str = "stdlib"
    tokens: Path = Path()
    """Folder of the byte pairs, for rungs with a vocabulary."""

    def has(self, of: Point) -> bool:
        """Whether a run is one of them."""
        return (not self.seeds or of.seed in self.seeds) and (not self.arms or of.arm in self.arms)

    def config(self, of: Point) -> RunConfig:
        """The configuration of a run. Only a processor's cache gains from parts of a step, and on a GPU a run takes
        less time than a few checkpoints."""
        source = self.text if of.config.data.vocab_size is None else str(self.tokens)
        found = dataclasses.replace(of.config, data=dataclasses.replace(of.config.data, source=source))
        if self.device != "cpu":
            found = dataclasses.replace(found, device=self.device, accumulate=1, checkpoint_every=0)
        return found


EVERYTHING = Share()


def climb(names: Sequence[str], work: Path, results: Path, stop: Stop, share: Share = EVERYTHING) -> int:
    """Runs what is left of these rungs, as far as it is in a share."""
    watcher = Watcher(should_stop=lambda: stop.asked)
    for name in names:
        rung, rows = RUNGS[name], read(name, results)
        own = range(FIRST_SEED, FIRST_SEED + rung.seeds)
        if unknown := sorted(set(share.seeds).difference(own)):
            raise DataError(f"{name} has the seeds {own[0]} to {own[-1]}, got {', '.join(map(str, unknown))}")
        check_text(rung.name, share.text)
        factors = (1.0, 1.0)
        if rung.data.vocab_size:
            files = write_tokens(share.text, rung.data.vocab_size, work / f"{name}-tokens")
            share = dataclasses.replace(share, tokens=files.path)
            data = rung.config(AUTOPILOT, 1.0, 0).data
            corpus = load(dataclasses.replace(data, source=str(files.path)))
            targets = heldout(corpus, rung.data.context, RunConfig().eval_sequences)[:, 1:]
            factors = files.per_byte(corpus.train), files.per_byte(targets)
        done = {point(r) for r in rows}
        predict_before(name, results, begun=bool(rows))
        for unit in units(rung):
            left = [p for p in unit if p not in done and share.has(p)]
            if not left:
                continue
            if left[0].arm == AUTOPILOT:
                predict_autopilot(name, results, begun=any(p.arm == AUTOPILOT for p in done))
            for each in left:
                directory = folder(work, each)
                directory.mkdir(parents=True, exist_ok=True)
                try:
                    train(share.config(each), directory, command="python -m experiments.ladder.run", watcher=watcher)
                except KeyboardInterrupt:
                    print("stopped; started again it goes on", flush=True)
                    return 0
                append(name, [row(each, directory, factors)], results)
                shutil.rmtree(directory)
                done.add(each)
            total = sum(len(u) for u in units(rung))
            print(f"{name}: {len(done)} of {total}", left[0].arm, left[0].seed, flush=True)
            if stop.asked:
                return 0
    return 0


def check_text(name: str, source: str = "stdlib") -> None:
    """Raises DataError where a text is not the plan's."""
    bytes_alone = dataclasses.replace(RUNGS[name].data, source=source, vocab_size=None)
    if load(bytes_alone).sha256 != CORPUS:
        raise DataError(
            f"the ladder is trained on the text of SHA-256 {CORPUS[:12]}…, which CPython 3.11.7 has, and {source} is "
            "another; let that Python write it (--save-text FOLDER), and read it here with --text FOLDER"
        )


def save_text(folder: Path) -> None:
    """Writes the documents of this Python's library, a file each, for a machine that has another Python."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, text in enumerate(read_documents("stdlib").texts):  # folders are read in the order of names
        (folder / f"{place:06}.txt").write_bytes(text)


def predict_before(name: str, results: Path, *, begun: bool) -> None:
    """Writes what the rungs below say of a rung that has no run yet; raises DataError where one below is not whole."""
    _predict(results / f"predicted-{name}.json", QUESTIONS, name, results, begun=begun)


def predict_autopilot(name: str, results: Path, *, begun: bool) -> None:
    """Writes what the present policy's runs on the rungs below say of its runs on a rung, before the first of them."""
    if name != next(iter(RUNGS)):
        own = [question for question in QUESTIONS if question.of_autopilot]
        _predict(results / f"predicted-{name}-{AUTOPILOT}.json", own, name, results, begun=begun)


def _predict(path: Path, questions: Sequence[Question], name: str, results: Path, *, begun: bool) -> None:
    if path.exists():
        return
    if begun:
        raise DataError(f"{name} has runs and no prediction: {path} is missing, and would be no prediction now")
    names, arms = list(RUNGS), {arm for question in questions for arm in (question.left, question.right)}
    below = {other: [r for r in read(other, results) if r["arm"] in arms] for other in names[: names.index(name)]}
    for other, rows in below.items():
        if len({point(r) for r in rows}) < sum(p.arm in arms for unit in units(RUNGS[other]) for p in unit):
            raise DataError(f"{other} is not finished; the prediction of {name} is made of it")
    found = predictions(name, below)
    about = {q.name: [dataclasses.asdict(p) for p in found[q.name]] for q in questions if q.name in found}
    write_json(path, {"commit": commit(), "rows": {n: len(r) for n, r in below.items()}, **about})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is left."""
    parser = argparse.ArgumentParser(prog="python -m experiments.ladder.run", description=__doc__)
    parser.add_argument("--rung", nargs="*", choices=list(RUNGS), default=list(RUNGS), help="sizes, the smallest first")
    parser.add_argument("--seed", nargs="*", type=int, default=(), help="these seeds alone; without it every seed")
    parser.add_argument("--arm", nargs="*", choices=list(ARMS), default=(), help="these arms alone")
    parser.add_argument("--device", default="cpu", help="where runs are computed: cpu, or cuda")
    parser.add_argument("--text", default="stdlib", help="a folder that --save-text has written under CPython 3.11.7")
    parser.add_argument("--save-text", type=Path, help="write this Python's library to a folder, and run nothing")
    parser.add_argument("--work", type=Path, default=Path("runs/ladder"), help="folder of runs that are under way")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of rows")
    parser.add_argument("--idle", action="store_true", help="run only when no other process wants the processor")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.idle:
        step_aside()
    if options.save_text:
        save_text(options.save_text)
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    share = Share(seeds=options.seed, arms=options.arm, device=options.device, text=options.text)
    return climb(options.rung, options.work, options.results, Stop(), share)


if __name__ == "__main__":
    sys.exit(main())
