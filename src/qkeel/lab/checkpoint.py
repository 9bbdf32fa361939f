"""The state of a run in memory, its environment, and checkpoints from which a run resumes bit-identically."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from qkeel.autopilot import Autopilot
from qkeel.errors import DamagedFileError, RunDirectoryError
from qkeel.handle import under
from qkeel.kernels.native import norm_rope_ready
from qkeel.lab.build_run import build_optimizer, note, put_on, rules, width_ratio
from qkeel.lab.config import RunConfig
from qkeel.lab.tasks import counted_bigrams, load_task
from qkeel.lab.text import Corpus
from qkeel.metrics import Row
from qkeel.nn.attention import SpecModule
from qkeel.options import Json
from qkeel.records import RunDirectory, write_bytes
from qkeel.records.disk import make_directory, read_file
from qkeel.records.run_directory import FileSizes, made_on
from qkeel.sites import find_sites
from qkeel.version import VERSION

# The env.json of a run describes its environment, without names of people, machines or folders. It contains everything
# apart from the configuration that affects the bits of the results; runs that differ in it are not mixed.

COMPARED = ("qkeel", "torch", "device", "cpu", "compiled_kernels")  # affect the bits but are not settings of a run


def computed_with(config: RunConfig) -> Json:
    """Returns the versions, processor and kernels, which affect the last digits of the results; see COMPARED."""
    device = config.device
    return {
        "qkeel": VERSION,
        "torch": torch.__version__,
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "compiled_kernels": device == "cpu" and norm_rope_ready(),  # they round differently from torch's operators
    }


def identity(config: RunConfig) -> Json:
    """Returns everything that must be equal for two runs of one configuration to be bit-identical: the result of
    `computed_with` and the corpus."""
    return {**computed_with(config), "corpus": about_corpus(load_task(config).corpus)}


def check_alike(path: Path, before: Json, now: Json) -> None:
    """Raises RunDirectoryError if a run was computed differently, or on a different text of the same name.

    Args:
        path: the run's directory.
        before: the run's env.json; values that an earlier version did not record count as different.
        now: the current `identity`.
    """
    unlike = [name for name in COMPARED if before.get(name) != now.get(name)]
    texts = [about.get("corpus") or {} for about in (before, now)]
    same_name = texts[0].get("name") == texts[1].get("name")
    if same_name and str(texts[0].get("sha256"))[:12] != str(texts[1].get("sha256"))[:12]:
        before, now = ({**about, "corpus SHA-256": text.get("sha256")} for about, text in zip((before, now), texts))
        unlike.append("corpus SHA-256")
    if unlike:
        how = "; ".join(f"{name}: {before.get(name, 'not recorded')} there, {now.get(name)} here" for name in unlike)
        raise RunDirectoryError(
            f"{path} was computed differently ({how}), and runs with different rounding or a different text must not "
            "be mixed. Restore the old environment (QKEEL_NATIVE=0 switches compiled kernels off), or choose another "
            "directory; nothing was changed."
        )


def refuse_mixture(runs: Path, now: Json) -> None:
    """Raises RunDirectoryError if a run in the folder was computed differently; see `check_alike`.

    Damaged runs are skipped, because they will be repeated.
    """
    for file in sorted(runs.glob("*/env.json")):
        with contextlib.suppress(DamagedFileError):
            check_alike(file.parent, RunDirectory(file.parent).env(), now)


def about_corpus(corpus: Corpus) -> Json:
    """Returns the name, content hash and sizes of a corpus."""
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
    """Returns env.json: the versions, the corpus hash, the formula with the remedy applied, the remedy's source and the
    command."""
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


# Dynamic loss scaling, which keeps gradients within the range of fp16, with one scale per run.

# The defaults of torch.amp.GradScaler; scaling by powers of two does not round.
START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
LEAST = 1.0  # below it the forward pass itself overflows, which no loss scale can fix


@final
class LossScale:
    """Halves the scale when a gradient is not finite and skips that step; doubles the scale after 2000 good steps.

    The scale of a run depends only on its own gradients, not on which runs train together with it. Skipped steps are
    counted, and each is reported by `taken_events`.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2, with the defaults of torch.amp.GradScaler.
    """

    def __init__(self, start: float = START, interval: int = INTERVAL) -> None:
        self.value, self.interval = start, interval
        self.skipped = 0
        self._sound = 0  # steps since the scale last changed
        self._finite = True
        self._events: list[str] = []

    def see(self, norm: Tensor) -> None:
        """Checks the norm of the unscaled gradient; waits for the device, as GradScaler does."""
        self._finite = math.isfinite(float(norm))

    @property
    def skips(self) -> bool:
        """True if the next step is skipped."""
        return not self._finite

    @property
    def exhausted(self) -> bool:
        """True if steps overflow even with a scale below 1."""
        return self.value < LEAST

    def update(self) -> None:
        """Ends a step: counts it and adjusts the scale."""
        if self._finite:
            self._sound += 1
            if self._sound == self.interval:
                self.value, self._sound = self.value * GROWTH, 0
            return
        self._events.append(f"skipped: the loss or a gradient overflowed fp16 at loss scale {self.value:g}")
        self.value, self._sound, self.skipped = self.value * BACKOFF, 0, self.skipped + 1

    def taken_events(self) -> list[str]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    def record(self) -> dict[str, float]:
        """Returns the fields of loss scaling in records.TASK_FIELDS."""
        return {"loss_scale": self.value, "skipped_steps": self.skipped}

    def state(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint."""
        return {"numbers": torch.tensor([self.value, self._sound, self.skipped], dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state` returned.

        Raises:
            KeyError: the state has no numbers.
            ValueError: the state has the wrong number of values.
        """
        value, sound, skipped = state["numbers"].tolist()
        self.value, self._sound, self.skipped = value, int(sound), int(skipped)


# Throughput of a run: tokens per second, and model FLOPs utilisation.

# Dense bf16 operations per second from the vendors' data sheets; the first name contained in the device's name applies.
PEAKS: dict[str, float] = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "L4": 121e12,
}


def flops_per_token(model: nn.Module, context: int) -> float:
    """Returns the operations per training token: 6 per weight of each matrix product, plus those of visible pairs.

    Each visible key costs 3 · 2 · h (d + d') operations, for the scores and weighted values of h heads in the forward
    pass and twice as many in the backward pass. A causal query at position i sees i + 1 keys, but no more than its
    window holds. Embedding lookups, norms and recomputation are not counted.

    Args:
        model: a model with qkeel's attention modules.
        context: the number of tokens per training sequence.

    Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B (which counts all T keys as visible).
    """
    total = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            total += 6 * module.weight.numel()
        if isinstance(module, SpecModule):
            reach = module.spec.position.reach or context
            keys = sum(min(i + 1, reach) for i in range(context)) / context
            out = module.get_submodule("o_proj")
            assert isinstance(out, nn.Linear)
            total += 6 * keys * (module.n_heads * module.head_dim + out.in_features)
    return total


def peak(device: torch.device, dtype: str) -> float | None:
    """Returns the peak bf16 operations per second of the device; None if unknown or if the run does not use bf16."""
    if device.type != "cuda" or dtype != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for known, value in PEAKS.items() if known in name), None)


def speed(tokens: int, seconds: float, flops: float, limit: float | None) -> dict[str, float | None]:
    """Returns tokens_per_second and mfu of records.STEP_FIELDS; None if nothing was trained or the peak is unknown."""
    rate = tokens / seconds if tokens and seconds > 0 else None
    share = None if rate is None or limit is None else rate * flops / limit
    return {"tokens_per_second": rate, "mfu": share}


# A run in memory: its task, model, optimizer and active remedy.


@final
class RunState:
    """The state of a run in memory, created from a resolved configuration.

    The initial weights are determined by the seed, and the batches by (seed, step). Training changes only `model`,
    `optimizer`, `loss_scale` and the state of the remedy's `handle`.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.task = load_task(config)
        self.device = torch.device(config.device)
        self.heldout = self.task.heldout(config.eval_sequences).to(self.device)
        corpus = self.task.corpus
        # One factor for all batches: counting the bytes of each batch would not make its noisy loss more exact.
        self.tokens_per_unit = {
            "train": corpus.tokens_per_unit(corpus.train),
            "heldout": corpus.tokens_per_unit(self.heldout.targets.cpu().numpy()),
        }
        self.probed = self.task.heldout(config.probe_sequences).to(self.device)
        torch.manual_seed(config.seed)
        self.model = self.task.build(torch.Generator().manual_seed(config.seed))
        _nudge(self.model, config.nudge)
        self.model.to(self.device)
        self.attentions = tuple(name for name, m in self.model.named_modules() if isinstance(m, SpecModule))
        self.flops_per_token = flops_per_token(self.model, config.data.context)
        self.optimizer = build_optimizer(config.optim, self.model, width_ratio(config.model))
        self.handle = put_on(config, self.model, self.optimizer)
        self.loss_scale = LossScale() if config.dtype == "fp16" else None
        self.model.train()
        if config.compile:
            self.model.compile()

    def close(self) -> None:
        """Ends the training and closes the autopilot, if there is one."""
        if isinstance(self.handle, Autopilot):
            self.handle.close()

    @property
    def events(self) -> Sequence[Row]:
        """The events of the autopilot so far, if there is one."""
        return self.handle.events if isinstance(self.handle, Autopilot) else ()


@torch.no_grad()
def _nudge(model: nn.Module, ulps: int) -> None:
    """Increases the first weight of the first matrix in the blocks by `ulps` float32 steps."""
    weight = next((p for p in model.get_submodule("blocks").parameters() if p.dim() == 2), None) if ulps else None
    if weight is not None:
        first = weight.detach().view(-1)[:1]
        first.view(torch.int32).add_(-ulps if first < 0 else ulps)  # the bits of floats are ordered like magnitudes


# The checkpoint of a run: one safetensors file, replaced atomically. Nothing is pickled.

# The state per parameter of AdamW, SGD and Muon.
_STATES = (frozenset(["step", "exp_avg", "exp_avg_sq"]), frozenset(["momentum_buffer"]), frozenset(["momentum"]))


@dataclasses.dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run: completed steps, CPU seconds, and the size of each record file at that time."""

    step: int = 0
    cpu_seconds: float = 0.0
    sizes: FileSizes | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """The contents of a checkpoint file."""

    progress: RunProgress
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, object]


def save(directory: RunDirectory, run: RunState, progress: RunProgress) -> None:
    """Saves a checkpoint of the run, atomically replacing the previous one."""
    tensors: dict[str, Tensor] = {f"model.{name}": t for name, t in _model_tensors(run.model).items()}
    numbers: dict[str, object] = {}
    for index, state in run.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = value
    tensors.update({f"remedy.{key}": value for key, value in run.handle.state().items()})
    if run.loss_scale is not None:
        tensors.update({f"loss_scale.{key}": value for key, value in run.loss_scale.state().items()})
    tensors.update(_random_state())
    about = {**dataclasses.asdict(progress), "optimizer": numbers}
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    make_directory(directory.checkpoint.parent, parents=False)
    write_bytes(directory.checkpoint, safetensors.torch.save(plain, {"qkeel": json.dumps(about)}))


def load(directory: RunDirectory, run: RunState) -> RunProgress:
    """Restores the run from its checkpoint and returns its progress.

    Raises:
        DamagedFileError: the file is damaged.
        RunDirectoryError: the checkpoint belongs to another model.
    """
    found = read_checkpoint(directory)
    restore(directory, run, found)
    return found.progress


def read_checkpoint(directory: RunDirectory) -> RunCheckpoint:
    """Reads the checkpoint of a run and checks that it is complete.

    Raises:
        DamagedFileError: the file is damaged.
    """
    path = directory.checkpoint
    data = read_file(path)
    try:
        tensors = safetensors.torch.load(data)  # checks the header too
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["qkeel"])
        progress = RunProgress(about["step"], float(about["cpu_seconds"]), about["sizes"])
        return RunCheckpoint(progress, tensors, about["optimizer"])
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} differs from what was written ({error}), so it was damaged.") from error


def restore(directory: RunDirectory, run: RunState, checkpoint: RunCheckpoint) -> None:
    """Restores the run from a checkpoint.

    Raises:
        RunDirectoryError: the checkpoint belongs to another model. Nothing on disk is changed.
    """
    tensors = checkpoint.tensors
    try:
        _load_model(run.model, under("model.", tensors))
        _load_optimizer(run.optimizer, under("optimizer.", tensors), checkpoint.numbers)
        run.handle.load(under("remedy.", tensors))
        if run.loss_scale is not None:
            run.loss_scale.load(under("loss_scale.", tensors))
        _set_random_state(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunDirectoryError(
            f"{directory.checkpoint} is not a complete checkpoint of this run ({error}). It was not written by this "
            f"version of qkeel; delete {directory.path} to run again, or restore the file."
        ) from error


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers by name; shared tensors appear once."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


@torch.no_grad()
def _load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    own = _model_tensors(model)
    if own.keys() != tensors.keys():
        raise ValueError(f"different tensors: {', '.join(sorted(own.keys() ^ tensors.keys()))}")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}")
        if own[name].dtype != tensor.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, expected {own[name].dtype}")
        own[name].copy_(tensor)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: Mapping[str, object]
) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, object]] = {}
    for name, value in [*tensors.items(), *numbers.items()]:
        index, _, key = name.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise ValueError(f"state {name} belongs to no parameter; the model has {len(parameters)} parameters")
        if not isinstance(value, (Tensor, int, float)):
            raise ValueError(f"state {name} is {value!r}, expected a number")
        state.setdefault(int(index), {})[key] = value
    for index, entries in state.items():
        _check_state(index, entries, parameters[index])
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _check_state(index: int, entries: Mapping[str, object], parameter: Tensor) -> None:
    """Raises ValueError unless `entries` are a valid optimizer state of the parameter."""
    if frozenset(entries) not in _STATES:
        raise ValueError(
            f"parameter {index} has the state {', '.join(sorted(entries))}, which no supported optimizer uses"
        )
    for key, value in entries.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else ()
        if shape != (() if key == "step" else tuple(parameter.shape)):
            raise ValueError(
                f"state {index}.{key} has shape {shape}, but its parameter has shape {tuple(parameter.shape)}"
            )
        if isinstance(value, Tensor) and not value.is_floating_point():
            raise ValueError(f"state {index}.{key} is {value.dtype}, expected floating-point numbers")


def _random_state() -> dict[str, Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(tensors: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
