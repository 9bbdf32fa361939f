"""The state of a run in memory, its environment, and checkpoints from which a run resumes bit-identically."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import final

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from qkeel.errors import DamagedFileError, RunDirectoryError
from qkeel.handle import under
from qkeel.kernels.native import ready as kernels_ready
from qkeel.lab.build_run import build_optimizer, put_on
from qkeel.lab.config import RunConfig
from qkeel.lab.tasks import load_task
from qkeel.lab.text import Corpus
from qkeel.nn.attention import SpecModule
from qkeel.options import Json
from qkeel.records import RunDirectory, write_bytes
from qkeel.records.disk import make_directory, read_file
from qkeel.records.run_directory import FileSizes, made_on
from qkeel.version import VERSION

# The env.json of a run describes its environment, without names of people, machines or folders. It contains everything
# apart from the configuration that affects the bits of the results; runs that differ in it are not mixed.

# Affect the bits but are not settings of a run.
COMPARED = ("qkeel", "torch", "device", "cpu", "compiled_kernels")


def computed_with(config: RunConfig) -> Json:
    """Returns the versions, processor and kernels, which affect the last digits of the results; see COMPARED.

    >>> sorted(computed_with(RunConfig(device="cpu")))
    ['compiled_kernels', 'cpu', 'device', 'qkeel', 'torch']
    """
    device = config.device
    return {
        "qkeel": VERSION,
        "torch": torch.__version__,
        "device": f"{device} ({torch.cuda.get_device_name(device)})"
        if device.startswith("cuda")
        else device,
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        # They round differently from torch's operators.
        "compiled_kernels": device == "cpu" and kernels_ready(),
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
    if (
        same_name
        and str(texts[0].get("sha256"))[:12] != str(texts[1].get("sha256"))[:12]
    ):
        before, now = (
            {**about, "corpus SHA-256": text.get("sha256")}
            for about, text in zip((before, now), texts)
        )
        unlike.append("corpus SHA-256")
    if unlike:
        differences = "; ".join(
            f"{name}: {before.get(name, 'not recorded')} there, {now.get(name)} here"
            for name in unlike
        )
        raise RunDirectoryError(
            f"{path} was computed differently ({differences}), and runs with different rounding or a different text "
            "must not be mixed. Restore the old environment (QKEEL_NATIVE=0 switches compiled kernels off), or choose "
            "another directory; nothing was changed."
        )


def refuse_mixture(runs: Path, now: Json) -> None:
    """Raises RunDirectoryError if a run in the folder was computed differently; see `check_alike`."""
    for file in sorted(runs.glob("*/env.json")):
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
    }


def environment(
    config: RunConfig, corpus: Corpus, model: nn.Module, command: str
) -> Json:
    """Returns env.json: the versions, the corpus, the size of the model and the command."""
    return {
        **computed_with(config),
        "python": platform.python_version(),
        **made_on(),
        "dtype": config.dtype,
        "corpus": about_corpus(corpus),
        "n_parameters": sum(p.numel() for p in model.parameters()),
        "command": command,
    }


# A run in memory: its task, model, optimizer and active remedy.


@final
class RunState:
    """The state of a run in memory, created from a resolved configuration.

    The initial weights are determined by the seed, and the batches by (seed, step). Training changes only `model`,
    `optimizer`, `scaler`, `skipped_steps` and the state of the remedy's `handle`.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.task = load_task(config)
        self.device = torch.device(config.device)
        self.heldout = self.task.heldout(config.eval_sequences).to(self.device)
        # The probe is the same in every run of a task, so that logits of remedies are compared on equal text.
        self.probed = self.task.heldout(config.probe_sequences).to(self.device)
        # Some layers draw their own weights when they are built, before `init_weights` replaces them.
        torch.manual_seed(config.seed)
        self.model = self.task.build(torch.Generator().manual_seed(config.seed))
        _nudge(self.model, config.nudge)
        self.model.to(self.device)
        self.attentions = tuple(
            name for name, m in self.model.named_modules() if isinstance(m, SpecModule)
        )
        # Remedies come after the optimizer: some scale its steps, others add parameters to its groups.
        self.optimizer = build_optimizer(config.optim, self.model)
        self.handle = put_on(config, self.model, self.optimizer)
        # Loss scaling keeps gradients within the range of fp16. A scale is a power of two, so it does not round.
        self.scaler = GradScaler(self.device.type, enabled=config.dtype == "fp16")
        self.skipped_steps = 0
        self.model.train()
        # Compiled last, so that the graph contains what the remedy changed.
        if config.compile:
            self.model.compile()

    def update_scale(self) -> None:
        """Ends a step of the loss scaling, which lowers the scale if the step was skipped."""
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.skipped_steps += self.scaler.get_scale() < scale

    @property
    def overflows(self) -> bool:
        """True if steps overflow fp16 even with a loss scale below 1, because the forward pass itself overflows."""
        return self.scaler.get_scale() < 1


@torch.no_grad()
def _nudge(model: nn.Module, ulps: int) -> None:
    """Increases the first weight of the first matrix in the blocks by `ulps` float32 steps."""
    matrices = [p for p in model.get_submodule("blocks").parameters() if p.dim() == 2]
    if ulps and matrices:
        first = matrices[0].detach().view(-1)[:1]
        # The bits of floats, read as integers, are ordered like their magnitudes.
        first.view(torch.int32).add_(-ulps if first < 0 else ulps)


# The checkpoint of a run: one safetensors file, replaced atomically. Nothing is pickled.

# Scale, sound steps since it changed, skipped steps.
_SCALING = "loss_scale.numbers"


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
    tensors: dict[str, Tensor] = {
        f"model.{name}": t for name, t in _model_tensors(run.model).items()
    }
    numbers: dict[str, object] = {}
    # safetensors holds nothing but tensors, so the numbers in an optimizer's state travel in the header.
    for index, state in run.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            else:
                numbers[f"{index}.{key}"] = value
    tensors.update(
        {f"remedy.{key}": value for key, value in run.handle.state().items()}
    )
    if run.scaler.is_enabled():
        scaler = run.scaler.state_dict()
        scaling = [scaler["scale"], scaler["_growth_tracker"], run.skipped_steps]
        tensors[_SCALING] = torch.tensor(scaling, dtype=torch.float64)
    tensors["random.cpu"] = torch.get_rng_state()
    # Dropout on a GPU draws from a generator of its own.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    about = {**dataclasses.asdict(progress), "optimizer": numbers}
    on_cpu = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    make_directory(directory.checkpoint.parent, parents=False)
    write_bytes(
        directory.checkpoint,
        safetensors.torch.save(on_cpu, {"qkeel": json.dumps(about)}),
    )


def load(directory: RunDirectory, run: RunState) -> RunProgress:
    """Restores the run from its checkpoint and returns its progress.

    Raises:
        DamagedFileError: the file is damaged.
        RunDirectoryError: the checkpoint belongs to another model.
    """
    checkpoint = read_checkpoint(directory)
    restore(directory, run, checkpoint)
    return checkpoint.progress


def read_checkpoint(directory: RunDirectory) -> RunCheckpoint:
    """Reads the checkpoint of a run and checks that it is complete.

    Raises:
        DamagedFileError: the file is damaged.
    """
    path = directory.checkpoint
    data = read_file(path)
    try:
        # Checks the header too.
        tensors = safetensors.torch.load(data)
        # `load` returns the tensors only, so the metadata are read from the header here: 8 bytes of length, then
        # JSON.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["qkeel"])
        cpu_seconds = float(about["cpu_seconds"])
        progress = RunProgress(about["step"], cpu_seconds, about["sizes"])
        return RunCheckpoint(progress, tensors, about["optimizer"])
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"{path} differs from what was written ({error}), so it was damaged."
        ) from error


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
        if run.scaler.is_enabled():
            scale, sound_steps, skipped_steps = tensors[_SCALING].tolist()
            # The scaler's growth factor, backoff and interval come from the configuration, so today's scaler has them
            # already.
            state = {
                **run.scaler.state_dict(),
                "scale": scale,
                "_growth_tracker": int(sound_steps),
            }
            run.scaler.load_state_dict(state)
            run.skipped_steps = int(skipped_steps)
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["random.cuda"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunDirectoryError(
            f"{directory.checkpoint} is not a complete checkpoint of this run ({error}). It was not written by this "
            f"version of qkeel; delete {directory.path} to run again, or restore the file."
        ) from error


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers by name; shared tensors appear once."""
    # A tied head and its embedding are one tensor; written twice, they could be restored to different values.
    ids: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in ids:
            ids.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


@torch.no_grad()
def _load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    current = _model_tensors(model)
    if current.keys() != tensors.keys():
        raise ValueError(
            f"different tensors: {', '.join(sorted(current.keys() ^ tensors.keys()))}"
        )
    for name, tensor in tensors.items():
        if current[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected {tuple(current[name].shape)}"
            )
        # In place, because the optimizer steps these very tensors.
        current[name].copy_(tensor)


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, Tensor],
    numbers: Mapping[str, object],
) -> None:
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    state: dict[int, dict[str, object]] = {}
    for name, value in [*tensors.items(), *numbers.items()]:
        index, _, key = name.partition(".")
        if not index.isdecimal() or int(index) >= len(parameters):
            raise ValueError(
                f"state {name} belongs to no parameter; the model has {len(parameters)} parameters"
            )
        state.setdefault(int(index), {})[key] = value
    # The groups hold settings only, and the loop sets the learning rate of every step: those of the new optimizer
    # serve.
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
