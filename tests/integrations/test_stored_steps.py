"""What trackio, and a tracker of accelerate, have stored after a training is what the run directory has, step by step."""

import pytest
from tests.contract.integrations.stored import tensorboard_scalars
from tests.contract.watch.small import batch, small
from tests.training import adamw

from qkeel import watch
from qkeel.integrations.watched_training import AccelerateSink
from qkeel.monitor import Ceiling
from qkeel.records import RunDirectory

KEY = "attn/max_logit"
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # what trackers warn of is theirs, and alarms are meant


def trained(folder, *sinks, owner=None, accumulate=2):
    """Goes on from step 20 to 31, where each third is measured; the largest logit by step of the run."""
    model = small()
    optimizer = adamw(model, 0.01)
    rule = Ceiling(threshold=-100.0)
    with watch(
        model, optimizer, every=3, sinks=[folder / "run", *sinks], rules=rule
    ) as monitor:
        monitor.steps = 20
        for step in range(12):
            for micro in range(accumulate):
                model(batch(accumulate * step + micro)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if owner is not None:
                owner(step)
    run = RunDirectory(folder / "run")
    assert len(run.events()) == 1
    found = {record["step"]: record["max_logit"] for record in run.metrics()}
    assert list(found) == [21, 24, 27, 30]
    return found


@pytest.mark.parametrize("joined", [False, True])
def test_trackio(joined, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    owner, project = None, f"gpt-{joined}"  # trackio reads TRACKIO_DIR once a process
    if joined:
        run = trackio.init(project=project, name="a", embed=False)

        def owner(step):
            run.log({"loss": float(step)})

    expected = trained(tmp_path, f"trackio:project={project},name=a", owner=owner)
    if joined:
        run.finish()
    rows = storage.get_logs(project, "a")
    found = {row["step"]: row[KEY] for row in rows if KEY in row}
    assert found == pytest.approx(expected)
    if joined:
        assert {row["step"]: row["loss"] for row in rows if "loss" in row} == {
            i: float(i) for i in range(12)
        }
    assert len(storage.get_alerts(project)) == 1


def test_trackers_of_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    accelerator = accelerate.Accelerator(
        cpu=True, log_with="tensorboard", project_dir=tmp_path / "tb"
    )
    accelerator.init_trackers("mine")
    expected = trained(tmp_path, AccelerateSink(accelerator))
    accelerator.end_training()
    assert tensorboard_scalars(tmp_path / "tb", KEY) == pytest.approx(
        expected, rel=1e-6
    )
