"""Counts what watching adds to the training steps of a model of transformers on a device, and prints it as JSON.

The device is the stand-in of `accelerator`. Attention is torch's fused operator of the CPU, counted as one launch, as a
GPU's is; so are the kernels of Triton that find the largest logit and the entropy of rows and of heads: here they find
nothing.
"""

import json
import warnings
from collections import Counter

import torch
from tests.devices.accelerator import DEVICE, Accelerator, Counts
from tests.remedies.foreign import hf, out
from tests.training import adamw
from torch import nn
from torch.overrides import TorchFunctionMode

import qkeel
from qkeel.capture.readers import sdpa_arguments
from qkeel.functional.statistics import ROW_FIELDS
from qkeel.kernels import statistics
from qkeel.patching.torch_state import flash_on_cpu

LAYERS = (2, 4, 12)
# The function itself: while a model is watched, another stands under its name.
SDPA = nn.functional.scaled_dot_product_attention


class Fused(TorchFunctionMode):
    """SDPA as a GPU computes it: by one operator."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not SDPA:
            return function(*args, **(kwargs or {}))
        given = sdpa_arguments(args, kwargs or {})
        q, k, v = (given[name] for name in ("query", "key", "value"))
        return flash_on_cpu(
            q, k, v, 0.0, bool(given["is_causal"]), scale=given["scale"]
        )[0]


def step(model, optimizer, tokens):
    """The work of one training step."""
    with Counts() as counts, Fused():
        optimizer.zero_grad()
        out(model, tokens).square().mean().backward()
        optimizer.step()
    return counts


def fields_found(call, threshold):
    """As many numbers as the kernel for all statistics of rows makes, in four launches: three are of key norms."""
    norms = torch.linalg.vector_norm(call.k, dim=-1).clamp_min(1e-30).reciprocal()
    found = norms.new_empty((len(ROW_FIELDS), *call.q.shape[:3])).neg()
    return found, call.q.new_ones(call.q.shape[:3], dtype=torch.int64), norms


def counted(layers):
    """What a measured step does more than one that nobody watches."""
    tokens = torch.randint(20, (2, 16)).to(DEVICE)
    found = {}
    for name, options in (
        ("measured, all statistics", {}),
        ("measured, all statistics by blocks", {}),
    ):
        statistics.row_fields = (
            (lambda *_: None) if name.endswith("blocks") else fields_found
        )
        model = hf("llama", "sdpa", num_hidden_layers=layers).to(DEVICE).train()
        optimizer = adamw(model, 0.001)
        plain = [step(model, optimizer, tokens) for _ in range(2)][-1]
        with qkeel.watch(model, optimizer, rules=[], **options) as monitor:
            watched = [step(model, optimizer, tokens) for _ in range(2)][-1]
            assert monitor.active
        found[name] = {
            "launches": watched.launches.total() - plain.launches.total(),
            "waits": dict(watched.waits - plain.waits),
            # Waits of the model itself, which count at the innermost place of qkeel's code while it is watched.
            "waits_elsewhere": (plain.waits - watched.waits).total(),
            "bytes": watched.read_and_written - plain.read_and_written,
        }
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with Accelerator():
        steps = {layers: counted(layers) for layers in LAYERS}
    print(json.dumps(steps, default=Counter))
