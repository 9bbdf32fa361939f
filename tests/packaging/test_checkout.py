"""A checkout that nobody installed works: its folder src on the path, and torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import importlib.metadata, sys, torch, qkeel
assert qkeel.__file__.startswith(sys.argv[1]), qkeel.__file__
try:
    importlib.metadata.version("qkeel")
except importlib.metadata.PackageNotFoundError:
    pass
else:
    raise AssertionError("qkeel is installed here")
model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters())
with qkeel.watch(model, optimizer, sinks=sys.argv[2]) as monitor:
    for _ in range(2):
        model(torch.randn(2, 5, 16)).square().mean().backward()
        optimizer.step()
    assert monitor.active and len(monitor.read()) == 1
print(qkeel.__version__)
"""


@pytest.mark.slow
def test_a_plain_checkout_watches_and_records(tmp_path):
    links = tmp_path / "packages"
    links.mkdir()
    # All folders of packages on the path: an environment may take those of another by a .pth file.
    folders = [Path(folder) for folder in sys.path if folder.endswith("-packages")]
    for package in (package for folder in folders for package in folder.iterdir()):
        if (
            not package.name.startswith(("qkeel", "__editable__"))
            and not (links / package.name).is_symlink()
        ):
            (links / package.name).symlink_to(package)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{links}"}
    command = [
        sys.executable,
        "-S",
        "-W",
        "error::UserWarning",
        "-c",
        SCRIPT,
        str(ROOT / "src"),
        str(tmp_path / "run"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert (tmp_path / "run").is_dir()
