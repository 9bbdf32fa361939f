"""A program under `qkeel watch` finds what it would find under python, and leaves what it would leave."""

import functools
import json
import os
import signal
import sys

import pytest
from tests import forked
from tests.contract.cli.scripts import run, script, watched

from qkeel.cli.python_program import Program, Torchrun, parse
from qkeel.cli.run_messages import TYPED
from qkeel.errors import InvalidValueError

TALKER = """
import os, sys
print(sys.argv, sys.path[0], __file__, __name__, os.getcwd(), __spec__, __builtins__)
import __main__
print(__main__.__file__, sys.modules["__main__"] is __main__)

class Pickled:
    pass

import pickle
print(type(pickle.loads(pickle.dumps(Pickled()))))

def fail():
    raise ValueError("x")

if sys.argv[1] == "raise":
    fail()
if sys.argv[1] == "chain":
    try:
        fail()
    except ValueError as error:
        raise KeyError("y") from error
if sys.argv[1] == "exit":
    sys.exit(7)
if sys.argv[1] == "words":
    sys.exit("sorry")
if sys.argv[1] == "hook":
    sys.excepthook = lambda kind, error, trace: print("hooked", kind, file=sys.stderr)
    fail()
if sys.argv[1] == "closed":
    sys.stdout.close()
if sys.argv[1] == "interrupt":
    raise KeyboardInterrupt
"""


def test_a_script_may_close_its_output(tmp_path):
    (tmp_path / "talk.py").write_text(TALKER)
    words = ["talk.py", "closed"]
    watched = run(["-m", "qkeel", "watch", "--", "python", *words], tmp_path)
    assert (watched.returncode, watched.stdout) == (0, run(words, tmp_path).stdout)


@pytest.mark.parametrize("before", [True, False])
def test_a_script_may_close_its_errors(before, tmp_path):
    closed = "import sys\nsys.stderr.close()\n"
    training = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
train(model, optimizer, 3)
"""
    script(tmp_path, closed + training if before else training + closed)
    result = watched(["python", "train.py"], tmp_path, "--every", "1")
    assert result.returncode == 0
    records = tmp_path / "qkeel-runs" / "train" / "metrics.jsonl"
    assert len(records.read_text().splitlines()) == 3


@pytest.mark.parametrize("mode", ["fine", "raise", "chain", "exit", "words", "hook"])
def test_output_exit_code_and_traceback_are_those_of_python(mode, tmp_path, here):
    (tmp_path / "talk.py").write_text(TALKER)
    words = ["talk.py", mode, "--out", "x", "--", "-v"]
    plain = run(words, tmp_path)
    code, out, err = here("--", "python", *words)
    assert (code, out) == (plain.returncode, plain.stdout)
    own = [line for line in err.splitlines() if line.startswith("qkeel: ")]
    assert [
        line for line in err.splitlines() if line not in own
    ] == plain.stderr.splitlines()
    assert len(own) == 1
    assert "the script created no torch.optim.Optimizer" in own[0]


def test_an_interruption_is_130_with_the_traceback_of_the_script(tmp_path, here):
    (tmp_path / "talk.py").write_text(TALKER)
    code, _, err = here("--", "python3", "talk.py", "interrupt")
    assert code == 130
    assert err.splitlines()[0] == "Traceback (most recent call last):"
    assert err.splitlines()[1].startswith(f'  File "{tmp_path / "talk.py"}", line')
    assert "qkeel/cli" not in err


def test_a_syntax_error_is_shown_as_python_shows_it(tmp_path, here):
    (tmp_path / "bad.py").write_text("x = (\n")
    code, _, err = here("--", "bad.py")
    assert code == 1
    assert err.startswith(run(["bad.py"], tmp_path).stderr)


def test_a_future_import_of_the_watcher_does_not_reach_the_script(tmp_path, here):
    (tmp_path / "s.py").write_text("def f(x: int): ...\nprint(f.__annotations__)\n")
    assert here("--", "python", "s.py")[1] == "{'x': <class 'int'>}\n"


@pytest.mark.slow
def test_a_module_is_run_as_python_does_with_stdin_and_unbuffered_output(
    tmp_path,
):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "import sys\nprint(sys.argv, sys.path[0], __name__, __spec__.name, sys.stdout.write_through)\n"
    (package / "go.py").write_text(
        text + "print(sys.stdin.read(), end='')\nsys.exit(5)\n"
    )
    words = ["-u", "-m", "package.go", "-m", "x"]
    asked = functools.partial(run, stdin="a\nb")
    plain, seen = (
        asked(words, tmp_path),
        watched(["python", *words], tmp_path, start=asked),
    )
    assert plain.stdout.endswith("True\na\nb")
    assert (seen.stdout, seen.returncode) == (plain.stdout, 5)


# What is typed behind `qkeel watch` -> what the one line says.
WRONG = {
    "": "expected a training command",
    "--": "expected a training command",
    "python s.py": "expected -- before the command",
    "python s.py --out x": "expected -- before the command",
    "-- python": "expected a script after python",
    "-- python -m": "expected the name of a module",
    "-- python -O s.py": "python -O -m qkeel watch -- python train.py",
    "-- python -c pass": "python's option -c",
    "-- bash s.sh": "expected python, torchrun or a .py file, got 'bash'",
    "-- accelerate launch s.py": "accelerate ... -m qkeel watch",
    "-- /nowhere/python s.py": "runs in the watcher's own interpreter",
    "-- python nope.py": "nope.py is missing; give the path of an existing file",
    "-- python .": "cannot read .: Is a directory. Expected a readable file",
    "-- python -m nope.at_all": "expected a module that Python can find",
    "--evry 5 -- python s.py": "unknown option --evry",
    "--every 0 -- python s.py": "at least 1 step",
    "--apply lalr --policy ladder -- python s.py": "got both",
    "--sink wandbb -- python s.py": "Did you mean 'wandb'",
    "-- torchrun --no-python x": "--no-python",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_one_line_and_exit_code_2(line, tmp_path, here):
    (tmp_path / "s.py").write_text("raise SystemExit('the script was run')")
    code, out, err = here(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert WRONG[line] in err
    assert [path.name for path in tmp_path.iterdir()] == ["s.py"]


def test_a_command_is_read():
    script = Program(name="a/b.py", arguments=("-u",), unbuffered=True)
    module = Program(name="a.b", arguments=("c",), module=True)
    assert parse(["python3", "-u", "a/b.py", "-u"]) == script
    assert parse([sys.executable, "-ma.b", "c"]) == module
    assert parse(["b.py"]) == Program(name="b.py")
    for line in ("torchrun b.py", "python -m torch.distributed.run b.py"):
        assert parse(line.split()) == Torchrun(("b.py",))
    for line in ("python -u -m a b", "python a.py -- -m"):
        program = parse(line.split())
        assert isinstance(program, Program)
        assert program.words == line.split()


def test_torchrun_starts_the_watcher_in_each_worker():
    watcher = ["qkeel", "watch", "--every", "3", "--"]
    head = [
        sys.executable,
        *["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"],
    ]
    for typed in ("t.py --lr 1", "-m t -m"):
        words = Torchrun(("--nproc-per-node", "2", *typed.split())).command(watcher)
        assert words == [*head, *watcher, "python", "-u", *typed.split()]
    with pytest.raises(InvalidValueError):
        Torchrun(("--no-python", "t")).command(watcher)


def test_under_torchrun_the_fix_is_the_command_that_was_typed(
    tmp_path, here, monkeypatch
):
    def become(path, words):
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", become)
    monkeypatch.setenv(TYPED, "")  # so that the test leaves no trace of it
    with pytest.raises(SystemExit):
        here("--every", "3", "--", "torchrun", "--nproc-per-node", "2", "a b.py")
    seen = []
    monkeypatch.setattr("qkeel.cli.watch.execute", lambda *_: 0)
    monkeypatch.setattr(
        "qkeel.cli.watch.WatchSession",
        lambda plan, _: (seen.append(plan.fix), Closed())[1],
    )
    (tmp_path / "a b.py").write_text("")
    for world in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", world)
        here("--every", "3", "--", "python", "a b.py")  # as a worker does
        assert TYPED not in os.environ
    remedy = 'qkeel.apply(model, "lalr", optimizer)'
    here("--", "python", "a b.py")  # as under another launcher, which left no word
    typed = "qkeel watch --every 3 --apply lalr -- torchrun --nproc-per-node 2 'a b.py'"
    assert [fix.lines(remedy)[0] for fix in seen] == [
        f"to fix it: {typed}",
        "to fix it: restart it with --apply lalr before the --",
        "to fix it: restart it with --apply lalr before the --",
    ]


class Closed:
    """A session that nothing was watched in."""

    def close(self, *, complete): ...

    def leave(self, program): ...


def test_ctrl_c_reaches_the_script_and_what_was_recorded_stays(tmp_path):
    train = """
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
try:
    train(net, optimizer)
    print("ready", flush=True)
    train(net, optimizer, 10**9)
except KeyboardInterrupt:
    print("tidied up", flush=True)
    raise
"""
    words = [
        "-m",
        "qkeel",
        "watch",
        "--every",
        "1",
        "--",
        "python",
        script(tmp_path, train).name,
    ]
    with forked.Python(words, tmp_path) as process:
        process.wait_for("ready\n")
        process.send_signal(signal.SIGINT)
        done = process.end(300)
    assert done.returncode == 130
    assert done.stdout == "ready\ntidied up\n"
    assert "\nKeyboardInterrupt\n" in done.stderr
    assert "qkeel: run qkeel-runs/train\n" in done.stderr
    place = tmp_path / "qkeel-runs" / "train"
    assert (place / "metrics.jsonl").exists()
    assert not (place / "DONE").exists()


RESUMED = """
import os
torch.manual_seed(0)
model = Attention()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if os.path.exists("last.pt"):
    optimizer.load_state_dict(torch.load("last.pt"))
for step in range(6):
    model(torch.randn(2, 8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(optimizer.state_dict(), "last.pt")
"""


def test_a_resumed_script_continues_the_numbers_of_its_steps(tmp_path, here):
    script(tmp_path, RESUMED)
    found = []
    for name in ("run", "run-2"):
        assert here("--out", "run", "--every", "2", "--", "python", "train.py")[0] == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(line)["step"] for line in lines])
    assert found == [[0, 2, 4], [6, 8, 10]]
