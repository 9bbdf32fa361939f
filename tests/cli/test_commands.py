from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests import forked
from tests.cli import answers

import qkeel
from qkeel.cli.app import main, make_app
from qkeel.cli.commands import EXAMPLES, GROUPS, commands, example, group
from qkeel.cli.console import StudyView, make_console, number, ranking, spent
from qkeel.cli.report import ANSWERS
from qkeel.cli.retired import RETIRED
from qkeel.cli.run import RunFlags, configure, starting
from qkeel.lab import RunConfig
from qkeel.lab.executors import Outcome
from qkeel.lab.plan import PlannedRun
from qkeel.records import RunDirectory, RunStatus, read_json
from qkeel.remedies import REMEDIES

TINY = shlex.split(
    "--data topics --context 8 --batch 2 --d-model 16 --n-heads 2 --steps 4 --log-every 2 --eval-sequences 8 "
    "--probe-sequences 2 --device cpu"
)

Capture = pytest.CaptureFixture[str]


def refused(arguments: list[str], capsys: Capture) -> str:
    """The one line of a command that ends with exit code 2."""
    assert main(arguments) == 2
    out = capsys.readouterr()
    assert out.err.startswith("error: ")
    assert out.err.count("\n") == 1
    assert "Traceback" not in out.err
    return out.err


def test_the_list_of_commands_says_what_each_command_says_of_itself() -> None:
    for command, (_, line) in commands().items():
        own = make_app(command.split())
        for name in command.split():
            own = own[name]
        assert own.help.startswith(f"{line}\n") or own.help == line, command


def test_every_example_of_the_help_can_be_typed() -> None:
    assert EXAMPLES.keys() <= {*commands(), "study"}
    for command, line in {
        command: example(command) for command in (*commands(), "study")
    }.items():
        words = shlex.split(line.partition(" > ")[0])[1:]
        make_app(words).parse_args(words, exit_on_error=False, print_error=False)
        assert line.startswith(
            "qkeel study lr" if command == "study" else f"qkeel {command}"
        ), command


def test_the_list_of_commands_and_the_version_need_no_library() -> None:
    code = """
import sys
sys.modules |= dict.fromkeys(["torch", "cyclopts", "rich", "numpy"])
sys.argv = ["qkeel", sys.argv[1]]
from qkeel.__main__ import main
sys.exit(main())"""
    shown = {}
    for word in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", code, word],
            check=True,
            capture_output=True,
            text=True,
        )
        shown[word] = done.stdout
    assert shown["--version"].strip() == qkeel.__version__
    for command in commands():
        assert f"  {command} " in shown["--help"]


def test_lists_help_and_the_formulas_of_names_wait_for_no_torch_and_are_what_torch_would_say() -> (
    None
):
    assert ANSWERS.read_text(encoding="utf-8") == answers.answers(), (
        "python -m tests.cli.answers"
    )
    # Lists, formulas and every page of help, in one interpreter that has no torch.
    asked = [
        "presets",
        "remedies",
        "explain qk_norm",
        "explain qwen3",
        "--help",
        "study --help",
        "report --help",
    ]
    code = """
import contextlib, io, sys
sys.modules["torch"] = None
from qkeel.cli.app import main
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(line.split())
    print(code, bool(said.getvalue()))"""
    done = subprocess.run(
        [sys.executable, "-c", code, *asked], capture_output=True, text=True
    )
    assert (done.stdout.split(), done.stderr) == (["0", "True"] * len(asked), "")


def test_every_command_stands_in_a_group_of_the_help() -> None:
    assert {name for members in GROUPS.values() for name in members} <= {*commands()}
    assert {group(command) for command in commands()} == {*GROUPS}


def test_an_argument_that_is_missing_is_asked_for_with_an_example(
    capsys: Capture,
) -> None:
    assert refused(["export", "x"], capsys) == (
        "error: qkeel export needs --to; for example: qkeel export qkeel-runs/train --to parquet\n"
    )
    assert refused(["report"], capsys).startswith(
        "error: qkeel report needs RUNS; for example: qkeel report "
    )


def test_rare_options_are_for_help_all(tmp_path: Path) -> None:
    shown = [
        forked.python(["-m", "qkeel", "demo", word], tmp_path)
        for word in ("--help", "--help-all")
    ]
    texts = {word: done.stdout for word, done in zip(("--help", "--help-all"), shown)}
    assert "--n-layers" in texts["--help"]
    assert "--deepnorm" not in texts["--help"]
    assert "--help-all shows every option" in texts["--help"]
    assert "--deepnorm" in texts["--help-all"]


def test_a_run_prints_its_directory_first_and_last(
    tmp_path: Path, capsys: Capture
) -> None:
    place = tmp_path / "r"
    assert (
        main(["run", *TINY, "--out", str(place), "--remedy", "qk_norm", "--lr", "0.02"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1] == f"run {place}"
    assert lines[1].startswith("step 0  val_loss ")
    assert "max_logit" in lines[2]
    assert "ETA" in lines[2]
    assert ": val_loss" in lines[-2]
    config = RunDirectory(place).config()
    assert (config["remedy"], config["optim"]["lr"], config["model"]["d_model"]) == (
        "qk_norm",
        0.02,
        16,
    )


def test_json_is_alone_on_stdout(tmp_path: Path, capsys: Capture) -> None:
    assert main(["run", *TINY, "--out", str(tmp_path / "r"), "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["status"] == "done"
    assert "step 0" in out.err


def test_the_default_directory_is_named_by_the_run_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *TINY]) == 0
    (place,) = (tmp_path / "runs").iterdir()
    assert place.name == RunConfig.from_dict(RunDirectory(place).config()).run_id


def test_collapse_is_exit_code_3_only_when_asked(
    tmp_path: Path, capsys: Capture
) -> None:
    bad = [
        *TINY,
        "--optimizer",
        "sgd",
        "--lr",
        "1e30",
        "--grad-clip",
        "0",
        "--out",
        str(tmp_path / "r"),
    ]
    assert main(["run", *bad]) == 0
    assert main(["run", *bad, "--fail-on-collapse"]) == 3
    assert "collapsed: val_loss nan" in capsys.readouterr().out


def test_a_study_writes_table_and_report(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "s"
    grid = [
        "--remedies",
        "none",
        "quack:tau=0.1",
        "--lrs",
        "0.01",
        "0.1",
        "--seeds",
        "0",
        "--jobs",
        "1",
    ]
    assert main(["study", "lr", *grid, *TINY, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1] == f"study {out}"
    assert lines[1] == "4 runs, 4 to do, 1 at once"
    assert lines[3].startswith("[1/4] none, lr 0.01, seed 0: val_loss")
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert len((out / "table.csv").read_text().splitlines()) == 5
    assert main(["study", "lr", *grid, *TINY, "--out", str(out)]) == 0
    assert "4 runs, 0 to do" in capsys.readouterr().out


def test_the_time_that_is_left_counts_the_steps_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(steps=10, eval_sequences=1)
    runs = [
        PlannedRun(config=dataclasses.replace(config, seed=seed)) for seed in range(4)
    ]
    steps, now, console = dict[str, int](), [0.0], make_console()
    with monkeypatch.context() as patched:
        patched.setattr("qkeel.cli.console.time.monotonic", lambda: now[0])
        patched.setattr(
            "qkeel.cli.console.last_step", lambda place: steps.get(str(place), 0)
        )

        def ended(view: StudyView, *places: str) -> str:
            """What is printed of the last of these runs."""
            with console.capture() as captured:
                for place in places:
                    view.on_outcome(Outcome(place, "it failed"))
            return captured.get().splitlines()[-1].partition("it failed")[2]

        view = StudyView(console, runs, tmp_path)
        first, second, *rest = view.runs
        now[0], steps = 60.0, {first: 10, second: 10}
        assert (
            ended(view, first) == "; about 1 min 00 s left"
        )  # of four, two are at their end
        assert ended(view, second, *rest) == ""
        # A study that goes on: three runs had taken 8 of 10 steps when this process started; one has ended since.
        now[0], steps = 0.0, {second: 8, **dict.fromkeys(rest, 8)}
        resumed = StudyView(console, runs, tmp_path)
        now[0] = 60.0
        assert (
            ended(resumed, second) == "; about 7 min 00 s left"
        )  # two steps a minute; 14 are left


def test_a_reader_of_the_help_that_stops_early_sees_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "qkeel", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_time_that_cannot_be_estimated_is_said_to_be_unknown_and_why(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimate(runs: object, jobs: int) -> float:
        raise RuntimeError("no such device")

    monkeypatch.setattr("qkeel.cli.run.estimate_seconds", estimate)
    study = [
        "study",
        "lr",
        "--remedies",
        "none",
        "--lrs",
        "0.1",
        "--seeds",
        "0",
        *TINY,
        "--out",
        str(tmp_path / "s"),
    ]
    why = "no time estimate: the first steps failed here with RuntimeError: no such device"
    for words in (["--dry-run"], []):
        assert main([*study, *words]) == 0
        assert why in capsys.readouterr().out


def test_a_dry_run_names_every_run_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    arguments = [
        *shlex.split("study lr --full-grid --seeds 0 --remedies none --out s"),
        *TINY,
    ]
    assert main([*arguments, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("to do\n") == 7
    assert "lr 0.0003" in out
    assert "about" in out
    assert not (tmp_path / "s").exists()


def test_a_recipe_is_overridden_by_flags(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'steps = 7\n[optim]\nlr = 0.5\nschedule = "wsd"\n[model]\ntied = true\n'
    )
    config, _ = configure(RunFlags(lr=0.25, tied=False), recipe)
    assert (
        config.steps,
        config.optim.lr,
        config.optim.schedule,
        config.model.tied,
    ) == (7, 0.25, "wsd", False)
    vision = RunFlags(task="vision", steps=7)  # a task brings its own defaults
    config, _ = configure(vision, None, starting(vision))
    assert (config.model.attention, config.data.batch, config.steps) == ("vit", 32, 7)


def test_a_recipe_may_hold_the_grid(tmp_path: Path, capsys: Capture) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[study]\nremedies = ["none"]\nlrs = [0.1]\nseeds = [4, 5]\n')
    arguments = [
        "study",
        "lr",
        "--recipe",
        str(recipe),
        *TINY,
        "--out",
        str(tmp_path / "s"),
        "--dry-run",
    ]
    assert main(arguments) == 0
    assert "seed 5" in capsys.readouterr().out
    recipe.write_text("[study]\nseedz = [4, 5]\n")
    assert "Did you mean 'seeds'" in refused(arguments, capsys)


def test_explain_prints_formula_and_source(capsys: Capture) -> None:
    assert main(["explain", "gemma2:cap=30"]) == 0
    assert "30·tanh(z/30)" in capsys.readouterr().out
    assert main(["explain", "softcap+qk_clip"]) == 0
    out = capsys.readouterr().out
    assert "2408.00118" in out
    assert "2507.20534" in out
    assert "γ_h = min(1, 100 / S_h)" in out
    assert "50·tanh(z/50)" in out
    assert main(["explain", "quack:tau=0.2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("lalr:tau=0.2: ")
    assert "lr(W_Q^h) = 0.2 · η · ‖W_K^h‖₀ / ‖W_K^h‖" in out
    assert "softmax" not in out


def test_explain_says_what_a_recorded_number_is(capsys: Capture) -> None:
    from qkeel.records import (
        BLOCK_FIELDS,
        HEAD_FIELDS,
        LAYER_FIELDS,
        MONITOR_FIELDS,
        explain_field,
    )

    names = [
        *HEAD_FIELDS,
        *LAYER_FIELDS,
        *BLOCK_FIELDS,
        *(f"monitor_{name}" for name in MONITOR_FIELDS),
    ]
    for name in names:
        assert main(["explain", name]) == 0
        assert capsys.readouterr().out.endswith(
            f"{name}: {explain_field(name)}\n"
        )  # query_norm is a remedy too


def test_what_explain_says_of_a_preset_with_options_is_no_contradiction(
    capsys: Capture,
) -> None:
    assert main(["explain", "gemma2:cap=30"]) == 0
    assert capsys.readouterr().out.startswith(
        "gemma2:cap=30: gemma2 with cap=30; as published: no norm, logits softca"
    )


def test_every_remedy_of_steps_has_a_rule_and_every_option_of_a_rule_is_there() -> None:
    for name, cls in REMEDIES.items():
        assert cls.rule or not cls.on_steps, name
        assert bool(cls().written_rule()) == bool(cls.rule), name


@pytest.mark.parametrize("command", ["presets", "remedies"])
def test_listings_name_everything_with_a_source(command: str, capsys: Capture) -> None:
    assert main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 8
    assert all("[" in line for line in lines)


def test_report_takes_run_directories(tmp_path: Path, capsys: Capture) -> None:
    main(["run", *TINY, "--out", str(tmp_path / "r")])
    assert main(["report", str(tmp_path / "r"), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
    assert "expected the directory of a study or of a run" in refused(
        ["report", str(tmp_path)], capsys
    )


BAD = [
    (["run", "--remedy", "qknorm"], "Did you mean 'qk_norm'"),
    (["run", "--remedy", "lalr:tua=1"], "Did you mean 'tau'"),
    (["run", "--remedy", "qk_norm+lalr"], "lalr at"),
    (["run", "--attention", "gema2"], "Did you mean 'gemma2'"),
    (["run", "--lrr", "0.1"], "Did you mean --lr?"),
    (
        ["study", "lr", "--lrs=1,fast"],
        'unable to convert "1,fast" into float. If an option takes several values, ',
    ),
    (["run", "--lr", "0"], "expected a finite number above 0 for lr, got 0.0"),
    (
        ["run", "--steps", "0"],
        "expected a finite number of at least 1 for steps, got 0",
    ),
    (["run", "--schedule", "cosin"], 'Did you mean "cosine"?'),
    (["run", "--d-model", "12", "--n-heads", "4"], "even"),
    (["run", "--data", "nowhere.txt"], "no such file"),
    (["run", "--device", "cuda:99"], "expected a device of this machine"),
    (["run", "--recipe", "nowhere.toml"], "nowhere.toml is missing"),
    (["study", "lr", "--remedies", "none", "softcapp"], "Did you mean 'softcap'"),
    (["study", "lr", "--lrs", "-1"], "expected a finite number above 0 for lr"),
    (["study", "lr", "--jobs", "0"], "at least 1 worker"),
    (["study", "lr", "--executor", "slrum"], "Did you mean 'slurm'"),
    (["explain", "gemma"], "Did you mean 'gemma"),
    (["explain", "gemma2:capp=3"], "Did you mean 'cap'"),
    (["stdy"], 'Did you mean "study"?'),
    *(
        (name.split(), f"`qkeel {name}` is gone: {instead}")
        for name, instead in RETIRED.items()
    ),
    (
        ["watch", "--live=8000", "--", "python", "train.py"],
        "`qkeel watch --live` is gone",
    ),
    *(
        (["study", "extrapolation", *flags.split()], said)
        for flags, said in (
            ("--test-lengths 100", "multiples of the training length 64, got 100"),
            ("--posthoc rerop", "rerope"),
            ("--posthoc rerope:window=64", "under the training length"),
            ("--forms knaa", "kna"),
            (
                "--forms cosa:gain=2",
                "expected true or false for option 'gain' of preset 'cosa', got 2",
            ),
            ("--forms kna --data topics --test-lengths 64000000", "the longest has"),
            ("--positions rope window", "window:window=128"),
            ("--positions alibii,rope", "separate them with spaces: alibii rope"),
            ("--forms kna+rerope:window=64", "under the training length, got 64 of 64"),
            ("--continue-at 100", "larger multiple of the training length 64, got 100"),
            ("--continue-at 0", "a length in tokens after the @"),
            (
                "--continue-at 128 --continue-steps 0",
                "at least 1 step of continued training, got 0",
            ),
            ("--test-sequences 0", "at least 1 held-out sequence, got 0"),
            ("--test-lengths 32", "multiples of the training length 64, got 32"),
            ("--blocks mha4 --d-model 60", "an even number of dimensions; got 15"),
            ("--posthoc knaa/ntk", "kna"),
            ("--posthoc ntk:windw=8", "option of ntk"),
            ("--posthoc pi@64", "larger multiple of the training length 64, got 64"),
            ("--posthoc pi@x", "length in tokens after the @"),
            ("--forms kna+rerop", "rerope"),
            ("--block mha", "--block"),
        )
    ),
    *(
        (["study", *flags.split()], said)
        for flags, said in (
            ("lr --task vision --images nowhere", "cannot find images 'nowhere'"),
            ("lr --task vision --image-size 16", "the images of digits are 8 × 8"),
            ("lr --task vision --patch 3", "image_size to be a multiple of patch"),
            ("multimodal --mixes mixx", "unknown data mix 'mixx'. Did you mean 'mix'"),
            ("multimodal --mixes mix:norm=perri", "unknown norm_order 'perri'"),
            (
                "multimodal --mixes mix:variance=big",
                "expected a number for image_variance",
            ),
            ("multimodal --context 40", "a canvas of 4 images needs 65 tokens"),
            ("multimodal --data nothing_here", "cannot find corpus 'nothing_here'"),
        )
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(arguments, capsys)
    assert "--jobs" in arguments or not list(tmp_path.iterdir())


def test_bad_corpora_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    np.full(100, 99, dtype="<u2").tofile(tmp_path / "words.bin")
    for name, extra, message in (
        ("empty.txt", [], "is empty"),
        ("short.txt", [], "expected more than the context"),
        ("words.bin", ["--vocab-size", "50"], "has token 99"),
    ):
        arguments = [
            "run",
            "--data",
            str(tmp_path / name),
            "--out",
            str(tmp_path / "r"),
            *extra,
        ]
        assert message in refused(arguments, capsys)
    assert not (tmp_path / "r").exists()


def test_directories_that_cannot_be_used_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: Capture
) -> None:
    place = tmp_path / "r"
    main(["run", *TINY, "--out", str(place)])
    assert "these differ: seed" in refused(
        ["run", *TINY, "--seed", "1", "--out", str(place)], capsys
    )
    (tmp_path / "file").write_text("in the way")
    for command in (["run"], ["study", "lr", "--jobs", "1"]):
        out = ["--out", str(tmp_path / "file" / "x")]
        assert "Choose a writable directory" in refused([*command, *TINY, *out], capsys)
    (place / "config.json").write_text("{")
    assert "is not complete JSON" in refused(
        ["run", *TINY, "--out", str(place)], capsys
    )
    (tmp_path / "bad.toml").write_text("steps = ")
    assert "is not valid TOML" in refused(
        ["run", "--recipe", str(tmp_path / "bad.toml")], capsys
    )


def test_a_full_disk_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for command in (
        ["run"],
        ["study", "lr", "--jobs", "1", "--lrs", "0.1", "--seeds", "0"],
    ):
        line = refused([*command, *TINY, "--out", str(tmp_path / command[0])], capsys)
        assert "No space left on device" in line
        assert re.search("[Ff]ree (some )?space", line)


def test_a_failed_run_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from qkeel.lab import train

    def broken(run: object, step: int) -> None:
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(train, "set_rate", broken)
    assert main(["run", *TINY, "--out", str(tmp_path / "r")]) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "error: the run failed: RuntimeError: the machine is on fire; see "
    )
    assert err.count("\n") == 1
    grid = ["--lrs", "0.1", "--seeds", "0", "--remedies", "none", "--jobs", "1"]
    assert main(["study", "lr", *grid, *TINY, "--out", str(tmp_path / "s")]) == 1
    assert "[1/1] none, lr 0.1, seed 0: failed: RuntimeError" in capsys.readouterr().out
    assert (tmp_path / "s" / "report.html").exists()


def test_a_run_that_is_started_with_ctrl_c_ignored_ignores_it(tmp_path: Path) -> None:
    # `nohup qkeel run &`: a Ctrl-C for the shell's next command is not for this one.
    longer = ["30" if word == "4" else word for word in TINY]
    words = ["-m", "qkeel", "run", *longer, "--out", str(tmp_path / "r")]
    with forked.Python(words, tmp_path, at_interrupt=signal.SIG_IGN) as process:
        process.wait_for("step  2 ")
        process.send_signal(signal.SIGINT)
        done = process.end()
    assert (done.returncode, done.stderr) == (0, "")
    assert RunDirectory(tmp_path / "r").status is RunStatus.DONE


def test_an_interrupted_run_is_exit_code_130_and_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "r"
    long = ["3000" if word == "4" else word for word in TINY]
    long = [*long, "--checkpoint-every", "0", "--out", str(place)]
    with forked.Python(["-m", "qkeel", "run", *long], tmp_path) as process:
        process.wait_for("step    2 ")
        process.send_signal(signal.SIGINT)
        done = process.end(300)
    assert done.returncode == 130
    assert done.stderr == f"interrupted. Resume with: qkeel run {shlex.join(long)}\n"
    assert RunDirectory(place).status is RunStatus.STARTED
    assert RunDirectory(place).checkpoint.exists()


def test_an_interrupted_study_keeps_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from qkeel.lab import executors

    real, calls = executors.run, []

    def interrupted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(executors, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["qkeel", "study", "lr", "--again"])
    grid = [
        "--lrs",
        "0.1",
        "--seeds",
        "0",
        "--remedies",
        "none",
        "qk_norm",
        "--jobs",
        "1",
    ]
    assert main(["study", "lr", *grid, *TINY, "--out", str(tmp_path / "s")]) == 130
    assert "Resume with: qkeel study lr --again" in capsys.readouterr().err
    table = (tmp_path / "s" / "table.csv").read_text().splitlines()
    assert table[1].endswith(",done")
    assert table[2].endswith(",missing")


def test_the_demo_is_a_study_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    assert main(["demo", *TINY, "--out", str(tmp_path / "d"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "24 runs, 24 to do" in out


def test_no_colour_is_written_into_a_pipe(tmp_path: Path, capsys: Capture) -> None:
    main(["run", *TINY, "--out", str(tmp_path / "r")])
    assert "\x1b[" not in capsys.readouterr().out


def test_a_study_says_which_command_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    arguments = [
        "study",
        "lr",
        *TINY,
        "--lrs",
        "0.1",
        "--seeds",
        "0",
        "--remedies",
        "softcap:cap=30",
        "--jobs",
        "1",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["qkeel", *arguments])
    assert main(arguments) == 0
    assert read_json(tmp_path / "runs" / "lr" / "study.json")["command"] == " ".join(
        ["qkeel", *arguments]
    )


def test_numbers_are_short() -> None:
    assert [number(x) for x in (None, 0.123, 57.81, 123.4, 11407.2)] == [
        "–",
        "0.123",
        "57.8",
        "123",
        "11,400",
    ]
    assert [spent(x) for x in (7.6, 80, 3725)] == ["8 s", "1 min 20 s", "1 h 02 min"]


def test_the_ranking_has_a_column_per_rate() -> None:
    about = {
        "status": "done",
        "remedy": "none",
        "val_loss": 2.0,
        "max_logit": 5.0,
        "seed": 0,
    }
    rows = [{**about, "lr": lr} for lr in (0.1, 0.01)]
    assert [column.header for column in ranking(rows).columns] == [
        "remedy",
        "lr 0.01",
        "lr 0.1",
    ]


def test_the_extrapolation_study_prints_what_is_kept_and_goes_on_with_more(
    tmp_path: Path, capsys: Capture
) -> None:
    sizes = shlex.split(
        "--data topics --batch 2 --d-model 16 --n-layers 1 --steps 4 --log-every 2 --eval-sequences 8"
    )
    flags = [
        *sizes,
        "--probe-sequences",
        "2",
        "--device",
        "cpu",
        "--jobs",
        "1",
        "--out",
        str(tmp_path / "s"),
    ]
    study = [
        "study",
        "extrapolation",
        "--train-length",
        "8",
        "--test-sequences",
        "2",
        "--seeds",
        "0",
        *flags,
    ]
    assert main([*study, "--forms", "kna", "--posthoc", "none"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["gau", "kna", "none", "64"] in [line[:4] for line in lines]
    assert (
        main(
            [
                *study,
                "--forms",
                "kna",
                "--posthoc",
                "rerope",
                "--blocks",
                "gau",
                "mha1",
                "--dry-run",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "2 runs, 2 to do" in out  # one only to be measured under another method
    more = [
        "--forms",
        "kna",
        "cosa:gain=true",
        "--positions",
        "rope",
        "alibi",
        "--continue-at",
        "16",
        "--dry-run",
    ]
    assert main([*study, *more]) == 0
    out = capsys.readouterr().out
    assert "4 runs, 4 to do" in out
    assert "cosa:gain=true+alibi, lr 0.01" in out
    assert not (tmp_path / "s" / "runs" / "x").exists()
    config = RunDirectory(next((tmp_path / "s" / "runs").iterdir())).config()
    assert (
        config["data"]["context"],
        config["model"]["block"],
        config["optim"]["weight_decay"],
    ) == (8, "gau", 0.01)
