"""The env.json of a run: where and on what it was made, without names of people, machines or folders.

What changes bits besides the configuration is in it: runs that differ there are not mixed.
"""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch
from torch import nn

from qkeel.errors import DamagedFileError, RunDirectoryError
from qkeel.kernels.native import ready
from qkeel.lab.config import RunConfig
from qkeel.lab.data.corpus import Corpus
from qkeel.lab.model.run_remedies import note, rules
from qkeel.lab.tasks.text import counted_bigrams, load_task
from qkeel.options import Json
from qkeel.records import RunDirectory
from qkeel.records.made_on import made_on
from qkeel.sites import find_sites
from qkeel.version import VERSION

COMPARED = ("qkeel", "torch", "device", "cpu", "compiled_kernels")  # what changes bits and is no setting of a run


def computed_with(config: RunConfig) -> Json:
    """Returns what decides the last digits besides the configuration, by COMPARED: versions, processor, kernels."""
    device = config.device
    return {
        "qkeel": VERSION,
        "torch": torch.__version__,
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "compiled_kernels": device == "cpu" and ready(),  # they round otherwise than torch's path
    }


def identity(config: RunConfig) -> Json:
    """Returns what makes two runs of one configuration the same to the last bit: `computed_with`, and the corpus."""
    return {**computed_with(config), "corpus": about_corpus(load_task(config).corpus)}


def check_alike(path: Path, before: Json, now: Json) -> None:
    """Raises RunDirectoryError where a run was computed otherwise than is done now, or on another text of one name.

    `path` is the run's, `before` its env.json, `now` an `identity`. What an earlier version
    did not record counts as different.
    """
    unlike = [name for name in COMPARED if before.get(name) != now.get(name)]
    texts = [about.get("corpus") or {} for about in (before, now)]
    same_name = texts[0].get("name") == texts[1].get("name")
    if same_name and str(texts[0].get("sha256"))[:12] != str(texts[1].get("sha256"))[:12]:
        before, now = ({**about, "corpus SHA-256": text.get("sha256")} for about, text in zip((before, now), texts))
        unlike.append("corpus SHA-256")
    if unlike:
        said = "; ".join(f"{name}: {before.get(name, 'not recorded')} there, {now.get(name)} here" for name in unlike)
        raise RunDirectoryError(
            f"{path} was computed otherwise ({said}), and runs that round differently or read another text are not "
            "mixed. Restore what was there (QKEEL_NATIVE=0 switches compiled kernels off), or choose another "
            "directory; nothing was changed."
        )


def refuse_mixture(runs: Path, now: Json) -> None:
    """Raises RunDirectoryError where one of the run directories in the folder was computed otherwise, see
    `check_alike`. A damaged one is made again, so it is passed over."""
    for file in sorted(runs.glob("*/env.json")):
        with contextlib.suppress(DamagedFileError):
            check_alike(file.parent, RunDirectory(file.parent).env(), now)


def about_corpus(corpus: Corpus) -> Json:
    """Returns name, content hash and sizes of a corpus."""
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "train_tokens": len(corpus.train),
        "heldout_tokens": len(corpus.heldout),
        "vocab_size": corpus.vocab_size,
        "loss_unit": corpus.loss_unit,
        **({"tokenizer_sha256": corpus.tokenizer} if corpus.tokenizer else {}),
    }


def environment(config: RunConfig, corpus: Corpus, model: nn.Module, command: str) -> Json:
    """Versions, corpus hash, rules and formula in use (remedy applied), remedy's source, command to reproduce."""
    remedy, counted = note(config.remedy), counted_bigrams(config)
    return {
        **computed_with(config),
        "python": platform.python_version(),
        **made_on(),
        "dtype": config.dtype,
        "corpus": about_corpus(corpus),
        **({} if counted is None else {"counted_bigrams": counted}),
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "formula": "\n\n".join(
            [*rules(config.remedy), *dict.fromkeys(site.spec.explain() for site in find_sites(model))]
        ),
        "remedy_line": remedy.line,
        "remedy_source": remedy.source,
        "command": command,
    }
