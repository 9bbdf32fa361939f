"""`qkeel convert`: a checkpoint with q/k norms as an architecture that others load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from qkeel.cli.exits import OK
from qkeel.remedies.retrofit import convert as write


def convert(
    checkpoint: Path,
    /,
    *,
    to: Literal["qwen3", "olmo2", "gemma3"],
    out: Path,
    norm_eps: Annotated[float | None, Parameter(show_default=False)] = None,
) -> int:
    """Write a checkpoint whose queries and keys are normed as a Qwen3, OLMo 2 or Gemma 3, with the same outputs.

    The norms come from qkeel.retrofit(model, "qk_norm", batches) and saved by save_pretrained. Nothing is run or
    unpickled; what the architecture cannot compute is refused with the reason.

    Args:
        checkpoint: A Hugging Face folder: config.json and safetensors, in one file or in shards.
        to: The architecture to write.
        out: The folder to write; it must not exist, or be empty.
        norm_eps: The eps of the q/k norms, where it is not rms_norm_eps of config.json.
    """
    print(write(checkpoint, to, out, norm_eps=norm_eps))
    return OK
