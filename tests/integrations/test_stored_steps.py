"""What each tracker has stored at the end of a training is what the run directory has, step by step."""

import csv

import numpy as np
import pytest
import torch
from tests.contract.integrations.stored import tensorboard_scalars, wandb_rows
from tests.contract.watch.small import batch, small

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator as events

    expected = trained(tmp_path, f"tensorboard:directory={tmp_path / 'tb'}")
    stored = events.EventAccumulator(str(tmp_path / "tb"))
    stored.Reload()
    (about,) = stored.Tensors("qkeel/about/text_summary")
    assert b'"model": "Small"' in about.tensor_proto.string_val[0]
    assert tensorboard_scalars(tmp_path / "tb", KEY) == pytest.approx(
        expected, rel=1e-6
    )


def test_csv_has_every_head(tmp_path):
    expected = trained(tmp_path, f"csv:path={tmp_path / 'csv'}")
    with open(tmp_path / "csv" / "steps.csv", encoding="utf-8") as file:
        steps = {
            int(row["step"]): float(row["max_logit"]) for row in csv.DictReader(file)
        }
    assert steps == expected
    heads = RunDirectory(tmp_path / "run").heads()
    with open(tmp_path / "csv" / "heads.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["layer"], row["type"], row["head"]) for row in rows[:3]] == [
        ("21", "blocks.0", "full", "0"), ("21", "blocks.0", "full", "1"), ("21", "blocks.1", "full", "0"),
    ]  # fmt: skip
    for name in ("entropy", "query_weight_norm"):
        assert np.allclose(
            [float(row[name]) for row in rows],
            heads.values[name].reshape(-1),
            rtol=1e-6,
        ), name
    assert np.isfinite(float(rows[-1]["query_grad_rms"]))
    assert (tmp_path / "csv" / "alarms.csv").read_text().count("ceiling -100") == 1


@pytest.mark.parametrize("joined", [False, True])
def test_wandb_offline(joined, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    owner = None
    if joined:
        run = wandb.init(project="mine")

        def owner(step):
            if step % 4 == 0:
                run.log({"loss": 1.0, "at": step})

    expected = trained(tmp_path, "wandb:project=gpt", owner=owner)
    if joined:
        assert "qkeel alarm: ceiling -100" in run.tags
        run.finish()
    wandb.teardown()  # its settings, of the folder too, are those of the process
    rows = wandb_rows(tmp_path)
    found = [(row["qkeel/step"], row[KEY]) for row in rows if KEY in row]
    assert len(found) == len(expected)
    assert dict(found) == pytest.approx(expected)
    if joined:
        assert [row["at"] for row in rows if "loss" in row] == [0, 4, 8]


@pytest.mark.parametrize("joined", [False, True])
def test_mlflow(joined, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    if joined:
        mlflow.start_run()
    expected = trained(tmp_path, "mlflow")
    if joined:
        assert mlflow.active_run() is not None
        mlflow.end_run()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    history = client.get_metric_history(run.info.run_id, KEY)
    assert {entry.step: entry.value for entry in history} == pytest.approx(expected)
    assert len(history) == len(expected)
    assert "max logit" in run.data.tags["qkeel.alarm.ceiling_-100"]


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
