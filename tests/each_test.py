"""What the processes that run tests share: annotations checked at run time, one thread, no leaking defaults."""

import atexit
import contextlib
import gc
import locale
import logging
import os
import random
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

import beartype._check.code.codemain as generated_checks
import pytest
from beartype import BeartypeConf, beartype
from jaxtyping import config as checks
from jaxtyping import install_import_hook

# A check of a list looks at one item by chance. It draws from a stream of its own, so that tests of random streams see
# those of the code under test alone.
generated_checks.getrandbits = random.Random(0).getrandbits
checked = beartype(
    conf=BeartypeConf(is_pep484_tower=True)
)  # an int is a float, as static checkers have it (PEP 484)

# Before the first import of qkeel: every annotated formula checks shapes and dtypes of what goes in and out.
# Where formulas are tested themselves each call is checked, at a third of the time; elsewhere in every 24th test.
# Compile tests run in processes of their own, which do not load this file.
# Not what the operators are given to refuse.
KERNELS = (
    "attention",
    "choose",
    "contract",
    "decoding",
    "logits.compiled",
    "logits.gpu",
    "norm_rope.encode",
    "statistics",
)
ALWAYS = {"functional", "golden"}
CHECKED = [
    "qkeel.functional",
    "qkeel.report",
    *(f"qkeel.kernels.{name}" for name in KERNELS),
]
# Slow tests compile in this process too, and the checks are Python that torch.compile stumbles over.
if os.environ.get("QKEEL_TYPE_CHECKS") != "0":
    install_import_hook(CHECKED, "each_test.checked")

import torch  # noqa: E402
from torch.optim.optimizer import (  # noqa: E402
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

# Tests run what users run: the compiled kernels, where there is a compiler. QKEEL_NATIVE=0 in the environment takes
# torch's path everywhere. Without a compiler qkeel itself takes it after one warning, which has a test of its own.
if shutil.which(os.environ.get("CXX", "c++")) is None:
    os.environ.setdefault("QKEEL_NATIVE", "0")

# Without a GPU Triton's kernels run in its interpreter; Triton looks at this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# To seed devices that are not there does nothing but write down the stack, 0.4 ms at each of the suite's seeds.
if not torch.accelerator.is_available():
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))

# How long an example takes to draw or to run depends on what else the machine does.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "on any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("on any machine")

# Numbers are written and read as this user's programs do, where a comma may stand for the decimal point.
with contextlib.suppress(locale.Error):
    locale.setlocale(locale.LC_ALL, "")


def _arithmetic():
    """What decides how torch and qkeel compute in this process: two runs of a test agree only where it agrees."""
    return {
        "the default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "denormal numbers": bool((torch.tensor([1e-39]) * 0.5 > 0).item()),
        "compiled kernels": _compiled_kernels(),
        "hooks of every optimizer": [
            len(_global_optimizer_pre_hooks),
            len(_global_optimizer_post_hooks),
        ],
    }


def _compiled_kernels():
    """Whether this process computes with the compiled kernels, which are compiled before the tests."""
    if os.environ.get("QKEEL_NATIVE") == "0":
        return False
    from qkeel.kernels import native

    return native.ready()


@pytest.fixture(autouse=True)
def _same_start(request):
    """Each test starts from the same seed and must leave what decides the arithmetic as it found it."""
    drawn = (
        zlib.crc32(request.node.nodeid.encode()) % 24 == 0
    )  # in whatever order tests are run
    checks.update(
        "jaxtyping_disable", not drawn and ALWAYS.isdisjoint(request.path.parts)
    )
    torch.manual_seed(0)
    before = _arithmetic()
    yield
    after = _arithmetic()
    changed = [
        f"{name} ({before[name]} before, {after[name]} now)"
        for name in before
        if before[name] != after[name]
    ]
    assert not changed, f"a test left behind: {', '.join(changed)}"


@pytest.fixture
def _compiler(monkeypatch):
    """The compiled kernels are on; for tests that are of nothing else, and are skipped where nothing can compile them.

    A compiler that fails is a defect: its tests fail.
    """
    from qkeel.kernels.native import build

    monkeypatch.setenv("QKEEL_NATIVE", "1")
    if sys.platform != "linux":
        pytest.skip("kernels are compiled on Linux only")
    try:
        build.find_compiler()
    except build.BuildError as reason:
        pytest.skip(str(reason))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """With QKEEL_TEST_ORDER=SEED: files in random order, and the tests of each file too."""
    if "QKEEL_TEST_ORDER" not in os.environ:
        return
    chance = random.Random(os.environ["QKEEL_TEST_ORDER"])
    places = {path: chance.random() for path in sorted({item.path for item in items})}
    items.sort(key=lambda item: (places[item.path], chance.random()))


_modules_frozen = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """What a test imported stays as well: transformers, Triton and torch's compiler make 400,000 objects."""
    global _modules_frozen
    if len(sys.modules) > _modules_frozen + 50:
        gc.collect()
        gc.freeze()
        _modules_frozen = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """The server of forked processes ends first, so that `time make test` counts what they took."""
    server = sys.modules.get("multiprocessing.forkserver")
    if server is not None:
        server._forkserver._stop()


# Extensions count at the end what was not taken down. Not before: pytest's last five searches would look at it all.
atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    """Compile what the tests will want, before one of them waits for it under its own time limit."""
    # What was imported and collected stays: to search it for rubbish again and again is a tenth of the suite's time.
    gc.freeze()
    gc.set_threshold(
        20_000, 10, 10
    )  # a look at each 700 objects of short lives finds little
    gc.enable()
    # pytest hangs a handler into each logger that does not pass messages on, six times a test: torch has forty of them.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    wanted = os.environ.get("QKEEL_NATIVE") != "0" or any(
        "native" in item.path.parts for item in session.items
    )
    if not session.items or session.config.option.collectonly or not wanted:
        return
    from qkeel.kernels.native import build

    if not _can_be_written(build.cache_folder()):
        os.environ["QKEEL_NATIVE_CACHE"] = str(
            Path(tempfile.gettempdir()) / f"qkeel-native-{os.getuid()}"
        )

    try:
        build.compiled()
    except (OSError, build.BuildError):  # told by the tests of the kernels themselves
        os.environ.setdefault("QKEEL_NATIVE", "0")


def _can_be_written(folder):
    """Whether files can be made in a folder, or the folder itself where it is missing."""
    nearest = next(above for above in (folder, *folder.parents) if above.exists())
    return os.access(nearest, os.W_OK)
