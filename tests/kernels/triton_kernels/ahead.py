"""Compiles the Triton kernels for a Hopper GPU where there is none, and prints what each takes."""

import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget

# Of several that it brings, the one that it takes itself.
from triton.backends.nvidia.compiler import (
    get_ptxas,
)
from triton.compiler import ASTSource

from qkeel.kernels.logits import triton_extremes as extremes
from qkeel.kernels.logits import triton_row_fields as row_fields
from qkeel.kernels.norm_rope import triton_kernels as norm_rope

FLOATS = "inverse gain cos sin parts tops lows scales fields inverses"
STORED = "x y dy kept dx q k"
WHOLE = {
    "counts": "*i64",
    "keys": "*u8",
    **dict.fromkeys(FLOATS.split(), "*fp32"),
    **dict.fromkeys(STORED.split(), "*bf16"),
}
NUMBERS = ["eps", "scale", "cap", "threshold"]
HEAD = {
    "D": 128,
    "HALF": 64,
    "WIDE": 64,
    "TAIL": 1,
    "HEADS": 16,
    "TOKENS": 1,
    "STEP": 1,
    "WHOLE": False,
}
PART = {
    "D": 64,
    "HALF": 8,
    "WIDE": 8,
    "TAIL": 64,
    "HEADS": 16,
    "TOKENS": 2,
    "STEP": 2,
    "WHOLE": False,
}
TOKEN = {**HEAD, "HEADS": 64, "WHOLE": True}
FORTH = {"KIND": 1, "GAIN": True, "TURN": True, "INVERSES": True}
BACK = {"KIND": 1, "GAIN": True, "BY_HEAD": False, "TURN": True, "KEPT_X": True}
SEEN = {"D": 128, "WIDE": 128, "ROWS": 128, "KEYS": 64, "CAUSAL": True}
SEEN |= dict.fromkeys(("WINDOW", "MASK", "CAP"), False)
FIELDS = {**SEEN, "SCALED": False}
ONES = (
    "heads",
    "times",
    "outer",
    "blocks",
    "groups",
    "groups_of_program",
    "share",
    "length",
    "tiles",
)


CASES = [
    ("forward", norm_rope.forward, {**HEAD, **FORTH}, 4),
    ("a part forward", norm_rope.forward, {**PART, "KIND": 2, "GAIN": False, "TURN": True, "INVERSES": 0}, 4),
    ("backward, x made anew", norm_rope.backward, {**HEAD, **BACK, "KEPT_X": False}, 4),
    ("backward, gains by head", norm_rope.backward, {**HEAD, **BACK, "KIND": 3, "BY_HEAD": True}, 4),
    ("forward of whole tokens", norm_rope.forward, {**TOKEN, **FORTH}, 16),
    ("backward of whole tokens", norm_rope.backward, {**TOKEN, **BACK, "KIND": 3, "BY_HEAD": True}, 16),
    # Triton's launcher makes constants of whole numbers that are 1.
    ("backward of one token", norm_rope.backward, {**HEAD, **BACK, **dict.fromkeys(ONES, 1)}, 4),
    ("all statistics", row_fields._fields, FIELDS, 8),
    ("all statistics at head_dim 64", row_fields._fields, {**FIELDS, "ROWS": 64, "D": 64, "WIDE": 64}, 4),
    ("all statistics of hidden keys", row_fields._fields, {**FIELDS, "MASK": True, "CAP": True}, 8),
    ("extremes in a window", extremes._extremes, {**SEEN, "WINDOW": True}, 8),
    ("extremes", extremes._extremes, SEEN, 8),
    ("extremes of one token", extremes._extremes, {**SEEN, **dict.fromkeys(ONES, 1)}, 8),
    ("extremes of hidden keys", extremes._extremes, {**SEEN, "MASK": True}, 8),
]  # fmt: skip


def made(kernel, constants, warps):
    """The kernel compiled as Triton's launcher would for aligned bfloat16 tensors."""
    types, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        pointer = WHOLE.get(name)
        types[name] = (
            "constexpr"
            if name in constants
            else pointer or ("fp32" if name in NUMBERS else "i32")
        )
        if pointer or re.fullmatch(r"\w_[bht]|(cos|sin)_[bt]", name):
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {
        name: value for name, value in constants.items() if name in kernel.arg_names
    }
    known = {
        (kernel.arg_names.index(name),): value for name, value in constants.items()
    }
    source = ASTSource(kernel, types, known, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )


def spilled(ptx):
    """Registers per thread, and bytes per thread that did not fit in them."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            get_ptxas(90).path,
            "-v",
            "--gpu-name=sm_90a",
            file.name,
            "-o",
            "/dev/null",
        ]
        told = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stderr
    registers, spills = (
        re.search(r"Used (\d+) registers", told),
        re.search(r"(\d+) bytes spill stores", told),
    )
    assert registers
    assert spills
    return int(registers[1]), int(spills[1])


if __name__ == "__main__":
    for told, kernel, constants, warps in CASES:
        compiled = made(kernel, constants, warps)
        used, spills = spilled(compiled.asm["ptx"])
        wide = len(
            re.findall(
                r"ld\.global\.v4|cp\.async\.cg\S* .*, 0x10,", compiled.asm["ptx"]
            )
        )
        print(
            f"{told}: registers {used}, spilled {spills}, shared {compiled.metadata.shared}, 16-byte loads {wide}"
        )
