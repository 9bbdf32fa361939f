"""The sources for processors that this machine is not: registers of another width, and targets to compile for."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qkeel.kernels.native import build

# What makes of zig's clang, which finds its own C++ library, a compiler like GCC: torch was built with GCC's library.
# Clang compiles, GCC links.
CLANG_ABOVE_GCC = """#!{python}
import subprocess, sys
given = sys.argv[1:]
zig = [sys.executable, "-m", "ziglang", "c++", "-w", "-fno-sanitize=undefined", "-nostdinc++", *{include}]
command = ["c++"] if "-shared" in given else zig
sys.exit(subprocess.call([*command, *[x for x in given if not x.startswith("--param=")]]))
"""
OF_KERNELS = ("attention", "decode", "logit_pass", "operators")
HERE = Path(__file__).parent
NO_ZIG = "the compiler for other machines is not installed: pip install 'qkeel[cross]'"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("c++") is None,
    reason="needs a compiler for x86-64",
)
@pytest.mark.parametrize(("lanes", "more"), [(4, "-mno-f16c"), (16, "")])
def test_the_kernels_pass_their_tests_with_registers_of_4_and_16_floats(
    lanes: int, more: str, tmp_path: Path
) -> None:
    flags = f"-DQKEEL_LANES={lanes} {more}"
    width = f'#include "tile.h"\nstatic_assert(qkeel::LANES == {lanes});'
    check = [
        "c++",
        *build.flags(),
        *flags.split(),
        *build.INCLUDE,
        "-fsyntax-only",
        "-x",
        "c++",
        "-",
    ]
    subprocess.run(check, input=width, text=True, check=True)
    run_tests(tmp_path, {"QKEEL_TEST_FLAGS": flags})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("c++") is None,
    reason="needs a compiler for x86-64",
)
def test_the_kernels_pass_their_tests_compiled_by_clang(tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip(NO_ZIG)
    said = subprocess.run(
        ["c++", "-E", "-v", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    )
    include = [
        f"-I{line.strip()}"
        for line in said.stderr.splitlines()
        if line.startswith(" /") and "c++" in line
    ]
    compiler = tmp_path / "clang"
    compiler.write_text(CLANG_ABOVE_GCC.format(python=sys.executable, include=include))
    compiler.chmod(0o700)
    room = {
        name: str(tmp_path / "zig")
        for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
    }
    run_tests(tmp_path, {"CXX": str(compiler), **room})


def run_tests(tmp_path: Path, variables: dict[str, str]) -> None:
    """Runs the tests of all kernels in an environment with these variables too, with a cache of its own."""
    files = [str(HERE / f"test_{name}.py") for name in OF_KERNELS]
    files += [str(HERE.parent / f"test_{name}.py") for name in ("norm_rope",)]
    # torch's compiler sees nothing of a kernel but its shapes.
    chosen = [
        "-m",
        "not slow",
        "-k",
        "not one_graph and not triton",
        "--timeout",
        "600",
        "-rf",
        "--tb=no",
    ]
    environment = {
        **os.environ,
        **variables,
        "QKEEL_NATIVE_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "pytest", "-n0", *chosen, *files]
    done = subprocess.run(
        command,
        env=environment,
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    assert done.returncode == 0, failed or done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos"])
def test_every_source_compiles_for_other_machines(target: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip(NO_ZIG)
    own = ("-march=", "-mcpu=", "--param=")  # of this machine
    flags = [flag for flag in build.FLAGS if not flag.startswith(own)]
    environment = {
        **os.environ,
        "ZIG_GLOBAL_CACHE_DIR": str(tmp_path),
        "ZIG_LOCAL_CACHE_DIR": str(tmp_path),
    }
    sources = sorted(build.FOLDER.rglob("*.cpp"))
    assert len(sources) == 7
    for source in sources:
        to = tmp_path / f"{source.stem}.o"
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "c++",
            "-target",
            target,
            *flags,
            *build.INCLUDE,
            "-w",
            "-c",
        ]
        done = subprocess.run(
            [*command, str(source), "-o", str(to)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{source.name}: {done.stderr[:2000]}"
        assert to.stat().st_size > 5_000, source.name
