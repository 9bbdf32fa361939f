"""The commands of `qkeel`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from qkeel.cli.benching import bench
from qkeel.cli.exits import COLLAPSED, FAILED, INTERRUPTED, OK, USAGE, command_line
from qkeel.cli.flags import AXES, as_toml, configure, starting, view
from qkeel.cli.precision import study_precision
from qkeel.cli.retrofitting import retrofit
from qkeel.cli.scanning import scan
from qkeel.cli.studying import AxisFlags, FormFlags, HowFlags, MixFlags, PartFlags, run_study
from qkeel.cli.watching import watch
from qkeel.errors import QkeelError

RunFlags: Any = view("RunFlags")
BaseFlags: Any = view("BaseFlags", without=AXES)
PartlessFlags: Any = view("PartlessFlags", without=AXES | {("model", "block"), ("optim", "name")})
_SIZED = {("model", name) for name in ("block", "attention", "n_heads", "n_kv_heads", "head_dim")}
FormlessFlags: Any = view("FormlessFlags", without=_SIZED | {("", "remedy"), ("", "seed"), ("data", "context")})

Several = Parameter(consume_multiple=True, negative_iterable=())
Flat = Parameter(name="*")


def _version() -> str:
    from qkeel import __version__

    return __version__


app = App(
    name="qkeel",
    help="Keeps attention logits on an even keel.",
    version=_version,
    suppress_keyboard_interrupt=False,
)
study_app = App(name="study", help="Many runs, one table and one report.")
app.command(study_app)
study_app.command(study_precision, name="precision")
app.command(scan)
app.command(retrofit)
app.command(watch)
app.command(bench)


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    try:
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, QkeelError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"interrupted. Go on with: {command_line()}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `qkeel presets | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return code if isinstance(code, int) else OK


@app.command
def demo(
    *,
    out: Path = Path("demo"),
    how: Annotated[HowFlags, Flat] = HowFlags(),  # noqa: B008 - frozen
    flags: Annotated[BaseFlags, Flat] = BaseFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """See logits explode, and remedies hold them or not, on real text in two minutes.

    Args:
        out: Directory of the study.
    """
    config, _ = configure(flags, None)
    return run_study("demo", config, None, out, how)


@app.command
def run(
    recipe: Path | None = None,
    *,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    json_: Annotated[bool, Parameter(name="--json", negative=(), show_default=False)] = False,
    fail_on_collapse: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[RunFlags, Flat] = RunFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Train once, recording the logits of every head; the same command goes on after an interruption.

    Args:
        recipe: TOML file of settings; flags go over it.
        out: Directory of the run [default: runs/RUN_ID].
        json_: Print the result as JSON, everything else to stderr.
        fail_on_collapse: Exit with code 3 if attention collapsed or the loss is NaN.
    """
    from qkeel.cli.console import RunView, make_console, number
    from qkeel.lab import Watcher
    from qkeel.lab import run as train
    from qkeel.lab.model import resolve

    config = resolve(configure(flags, recipe, starting(flags))[0])
    place = out or Path("runs") / config.run_id
    console = make_console(stderr=json_)
    console.print(f"run {place}", highlight=False, markup=False, soft_wrap=True)
    watcher = Watcher(on_record=RunView(console, config.steps).on_record, should_stop=_stop_on_interrupt())
    try:
        directory = train(config, place, command=command_line(), watcher=watcher)
    except QkeelError:
        raise
    except Exception as error:
        print(f"error: the run failed: {type(error).__name__}: {error}; see {place / 'FAILED'}", file=sys.stderr)
        return FAILED
    row = directory.summary()
    if json_:
        print(json.dumps({k: v if v == v else None for k, v in row.items()}))
    state = "collapsed" if row["collapsed"] else "healthy"
    result = f"val_loss {row['val_loss']:.3f}, max logit {number(row['max_logit'])}, {row['cpu_seconds']:.1f} cpu-s"
    console.print(f"{state}: {result}", highlight=False)
    console.print(f"run {place}", highlight=False, markup=False, soft_wrap=True)
    return COLLAPSED if fail_on_collapse and row["collapsed"] else OK


def _stop_on_interrupt() -> Any:
    """First Ctrl-C: a checkpoint at the next step. Second: at once."""
    asked: list[bool] = []

    def handler(number: int, frame: FrameType | None) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handler)
    return lambda: bool(asked)


@study_app.command(name="lr")
def study_lr(
    *,
    axes: Annotated[AxisFlags, Flat] = AxisFlags(),  # noqa: B008
    out: Path = Path("runs/lr"),
    recipe: Path | None = None,
    how: Annotated[HowFlags, Flat] = HowFlags(),  # noqa: B008
    flags: Annotated[BaseFlags, Flat] = BaseFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Remedies × learning rates × seeds: which remedies widen the range of rates that train well.

    By default none, qk_norm and lalr:tau=0.1 at 0.01, 0.03, 0.1 and 0.3. Finished runs are kept, killed ones go on, and
    the directory takes more remedies, rates and seeds later.

    Args:
        out: Directory of the study.
        recipe: TOML file of settings, a table [study] for the grid; flags go over it.
    """
    config, study = configure(flags, recipe, starting(flags))
    return run_study("lr", config, axes.grid(study), out, how)


@study_app.command(name="mla")
def study_mla(
    *,
    axes: Annotated[AxisFlags, Flat] = AxisFlags(),  # noqa: B008
    parts: Annotated[PartFlags, Flat] = PartFlags(),  # noqa: B008
    out: Path = Path("runs/mla"),
    recipe: Path | None = None,
    how: Annotated[HowFlags, Flat] = HowFlags(),  # noqa: B008
    flags: Annotated[PartlessFlags, Flat] = PartlessFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Latent and multi-head attention × AdamW and Muon × remedies × learning rates × seeds.

    By default none, qk_norm, qk_clip:threshold=30, lalr:tau=0.1 and qk_lr:factor=0.1 at 0.01, 0.1 and 0.3.
    Finished runs are kept, killed ones go on, and the directory takes more of everything later.

    Args:
        out: Directory of the study.
        recipe: TOML file of settings, a table [study] for the grid; flags go over it.
    """
    from qkeel.lab.studies.mla import DEFAULT

    config, study = configure(flags, recipe)
    return run_study("mla", config, axes.grid(parts.over(study), DEFAULT), out, how)


@study_app.command(name="multimodal")
def study_multimodal(
    *,
    axes: Annotated[AxisFlags, Flat] = AxisFlags(),  # noqa: B008
    mixes: Annotated[MixFlags, Flat] = MixFlags(),  # noqa: B008
    out: Path = Path("runs/multimodal"),
    recipe: Path | None = None,
    how: Annotated[HowFlags, Flat] = HowFlags(),  # noqa: B008
    flags: Annotated[BaseFlags, Flat] = BaseFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Text and images in one sequence: mixes × remedies × learning rates × seeds, all under one probe.

    By default text alone and text mixed with handwritten digits; none, qk_norm, swin_norm and what held Chameleon 7B
    and 34B; rates 0.01 and 0.1. Finished runs are kept, killed ones go on, and the directory takes more later.

    Args:
        out: Directory of the study.
        recipe: TOML file of settings, a table [study] for the grid; flags go over it.
    """
    base, grid = mixes.default()
    config, study = configure(flags, recipe, base)
    return run_study("multimodal", config, axes.grid(mixes.over(study), grid), out, how)


@study_app.command(name="extrapolation")
def study_extrapolation(
    *,
    axes: Annotated[FormFlags, Flat] = FormFlags(),  # noqa: B008 - frozen
    train_length: Annotated[int | None, Parameter(show_default=False, group="Grid")] = None,
    out: Path = Path("runs/extrapolation"),
    recipe: Path | None = None,
    how: Annotated[HowFlags, Flat] = HowFlags(),  # noqa: B008
    flags: Annotated[FormlessFlags, Flat] = FormlessFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Train short, test long: forms of attention × blocks × seeds, each tested as trained and changed post hoc.

    A model of 3 layers (6 of GAU) of width 64 learns for 300 steps of 16 texts at rate 0.01 unless flags say otherwise.
    Finished runs are kept, killed ones go on; the directory takes more forms, seeds, methods and lengths later.

    Args:
        train_length: Tokens of context in training [default: 64].
        out: Directory of the study.
        recipe: TOML file of settings, a table [study] for the grid; flags go over it.
    """
    from dataclasses import replace

    from qkeel.lab.studies.extrapolation import BASE

    config, study = configure(flags, recipe, BASE)
    if train_length is not None:
        config = replace(config, data=replace(config.data, context=train_length))
    contexts = axes.contexts(config.data.context, study)
    return run_study("extrapolation", config, axes.grid(config.optim.lr, study), out, how, contexts)


@app.command
def report(
    runs: Annotated[list[Path], Several],
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("report.html"),
) -> int:
    """Write one self-contained HTML page about studies, runs or watched models.

    Args:
        runs: Directories of studies, of runs, or of watched models.
        output: The file to write.
    """
    from qkeel.report import write

    write(runs, output)
    print(output)
    return OK


@app.command(name="explain")
def explain_command(name: str, /) -> int:
    """Print the formula that a preset or remedy puts in force, and its source.

    Args:
        name: A preset or remedy with options, like gemma2:cap=30 or lalr:tau=0.1.
    """
    from qkeel.cli.explain import explain

    print(explain(name))
    return OK


@app.command(name="presets")
def presets_command() -> int:
    """List the published attention recipes."""
    from qkeel.spec import presets

    return _listing(presets())


@app.command(name="remedies")
def remedies_command() -> int:
    """List the remedies."""
    from qkeel.remedies import remedies

    return _listing(remedies())


@app.command(name="config")
def config_command(
    *,
    recipe: Path | None = None,
    flags: Annotated[RunFlags, Flat] = RunFlags(),  # type: ignore[valid-type]  # noqa: B008
) -> int:
    """Print the configuration that a recipe and flags make, as a TOML recipe.

    Args:
        recipe: TOML file of settings; flags go over it.
    """
    print(as_toml(configure(flags, recipe, starting(flags))[0]))
    return OK


def _listing(names: dict[str, str]) -> int:
    width = max(map(len, names))
    for name, line in names.items():
        print(f"{name:<{width}}  {line}")
    return OK
