"""Which files are mutated, and which tests are their direct ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Promises about several rooms: each mutant runs those of them that execute its line.
SHARED = ("contract", "golden", "conformance", "parity", "processes")
EXAMPLES = "test_the_examples_of_a_room_run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Files to mutate and the tests they run against.

    Args:
        files: patterns of the files, relative to the repository.
        tests: folders and patterns of files in tests/, besides `SHARED`.
        examples: whose examples in docstrings are tests, too.
        count: the mutants of a seed.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    examples: tuple[str, ...]
    count: int = 20

    def test_files(self, root: Path) -> list[str]:
        """The files of its tests, relative to the checkout."""
        patterns = [name if name.endswith(".py") else f"{name}/**/test_*.py" for name in (*self.tests, *SHARED)]
        patterns.append("**/test_examples.py")
        return sorted({str(f.relative_to(root)) for pattern in patterns for f in (root / "tests").glob(pattern)})

    def takes(self, test: str) -> bool:
        """Whether a test in one of these files, by its name in pytest, is one of its own."""
        name = test.partition("::")[2]
        return EXAMPLES not in name or name in [f"{EXAMPLES}[{room}]" for room in self.examples]


def _room(name: str, *tests: str, count: int = 20) -> Room:
    return Room(files=(f"src/qkeel/{name}/**/*.py",), tests=(name, *tests), examples=(name,), count=count)


ROOT = ("errors", "handle", "ops", "options", "reference")

# Some tests of a room lie with what they need: in the folder of another one.
ROOMS = {
    "monitor": _room("monitor"),
    "remedies": _room("remedies", count=40),
    "kernels": _room("kernels", "test_ops.py"),
    "lab": _room("lab"),
    "report": _room("report"),
    "capture": _room("capture", "sites"),
    "sites": _room("sites"),
    "heads": _room("heads", "sites"),
    "audit": _room("audit"),
    "cli": _room("cli"),
    "spec": _room("spec", "test_reference.py", count=40),
    "functional": _room("functional", "spec/test_band_call.py", "remedies/test_z_loss.py", count=40),
    "patching": _room("patching", "sites"),
    "records": _room("records", "monitor/test_sinks.py"),
    "autopilot": _room("autopilot"),
    "nn": _room("nn", "kernels/**/test_hazards.py"),
    "integrations": _room("integrations"),
    "dist": _room(
        "dist", "monitor/test_watch_processes.py", "remedies/test_processes.py", "remedies/test_sharded_weights.py"
    ),
    "metrics": _room("metrics"),
    "frames": _room("frames"),
    "root": Room(files=tuple(f"src/qkeel/{name}.py" for name in ROOT), tests=("test_*.py",), examples=ROOT),
}
