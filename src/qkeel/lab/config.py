"""The configuration of a training run: fields, checks, and the settings that can be axes of a study."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, Self, final

from qkeel.errors import InvalidTypeError, InvalidValueError, check
from qkeel.options import (
    Bound,
    Count,
    Json,
    Natural,
    NotNegative,
    Positive,
    Share,
    read_fields,
    settle,
)

# Command-line flags, TOML recipes and config.json are views of these frozen dataclasses. The strings below the fields
# are the help texts of the flags.

# None if it is not given.
OptionalSize = Annotated[int | None, Bound(1, included=True)]
# Height and width of the handwritten digits in pixels.
IMAGE_SIZE = 8


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The decoder: sizes, attention and layout.

    >>> RunConfig(model=ModelConfig(n_layers=4)).model.n_layers
    4
    """

    d_model: Count = 64
    """Width of the residual stream."""
    n_layers: Count = 2
    """Number of blocks."""
    n_heads: Count = 4
    """Number of query heads per layer."""
    n_kv_heads: OptionalSize = None
    """Number of key and value heads per layer; n_heads if not given."""
    head_dim: OptionalSize = None
    """Width of one head; d_model / n_heads if not given."""
    attention: str = "baseline"
    """The attention formula: the name of a preset, with options if needed, as in 'gemma2:cap=30'."""
    position: str = ""
    """Position encoding that replaces the preset's, e.g. 'alibi' or 'hwfa:window=16'; '/' separates layers."""
    block: Literal["mha", "mla", "gau"] = "mha"
    """Multi-head attention (also grouped or multi-query), multi-head latent attention, or gated attention units without
    an MLP."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """Type of the feed-forward branch."""
    mlp_ratio: float = 4.0
    """Number of hidden units of the feed-forward branch, as a multiple of d_model."""
    norm_order: Literal["pre", "post", "swin", "peri", "none"] = "pre"
    """Where the norms are in a block, or none for no norms."""
    tied: bool = False
    """Whether the output layer shares the embedding's weights."""
    deepnorm: bool = False
    """Use DeepNorm's factors on the residual stream and the initial weights; for block=gau with norm_order=post."""

    def __post_init__(self) -> None:
        settle(self)
        _check_multiple("n_heads", self.n_heads, "n_kv_heads", self.n_kv_heads or 1)
        is_single = self.block != "gau" or self.n_heads == 1
        check(is_single, "n_heads=1 for block=gau, which has one head", self.n_heads)
        has_units = self.mlp_ratio * self.d_model >= 1
        check(has_units, "an MLP with at least one unit", f"mlp_ratio={self.mlp_ratio}")
        if self.deepnorm and not (self.block == "gau" and self.norm_order == "post"):
            raise InvalidValueError("deepnorm needs block=gau with norm_order=post")
        if self.head_dim is None:
            _check_multiple(
                "d_model",
                self.d_model,
                "n_heads",
                self.n_heads,
                "; change one of them or give head_dim",
            )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The source of the text, its tokens and the size of batches.

    >>> RunConfig(data=DataConfig(context=64)).data.source
    'stdlib'
    """

    source: str = "stdlib"
    """stdlib, topics, or a path: a text file, a folder, or tokens as uint16 in a .bin file."""
    context: Count = 32
    """Number of tokens per sequence."""
    batch: Count = 8
    """Number of sequences per step."""
    vocab_size: OptionalSize = None
    """Number of token ids; by default 256 for text, whose tokens are bytes, and the largest token id + 1 for .bin."""
    task: Literal["text", "multimodal", "vision", "translation"] = "text"
    """Predict text, text and images in one sequence, the class of an image, or a translation."""
    pairs: Count = 1000
    """Translation: number of pairs of a text and its translation to train on."""

    def __post_init__(self) -> None:
        settle(self)
        check(bool(self.source), "the name or path of a corpus as source", "''")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImagesConfig:
    """How the model reads handwritten digits of 8 × 8 pixels; used only by tasks with images."""

    patch: Count = 2
    """Height and width of a patch in pixels; each patch is one token."""
    levels: Annotated[int, Bound(2, included=True)] = 4
    """Multimodal: number of grey levels per pixel; a patch becomes one of levels^(patch²) codes of the vocabulary."""
    image_input: Literal["codes", "patches"] = "codes"
    """Multimodal: read images through one embedding per code, or through a linear map of each patch's pixels."""
    image_share: Share = 0.5
    """Multimodal: share of sequences with an image and its caption."""
    image_variance: Positive = 1.0
    """Multimodal: initial variance of image embeddings; that of text embeddings is 1."""
    canvas: Count = 4
    """Multimodal: largest number of images side by side on one canvas."""

    def __post_init__(self) -> None:
        settle(self)
        _check_multiple("the size of an image", IMAGE_SIZE, "patch", self.patch)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule.

    >>> RunConfig(optim=OptimConfig(name="muon")).optim.name
    'muon'
    """

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """AdamW, SGD with momentum, or Muon (hidden matrices) with AdamW for the rest."""
    lr: Positive = 0.01
    """Peak learning rate."""
    beta1: NotNegative = 0.9
    """AdamW: decay of the running mean of gradients."""
    beta2: NotNegative = 0.95
    """AdamW: decay of the running mean of squared gradients."""
    eps: Positive = 1e-8
    """AdamW: constant added to the denominator."""
    momentum: NotNegative = 0.95
    """SGD and Muon: decay of the momentum."""
    weight_decay: NotNegative = 0.0
    """Weight decay of matrices, decoupled (SGD: added to the gradient); gains have no weight decay."""
    decay: Literal["coupled", "independent"] = "coupled"
    """coupled multiplies weight decay by the learning rate, independent by the rate relative to its peak."""
    grad_clip: NotNegative = 1.0
    """Global norm to which gradients are clipped; 0 disables clipping."""
    warmup: Share = 0.1
    """Share of the steps in which the rate is warmed up linearly."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """Schedule of the rate after the warm-up; wsd keeps the rate constant, then reduces it linearly over the last fifth
    of the steps."""
    final: Share = 0.05
    """Final rate relative to the peak (cosine, wsd)."""
    z_loss: NotNegative = 0.0
    """Weight of the mean squared log-partition of the output logits in the training loss."""

    def __post_init__(self) -> None:
        settle(self)
        largest = max(self.beta1, self.beta2, self.momentum)
        check(largest < 1, "beta1, beta2 and momentum below 1", largest)
        if self.decay == "independent" and self.name == "sgd":
            raise InvalidValueError(
                "independent weight decay is for adamw and muon; sgd adds decay to its gradient"
            )


_PARTS = (ModelConfig, DataConfig, OptimConfig, ImagesConfig)
# Cannot change a recorded value, so it is not part of a run's identity.
_CADENCE = ("checkpoint_every",)
# Fields that were added later are left out if they have their default values, so that the run_id of older runs does not
# change.
_NEWER = {
    "model": {
        "position": "",
        "deepnorm": False,
        "mlp_ratio": 4.0,
    },
    "optim": {"decay": "coupled"},
    "": {"accumulate": 1, "nudge": 0},
}


# Settings of earlier versions by section -> the only value under which this version computes the same, and what replaces
# the other values.
_RETIRED: dict[str, dict[str, tuple[object, str]]] = {
    "model": {
        "parametrisation": ("standard", "models have the standard parametrisation"),
        "base_width": (64, "models have the standard parametrisation"),
        "base_head_dim": (16, "models have the standard parametrisation"),
    },
    "data": {
        "tokens": (
            "bytes",
            "write the tokens of another tokenizer to a .bin file and give it as the source",
        ),
        "windows": ("drawn", "training windows are drawn at random"),
        "needle": (0.0, "train on texts without needles"),
        "needle_keys": (4, "train on texts without needles"),
    },
    "images": {
        "images": ("digits", "the lab's images are its handwritten digits"),
        "image_size": (IMAGE_SIZE, "the lab's images are its handwritten digits"),
        "image_first": (0.5, "half of the images precede their captions"),
    },
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training run. Every field except `checkpoint_every` affects the recorded values.

    >>> config = RunConfig(steps=100)
    >>> config == RunConfig.from_dict(config.to_dict())
    True
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)  #: the decoder
    data: DataConfig = dataclasses.field(default_factory=DataConfig)  #: the text
    #: the optimizer
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    #: unused by text
    images: ImagesConfig = dataclasses.field(default_factory=ImagesConfig)
    remedy: str = "none"
    """Spec string of the remedy, like 'lalr:tau=0.1+qk_clip'."""
    seed: Natural = 0
    """Seed for initial weights and batches."""
    steps: Count = 150
    """Number of optimizer steps."""
    accumulate: Count = 1
    """Number of equal parts in which each batch is computed, to save memory."""
    log_every: Count = 10
    """Number of steps between records; the first and the last step are always recorded."""
    checkpoint_every: Natural = 50
    """Number of steps between checkpoints; 0 saves one only at the end."""
    eval_every: Natural = 0
    """Number of steps between evaluations, a multiple of log_every; 0 evaluates only before and after training."""
    eval_sequences: Count = 256
    """Number of held-out sequences over which val_loss is averaged."""
    probe_sequences: Count = 4
    """Number of held-out sequences on which attention statistics are measured."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps; auto uses CUDA if available, otherwise the CPU."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format; bf16 and fp16 (with loss scaling) use autocast with float32 weights; auto is bf16 on CUDA devices
    that support it, otherwise fp32."""
    compile: bool = False
    """Train with torch.compile."""
    threads: Count = 1
    """Number of CPU threads, which affects the order of summation and thereby the last digits."""
    nudge: Natural = 0
    """Number of float32 steps (ulps) by which one weight is changed before training, to measure how fast two runs
    diverge."""

    def __post_init__(self) -> None:
        settle(self)
        for section, kind in zip(
            (self.model, self.data, self.optim, self.images), _PARTS, strict=True
        ):
            if not isinstance(section, kind):
                name = kind.__name__.removesuffix("Config").lower()
                raise InvalidTypeError(
                    f"expected a {kind.__name__} as {name}, got {section!r}"
                )
        _check_multiple("batch", self.data.batch, "accumulate", self.accumulate)
        _check_multiple("eval_every", self.eval_every, "log_every", self.log_every)
        is_device = self.device.split(":")[0] in ("auto", "cpu", "cuda", "mps")
        check(is_device, "device auto, cpu, cuda, cuda:N or mps", repr(self.device))

    @property
    def run_id(self) -> str:
        """The first 12 hex digits of the SHA-256 of everything that affects the recorded values (see `identity`)."""
        # Sorted, or moving a field inside a dataclass would give every run a new name.
        text = json.dumps(self.identity(), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def identity(self) -> Json:
        """The configuration without the checkpoint cadence, the device number and settings that the task ignores."""
        values = {k: v for k, v in self.to_dict().items() if k not in _CADENCE}
        for section, names in _NEWER.items():
            table = values[section] if section else values
            for name, nothing in names.items():
                if table[name] == nothing:
                    del table[name]
        # Each setting that the rest of the configuration makes idle: two runs that differ in it only are one run.
        if self.data.task != "translation":
            del values["data"]["pairs"]
        if self.data.task in ("text", "translation"):
            del values["images"]
        else:
            # Settings until 0.1, which are part of the names of runs.
            values["images"] |= {name: x for name, (x, _) in _RETIRED["images"].items()}
        if self.data.task == "text":
            del values["data"]["task"]
        # Which of a machine's GPUs trained a run is chance; whether a GPU or the CPU did shows in the last bits.
        return {**values, "device": self.device.split(":")[0]}

    def to_dict(self) -> Json:
        """Returns the configuration as plain values, nested like the dataclasses, which `from_dict` can read."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Reads nested plain values (TOML, JSON). Missing keys get their defaults; unknown keys are rejected.

        A setting of an earlier version that no longer exists is ignored if it had its default value.
        """
        for section, retired in _RETIRED.items():
            table = values.get(section)
            if not isinstance(table, Mapping):
                continue
            for name in table.keys() & retired.keys():
                neutral, replacement = retired[name]
                if table[name] != neutral:
                    raise InvalidValueError(
                        f"{section}.{name}={table[name]} is gone; {replacement}"
                    )
            kept = {name: table[name] for name in table if name not in retired}
            values = {**values, section: kept}
        return read_fields(cls, values, "")


def with_values(config: RunConfig, **values: object) -> RunConfig:
    """Returns the configuration with other values; the values of a section are given as a dict and set all at once.

    >>> with_values(RunConfig(), optim={"lr": 0.1}, seed=3).optim.lr
    0.1
    """
    parts = {
        "model": config.model,
        "data": config.data,
        "optim": config.optim,
        "images": config.images,
    }
    tables = {
        name: dataclasses.replace(parts[name], **fields)
        for name, fields in values.items()
        if isinstance(fields, dict)
    }
    return dataclasses.replace(config, **{**values, **tables})


def _check_multiple(
    name: str, value: int, of: str, divisor: int, advice: str = ""
) -> None:
    if value % divisor:
        raise InvalidValueError(
            f"expected {name} to be a multiple of {of}, got {value} and {divisor}{advice}"
        )


# The settings of a run that can be axes of a grid, with their sections.
SETTINGS: dict[str, str] = {
    **dict.fromkeys(("d_model", "n_layers", "n_heads", "head_dim"), "model"),
    **dict.fromkeys(("context", "batch"), "data"),
    **dict.fromkeys(("schedule", "weight_decay", "decay"), "optim"),
    "steps": "",
}


def variants(
    base: RunConfig, axes: Mapping[str, Sequence[object]]
) -> Iterator[tuple[str, RunConfig]]:
    """Yields a configuration for every combination of values, with a name that distinguishes it from the others.

    Axes with at most one value do not appear in names, so a grid of such axes has the same names as one without axes.

    >>> [name for name, _ in variants(RunConfig(), {"d_model": (32, 64), "steps": (10,)})]
    ['d_model 32', 'd_model 64']
    """
    varied = {axis: values for axis, values in axes.items() if values}
    for point in itertools.product(*varied.values()):
        values = dict(zip(varied, point))
        yield (
            ", ".join(
                f"{axis} {value}"
                for axis, value in values.items()
                if len(varied[axis]) > 1
            ),
            at(base, values),
        )


def at(base: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """Returns the configuration with these values, set together because one may be invalid without another."""
    fields: dict[str, dict[str, object]] = {"": {}}
    for axis, value in values.items():
        fields.setdefault(SETTINGS[axis], {})[axis] = value
    return with_values(base, **fields.pop(""), **fields)
