import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forked
from tests.cli import answers

import qkeel
from qkeel.cli.app import main, make_app
from qkeel.cli.commands import EXAMPLES, GROUPS, commands, example, group
from qkeel.cli.console import RunView, StudyView, make_console, number, ranking, spent
from qkeel.cli.report import ANSWERS
from qkeel.cli.retired import RETIRED
from qkeel.cli.run import RunFlags, configure, starting
from qkeel.lab import RunConfig
from qkeel.lab.executors import Outcome
from qkeel.lab.plan import PlannedRun
from qkeel.records import (
    BLOCK_FIELDS,
    HEAD_FIELDS,
    MONITOR_FIELDS,
    RunDirectory,
    RunStatus,
    explain_field,
    read_json,
)
from qkeel.remedies import REMEDIES

TINY = shlex.split(
    "--data topics --context 8 --batch 2 --d-model 16 --n-heads 2 --steps 4 --log-every 2 --eval-sequences 8 "
    "--probe-sequences 2 --device cpu"
)


def refused(arguments, capsys):
    """The one line of a command that ends with exit code 2."""
    assert main(arguments) == 2
    out = capsys.readouterr()
    assert out.err.startswith("error: ")
    assert out.err.count("\n") == 1
    assert "Traceback" not in out.err
    return out.err


def test_the_list_of_commands_says_what_each_says_of_itself_with_an_example_that_can_be_typed():
    assert {name for members in GROUPS.values() for name in members} <= {*commands()}
    assert {group(command) for command in commands()} == {*GROUPS}
    for command, (_, line) in commands().items():
        own = make_app(command.split())
        for name in command.split():
            own = own[name]
        assert own.help.startswith(f"{line}\n") or own.help == line, command
    assert EXAMPLES.keys() <= {*commands(), "study"}
    for command in (*commands(), "study"):
        line = example(command)
        words = shlex.split(line.partition(" > ")[0])[1:]
        make_app(words).parse_args(words, exit_on_error=False, print_error=False)
        begin = "study lr" if command == "study" else command
        assert line.startswith(f"qkeel {begin}"), command


def test_the_list_of_commands_and_the_version_need_no_library():
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


def test_lists_help_and_the_formulas_of_names_wait_for_no_torch_and_are_what_torch_would_say():
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


GRID = shlex.split("study lr --remedies none --lrs 0.1 --seeds 0 --jobs 1")


def test_a_run_prints_its_directory_first_and_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *TINY, "--remedy", "qk_norm", "--lr", "0.02"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    (place,) = Path("runs").iterdir()
    assert lines[0] == lines[-1] == f"run {place}"
    assert lines[1].startswith("step 0  val_loss ")
    assert "max_logit" in lines[2]
    assert ": val_loss" in lines[-2]
    assert "\x1b[" not in out  # no colour is written into a pipe
    config = RunConfig.from_dict(RunDirectory(place).config())
    assert (config.remedy, config.optim.lr) == ("qk_norm", 0.02)
    assert place.name == config.run_id


def test_a_study_writes_table_and_report_and_says_which_command_made_it(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "s"
    grid = shlex.split("--remedies none quack:tau=0.1 --lrs 0.01 0.1")
    arguments = [*GRID, *grid, *TINY, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["qkeel", *arguments])
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("to do\n") == 4
    assert "nothing was written" in said
    assert not out.exists()
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1] == f"study {out}"
    assert lines[1] == "4 runs, 4 to do, 1 at once"
    (first,) = [line for line in lines if line.startswith("[1/4]")]
    assert first.startswith("[1/4] none, lr 0.01, seed 0: val_loss")
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert len((out / "table.csv").read_text().splitlines()) == 5
    command = read_json(out / "study.json")["command"]
    assert command == shlex.join(["qkeel", *arguments])
    assert main(arguments) == 0
    assert "4 runs, 0 to do" in capsys.readouterr().out


def test_the_time_that_is_left_counts_the_steps_of_all_runs(tmp_path, monkeypatch):
    config = RunConfig(steps=10, eval_sequences=1)
    runs = [PlannedRun(config=dataclasses.replace(config, seed=i)) for i in range(4)]
    now, console = [0.0], make_console()
    monkeypatch.setattr("qkeel.cli.console.time.monotonic", lambda: now[0])
    view = StudyView(console, runs, tmp_path)
    printed = []
    for place in list(view.runs):
        now[0] += 20.0
        with console.capture() as captured:
            view.on_outcome(Outcome(place, "it failed"))
        printed.append(captured.get().strip().partition("it failed")[2])
    # Three runs are left after 20 s, two after 40 s, one after 60 s.
    assert printed == [
        *["; about 1 min 00 s left", "; about 40 s left"],
        "; about 20 s left",
        "",
    ]


def test_a_collapse_of_a_study_is_exit_code_3_where_it_is_asked_for(tmp_path, capsys):
    wild = ["--optimizer", "sgd", "--grad-clip", "0", "--warmup", "0"]
    study = [*GRID, *TINY, *wild, "--lrs", "1e30", "--out", str(tmp_path / "s")]
    assert [main(study), main([*study, "--fail-on-collapse"])] == [0, 3]
    assert "collapsed" in capsys.readouterr().out


def test_a_reader_of_the_help_that_stops_early_sees_no_traceback():
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_an_output_that_cannot_be_written_is_exit_code_1():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qkeel", "presets"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write the output: No space left")
    assert done.stderr.endswith("free some space\n")


def test_numbers_times_and_records_are_short():
    numbers = [number(x) for x in (None, 0.123, 57.81, 123.4, 11407.2)]
    assert numbers == ["–", "0.123", "57.8", "123", "11,400"]
    assert [spent(x) for x in (7.6, 80, 3725)] == ["8 s", "1 min 20 s", "1 h 02 min"]
    console = make_console()
    record = {"step": 10, "max_logit": 12.34, "entropy": 1.5, "val_loss": 2.0}
    record |= dict.fromkeys(("train_loss", "grad_norm", "tokens_per_second"))
    later = {"step": 30, "train_loss": 1.0, "grad_norm": 0.5}
    later |= {"val_loss": None, "tokens_per_second": 2000.0}
    with console.capture() as captured:
        for fields in (record, {**record, **later}):
            RunView(console, 100).on_record(fields)
    end = "max_logit 12.3  entropy 1.50"
    assert captured.get().splitlines() == [
        f"step  10  val_loss 2.000  {end}",
        f"step  30  loss 1.000  grad_norm 0.500  {end}  tok/s 2,000",
    ]


def test_a_recipe_is_overridden_by_flags(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'steps = 7\n[optim]\nlr = 0.5\nschedule = "wsd"\n[model]\ntied = true\n'
    )
    config = configure(RunFlags(lr=0.25, tied=False), recipe)
    assert (
        config.steps,
        config.optim.lr,
        config.optim.schedule,
        config.model.tied,
    ) == (7, 0.25, "wsd", False)
    vision = RunFlags(task="vision", steps=7)  # a task brings its own defaults
    config = configure(vision, None, starting(vision))
    assert (config.model.attention, config.data.batch, config.steps) == ("vit", 32, 7)


def test_a_recipe_that_cannot_be_read_is_refused(tmp_path, capsys):
    recipe = tmp_path / "r.toml"
    words = ["study", "lr", "--recipe", str(recipe), *TINY, "--dry-run"]
    for text, said in (
        ("[study]\nseeds = [4, 5]\n", "study"),
        ("steps = ", "is not valid TOML"),
        ("a = " + "[" * 2000, "TOML"),
    ):
        recipe.write_text(text)
        assert said in refused(words, capsys)


@pytest.mark.parametrize(
    ("name", "said", "not_said"),
    [
        ("gemma2:cap=30", ["gemma2 with cap=30; as published:", "30·tanh(z/30)"], "γ"),
        (
            "softcap+qk_clip",
            ["2408.00118", "2507.20534", "γ_h = min(1, 100 / S_h)", "50·tanh(z/50)"],
            "stays the model's own",
        ),
        (
            "quack:tau=0.2",
            ["lalr:tau=0.2: ", "lr(W_Q^h) = 0.2 · η · ‖W_K^h‖₀ / ‖W_K^h‖"],
            "softmax",
        ),
    ],
)
def test_explain_prints_formula_and_source(name, said, not_said, capsys):
    assert main(["explain", name]) == 0
    out = capsys.readouterr().out
    assert all(words in out for words in said)
    assert not_said not in out


def test_explain_says_what_a_recorded_number_is(capsys):
    names = [*HEAD_FIELDS, *BLOCK_FIELDS]
    names += [f"monitor_{name}" for name in MONITOR_FIELDS]
    for name in names:
        assert main(["explain", name]) == 0
        # query_norm is a remedy too.
        assert capsys.readouterr().out.endswith(f"{name}: {explain_field(name)}\n")


def test_every_remedy_of_steps_has_a_rule_and_every_option_of_a_rule_is_there():
    for name, cls in REMEDIES.items():
        assert cls.rule or not cls.on_steps, name
        assert bool(cls().written_rule()) == bool(cls.rule), name


# What is typed -> what the one line says.
BAD = {
    "export x": "qkeel export needs --to; for example: qkeel export",
    "report": "qkeel report needs RUNS; for example: qkeel report ",
    "report .": "expected the directory of a study or of a run",
    "run --remedy lalr:tua=1": "Did you mean 'tau'",
    "run --remedy qk_norm+lalr": "lalr at",
    "run --lrr 0.1": "Did you mean --lr?",
    "run --schedule cosin": 'Did you mean "cosine"?',
    "run --data nowhere.txt": "no such file",
    "run --device cuda:99": "expected a device of this machine",
    "run --recipe nowhere.toml": "nowhere.toml is missing",
    "study lr --remedies none softcapp": "Did you mean 'softcap'",
    "study lr --jobs 0": "at least 1 worker",
    "study lr --executor slrum": "Did you mean 'slurm'",
    "study multimodal --mixes mixx": "unknown data mix 'mixx'. Did you mean 'mix'",
    "study extrapolation --test-lengths 100": "multiples of the training length 64",
    "study extrapolation --posthoc rerop": "rerope",
    "study extrapolation --forms kna --data topics --test-lengths 64000000": "the longest has",
    "study extrapolation --blocks mha4 --d-model 60": "even number of dimensions; got 15",
    "explain gemma2:capp=3": "Did you mean 'cap'",
    "stdy": 'Did you mean "study"?',
    "watch --live=8000 -- python train.py": "`qkeel watch --live` is gone",
    **{name: f"`qkeel {name}` is gone: {instead}" for name, instead in RETIRED.items()},
}


@pytest.mark.parametrize("line", BAD)
def test_bad_usage_is_one_line_and_exit_code_2(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert BAD[line] in refused(shlex.split(line), capsys)
    assert "--jobs" in line or not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    place = tmp_path / "r"
    run = ["run", *TINY, "--out", str(place)]
    assert main(run) == 0
    assert "these differ: seed" in refused([*run, "--seed", "1"], capsys)
    for command in (["run"], GRID):
        words = [*command, *TINY, "--out", str(tmp_path / "file" / "x")]
        assert "Choose a writable directory" in refused(words, capsys)


def test_a_failed_run_is_exit_code_1(tmp_path, monkeypatch, capsys):
    from qkeel.lab import train

    def broken(run, step):
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(train, "set_rate", broken)
    assert main(["run", *TINY, "--out", str(tmp_path / "r")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: the run failed: RuntimeError: the machine is on fire")
    assert err.count("\n") == 1
    assert main([*GRID, *TINY, "--out", str(tmp_path / "s")]) == 1
    assert "[1/1] none, lr 0.1, seed 0: failed: RuntimeError" in capsys.readouterr().out
    assert (tmp_path / "s" / "report.html").exists()


def test_a_run_that_is_started_with_ctrl_c_ignored_ignores_it(tmp_path):
    # `nohup qkeel run &`: a Ctrl-C for the shell's next command is not for this one.
    longer = ["30" if word == "4" else word for word in TINY]
    words = ["-m", "qkeel", "run", *longer, "--out", str(tmp_path / "r")]
    with forked.Python(words, tmp_path, at_interrupt=signal.SIG_IGN) as process:
        process.wait_for("step  2 ")
        process.send_signal(signal.SIGINT)
        done = process.end()
    assert (done.returncode, done.stderr) == (0, "")
    assert RunDirectory(tmp_path / "r").status is RunStatus.DONE


def test_an_interrupted_run_is_exit_code_130_and_goes_on(tmp_path):
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


def test_an_interrupted_study_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    from qkeel.lab import executors

    real, calls = executors.run, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(executors, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["qkeel", "study", "lr", "--again"])
    words = [*GRID, "--remedies", "none", "qk_norm", *TINY]
    assert main([*words, "--out", str(tmp_path / "s")]) == 130
    assert "Resume with: qkeel study lr --again" in capsys.readouterr().err
    table = (tmp_path / "s" / "table.csv").read_text().splitlines()
    assert [row.rpartition(",")[2] for row in table[1:]] == ["done", "missing"]


def test_the_ranking_has_a_column_per_rate_and_means_over_seeds():
    about = {"status": "done", "remedy": "none", "val_loss": 2.0}
    more = {**about, "remedy": "[x]", "lr": 0.1, "val_loss": 5.0, "max_logit": 7.0}
    rows = [
        {**about, "lr": 0.1, "max_logit": 20.0},
        {**about, "lr": 0.1, "val_loss": 3.0, "max_logit": 30.0},
        {
            **about,
            "lr": 0.01,
            "max_logit": 40.0,
            "val_accuracy": 0.5,
            "val_bleu": 12.34,
        },
        more,
        {**about, "lr": 0.5, "status": "failed"},
    ]
    cells = [[column.header, *column.cells] for column in ranking(rows).columns]
    assert cells == [
        ["remedy", "none", r"\[x]"],
        ["lr 0.01", "2.000, 50.0 % correct, BLEU 12.3 (40)", "–"],
        ["lr 0.1", "2.500 (30)", "5.000 (7)"],
    ]


def test_the_extrapolation_study_goes_on_with_more(tmp_path, capsys):
    words = (
        "study extrapolation --train-length 8 --test-sequences 2 --seeds 0 --data topics --batch 2 --d-model 16 "
        "--n-layers 1 --steps 4 --log-every 2 --eval-sequences 8 --probe-sequences 2 --device cpu --jobs 1"
    )
    study = [*shlex.split(words), "--out", str(tmp_path / "s")]
    assert main([*study, "--forms", "kna", "--posthoc", "none"]) == 0
    capsys.readouterr()
    for more, runs in (
        # One of them only to be measured under another method.
        ("--forms kna --posthoc rerope --blocks gau mha1", "2 runs, 2 to do"),
        (
            "--forms kna kna+alibi cosa:gain=true cosa:gain=true+alibi --posthoc kna/pi@16",
            "4 runs, 4 to do",
        ),
    ):
        assert main([*study, *shlex.split(more), "--dry-run"]) == 0
        assert runs in capsys.readouterr().out
    (run,) = (tmp_path / "s" / "runs").iterdir()
    config = RunConfig.from_dict(RunDirectory(run).config())
    assert (config.data.context, config.model.block) == (8, "gau")
    assert config.optim.weight_decay == 0.01
