"""Which files are mutated, and which tests are their direct ones."""

# The rooms, and where further tests of each lie in tests/ besides the folder of its name.
ROOMS = {
    "monitor": (),
    "remedies": (),
    "kernels": ("test_ops.py",),
    "lab": (),
    "report": (),
    "capture": ("sites/**/test_*.py",),
    "sites": (
        "monitor/test_roles.py",
        "monitor/test_several_models.py",
        "remedies/test_logsumexp_bound.py",
    ),
    "audit": (),
    "cli": (),
    "spec": (),
    "functional": ("spec/test_band_call.py", "remedies/test_z_loss.py"),
    "patching": ("sites/**/test_*.py",),
    "records": ("monitor/test_sinks.py",),
    "autopilot": (),
    "nn": ("kernels/**/test_hazards.py",),
    "integrations": ("autopilot/test_integrations.py",),
    "distributed": (
        "between_processes/test_*.py",
        "processes/**/test_*.py",
        "monitor/test_watch_processes.py",
        "remedies/test_processes.py",
    ),
    "metrics": (),
    "frames": (),
    "root": ("test_*.py", "spec/test_presets.py"),
}
ROOT = ("errors", "handle", "ops", "options", "reference")
# Of these a seed draws 40 mutants, of the others 20.
FORMULAS = ("functional", "spec", "remedies")
# Promises about several rooms: each mutant runs those that execute its line.
SHARED = ("contract", "conformance", "processes")


def mutated_files(root, room):
    """The source files of a room in a checkout: a folder, one file of that name, or those at the root."""
    if room == "root":
        files = [root / f"src/qkeel/{name}.py" for name in ROOT]
        return [f for f in files if f.exists()]
    file = root / f"src/qkeel/{room}.py"
    return [file] if file.exists() else sorted(file.with_suffix("").rglob("*.py"))


def test_files(root, room):
    """The files of a room's direct tests, relative to the checkout."""
    patterns = [f"{name}/**/test_*.py" for name in (room, *SHARED)]
    patterns += [*ROOMS[room], "**/test_examples.py"]
    return sorted(
        {
            str(f.relative_to(root))
            for pattern in patterns
            for f in (root / "tests").glob(pattern)
        }
    )


def is_direct(test, room):
    """Whether a test of these files is the room's: not the examples in other rooms' docstrings."""
    _, examples, of = test.partition("::test_the_examples_of_a_room_run")
    return not examples or of.strip("[]") in (ROOT if room == "root" else (room,))
