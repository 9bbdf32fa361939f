"""`qkeel watch -- python train.py`: training is to the bit what it is without, and a run directory is left behind."""

import re

import pytest
from tests import forked
from tests.contract.cli.scripts import run, script, watched
from tests.contract.cli.test_watch import HOT

from qkeel.cli.app import main
from qkeel.records import RunDirectory, RunStatus


def train(folder, text, start=run):
    """Watch a script in a process of its own; its run directory."""
    result = watched(
        ["python", script(folder, text).name], folder, "--every", "1", start=start
    )
    assert result.returncode == 0, result.stderr
    return RunDirectory(folder / "qkeel-runs" / "train")


NEW_PHASE = """
torch.manual_seed(0)
net = Net(2)
for phase in range(2):
    opt = torch.optim.AdamW(net.parameters(), lr=0.5)
    train(net, opt, 16)
    print(sorted({name for module in net.modules() for name in module.__dict__.get("_qkeel_applied", {})}))
"""

TWO_GROUPS = """
torch.manual_seed(0)
net = Net(2)
rest = torch.optim.AdamW([p for name, p in net.named_parameters() if "qkv" not in name], lr=0.5)
own = torch.optim.AdamW([p for name, p in net.named_parameters() if "qkv" in name], lr=0.5)
for step in range(16):
    loss(net, batch(step)).backward()
    rest.step()
    own.step()
    rest.zero_grad()
    own.zero_grad()
"""


@pytest.mark.parametrize("text", [NEW_PHASE, TWO_GROUPS])
def test_the_autopilot_acts_in_each_phase_and_on_each_optimizer(tmp_path, text):
    words = ["python", script(tmp_path, text).name]
    options = [
        "--every",
        "2",
        "--autopilot",
        "--policy",
        "ladder:threshold=20,patience=1",
    ]
    result = watched(words, tmp_path, *options, start=forked.python)
    assert result.returncode == 0, result.stderr
    assert "already applied" not in result.stderr
    assert "does not hold" not in result.stderr
    assert "deleted the model" not in result.stderr
    parts = result.stderr.split("qkeel: watching 2 attention layers of Net")[1:]
    assert len(parts) == 1 + (text is NEW_PHASE)
    assert all(": qk_clip:threshold=20,steps=matched" in part for part in parts), (
        result.stderr
    )
    assert result.stdout == "['qk_clip']\n" * 2 * (text is NEW_PHASE)


# Without garbage collection, what the search for sites has copied stays alive until the second optimizer is made.
DRIFT = """
net = Net(2)
with torch.no_grad():
    for layer in net.layers:
        layer.qkv.weight.mul_(30)
train(net, torch.optim.SGD(net.parameters(), lr=1e-3), 3)
print("done")
"""


def test_the_run_is_complete_and_the_terminal_says_where_it_is_and_what_is_wrong(
    tmp_path,
):
    words = ["python", script(tmp_path, DRIFT).name]
    result = watched(
        words,
        tmp_path,
        "--every",
        "2",
        "--sink",
        "directory:path=copy",
        start=forked.python,
    )
    assert (result.returncode, result.stdout) == (0, "done\n")
    lines = result.stderr.splitlines()
    assert all(line.startswith("qkeel: ") for line in lines), result.stderr
    assert lines[0] == "qkeel: watching 2 attention layers of Net, run qkeel-runs/train"
    alarm = re.compile(
        r"qkeel: (notice|alarm|critical) at step 0, layers\.\d, head \d: "
    )
    assert sum(bool(alarm.match(line)) for line in lines) >= 1
    assert lines[-2:] == [
        "qkeel: run qkeel-runs/train",
        "qkeel: page qkeel-runs/train/report.html",
    ]
    assert (
        (tmp_path / "qkeel-runs" / "train" / "report.html")
        .read_text()
        .startswith("<!doctype html>")
    )
    directory = RunDirectory(tmp_path / "qkeel-runs" / "train")
    assert directory.status is RunStatus.DONE
    assert [line["step"] for line in directory.metrics()] == [
        0,
        2,
    ]  # of 3 steps: the last is one of them
    assert directory.env()["command"] == "train.py"
    assert RunDirectory(tmp_path / "copy").metrics() == directory.metrics()
    (counts,) = (line for line in lines if line.startswith("qkeel: alarms: "))
    assert sum(map(int, re.findall(r"\d+", counts))) == directory.summary()["alarms"]
    assert main(["report", str(directory.path), "-o", str(tmp_path / "page.html")]) == 0


TWO_OPTIMIZERS = """
torch.manual_seed(0)
net = Net(2)
others = [p for name, p in net.named_parameters() if "qkv" not in name]
rest = torch.optim.SGD(others, lr=1e-3)
own = torch.optim.SGD([p for name, p in net.named_parameters() if "qkv" in name], lr=1e-3)
before = [layer.qkv.weight.detach().clone() for layer in net.layers]
loss(net, batch(0)).backward()
rest.step()
own.step()
print(max(float((layer.qkv.weight - w)[:32].abs().max()) for layer, w in zip(net.layers, before)))
"""


def test_of_two_optimizers_the_one_that_steps_the_attention_gets_the_remedy(
    tmp_path,
):
    found = []
    for options in ([], ["--apply", "lalr:tau=0.1"]):
        result = watched(
            ["python", script(tmp_path, TWO_OPTIMIZERS).name],
            tmp_path,
            *options,
            start=forked.python,
        )
        assert result.returncode == 0, result.stderr
        found.append(float(result.stdout))
    assert found[1] == pytest.approx(found[0] / 10, rel=0.01)


def test_a_model_without_attention_beside_the_one_that_is_meant_is_left_alone(
    tmp_path,
):
    script(
        tmp_path,
        "critic = nn.Linear(2, 2)\ncritics = torch.optim.SGD(critic.parameters(), lr=0.1)\n"
        "critic(torch.ones(1, 2)).sum().backward()\ncritics.step()\n"
        "net = Net(1)\ntrain(net, torch.optim.SGD(net.parameters(), lr=0.1))\nprint('trained')",
    )
    result = watched(
        ["python", "train.py"],
        tmp_path,
        "--apply",
        "softcap:cap=1",
        start=forked.python,
    )
    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert (
        "qkeel: Linear has no attention: softcap:cap=1 is not applied to it"
        in result.stderr
    )


def test_messages_begin_at_the_left_though_a_progress_bar_is_in_the_middle_of_its_line(
    tmp_path,
):
    text = HOT.replace(
        "train(net, optimizer, 3)",
        "from tqdm import tqdm\nfor _ in tqdm(range(2)):\n    train(net, optimizer, 2)",
    )
    result = watched(
        ["python", script(tmp_path, text).name], tmp_path, start=forked.python
    )
    assert result.returncode == 0, result.stderr
    assert "it/s" in result.stderr or "s/it" in result.stderr or "0/2" in result.stderr
    for part in result.stderr.replace("\r", "\n").splitlines():
        assert "qkeel: " not in part or part.startswith("qkeel: "), part
    assert re.search(
        r"^qkeel: (notice|alarm|critical) at step", result.stderr, flags=re.M
    )


TWO = """
one, two = Net(), Net(2)

class Critic(Net):
    pass

critic = Critic()
pairs = [(net, torch.optim.Adam(net.parameters())) for net in (one, critic, two)]
for net, optimizer in pairs:
    train(net, optimizer, 2)
"""


def test_each_model_has_a_directory_and_what_is_there_stays(tmp_path, here):
    script(tmp_path, TWO)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "mine").write_text("x")
    code, _, err = here("--out", "r", "--", "python", "train.py")
    assert code == 0
    assert "qkeel report r-2 r-Critic r-3" in err
    models = {
        name: RunDirectory(tmp_path / name).config()["model"]
        for name in ("r-2", "r-3", "r-Critic")
    }
    assert models == {"r-2": "Net", "r-3": "Net", "r-Critic": "Critic"}
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["mine"]


REASONS = [
    ("net = Net()", "the script created no torch.optim.Optimizer in this process"),
    ("torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)", "no nn.Module was found"),
    (
        "net = Net(); torch.optim.SGD(net.parameters(), lr=1)",
        "Net was not called in this process",
    ),
    (
        "net = Net(); o = torch.optim.SGD(net.parameters(), lr=1); net(batch(0)).sum().backward()",
        "no step of its optimizer was seen",
    ),
    (
        "net = nn.Linear(2, 2); o = torch.optim.SGD(net.parameters(), lr=1); net(torch.ones(1, 2))",
        "see above",
    ),
    (
        "net = Net(); o = torch.optim.SGD(net.parameters(), lr=1); train(net.forward, o)",
        "no attention was seen in the passes of Net",
    ),
]


@pytest.mark.parametrize(("text", "reason"), REASONS)
def test_where_nothing_is_measured_the_reason_is_said(text, reason, tmp_path, here):
    script(tmp_path, text)
    code, _, err = here("--", "python", "train.py")
    assert code == 0
    assert err.splitlines()[-1].startswith("qkeel: nothing was measured: ")
    assert reason in err
    assert not (tmp_path / "qkeel-runs").exists()


@pytest.mark.parametrize("text", [text for text, _ in REASONS[:3]])
def test_a_remedy_that_was_applied_to_nothing_is_said(text, tmp_path, here):
    script(tmp_path, text)
    code, _, err = here("--apply", "qk_clip", "--", "python", "train.py")
    assert code == 0
    assert (
        "nothing was measured, and qk_clip was applied to nothing in this process: "
        in err
    )


def test_variables_that_the_script_sets_too_late_are_said(tmp_path, here, monkeypatch):
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCH_HOME"):
        monkeypatch.setenv(name, "0")
    late = """
import os
os.environ.update(OMP_NUM_THREADS="77", TORCH_HOME="x", TORCHINDUCTOR_MAX_AUTOTUNE="0")
net = Net()
train(net, torch.optim.SGD(net.parameters(), lr=0.1))
train(net, torch.optim.SGD(net.parameters(), lr=0.1))
"""
    script(tmp_path, late)
    code, _, err = here("--", "python", "train.py")
    assert code == 0
    assert err.count("qkeel: OMP_NUM_THREADS, which the script sets, is without") == 1
    assert "in the command: OMP_NUM_THREADS=77 qkeel watch -- python train.py" in err


def test_a_script_that_fails_keeps_what_was_measured_and_is_not_complete(
    tmp_path, here
):
    script(
        tmp_path,
        "net = Net()\ntrain(net, torch.optim.SGD(net.parameters(), lr=1))\nraise SystemExit(9)",
    )
    assert here("--", "train.py")[0] == 9
    directory = RunDirectory(tmp_path / "qkeel-runs" / "train")
    assert [one["step"] for one in directory.metrics()] == [
        0,
        2,
    ]  # every second of the first steps
    assert directory.status is RunStatus.STARTED


@pytest.mark.parametrize(
    "place",
    ["cli.model_finder.chains", "monitor.measure.StepNumbers.before"],
)
def test_a_fault_of_the_watcher_is_the_reason(place, tmp_path, here, monkeypatch):
    def fails(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(f"qkeel.{place}", fails)
    script(tmp_path, "net = Net()\ntrain(net, torch.optim.SGD(net.parameters(), lr=1))")
    code, _, err = here("--", "python", "train.py")
    assert code == 0
    assert err.splitlines()[-1] == "qkeel: nothing was measured: see above"


LEFT_OUT = """
net = Net(1)
for some in (lambda name: True, lambda name: "qkv" in name, lambda name: True):
    weights = [p for name, p in net.named_parameters() if some(name)]
    train(net, torch.optim.SGD(weights, lr=1e-3), 2)
"""


def test_what_a_remedy_added_and_a_later_optimizer_does_not_train_is_named(
    tmp_path, here
):
    script(tmp_path, LEFT_OUT)
    code, _, err = here("--apply", "qk_norm", "--", "python", "train.py")
    assert code == 0
    assert err.count("the new SGD does not train ") == 1
    assert "which --apply added: these parameters stay unchanged" in err


AROUND = """
class Scored(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.score = net, nn.Linear(32, 32)

    def forward(self, x):
        return self.score(self.net(x))

def top(net):
    y = net.embed(batch(0))
    q, k, _ = (z.unflatten(-1, (2, 8)).transpose(1, 2) for z in net.layers[0].qkv(y).chunk(3, -1))
    return (q @ k.mT / 8**0.5).tril().max().item()

net = Net(1)
for phase in PHASES:
    if phase == "outer":
        scored = Scored(net)
    model = scored if phase == "outer" else net
    with torch.no_grad():
        net.layers[0].qkv.weight.mul_(20)
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), 2)
    print(top(net))
"""


def around(folder, *phases):
    alike = "batch = lambda _: torch.arange(8)[None]"
    script(folder, alike + AROUND.replace("PHASES", str(phases)))


@pytest.mark.parametrize("remedy", ["qk_clip:threshold=0.5", "softcap:cap=0.5"])
def test_a_remedy_goes_with_the_model_into_a_larger_one(remedy, tmp_path, here):
    around(tmp_path, "inner", "outer")
    code, out, err = here("--apply", remedy, "--", "python", "train.py")
    assert code == 0, err
    is_clip = remedy.startswith("qk_clip")
    assert all(is_clip is (float(line) < 0.51) for line in out.split())
    assert err.count(f"{remedy} stays where it was put into Net") == (not is_clip)


def test_a_part_of_a_model_that_is_trained_again_is_watched_again(tmp_path, here):
    around(tmp_path, "inner", "outer", "inner", "outer")
    code, _, err = here("--every", "1", "--", "python", "train.py")
    assert code == 0, err
    assert "stopped looking" not in err
    assert err.count("qkeel: watching 1 attention layer of ") == 4


CHILD = """
import os, sys, warnings
from qkeel.errors import QkeelWarning
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
if os.fork() == 0:
    train(net, optimizer)
    own = Net()
    train(own, torch.optim.SGD(own.parameters(), lr=0.1))
    warnings.warn("from the child", QkeelWarning)
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
train(net, optimizer)
"""


@pytest.mark.parametrize("seconds", [1e-3, 1e6])
def test_the_page_is_rewritten_while_the_script_runs_and_reloads_itself_until_the_end(
    seconds, tmp_path, here, monkeypatch
):
    monkeypatch.setattr("qkeel.cli.run_messages.PAGE_SECONDS", seconds)
    text = "net = Net()\ntrain(net, torch.optim.SGD(net.parameters(), lr=0.1))\n"
    script(
        tmp_path,
        text
        + "import pathlib\npage = pathlib.Path('qkeel-runs/train/report.html')\n"
        + "page.exists() and pathlib.Path('during.html').write_text(page.read_text())",
    )
    code, _, err = here("--every", "1", "--", "python", "train.py")
    assert code == 0
    during, after = (
        tmp_path / name for name in ("during.html", "qkeel-runs/train/report.html")
    )
    assert during.exists() == (seconds < 1)
    if seconds < 1:
        assert '<meta http-equiv="refresh" content="0.001">' in during.read_text()
    assert 'http-equiv="refresh"' not in after.read_text()
    assert (
        err.count("qkeel: page qkeel-runs/train/report.html") == 1 + during.exists()
    )  # once where it is, and at the end


def test_a_forked_child_ends_in_silence(tmp_path):
    words = ["python", script(tmp_path, CHILD).name]
    result = watched(words, tmp_path, "--every", "1", start=forked.python)
    assert (result.returncode, result.stderr.count("qkeel: run ")) == (0, 1), (
        result.stderr
    )
    assert "from the child" not in result.stderr
    (made,) = (tmp_path / "qkeel-runs").iterdir()
    directory = RunDirectory(made)
    assert len(directory.metrics()) == 3
    assert directory.status is RunStatus.DONE


WORKERS = """
from torch.utils.data import DataLoader

if __name__ == "__main__":
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = [row for step in range(4) for row in batch(step)]
    for x in DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="CONTEXT"):
        loss(net, x).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "context",
    [
        "fork",
        *(
            pytest.param(c, marks=[pytest.mark.slow, pytest.mark.timeout(300)])
            for c in ("spawn", "forkserver")
        ),
    ],
)
def test_the_workers_of_a_data_loader_are_left_alone(context, tmp_path):
    start = (
        forked.python if context == "fork" else run
    )  # the others start the program anew
    assert (
        len(train(tmp_path, WORKERS.replace("CONTEXT", context), start).metrics()) == 4
    )


PARALLEL = """
import os, sys
import torch.distributed as dist

torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
net = Net(2)
model = net
if world > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
if rank == 1 and "fault" in sys.argv:
    from qkeel.monitor.measure import StepNumbers

    passes = []
    real = StepNumbers.before

    def failing(self, *call):
        passes.append(1)
        if len(passes) > int(sys.argv[2]):
            raise ZeroDivisionError("injected")
        return real(self, *call)

    StepNumbers.before = failing
for step in range(4):
    loss(model, batch(step).chunk(world)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(total(net))
if world > 1:
    dist.destroy_process_group()
"""
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("passes", ["0", "2"])
def test_a_fault_in_one_process_stops_the_measuring_and_not_the_training(
    passes, tmp_path
):
    script(tmp_path, PARALLEL)
    plain = run(["-m", "torch.distributed.run", *TORCHRUN[1:]], tmp_path)
    seen = watched([*TORCHRUN, "fault", passes], tmp_path, "--every", "1")
    assert seen.returncode == 0, seen.stderr
    assert seen.stdout == plain.stdout
    assert (
        "qkeel: warning (rank 1): qkeel's monitor switched itself off: ZeroDivisionError: injected"
        in seen.stderr
    )


def test_a_model_that_the_script_watches_itself_gets_the_remedies_and_a_line_says_who_measures(
    tmp_path, here
):
    body = """
import qkeel
net = Net()
monitor = qkeel.watch(net, rules=[])
train(net, torch.optim.SGD(net.parameters(), lr=0.1))
print("OUT", float(net(batch(9)).detach().abs().sum()))
"""
    outputs = []
    for words in ([], ["--apply", "softcap:cap=0.01"]):
        script(tmp_path, body)
        code, out, err = here(*words, "--", "python", "train.py")
        assert code == 0
        assert (
            err.count(
                "Net is watched by the script itself, so this command does not measure it"
            )
            == 1
        )
        assert "nothing was measured: the script watches its models itself" in err
        outputs.append(float(out.rpartition("OUT ")[2].split()[0]))
    assert outputs[0] != outputs[1]


WITH_A_REMEDY = """
import qkeel
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
qkeel.apply(model, "qk_clip:threshold=100", optimizer)
for step in range(3):
    with torch.no_grad():
        loss(model, batch(step + 10))
    train(model, optimizer, 2)
"""


def test_the_end_of_a_run_tells_its_untrained_passes_and_the_scripts_remedy(
    tmp_path, here
):
    words = ["python", script(tmp_path, WITH_A_REMEDY).name]
    code, _, err = here("--every", "2", "--", *words)
    assert code == 0
    assert (
        "watching 1 attention layer of Net with qk_clip:threshold=100 active, run"
        in err
    )
    assert "\nqkeel: passes that were not trained: step 4 (untrained), max logit" in err
    assert re.search(r"head \d, step \d, the largest of 3 measured\b", err)
    page = (tmp_path / "qkeel-runs" / "train" / "report.html").read_text()
    assert "qk_clip:threshold=100 active" in page


def test_a_directory_that_cannot_be_written_is_an_error_before_training(tmp_path, here):
    script(tmp_path, "print('training'); net = Net()")
    (tmp_path / "file").write_text("in the way")
    code, out, err = here("--out", "file/run", "--", "python", "train.py")
    assert (code, out) == (2, "")
    assert "Choose a writable directory" in err
