"""The configuration of a training run: every field, its checks, and the axes of studies."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Self, final

from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.options import Json, read_fields, settle

# The configuration of a training run: frozen dataclasses. Flags, TOML recipes and config.json are views of them.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The decoder: sizes, what attention computes, layout."""

    d_model: int = 64
    """Width of the residual stream."""
    n_layers: int = 2
    """Number of blocks."""
    n_heads: int = 4
    """Query heads per layer."""
    n_kv_heads: int | None = None
    """Key and value heads per layer; as many as n_heads if not given."""
    head_dim: int | None = None
    """Width of one head; d_model / n_heads if not given."""
    attention: str = "baseline"
    """What attention computes: a preset, with options as in 'gemma2:cap=30'."""
    position: str = ""
    """Position in place of the form's, like 'alibi' or 'hwfa:window=16', several layers by '/'; empty keeps it."""
    block: Literal["mha", "mla", "gau"] = "mha"
    """Multi-head (grouped, multi-query), multi-head latent attention, or gated attention units, which take no MLP."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """The feed-forward branch."""
    mlp_ratio: float = 4.0
    """Hidden units of the feed-forward branch as a multiple of d_model."""
    norm_order: Literal["pre", "post", "swin", "peri", "none"] = "pre"
    """Where the norms of a block are, if it has any."""
    tied: bool = False
    """Whether the head shares the embedding's weights."""
    deepnorm: bool = False
    """DeepNorm's factors on the residual stream and at the start; for block gau with norm_order post."""
    parametrisation: Literal["standard", "mup"] = "standard"
    """How rates, logits and outputs depend on the width: not at all, or as in µP, so that a rate suits every width."""
    base_width: int = 64
    """Width at which µP is the standard parametrisation."""
    base_head_dim: int = 16
    """Size of a head at which µP is the standard parametrisation."""

    def __post_init__(self) -> None:
        settle(self)
        _check(self, "at least 1", _one, "d_model", "n_layers", "n_heads", "n_kv_heads")
        _check(self, "at least 1", _one, "head_dim", "base_width", "base_head_dim")
        _check_multiple("n_heads", self.n_heads, "n_kv_heads", self.n_kv_heads or 1)
        if self.block == "gau" and self.n_heads != 1:
            raise InvalidValueError(f"expected n_heads=1 for block gau, which has one head, got {self.n_heads}")
        if not self.mlp_ratio * self.d_model >= 1:
            raise InvalidValueError(f"expected an MLP of at least one unit, got mlp_ratio={self.mlp_ratio}")
        if self.parametrisation == "mup" and self.block != "mha":
            raise InvalidValueError(f"expected block mha with parametrisation mup, got {self.block}, which has no rule")
        if self.deepnorm and not (self.block == "gau" and self.norm_order == "post"):
            raise InvalidValueError("deepnorm is for block gau with norm_order post")
        if self.head_dim is None:
            _check_multiple("d_model", self.d_model, "n_heads", self.n_heads, "; change one of them or give head_dim")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The source of the text and how it is cut."""

    source: str = "stdlib"
    """stdlib, topics, hf:NAME, or a path: text file, folder, glob, .bin (uint16, or .bin#uint8), .jsonl#column,
    .parquet#column."""
    context: int = 32
    """Tokens per sequence."""
    batch: int = 8
    """Sequences per step."""
    vocab_size: int | None = None
    """Number of token ids; 256 for bytes, 1024 for bpe, the largest token + 1 for .bin if not given."""
    tokens: Literal["bytes", "bpe"] = "bytes"
    """Tokens of a text: its bytes, or byte pairs learned from its training part; losses are nats per byte for both."""
    task: Literal["text", "multimodal", "vision", "translation"] = "text"
    """Next tokens of text, of text and images in one sequence, the class of an image, or text in a second language."""
    windows: Literal["drawn", "once"] = "drawn"
    """Text: whether the windows of training are drawn independently, so that text may repeat, or each is used once."""
    needle: float = 0.0
    """Share of training sequences with needles: tokens over the text that hold a key and a value, and questions for
    the value of a key."""
    pairs: int = 1000
    """Translation: how many texts of the training part have a translation."""
    needle_keys: int = 4
    """Needles of a text, one for each key; ignored without needles."""

    def __post_init__(self) -> None:
        settle(self)
        _check(self, "at least 1", _one, "context", "batch", "vocab_size", "needle_keys", "pairs")
        _check(self, "between 0 and 1", _share, "needle")
        if self.needle and self.task != "text":
            raise InvalidValueError(f"needles are for task text, got needle {self.needle} and task {self.task}")
        if self.tokens == "bpe" and (self.needle or self.task != "text"):
            raise InvalidValueError("tokens bpe are for task text without needles; use tokens bytes")
        if self.windows == "once" and self.task != "text":
            raise InvalidValueError(f"windows once are for task text, got task {self.task}")
        if not self.source:
            raise InvalidValueError("expected the name or path of a corpus as data source, got an empty string")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImagesConfig:
    """Images and how a model sees them; of no meaning where the task is text."""

    images: str = "digits"
    """digits, photos, a folder of one subfolder per class, or a .jsonl of path and text."""
    image_size: int = 8
    """Height and width in pixels; images of another size are refused."""
    patch: int = 2
    """Height and width in pixels of what makes one token."""
    levels: int = 4
    """Multimodal: grey levels of a pixel; a patch is one of levels^(patch²) codes of the vocabulary."""
    image_input: Literal["codes", "patches"] = "codes"
    """Multimodal: an embedding per code, or a linear map of the patch's pixels."""
    image_share: float = 0.5
    """Multimodal: share of the sequences that hold an image and its caption."""
    image_variance: float = 1.0
    """Multimodal: variance of image embeddings before training; that of text is 1."""
    image_first: float = 0.5
    """Multimodal: share of the images that come before their caption."""
    canvas: int = 4
    """Multimodal: most images side by side on one canvas."""

    def __post_init__(self) -> None:
        settle(self)
        _check(self, "at least 1", _one, "image_size", "patch", "canvas")
        _check(self, "at least 2", lambda x: x >= 2, "levels")
        _check(self, "between 0 and 1", _share, "image_share", "image_first")
        _check(self, "above 0", _positive, "image_variance")
        _check_multiple("image_size", self.image_size, "patch", self.patch)
        if not self.images:
            raise InvalidValueError("expected the name or path of images, got an empty string")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """AdamW, SGD with momentum, or Muon (hidden matrices) with AdamW for the rest."""
    lr: float = 0.01
    """Peak learning rate."""
    beta1: float = 0.9
    """AdamW: decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW: decay of the mean of squared gradients."""
    eps: float = 1e-8
    """AdamW: added to the denominator."""
    momentum: float = 0.95
    """SGD and Muon: decay of the momentum."""
    weight_decay: float = 0.0
    """Weight decay of matrices, decoupled (SGD: coupled); gains have none."""
    decay: Literal["coupled", "independent"] = "coupled"
    """Whether a step's weight decay is multiplied by its rate, or by the rate's share of its peak."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    warmup: float = 0.1
    """Share of the steps in which the rate rises linearly."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """Schedule of the rate after the warm-up; wsd holds it, then falls linearly over the last fifth."""
    final: float = 0.05
    """Rate at the end as a share of the peak (cosine, wsd)."""
    z_loss: float = 0.0
    """Weight of the mean squared log-partition of the output logits in the training loss."""

    def __post_init__(self) -> None:
        settle(self)
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise InvalidValueError(f"expected a learning rate above 0, got {self.lr}")
        _check(self, "at least 0 and below 1", lambda x: 0 <= x < 1, "beta1", "beta2", "momentum")
        _check(self, "above 0", _positive, "eps")
        _check(self, "between 0 and 1", _share, "warmup", "final")
        _check(self, "at least 0", lambda x: 0 <= x < math.inf, "weight_decay", "grad_clip", "z_loss")
        if self.decay == "independent" and self.name == "sgd":
            raise InvalidValueError("independent weight decay is for adamw and muon; that of sgd is in its gradient")


_PARTS = (ModelConfig, DataConfig, OptimConfig, ImagesConfig)
# Cannot change a recorded number, so it is no part of what a run is.
_CADENCE = ("checkpoint_every",)
# Newer than the first runs: left out at its default, so that older runs keep their names.
_NEWER = {
    "data": {"needle": 0.0, "tokens": "bytes", "windows": "drawn"},
    "model": {"position": "", "deepnorm": False, "mlp_ratio": 4.0, "parametrisation": "standard"},
    "optim": {"decay": "coupled"},
    "": {"accumulate": 1, "nudge": 0},
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One training run. Everything in it decides the recorded numbers, except `checkpoint_every`."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)  #: the decoder
    data: DataConfig = dataclasses.field(default_factory=DataConfig)  #: the text
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)  #: the optimizer
    images: ImagesConfig = dataclasses.field(default_factory=ImagesConfig)  #: unused by text
    remedy: str = "none"
    """Spec string of the remedy, like 'lalr:tau=0.1+qk_clip'."""
    seed: int = 0
    """Decides initial weights and batches."""
    steps: int = 150
    """Optimizer steps."""
    accumulate: int = 1
    """Equal parts that a step's batch is computed in, one after the other, where it does not fit into memory whole."""
    log_every: int = 10
    """Steps between records; the first and the last step are always recorded."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 only at the end."""
    eval_every: int = 0
    """Steps between evaluations, a multiple of log_every; 0 only before and after training."""
    eval_sequences: int = 256
    """Held-out sequences over which val_loss is averaged."""
    probe_sequences: int = 4
    """Held-out sequences on which attention statistics are measured."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps; auto takes cuda where there is one, else the CPU."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of training; bf16 and fp16 (with loss scaling) are autocast over float32 weights; auto is bf16 on CUDA
    devices that have it."""
    compile: bool = False
    """Train through torch.compile."""
    threads: int = 1
    """CPU threads; they change the order of sums, hence the last digits."""
    nudge: int = 0
    """Float32 steps by which one weight is moved before training, to see how far two runs move apart."""

    def __post_init__(self) -> None:
        settle(self)
        for part, kind in zip((self.model, self.data, self.optim, self.images), _PARTS, strict=True):
            if not isinstance(part, kind):
                name = kind.__name__.removesuffix("Config").lower()
                raise InvalidTypeError(f"expected a {kind.__name__} as {name}, got {part!r}")
        _check(self, "at least 1", _one, "steps", "accumulate", "log_every", "threads")
        _check(self, "at least 1", _one, "eval_sequences", "probe_sequences")
        _check(self, "at least 0", lambda x: x >= 0, "seed", "checkpoint_every", "eval_every", "nudge")
        _check_multiple("batch", self.data.batch, "accumulate", self.accumulate)
        _check_multiple("eval_every", self.eval_every, "log_every", self.log_every)
        if self.model.parametrisation == "mup":
            _check_mup(self)
        if self.device.split(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise InvalidValueError(f"expected device auto, cpu, cuda, cuda:N or mps, got {self.device!r}")

    @property
    def run_id(self) -> str:
        """12 hex digits of the SHA-256 of everything that decides the numbers (see `identity`)."""
        text = json.dumps(self.identity(), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def identity(self) -> Json:
        """The configuration without checkpoint cadence and device number: what makes two runs the same run. Nor are
        images part of a run on text.
        """
        values = {k: v for k, v in self.to_dict().items() if k not in _CADENCE}
        for section, names in _NEWER.items():
            table = values[section] if section else values
            for name, nothing in names.items():
                if table[name] == nothing:
                    del table[name]
        if not self.data.needle:
            del values["data"]["needle_keys"]
        if self.model.parametrisation == "standard":
            del values["model"]["base_width"], values["model"]["base_head_dim"]
        if self.data.task != "translation":
            del values["data"]["pairs"]
        if self.data.task in ("text", "translation"):
            del values["images"]
        if self.data.task == "text":
            del values["data"]["task"]
        return {**values, "device": self.device.split(":")[0]}

    def to_dict(self) -> Json:
        """Plain values, nested like the dataclasses; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Reads nested plain values (TOML, JSON); what is missing has its default, unknown keys are refused."""
        return read_fields(cls, values, "")


def with_values(config: RunConfig, **values: object) -> RunConfig:
    """Returns the configuration with other values; those of a section are a table, all set at once.

    >>> with_values(RunConfig(), optim={"lr": 0.1}, seed=3).optim.lr
    0.1
    """
    parts = {"model": config.model, "data": config.data, "optim": config.optim, "images": config.images}
    tables = {name: dataclasses.replace(parts[name], **own) for name, own in values.items() if isinstance(own, dict)}
    return dataclasses.replace(config, **{**values, **tables})


def _check_mup(config: RunConfig) -> None:
    """Raises where µP has no rule for the optimizer or for what the model reads."""
    if config.optim.name != "adamw":
        raise InvalidValueError(f"expected optimizer adamw with parametrisation mup, got {config.optim.name}")
    if config.data.task == "vision" or config.images.image_input == "patches":
        raise InvalidValueError("parametrisation mup is for models that read tokens, not patches of images")


def _check(config: object, range_: str, holds: Callable[[float], bool], *names: str) -> None:
    """Raises unless every number of these names that is given lies in the range."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not holds(value):
            raise InvalidValueError(f"expected {name} to be {range_}, got {value}")


def _check_multiple(name: str, value: int, of: str, divisor: int, advice: str = "") -> None:
    if value % divisor:
        raise InvalidValueError(f"expected {name} to be a multiple of {of}, got {value} and {divisor}{advice}")


def _one(x: float) -> bool:
    return x >= 1


def _share(x: float) -> bool:
    return 0 <= x <= 1


def _positive(x: float) -> bool:
    return 0 < x < math.inf


# The axes of a grid that are settings of its runs: sizes, steps, parametrisation, schedule and weight decay.

# The section and name of the setting of each axis; the axis has the setting's name.
SETTINGS: dict[str, str] = {
    **dict.fromkeys(("d_model", "n_layers", "n_heads", "head_dim", "parametrisation"), "model"),
    **dict.fromkeys(("context", "batch"), "data"),
    **dict.fromkeys(("schedule", "weight_decay", "decay"), "optim"),
    "steps": "",
}


def variants(base: RunConfig, axes: Mapping[str, Sequence[object]]) -> Iterator[tuple[str, RunConfig]]:
    """Yields the configuration under every combination of values, and what tells it from the others in words.

    Axes of no or one value are in no name: such a grid has the names of one without axes.

    >>> [name for name, _ in variants(RunConfig(), {"d_model": (32, 64), "steps": (10,)})]
    ['d_model 32', 'd_model 64']
    """
    given = {axis: values for axis, values in axes.items() if values}
    for point in itertools.product(*given.values()):
        values = dict(zip(given, point))
        yield ", ".join(f"{axis} {value}" for axis, value in values.items() if len(given[axis]) > 1), at(base, values)


def at(base: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """The configuration with these values, those of a section all at once: one may not be possible without another."""
    fields: dict[str, dict[str, object]] = {"": {}}
    for axis, value in values.items():
        fields.setdefault(SETTINGS[axis], {})[axis] = value
    return with_values(base, **fields.pop(""), **fields)
