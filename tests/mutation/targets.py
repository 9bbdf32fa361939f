"""Which files are mutated, and which tests are their direct ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Files to mutate and the tests they run against.

    Args:
        files: patterns of the files, relative to the repository.
        tests: patterns of test files that every mutant of the room runs, cheap ones first.
        more: patterns of further test files by a part of the mutated file's path.
        examples: those in the docstrings of these files, as a test.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    more: dict[str, tuple[str, ...]] = field(default_factory=dict)
    examples: str = ""


EXAMPLES = "tests/docs/test_examples.py::test_the_examples_of_a_room_run"
# Step remedies on logits of other forms: some heads alone, key heads in another order, sums of products, gated units.
SUMS = tuple(f"tests/remedies/test_{name}.py" for name in ("heads_option", "key_heads", "sums", "gau"))

ROOMS = {
    "functional": Room(
        files=("src/qkeel/functional/**/*.py",),
        tests=("tests/functional/**/test_*.py", "tests/golden/test_*.py"),
        more={
            "statistics/": (
                "tests/conformance/test_statistics.py",
                "tests/conformance/test_class_statistics.py",
                "tests/conformance/test_scores_statistics.py",
            ),
            "rows": ("tests/spec/test_band_call.py",),
            "/rope.py": ("tests/parity/test_rope.py",),
            "rope_frequencies": ("tests/parity/test_stretch.py",),
            "losses": ("tests/remedies/test_z_loss.py",),
        },
        examples=f"{EXAMPLES}[functional]",
    ),
    "spec": Room(
        files=("src/qkeel/spec/**/*.py",),
        tests=("tests/spec/**/test_*.py", "tests/golden/test_*.py", "tests/test_reference.py"),
        more={
            "position": ("tests/conformance/test_positions.py",),
            "rotary": ("tests/parity/test_rope.py",),
            "rope_scaling": ("tests/parity/test_stretch.py",),
            "presets": ("tests/parity/test_constants.py", "tests/parity/test_transformers.py"),
        },
        examples=f"{EXAMPLES}[spec]",
    ),
    "kernels": Room(
        files=("src/qkeel/kernels/**/*.py",),
        tests=("tests/kernels/**/test_*.py", "tests/conformance/test_kernels.py", "tests/test_ops.py"),
    ),
    "audit": Room(files=("src/qkeel/audit/*.py",), tests=("tests/audit/test_*.py",)),
    "nn": Room(files=("src/qkeel/nn/*.py",), tests=("tests/nn/test_*.py", "tests/kernels/native/test_hazards.py")),
    "steps": Room(
        files=(
            "src/qkeel/remedies/lalr.py",
            "src/qkeel/remedies/qk_clip.py",
            "src/qkeel/remedies/qk_weights.py",
            "src/qkeel/remedies/sigma_reparam.py",
        ),
        tests=(
            "tests/golden/test_updates.py",
            "tests/remedies/**/test_steps.py",
            "tests/remedies/**/test_lalr_*.py",
            "tests/remedies/**/test_qk_clip*.py",
            "tests/remedies/**/test_bundle.py",
            "tests/remedies/**/test_decay.py",
            "tests/remedies/**/test_linear.py",
            "tests/remedies/**/test_logit_shares.py",
            "tests/remedies/**/test_masters_adapters.py",
            "tests/remedies/**/test_sharded_weights.py",
            "tests/remedies/**/test_sigma_reparam.py",
            "tests/remedies/**/test_step_robustness.py",
            "tests/remedies/**/test_structure.py",
        ),
        more={
            **dict.fromkeys(("lalr", "qk_clip", "logit_shares", "qk_weights"), SUMS),
            "step_remedy": ("tests/remedies/test_heads_option.py",),
            "join_optimizer": ("tests/remedies/test_spec_remedies.py",),
            "head_groups": SUMS,
        },
    ),
}


# The file that tests a module first where it has another name.
FIRST = {
    "available": "test_loading",
    "compiled_attention": "test_attention",
    "encode": "test_norm_rope",
    "torch_kernels": "test_kernels",
    "explain_experiment": "test_explain",
    "explain_responses": "test_explain",
    "tensor_heads": "test_scan",
    "mla": "test_latent_cache",
    "head_groups": "test_bundle",
    "head_views": "test_bundle",
    "head_weights": "test_masters_adapters",
    "lalr": "test_lalr_factors",
    "mixed_precision": "test_masters_adapters",
    "qk_weights": "test_decay",
    "replaced_weights": "test_step_robustness",
    "linearity": "test_linear",
    "logit_change": "test_changes",
    "logit_stats": "test_stats",
    "rope_frequencies": "test_rope",
    "step_remedy": "test_steps",
}


def tests_of(root: Path, room: Room, path: str) -> list[str]:
    """Returns the test files of a mutated file, the one that is most about it first."""
    patterns = [*room.tests, *(p for part, more in room.more.items() if part in path for p in more)]
    found = list(dict.fromkeys(str(f.relative_to(root)) for p in patterns for f in sorted(root.glob(p))))
    first = FIRST.get(Path(path).stem, f"test_{Path(path).stem}")
    return [*sorted(found, key=lambda f: Path(f).stem != first), *filter(None, [room.examples])]
