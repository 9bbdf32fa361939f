"""The sources for processors that this machine is not: registers of another width, and targets to compile for."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qkeel.kernels.native import build

FILES = ("test_attention", "test_decode", "test_logit_pass", "test_operators")
HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("c++") is None,
    reason="needs a compiler for x86-64",
)
@pytest.mark.parametrize(("lanes", "more"), [(4, "-mno-f16c"), (16, "")])
def test_the_kernels_pass_their_tests_with_registers_of_4_and_16_floats(
    lanes, more, tmp_path
):
    flags = f"-DQKEEL_LANES={lanes} {more}"
    width = f'#include "tile.h"\nstatic_assert(qkeel::LANES == {lanes});'
    options = [*build.flags(), *flags.split(), *build.INCLUDE]
    check = ["c++", *options, "-fsyntax-only", "-x", "c++", "-"]
    subprocess.run(check, input=width, text=True, check=True)
    cache = str(tmp_path / "cache")
    environment = {"QKEEL_TEST_FLAGS": flags, "QKEEL_NATIVE_CACHE": cache}
    # torch's compiler sees nothing of a kernel but its shapes.
    chosen = ["-m", "not slow", "-k", "not one_graph and not triton", "--tb=no"]
    files = [str(HERE / f"{name}.py") for name in (*FILES, "../test_norm_rope")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", *chosen, *files],
        env={**os.environ, **environment},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos"])
def test_every_source_compiles_for_other_machines(target, tmp_path):
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs a compiler for other machines: pip install 'qkeel[cross]'")
    own = ("-march=", "-mcpu=", "--param=")  # of this machine
    flags = [flag for flag in build.FLAGS if not flag.startswith(own)]
    names = ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
    environment = {**os.environ, **dict.fromkeys(names, str(tmp_path))}
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, *flags]
    sources = sorted(build.FOLDER.rglob("*.cpp"))
    assert len(sources) == 7
    for source in sources:
        to = ["-w", "-c", str(source), "-o", str(tmp_path / f"{source.stem}.o")]
        subprocess.run([*command, *build.INCLUDE, *to], env=environment, check=True)
