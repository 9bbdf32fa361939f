"""The env.json of a run: where and on what it was made, without names of people, machines or folders."""

from __future__ import annotations

import platform
from importlib import metadata

import torch
from torch import nn

from qkeel.kernels.native import ready
from qkeel.lab.config import RunConfig
from qkeel.lab.config_fields import Json
from qkeel.lab.data.corpus import Corpus
from qkeel.lab.model.run_remedies import note
from qkeel.sites import find_sites


def environment(config: RunConfig, corpus: Corpus, model: nn.Module, command: str) -> Json:
    """Versions, corpus hash, formula in use (remedy applied), remedy's source, command to reproduce."""
    remedy = note(config.remedy)
    return {
        "qkeel": next((found.version for found in metadata.distributions(name="qkeel")), "unknown"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": _device_name(config.device),
        "dtype": config.dtype,
        "compiled_kernels": config.device == "cpu" and ready(),  # they round otherwise than torch's path
        "corpus": {
            "name": corpus.name,
            "sha256": corpus.sha256,
            "train_tokens": len(corpus.train),
            "heldout_tokens": len(corpus.heldout),
            "vocab_size": corpus.vocab_size,
            "loss_unit": corpus.loss_unit,
        },
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "formula": "\n\n".join(dict.fromkeys(site.spec.explain() for site in find_sites(model))),
        "remedy_line": remedy.line,
        "remedy_source": remedy.source,
        "command": command,
    }


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return device
