"""`qkeel recommend`: expected logits and remedies for a configuration, based on the measurements of the studies."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import final

from qkeel.errors import DataError, InvalidValueError
from qkeel.lab.build_run import learning_rate
from qkeel.lab.config import DataConfig, ModelConfig, RunConfig
from qkeel.options import Json
from qkeel.records import read_json
from qkeel.records.file_formats import read_toml
from qkeel.records.run_directory import flat
from qkeel.spec import PRESETS

# The law of logit growth, which gives the largest logit of a run as a function of its sizes and summed learning rates.

# Each variable is divided by the middle of the measured range before taking its logarithm.
MIDDLE = {"w": 64.0, "l": 2.0, "d": 16.0, "b": 8.0, "r": 0.03}
FIRST_STEP = 10  # before this step, the logits still have their values at initialisation
Law = Json  # a fit from evidence.json: coefficients, fitted, rates, half_widths


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A value expected for a single run, with an interval."""

    value: float  #: the expected value; on a logarithmic scale, the exponential of the middle
    low: float  #: the lower end of the interval
    high: float  #: the upper end of the interval


def sizes(config: RunConfig) -> dict[str, float]:
    """Returns the law's variables w, l, d, b and r: width, number of blocks, head size, batch size and peak rate."""
    model = config.model
    head = model.head_dim or model.d_model / model.n_heads
    return {"w": model.d_model, "l": model.n_layers, "d": head, "b": config.data.batch, "r": config.optim.lr}


def summed_rates(config: RunConfig) -> list[float]:
    """Returns the sum of learning rates after 0, 1, … steps."""
    sums = [0.0]
    for step in range(config.steps):
        sums.append(sums[-1] + learning_rate(config.optim, step, config.steps))
    return sums


def monomials(config: RunConfig, names: Sequence[str], summed: float) -> list[float]:
    """Returns the value of each monomial, like "" (which is 1), "s" or "ssw", where s = ln Σ lr and all other letters
    stand for ln(size / middle of its range), with the sizes of `sizes`."""
    letters = {letter: math.log(size / MIDDLE[letter]) for letter, size in sizes(config).items()}
    letters["s"] = math.log(summed)
    return [math.prod(letters[letter] for letter in name) for name in names]


def doublings(config: RunConfig, fitted: Mapping[str, Sequence[float]]) -> float:
    """Returns by how many doublings, summed over all axes, a configuration lies outside the fitted sizes."""
    spans = [(size, fitted[letter]) for letter, size in sizes(config).items() if letter in fitted]
    return sum(max(0.0, math.log2(low / size), math.log2(size / high)) for size, (low, high) in spans)


def band(config: RunConfig, law: Law) -> int:
    """Returns the index of the band of peak rates in which the configuration lies; each band has its own errors."""
    return sum(config.optim.lr > edge for edge in law["rates"])


def predict(config: RunConfig, law: Law, summed: float) -> Expected:
    """Returns Σ coefficient · monomial with an interval that widens with each doubling outside the fitted sizes.

    Args:
        config: the configuration of the run.
        law: the fit.
        summed: the sum of learning rates, Σ lr.
    """
    coefficients = law["coefficients"]
    value = sum(c * m for c, m in zip(coefficients.values(), monomials(config, list(coefficients), summed)))
    inside, outside = law["half_widths"][band(config, law)]
    half = inside + max(0.0, outside - inside) * doublings(config, law["fitted"])
    return Expected(value=value, low=value - half, high=value + half)


def expected_logit(config: RunConfig, law: Law, summed: float) -> Expected:
    """Returns the expected largest logit (nats, over layers and heads) when the learning rates sum to `summed`."""
    log = predict(config, law, summed)
    return Expected(value=math.exp(log.value), low=math.exp(log.low), high=math.exp(log.high))


# The evidence behind the advice, and the settings of a configuration that lie outside it.

EVIDENCE = Path(__file__).with_name("evidence.json")  # written by `python -m experiments.predictions.drift_law`
# Settings that do not affect learning, or do so only together with other settings that were not measured.
_NO_MATTER = ("seed", "remedy", "device", "compile", "threads", "nudge", "accumulate", "log_every", "eval_every")
_NO_MATTER += ("eval_sequences", "probe_sequences", "checkpoint_every", "model.n_heads", "model.base_width")
_NO_MATTER += ("model.base_head_dim", "data.needle_keys", "data.pairs")
_WORDS = {"model.d_model": "width", "model.n_layers": "blocks", "data.batch": "batch", "optim.name": "optimizer"}
_WORDS |= {"optim.lr": "learning rate", "model.head_dim": "size of a head", "data.source": "text"}


@functools.cache
def evidence() -> Json:
    """Returns the measurements: the law, the gain and cost of each remedy, and the rows on which they are based."""
    return read_json(EVIDENCE)


def settings(config: RunConfig) -> Json:
    """Returns the settings of a run that affect learning, by name, as in "model.d_model"."""
    model = config.model
    values = config.to_dict()
    del values["images"]
    values["model"]["head_dim"] = model.head_dim or model.d_model // model.n_heads
    values["model"]["n_kv_heads"] = model.n_kv_heads or model.n_heads
    values["model"]["kv_share"] = values["model"].pop("n_kv_heads") / model.n_heads
    values["data"]["vocab_size"] = config.data.vocab_size or 256
    values["dtype"] = config.dtype.replace("auto", "fp32")
    return {name: value for name, value in flat(values).items() if name not in _NO_MATTER}


def outside(config: RunConfig, boxes: Sequence[Json]) -> tuple[str, ...]:
    """Finds the box with the fewest settings outside the measured range, and returns a sentence for each such setting.

    A box maps the names of settings to lists. Two numbers are the lowest and the highest measured value; strings are
    the measured values. Any setting not named there was measured only at the studies' default value.
    """
    base, own = settings(RunConfig()), settings(config)
    found = []
    for box in boxes:
        spans = {name: box.get(name, [value]) for name, value in base.items()}
        found.append(
            tuple(_sentence(name, own[name], span) for name, span in spans.items() if not _in(own[name], span))
        )
    return min(reversed(found), key=len)


def _in(value: float, span: Sequence[float]) -> bool:
    return span[0] <= value <= span[1] if _is_range(span) else value in span


def _is_range(span: Sequence[object]) -> bool:
    return len(span) == 2 and not isinstance(span[0], str)


def _sentence(name: str, value: object, span: Sequence[object]) -> str:
    measured = f"{span[0]:g} to {span[1]:g}" if _is_range(span) else " or ".join(map(str, span))
    return f"{_WORDS.get(name, name.rpartition('.')[2].replace('_', ' '))} is {value}; measured: {measured}"


# Reading a configuration from a transformers config.json, a recipe, or a trained or watched run.

_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_PLAIN = ("llama", "mistral")  # model types whose attention is the baseline: RoPE and nothing else
KnownConfig = tuple[RunConfig, tuple[str, ...]]


def read_configuration(path: Path) -> KnownConfig:
    """Returns the configuration at a path, and a sentence for each setting that the configuration does not determine.

    Raises:
        DataError: the path is not a configuration, or a size is missing.
        InvalidValueError: a size is not an integer, or the recipe or run is invalid.
    """
    if path.suffix == ".toml":
        values = read_toml(path)
        values.pop("study", None)
        return RunConfig.from_dict(values), ()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"{path} is not a recipe (.toml), a config.json or a directory with a config.json. Pass one of these, or "
            "the sizes as flags"
        )
    values = read_json(file)
    if not isinstance(values, dict):
        raise DataError(f"{file} has {type(values).__name__}; expected an object with the settings of a model or a run")
    if values.get("kind") == "watch":
        return _watched(values, file)
    if "optim" in values:
        return RunConfig.from_dict(values), ()
    return _transformers(values, file)


def _transformers(values: Json, file: Path) -> KnownConfig:
    """Returns the sizes and attention of a transformers model, with the training settings of the studies."""
    text = values.get("text_config")  # a model of several modalities
    values = text if isinstance(text, dict) else values
    kind = str(values.get("model_type", "unknown"))
    attention = "baseline" if kind in _PLAIN else kind if kind in PRESETS else ""
    extra = () if attention else (f"attention is that of model type {kind}; measured: baseline",)
    kv, head = values.get("num_key_value_heads"), values.get("head_dim")
    model = ModelConfig(
        d_model=_whole(values, _WIDTH, file),
        n_layers=_whole(values, _DEPTH, file),
        n_heads=_whole(values, _HEADS, file),
        n_kv_heads=kv if isinstance(kv, int) else None,
        head_dim=head if isinstance(head, int) else None,
        attention=attention or "baseline",
        mlp="swiglu" if values.get("hidden_act") == "silu" else "gelu",
        tied=bool(values.get("tie_word_embeddings", False)),
    )
    vocabulary = _whole(values, ("vocab_size",), file)
    return RunConfig(model=model, data=DataConfig(vocab_size=vocabulary)), extra


def _watched(values: Json, file: Path) -> KnownConfig:
    """Returns the attention sizes of a watched model, whose text and number of steps are not recorded."""
    sites = [site for site in values.get("sites") or () if isinstance(site, dict)]
    if not sites:
        raise DataError(f"{file} belongs to a watched model without attention; expected at least one attention layer")
    heads, size = (_whole(sites[0], (key,), file) for key in ("n_heads", "head_dim"))
    model = ModelConfig(d_model=heads * size, n_layers=len(sites), n_heads=heads, head_dim=size)
    unknown = ("the text and steps of a watched model are not recorded; measured: the text and steps of the studies",)
    return RunConfig(model=model), unknown


def _whole(values: Json, keys: tuple[str, ...], file: Path) -> int:
    for key in keys:
        value = values.get(key)
        if value is not None:
            if type(value) is not int or value < 1:
                raise InvalidValueError(
                    f"expected {key} in {file} to be a whole number of at least 1, got {value!r:.60}"
                )
            return value
    raise DataError(f"{file} has no {keys[0]}; expected the config.json of a transformers model, or of a run")


# The recommendation: the expected logits and the gains of remedies, with intervals and evidence.

THRESHOLDS = (30.0, 100.0, 1000.0)  # nats; above the last, the loss suffers according to Wortsman et al. 2023
_STEPS = 5  # number of steps for which logits are printed
_ENDS = tuple(map(attrgetter, ("value", "high", "low")))
_NEAREST = 2  # rows of evidence to print if no row has exactly this size and rate


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemedyAdvice:
    """The expected effect of a remedy on a configuration."""

    remedy: str  #: spec string
    #: loss without minus loss with the remedy, in nats per byte, with an interval for one pair of runs; None if unknown
    gain: Expected | None
    cost: Expected  #: CPU time with the remedy relative to that without, for the work described in `cost_of`
    cost_of: str  #: the work whose time was measured, and the source of the measurement
    rows: Sequence[Json]  #: the nearest measurements: sizes, rate, mean gain with 95 % interval, seeds


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The advice for one configuration; `str` formats it as sentences, `dataclasses.asdict` as plain data."""

    outside: Sequence[str]  #: settings outside the measurements of logits; if there are any, `logits` is empty
    outside_gain: Sequence[str]  #: settings outside the measurements of gains; if there are any, gains are None
    level: float  #: coverage of the intervals, for logits of single runs and gains of single pairs
    logits: Sequence[tuple[int, Expected]]  #: steps, each with the largest logit expected at that step, in nats
    #: logits, each with the expected, earliest and latest step at which it is exceeded; None if not in this run
    passes: Sequence[tuple[float, int | None, int | None, int | None]]
    remedies: Sequence[RemedyAdvice]  #: every measured remedy, in descending order of gain

    @property
    def remedy(self) -> str | None:
        """The remedy with the largest expected gain whose interval lies above 0; None if there is none."""
        sure = [advice for advice in self.remedies if advice.gain and advice.gain.low > 0]
        return sure[0].remedy if sure else None

    def __str__(self) -> str:
        return "\n".join([*self._logits(), *self._remedies()])

    def _logits(self) -> list[str]:
        if self.outside:
            return [
                "expected logits: not known, because these settings are outside the measurements:",
                *(f"  {line}" for line in self.outside),
            ]
        lines = [f"expected largest logit (nats; {self.level:.0%} interval for a single run):"]
        lines += [
            f"  step {step}: {_number(z.value)} ({_number(z.low)} to {_number(z.high)})" for step, z in self.logits
        ]
        for logit, step, early, late in self.passes:
            when = "not in this run" if step is None else f"at step {step}"
            span = "never" if early is None else f"from step {early} on" if late is None else f"step {early} to {late}"
            lines.append(f"  passes {logit:g}: {when} ({span})")
        return lines

    def _remedies(self) -> list[str]:
        if self.outside_gain:
            lines = ["remedy: not known, because these settings are outside the measurements of gains:"]
            return lines + [f"  {line}" for line in self.outside_gain]
        shown = self.remedy or "none: no gain was found here"
        lines = [f"remedy: {shown} ({self.level:.0%} intervals for a single pair of runs)"]
        for advice in self.remedies:
            gain, cost = advice.gain, advice.cost
            if gain:
                span = f"{gain.low:+.3f} to {gain.high:+.3f}"
                lines.append(f"  {advice.remedy}: gain {gain.value:+.3f} ({span}) nats per byte")
                times = f"{cost.value:.3f} times ({cost.low:.3f} to {cost.high:.3f})"
                lines.append(f"    time: {times} that of {advice.cost_of}")
                lines += [f"    measured at {_row(row)}" for row in advice.rows]
        return lines


def recommend(source: RunConfig | str | Path) -> Recommendation:
    """Returns the expected logits of a configuration and the remedy to use, based on measured runs.

    ln z = Σ coefficient · monomial of ln Σ lr and of the logarithms of the sizes. The fit, its test on held-out sizes
    and the coverage of its intervals are described in experiments/notes/results/drift-law.md; for the gains, they are
    in
    experiments/notes/results/gains.md.

    Args:
        source: a configuration, or the path of a transformers config.json or its folder, of a recipe, or of the
            directory of a trained or watched run.

    Raises:
        InvalidValueError: the configuration is invalid.
        DataError: there is no configuration at the path.
        RunDirectoryError: a file of the run is damaged.

    >>> advice = recommend(RunConfig())
    >>> len(advice.outside), advice.logits[-1][0]
    (0, 150)
    """
    config, unknown = (source, ()) if isinstance(source, RunConfig) else read_configuration(Path(source))
    known = evidence()
    law = known["law"]
    beyond = (*unknown, *outside(config, law["boxes"]))
    if config.remedy != "none":  # the law is that of logits without a remedy; gains are those over no remedy
        beyond += (f"remedy is {config.remedy}; measured: none",)
    gains = (*unknown, *outside(config, known["gain_boxes"]))
    sums = summed_rates(config) if not beyond else [0.0]
    course = [(step, expected_logit(config, law, sums[step])) for step in range(FIRST_STEP, len(sums))]
    advice = [_advice(config, remedy, table, known=not gains) for remedy, table in known["remedies"].items()]
    advice.sort(key=lambda one: -(one.gain.value if one.gain else 0.0))
    return Recommendation(
        outside=beyond,
        outside_gain=gains,
        level=law["level"],
        logits=[course[round(i * (len(course) - 1) / (_STEPS - 1))] for i in range(_STEPS)] if course else [],
        passes=[_passes(logit, course) for logit in THRESHOLDS] if course else [],
        remedies=advice,
    )


def _advice(config: RunConfig, remedy: str, table: Json, *, known: bool) -> RemedyAdvice:
    """Returns the advice for one remedy; `known` is whether gains were measured for such a configuration."""
    cost = Expected(**{end: table["cost"][end] for end in ("value", "low", "high")})
    of = f"{table['cost']['of']} ({table['cost']['source']})"
    gain = predict(config, table["gain"], 1.0) if known else None
    rows = sorted(table["rows"], key=lambda row: _distance(config, row))[:_NEAREST] if known else []
    rows = rows[:1] if rows and not _distance(config, rows[0]) else rows
    return RemedyAdvice(remedy=remedy, gain=gain, cost=cost, cost_of=of, rows=rows)


def _distance(config: RunConfig, row: Json) -> float:
    """Returns the number of doublings of width, depth and rate between a configuration and a row of evidence."""
    own = sizes(config)
    return sum(
        abs(math.log2(own[letter] / row[name])) for letter, name in (("w", "width"), ("l", "depth"), ("r", "lr"))
    )


def _passes(logit: float, course: Sequence[tuple[int, Expected]]) -> tuple[float, int | None, int | None, int | None]:
    """Returns a logit with the first steps at which the expected value, its upper end and its lower end exceed it."""
    ends = [next((step for step, z in course if end(z) > logit), None) for end in _ENDS]
    return logit, ends[0], ends[1], ends[2]


def _row(row: Json) -> str:
    return (
        f"width {row['width']}, blocks {row['depth']}, rate {row['lr']:g}: {row['mean']:+.3f} ({row['low']:+.3f} to "
        f"{row['high']:+.3f}), {row['seeds']} seeds"
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
