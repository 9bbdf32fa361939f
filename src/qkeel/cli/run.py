"""Commands about training: `qkeel run`, `demo` and the studies, and the page of a study while it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import signal
import sys
import threading
import time
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import docstring_parser
from cyclopts import Parameter

from qkeel.cli.commands import COLLAPSED, FAILED, HELP_ALL, OK, command_line
from qkeel.cli.console import (
    RunView,
    StudyView,
    make_console,
    number,
    print_line,
    ranking,
)
from qkeel.cli.parameters import Switch, Unset
from qkeel.errors import QkeelError
from qkeel.lab import Watcher
from qkeel.lab import run as train
from qkeel.lab.build_run import resolve
from qkeel.lab.config import (
    DataConfig,
    ImagesConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from qkeel.lab.execute import (
    Execution,
    make_plan,
    pending,
    run_directory,
    run_plan,
)
from qkeel.lab.executors import Outcome, default_jobs
from qkeel.lab.plan import Grid, LongContexts, Study, StudyOption
from qkeel.lab.quick_demo import quick_demo
from qkeel.lab.studies import MULTIMODAL_BASE, STUDIES
from qkeel.options import annotations
from qkeel.records.file_formats import read_toml
from qkeel.report import write

# Flags as views of the configuration dataclasses: names, types, choices and help come from there.

# a TOML table: numbers, text, booleans, lists and tables by name.
Settings = dict[str, Any]
# Its name, its type, and how it is shown.
Flag = tuple[str, object, Parameter]
_SECTIONS: dict[str, tuple[type, str]] = {
    "": (RunConfig, "Run"),
    "data": (DataConfig, "Data"),
    "optim": (OptimConfig, "Optimizer"),
    "model": (ModelConfig, "Model"),
    "images": (ImagesConfig, "Images"),
}
# What `--help` shows; the rest is for `--help-all`, and for recipes.
_COMMON = {
    *("data", "task", "context", "batch"),
    *("d_model", "n_layers", "n_heads", "attention", "position", "block"),
    *(
        "optimizer",
        "lr",
        "warmup",
        "schedule",
        "remedy",
        "steps",
        "seed",
        "device",
        "dtype",
        "log_every",
    ),
}
_RENAMED = {("data", "source"): "data", ("optim", "name"): "optimizer"}


# Flag attribute -> (section, field).
_ENTRIES: dict[str, tuple[str, str]] = {
    _RENAMED.get((section, field), field): (section, field)
    for section, (cls, _) in _SECTIONS.items()
    for field, kind in annotations(cls).items()
    if not dataclasses.is_dataclass(kind)
}
# Without the bounds, which the configuration checks.
_kinds = functools.cache(typing.get_type_hints)


def view(without: Collection[tuple[str, str]] = (), extra: Iterable[Flag] = ()) -> type:
    """Returns a dataclass of flags: those in `extra` and one for each field of RunConfig and its parts that is not
    itself a dataclass. Flags that are not given are None.
    """
    docs = {section: _documents(cls) for section, (cls, _) in _SECTIONS.items()}
    flags = list(extra)
    for flag, (section, field) in _ENTRIES.items():
        if (section, field) in without:
            continue
        cls, title = _SECTIONS[section]
        kind = _kinds(cls)[field]
        default = next(f.default for f in dataclasses.fields(cls) if f.name == field)
        help_text = docs[section][field]
        if default not in (None, ""):
            help_text += f" [default: {'false' if default is False else default}]"
        dashed = flag.replace("_", "-")
        parameter = Parameter(
            name=f"--{dashed}",
            group=title,
            help=help_text,
            show_default=False,
            negative=f"--no-{dashed}" if isinstance(default, bool) else None,
            show=flag in _COMMON or HELP_ALL in sys.argv,
        )
        flags.append((flag, kind, parameter))
    fields = [
        (flag, Annotated[_optional(kind), parameter], dataclasses.field(default=None))
        for flag, kind, parameter in flags
    ]
    view_class = dataclasses.make_dataclass(
        "RunFlags", fields, frozen=True, kw_only=True
    )
    # Else it passes for a built-in type.
    view_class.__module__ = __name__
    return view_class


@functools.cache  # the command of each study asks for the same five
def _documents(cls: type) -> dict[str, str]:
    documents = {"remedy": "Spec string of the remedy, like lalr:tau=0.1+qk_clip."}
    for p in docstring_parser.parse_from_object(cls).params:
        documents.setdefault(p.arg_name, " ".join((p.description or "").split()))
    return documents


def _optional(kind: object) -> object:
    return kind if isinstance(kind, types.UnionType) else typing.Optional[kind]  # noqa: UP045 - of a Literal too


def configure(
    flags: object, recipe: Path | None, base: RunConfig | None = None
) -> RunConfig:
    """Returns the configuration of a recipe, overridden by flags and completed by `base`."""
    values = _over(
        base.to_dict() if base else {}, {} if recipe is None else read_toml(recipe)
    )
    # After the recipe, which flags override.
    for flag, (section, field) in _ENTRIES.items():
        value = vars(flags).get(flag)
        if value is not None:
            (values.setdefault(section, {}) if section else values)[field] = value
    return RunConfig.from_dict(values)


def starting(flags: object) -> RunConfig | None:
    """Returns the defaults for the task named by the flags, which a recipe and flags override, or None."""
    task = vars(flags).get("task")
    if task == "vision":
        return RunConfig(
            model=ModelConfig(attention="vit"), data=DataConfig(task="vision", batch=32)
        )
    return MULTIMODAL_BASE if task == "multimodal" else None


def _over(values: Settings, extra: Settings) -> Settings:
    """Updates nested values with those in `extra`, which replace values of the same name, and returns them."""
    for key, value in extra.items():
        are_tables = isinstance(value, dict) and isinstance(values.get(key), dict)
        values[key] = _over(values[key], value) if are_tables else value
    return values


# `qkeel run`: one training run.

RunFlags: Any = view()
_FLAT = Parameter(name="*")


def run(
    recipe: Path | None = None,
    *,
    out: Unset[Path] = None,
    fail_on_collapse: Switch = False,
    flags: Annotated[RunFlags, _FLAT] = RunFlags(),  # type: ignore[valid-type]  # noqa: B008 - frozen
) -> int:
    """Train one model, recording the logits of every head; the same command resumes an interrupted run.

    Args:
        recipe: TOML file with settings; flags override the file.
        out: Directory of the run [default: runs/RUN_ID].
        fail_on_collapse: Exit with code 3 if attention collapsed or the loss is NaN.
    """
    config = resolve(configure(flags, recipe, starting(flags)))
    path = out or Path("runs") / config.run_id
    console = make_console()
    print_line(console, f"run {path}")
    watcher = Watcher(
        on_record=RunView(console, config.steps).on_record,
        should_stop=_stop_on_interrupt(),
    )
    try:
        directory = train(config, path, command=command_line(), watcher=watcher)
    except QkeelError:
        raise
    except Exception as error:
        print(
            f"error: the run failed: {type(error).__name__}: {error}; see {path / 'FAILED'}",
            file=sys.stderr,
        )
        return FAILED
    row = directory.summary()
    state = "collapsed" if row["collapsed"] else "healthy"
    outcome_text = f"val_loss {row['val_loss']:.3f}, max logit {number(row['max_logit'])}, {row['cpu_seconds']:.1f} cpu-s"
    console.print(f"{state}: {outcome_text}", highlight=False)
    print_line(console, f"run {path}")
    return COLLAPSED if fail_on_collapse and row["collapsed"] else OK


def _stop_on_interrupt() -> Callable[[], bool]:
    """Returns a function that reports whether to stop with a checkpoint at the next step, as the first Ctrl-C requests.

    The second Ctrl-C stops at once. If the process was started with SIGINT ignored (`qkeel run &`), neither has an
    effect.
    """
    interrupted = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # A shell starts background jobs with the signal ignored, and a handler would undo that.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
    return interrupted.is_set


# `qkeel study` and `qkeel demo`: many runs, one table, one report. Each study says which options its command has.


@dataclasses.dataclass(frozen=True, kw_only=True)
class HowFlags:
    """Options that control how a study is executed; none of them changes a result."""

    jobs: Unset[int] = None
    """Number of runs at once [default: the number of cores, at most 4; with ray or dask, as many as the cluster has
    cores; with slurm, 16]."""
    executor: Annotated[str, Parameter(show_default=False)] = "loky"
    """Where to execute the runs: loky (processes of this machine), ray, dask, or slurm with options of submitit, like
    slurm:slurm_partition=gpu,timeout_min=60. Any number of machines can run the same command with one shared --out."""
    dry_run: Switch = False
    """Only report which runs would be executed."""
    fail_on_collapse: Switch = False
    """Exit with code 3 if attention collapsed in any run or the loss of any run is NaN."""


def __getattr__(name: str) -> Callable[..., int]:
    """Creates the command of a study when the attribute with the study's name is requested."""
    if name not in STUDIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return study_command(name)


QUICK = StudyOption(
    "quick",
    bool,
    "Train two models in ten seconds and print what happens to them; no page is written.",
)


def study_command(name: str) -> Callable[..., int]:
    """Returns the function behind the command of a study: its parameters are the flags."""
    study = STUDIES[name]
    without = {("", "remedy"), ("", "seed"), *study.decides}
    options = (*study.options, QUICK) if name == "demo" else study.options
    flags: Any = view(without=without, extra=map(_flag, options))

    def command(
        *,
        out: Path = Path(study.out or f"runs/{name}"),
        recipe: Path | None = None,
        how: Annotated[HowFlags, _FLAT] = HowFlags(),
        # The class of the flags is made here, so it replaces this annotation below, where cyclopts reads it.
        flags: object = flags(),
    ) -> int:
        if vars(flags).get(QUICK.name):
            console = make_console()
            with _without_compiler():
                quick_demo(lambda line: print_line(console, line))
            return OK
        names = [option.name for option in study.options]
        config = configure(flags, recipe, study.base or starting(flags))
        options = {name: vars(flags)[name] for name in names}
        options = {name: x for name, x in options.items() if x is not None}
        request = study.request(config, study.grid, options)
        with _without_compiler() if name == "demo" else contextlib.nullcontext():
            return run_study(study, *request, out=out, how=how)

    command.__annotations__ |= {"flags": Annotated[flags, _FLAT]}
    command.__doc__ = f"""{study.line}

    {study.help}

    Args:
        out: Directory of the study.
        recipe: TOML file with settings of the runs; flags override the file.
    """
    return command


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Switches compiled kernels off, here and in the processes that start meanwhile, unless the variable is set.

    The demo is the first thing that runs after a clone: it must not wait for a compiler, and its tiny models are no
    slower without one.
    """
    name = "QKEEL_NATIVE"
    is_set = name in os.environ
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]


def _flag(option: StudyOption) -> Flag:
    """The name, type and help of the flag for a study's option."""
    shown = Parameter(
        help=option.about,
        show_default=False,
        group="Grid",
        consume_multiple=option.kind not in (int, float, str, bool),
        negative_iterable=(),
        negative=() if option.kind is bool else None,
    )
    return option.name, option.kind, shown


# A study from the command line: plan, progress, table, report, exit code.

# Between two versions of the page, which a browser loads again by itself while the runs
# end.
PAGE_SECONDS = 10.0


def run_study(
    study: Study,
    base: RunConfig,
    grid: Grid,
    contexts: LongContexts | None,
    *,
    out: Path,
    how: HowFlags,
) -> int:
    """Runs a study, writes its table and report, and returns the exit code; the directory is printed first and last.

    Args:
        study: the study.
        base: the configuration that all runs share.
        grid: the axes.
        contexts: the test lengths and post-hoc methods, if the study has them.
        out: the directory of the study.
        how: options for the execution, such as the number of processes and the dry run.
    """
    console = make_console()
    jobs = default_jobs(how.executor) if how.jobs is None else how.jobs
    plan = make_plan(study, base, grid, contexts)
    left = pending(plan, out)
    print_line(console, f"study {out}")
    at_once = (
        f"{jobs} at once" if jobs > 0 else "as many at once as the cluster has cores"
    )
    print_line(console, f"{len(plan.runs)} runs, {len(left)} to do, {at_once}")
    if how.dry_run:
        for run in plan.runs:
            state = "to do" if run in left else "done"
            name = run_directory(out, run).name
            print_line(
                console, f"{name}  {run.title}, {run.config.steps} steps: {state}"
            )
        print_line(console, "nothing was written")
        return OK
    page = StudyPage(out)
    if len(left) > 2:
        print_line(
            console,
            f"page {page.file}: it appears after two runs, and fills while the others end",
        )
    view = StudyView(console, left, out)

    def on_outcome(outcome: Outcome) -> None:
        view.on_outcome(outcome)
        page.on_outcome(outcome)

    execution = Execution(
        workers=jobs,
        executor=how.executor,
        command=command_line(),
        on_outcome=on_outcome,
    )
    study_result = run_plan(plan, out, execution)
    write(out, page.file)
    for role in () if plan.contexts else dict.fromkeys(run.role for run in plan.runs):
        ids = {run.config.run_id for run in plan.runs if run.role == role}
        title = "" if role == "grid" else f"{role}: "
        print_line(console, f"{title}mean val_loss over seeds (largest max logit):")
        console.print(
            ranking([row for row in study_result.table if row["run_id"] in ids])
        )
    for failure in study_result.failures:
        print_line(console, f"failed: {failure.directory}: {failure.error}")
    print_line(console, f"report {page.file}")
    print_line(console, f"study {out}")
    if study_result.failures:
        return FAILED
    collapsed = any(row["collapsed"] for row in study_result.table)
    return COLLAPSED if how.fail_on_collapse and collapsed else OK


class StudyPage:
    """The page of a study, written again and again while its runs end."""

    def __init__(self, out: Path) -> None:
        self.file = out / "report.html"
        self._ended, self._written = 0, -math.inf

    def on_outcome(self, outcome: Outcome) -> None:
        """Writes the page if two runs have ended and the last version is PAGE_SECONDS old."""
        self._ended += 1
        at = time.monotonic()
        if self._ended >= 2 and at >= self._written + PAGE_SECONDS:
            # A page that cannot be written, for example on a full disk, must not stop the runs; the last one reports it.
            with contextlib.suppress(QkeelError):
                write(self.file.parent, self.file, refresh=PAGE_SECONDS)
            self._written = at
