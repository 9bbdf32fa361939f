"""The runs of a study: its grid, its plan, and rates tuned on one seed."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, final

from qkeel.errors import InvalidTypeError, InvalidValueError, RunDirectoryError, check
from qkeel.lab.config import SETTINGS, RunConfig, variants, with_values
from qkeel.options import Json, Term, parse

# The plan of a study: a product of remedies, rates and seeds, and what is done with the trained weights.

# The types of an axis; the others are text.
_NUMBERS = ("lrs", "weight_decay")
_WHOLE = ("seeds", "tuning_seeds", "test_lengths", "d_model", "n_layers", "n_heads", "head_dim", "context", "batch")
_KINDS = {**dict.fromkeys(_NUMBERS, (int, float)), **dict.fromkeys((*_WHOLE, "steps"), (int,))}
AXES = ("remedies", "lrs", "seeds", "blocks", "optimizers", "mixes", "tuning_seeds", *SETTINGS)
UNMOVED, MOVED = "unmoved", "moved"  # roles of the runs of a pair
FULL_GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)  # Wortsman et al. 2023, arXiv 2309.14322, section 2.1
# One remedy of each kind, that of the paper that it is from; all of them train in stacks.
ONE_OF_EACH = (
    *("none", "qk_norm", "qkv_norm", "softcap:cap=50", "qk_clip:threshold=30", "lalr:tau=0.1", "sigmoid"),
    *("key_norm", "qk_lr:factor=0.1", "swin_norm"),
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The axes of a study: it has a run for every combination of a remedy, a learning rate and a seed.

    Remedies keep their order; rates and seeds are sorted; what is named twice counts once. Where a study compares
    forms of attention, those take the place of remedies.

    Each further axis that is not empty divides the study into parts, one for each combination of their values: blocks
    (mha, mla), optimizers, mixes of data, and settings of the model, the data or the optimizer. Remedies are compared
    within a part only, since a learning rate does not mean the same to two optimizers or widths.

    With tuning seeds, each remedy runs in every part at the rate that is best for it on those seeds.
    """

    remedies: Sequence[str]  #: spec strings, such as "qk_clip:threshold=100"
    lrs: Sequence[float]  #: peak learning rates
    seeds: Sequence[int]  #: of the initial weights and the batches
    blocks: Sequence[str] = ()  #: "mha", "mla", "gau"
    optimizers: Sequence[str] = ()  #: "adamw", "sgd", "muon"
    mixes: Sequence[str] = ()  #: of the data's sources
    tuning_seeds: Sequence[int] = ()  #: seeds of the search for the rate
    d_model: Sequence[int] = ()  #: width of the model
    n_layers: Sequence[int] = ()  #: blocks of the model
    n_heads: Sequence[int] = ()  #: query heads of a block
    head_dim: Sequence[int] = ()  #: numbers of one head's query
    context: Sequence[int] = ()  #: tokens of a sequence
    batch: Sequence[int] = ()  #: sequences of a step
    steps: Sequence[int] = ()  #: optimizer steps of a run
    parametrisation: Sequence[str] = ()  #: "standard" or "mup"
    schedule: Sequence[str] = ()  #: "constant", "cosine" or "wsd"
    weight_decay: Sequence[float] = ()  #: of matrices, at least 0
    decay: Sequence[str] = ()  #: "coupled" or "independent" weight decay

    def __post_init__(self) -> None:
        _settle_lists(self, AXES)
        for name, values in zip(AXES, (self.remedies, self.lrs, self.seeds)):
            if not values:
                raise InvalidValueError(f"expected at least one of {name}, got none")
        object.__setattr__(self, "lrs", tuple(sorted({float(lr) for lr in self.lrs})))
        object.__setattr__(self, "seeds", tuple(sorted(self.seeds)))
        if both := sorted(set(self.seeds).intersection(self.tuning_seeds)):
            raise InvalidValueError(
                f"expected tuning seeds that no compared run has, got {both} among both: a rate chosen on the seeds "
                "that are compared makes its remedy look better than it is. Give other --tuning-seeds"
            )

    def settings(self) -> Json:
        """The values of each setting that is an axis, none where the configuration has it alone."""
        values = dataclasses.asdict(self)
        return {axis: values[axis] for axis in SETTINGS}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LongContexts:
    """The treatment of the weights of each run of a study: methods at every length, on held-out text.

    Methods are those of `AttentionSpec.extrapolate`, as Method reads them: 'rerope:window=16' for all forms,
    'kna/ntk' for one, 'baseline/pi@256' trained on at 256 tokens. Lengths are multiples of the training length.
    """

    posthoc: Sequence[str] = ("none", "rerope", "ntk")  #: the methods, as text
    test_lengths: Sequence[int] = (512,)  #: tokens
    sequences: int = 64  #: held-out sequences, at least 1
    continue_steps: int = 100
    """Steps of a method that is trained on."""

    def __post_init__(self) -> None:
        _settle_lists(self, ("posthoc", "test_lengths"))
        if not (self.posthoc and self.test_lengths):
            raise InvalidTypeError(f"expected a list of methods and one of lengths, got {self}")
        object.__setattr__(self, "posthoc", tuple(dict.fromkeys(str(Method.parse(text)) for text in self.posthoc)))
        object.__setattr__(self, "test_lengths", tuple(sorted(set(self.test_lengths))))
        if type(self.sequences) is not int or type(self.continue_steps) is not int:
            raise InvalidTypeError(f"expected whole numbers as sequences and continue_steps, got {self}")
        check(self.sequences >= 1, "at least 1 held-out sequence", self.sequences)
        check(self.continue_steps >= 1, "at least 1 step to train on", self.continue_steps)

    def of(self, form: str) -> Self:
        """Those of one form; as trained where no method is asked of it."""
        methods = [method for text in self.posthoc if (method := Method.parse(text)).form in ("", form)]
        return dataclasses.replace(self, posthoc=[method.label for method in methods] or ["none"])

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """Every method at every length."""
        return list(itertools.product(self.posthoc, self.test_lengths))

    def check(self, train_length: int) -> None:
        """Raises unless every length is a multiple of the training length."""
        for length in self.test_lengths:
            if length < train_length or length % train_length:
                raise InvalidValueError(
                    f"expected test lengths that are multiples of the training length {train_length}, got {length}"
                )
        for at in filter(None, (Method.parse(text).trained_at for text in self.posthoc)):
            if at <= train_length or at % train_length:
                raise InvalidValueError(
                    f"expected to train on at a multiple of the training length {train_length} above it, got {at}"
                )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Primary:
    """The comparison that a study is made to decide, named before its runs: by held-out loss, paired by seed.

    It is judged alone, by one interval of 95 %. All other comparisons of the study are secondary: the page gives their
    intervals without a verdict. `expected` and `spread` are what the number of seeds was chosen by; they are from
    other seeds than the study's, and hold for its own configuration only.
    """

    remedy: str  #: the spec string of the one
    baseline: str = "none"  #: that of the other
    lr: float  #: the learning rate of both
    expected: float | None = None  #: the difference that is to be shown, in nats
    spread: float | None = None  #: standard deviation of the differences of pairs, in nats
    source: str = ""  #: the runs that both numbers are from

    def holds(self, run: PlannedRun) -> bool:
        """Returns whether a run is one of those compared."""
        return run.role == "grid" and run.name in (self.remedy, self.baseline) and run.config.optim.lr == self.lr

    def without_power(self) -> Self:
        """The same for runs of another configuration, of which no spread is known."""
        return dataclasses.replace(self, expected=None, spread=None, source="")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a study. `role` keeps runs of another length, model or optimizer apart from the grid.

    `form` names the attention where that is what the study compares, instead of the remedy.
    """

    config: RunConfig
    role: str = "grid"
    form: str = ""
    part: str = ""
    """The values of the grid's axes that tell it from runs of the same role; they are part of the role's name."""

    @property
    def name(self) -> str:
        """The label that is compared: the attention form, or the remedy."""
        return self.form or self.config.remedy

    @property
    def title(self) -> str:
        """The words that tell it from the other runs of its study: role, name, rate and seed."""
        role = "" if self.role == "grid" else f"{self.role}, "
        return f"{role}{self.name}, lr {self.config.optim.lr:g}, seed {self.config.seed}"

    def entry(self) -> Json:
        """The run's line in study.json."""
        config = self.config
        about = {"run_id": config.run_id, "remedy": self.name, "lr": config.optim.lr, "seed": config.seed}
        return {**about, "role": self.role, **({"part": self.part} if self.part else {})}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A study's name, grid, and runs in the order of the table. Configurations are resolved."""

    name: str  #: of the study
    grid: Grid  #: its axes
    runs: Sequence[PlannedRun]  #: in the order of the table
    contexts: LongContexts | None = None  #: what is measured at longer lengths; None: nothing
    tuned: Sequence[Json] = ()
    """The rate that was chosen for each remedy of each role, see `lab.tuning`."""
    primary: Primary | None = None
    """The comparison that it is made to decide, where one is named."""

    def bases(self) -> dict[str, Json]:
        """Per role, what its runs share: their configuration without remedy, rate and seed."""
        return {run.role: shared(run.config, but_attention=bool(run.form)) for run in self.runs}


Request = tuple[RunConfig, Grid, LongContexts | None]
GivenOptions = Mapping[str, Any]  # options by name, as a command line or a recipe gives them


@final
@dataclasses.dataclass(frozen=True, slots=True)
class StudyOption:
    """An option of a study as a whole: a flag of its command, and a key of the table [study] of a recipe."""

    name: str
    kind: object
    """Its type, like int or list[str]; a list takes several words. bool is a switch, which no recipe has."""
    about: str
    """What it is, in a sentence, with its default."""


AXIS_OPTIONS = (
    StudyOption("remedies", list[str], "Remedies as spec strings."),
    StudyOption("lrs", list[float], "Peak learning rates."),
    StudyOption("seeds", list[int], "Seeds of weights and batches [default: 0 1 2]."),
    StudyOption("full_grid", bool, "Seven rates over three decades, 0.0003 to 0.3."),
    StudyOption("tune", Literal["lr"], "Compare each remedy at the best of the rates, which is chosen on other seeds."),
    StudyOption("tuning_seeds", list[int], "Seeds that rates are chosen on [default: 1000 1001 1002]."),
)
OPTIMIZERS = StudyOption(
    "optimizers", list[Literal["adamw", "sgd", "muon"]], "Optimizers, side by side; of mla adamw and muon if not given."
)
TUNING_SEEDS = (1000, 1001, 1002)


def on_axes(base: RunConfig, default: Grid, given: GivenOptions) -> Request:
    """Returns the request of a study whose options are axes: what is given of them over the default."""
    axes = {name: given.get(name) or values for name, values in dataclasses.asdict(default).items()}
    if given.get("full_grid"):
        axes["lrs"] = FULL_GRID
    if given.get("tune") and not given.get("tuning_seeds"):
        axes["tuning_seeds"] = TUNING_SEEDS
    return base, Grid(**axes), None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study: what it compares where nothing else is asked for, how that becomes runs, and what its command takes.

    A new study is a file of `lab.studies` that holds one of these, and a line of the table there.
    """

    help: str
    """What the help of its command says after its line in the table."""
    grid: Grid
    runs: Callable[[RunConfig, Grid], Sequence[PlannedRun]]
    """Makes the runs of a grid, each a variant of one configuration."""
    base: RunConfig | None = None
    """The configuration that it starts from, where that is not the default one."""
    contexts: LongContexts | None = None
    options: Sequence[StudyOption] = AXIS_OPTIONS
    request: Callable[[RunConfig, Grid, GivenOptions], Request] = on_axes
    """Makes configuration, grid and contexts of the options that are given and of the default grid."""
    decides: Collection[tuple[str, str]] = (("optim", "lr"),)
    """Section and name of the settings that the study gives its runs, as it gives them remedy and seed: no flags of its
    command."""
    instead: Mapping[str, Study] = dataclasses.field(default_factory=dict)
    """Studies of the same runs with another grid and base, by the switch that takes them in place of this one."""
    out: str = ""
    """The directory of its command, where that is not runs/NAME."""
    primary: Primary | None = None
    """The comparison that it is made to decide; None where all are judged alike, together."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The settings that its command takes several values of: those that it does not decide itself."""
        return tuple(axis for axis, section in SETTINGS.items() if self.options and (section, axis) not in self.decides)

    def plan(self, name: str, base: RunConfig | None, grid: Grid | None, contexts: LongContexts | None = None) -> Plan:
        """Returns the study's plan under this name; what is not given is its own."""
        grid = grid or self.grid
        contexts = self.contexts and (contexts or self.contexts)
        runs = []
        for part, variant in variants(base or self.base or RunConfig(), grid.settings()):
            for run in self.runs(variant, grid):
                both = (*((run.role,) if run.role != "grid" else ()), *((part,) if part else ()))
                runs.append(dataclasses.replace(run, role=", ".join(both) or "grid", part=part))
        return Plan(name=name, grid=grid, runs=runs, contexts=contexts, primary=self._primary(runs, base))

    def _primary(self, runs: Sequence[PlannedRun], base: RunConfig | None) -> Primary | None:
        """The primary comparison, where the runs hold both sides of it."""
        named = self.primary
        if named is None or {run.name for run in runs if named.holds(run)} != {named.remedy, named.baseline}:
            return None
        return named if base in (None, self.base or RunConfig()) else named.without_power()


def _settle_lists(of: object, names: Sequence[str]) -> None:
    """Makes each of these attributes a tuple in which everything stands once; raises where one is no list."""
    for name in names:
        values = getattr(of, name)
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InvalidTypeError(f"expected a list of {name}, got {values!r}")
        kinds = _KINDS.get(name, (str,))
        for value in values:
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise InvalidTypeError(f"expected {' or '.join(k.__name__ for k in kinds)} in {name}, got {value!r}")
        object.__setattr__(of, name, tuple(dict.fromkeys(values)))


def shared(config: RunConfig, *, but_attention: bool = False) -> Json:
    """The identity of a configuration without what a grid varies."""
    values = config.identity()
    if but_attention:
        values["model"] = {k: v for k, v in values["model"].items() if k != "attention"}
    optim = {k: v for k, v in values["optim"].items() if k != "lr"}
    return {**{k: v for k, v in values.items() if k not in ("remedy", "seed")}, "optim": optim}


def parts(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """A product for each of the grid's blocks and optimizers, its role their names; one "grid" where it has neither."""
    if not grid.blocks and not grid.optimizers:
        return product(base, grid)
    runs = []
    both = itertools.product(grid.optimizers or (base.optim.name,), grid.blocks or (base.model.block,))
    for optimizer, block in both:
        own = with_values(base, model={"block": block}, optim={"name": optimizer})
        runs += product(own, grid, f"{block}, {optimizer}")
    return runs


def product(base: RunConfig, grid: Grid, role: str = "grid") -> list[PlannedRun]:
    """Remedies × rates × seeds, in this order, each a variant of `base`."""
    runs = []
    for remedy, lr, seed in itertools.product(grid.remedies, grid.lrs, grid.seeds):
        config = with_values(base, remedy=remedy, optim={"lr": lr}, seed=seed)
        runs.append(PlannedRun(config=config, role=role))
    return runs


def pairs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """The product as it is, then with one weight moved by one float32 step; both train in the same stacks."""
    return [*product(base, grid, UNMOVED), *product(with_values(base, nudge=1), grid, MOVED)]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """[FORM/]METHOD[+METHOD][@LENGTH]: of AttentionSpec.extrapolate, with options as in rerope:window=16+log_n.
    Without a form it is for all; with a length the weights are trained on at it, the attention changed so.
    """

    terms: tuple[Term, ...]
    """Applied one after the other."""
    form: str = ""
    trained_at: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads one.

        >>> str(Method.parse("baseline/abf:base=500000@256"))
        'baseline/abf:base=500000@256'
        """
        if not isinstance(text, str):
            raise InvalidTypeError(f"expected a post-hoc method like 'rerope:window=16', got {type(text).__name__}")
        form, _, rest = text.rpartition("/")
        name, at, length = rest.partition("@")
        if at and not (length.isdigit() and int(length) > 0):
            raise InvalidValueError(f"expected a length in tokens behind the @, as in pi@256, got {text!r}")
        return cls(terms=parse(name), form=form, trained_at=int(length) if at else 0)

    @property
    def label(self) -> str:
        """It without its form."""
        name = "+".join(map(str, self.terms))
        return f"{name}@{self.trained_at}" if self.trained_at else name

    def __str__(self) -> str:
        return f"{self.form}/{self.label}" if self.form else self.label


# The learning rate of each remedy, chosen on seeds that no compared run has.

FOLDER = "tuning"  # of a study's directory: the study that its rates are chosen by


def tuning_plan(plan: Plan) -> Plan:
    """Returns the plan of what rates are chosen by: the runs of a plan, on the grid's tuning seeds."""
    grid = plan.grid
    first = [run for run in plan.runs if run.config.seed == grid.seeds[0]]
    configs = [(run, dataclasses.replace(run.config, seed=seed)) for run in first for seed in grid.tuning_seeds]
    runs = [dataclasses.replace(run, config=config) for run, config in configs]
    own = dataclasses.replace(grid, seeds=grid.tuning_seeds, tuning_seeds=())
    return dataclasses.replace(plan, grid=own, runs=runs, contexts=None)


def tuned_plan(plan: Plan, table: Sequence[Mapping[str, object]]) -> Plan:
    """Returns the plan with each remedy of each role at its best rate only: of the smallest mean loss on tuning seeds.

    A loss that is not finite counts as infinite; of two rates that are equally good the lower is taken. `border` of a
    choice says whether it is the lowest or highest rate of the grid, so that a better one may lie outside.

    Args:
        plan: with all rates. table: a row for each run of `tuning_plan(plan)`, and for others.

    Raises: RunDirectoryError where a run has no row, since it failed or another shard is to do it.
    """
    losses = {row["run_id"]: _loss(row["val_loss"]) for row in table if row["status"] == "done"}
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for run in tuning_plan(plan).runs:
        if run.config.run_id not in losses:
            raise RunDirectoryError(
                f"the run of {run.name} at rate {run.config.optim.lr:g} on tuning seed {run.config.seed} is not done, "
                "so no rate can be chosen: it failed, or another shard is to do it. Run this command again afterwards"
            )
        by_rate = found.setdefault((run.role, run.name), {})
        by_rate.setdefault(run.config.optim.lr, []).append(losses[run.config.run_id])
    tuned = [_chosen(role, name, by_rate, plan.grid.tuning_seeds) for (role, name), by_rate in found.items()]
    best = {(choice["role"], choice["remedy"]): choice["lr"] for choice in tuned}
    runs = [run for run in plan.runs if run.config.optim.lr == best[run.role, run.name]]
    return dataclasses.replace(plan, runs=runs, tuned=tuned)


def _chosen(role: str, name: str, by_rate: Mapping[float, Sequence[float]], seeds: Sequence[int]) -> Json:
    means = {lr: sum(losses) / len(losses) for lr, losses in sorted(by_rate.items())}
    rates = list(means)
    best = min(rates, key=lambda lr: means[lr])
    border = "lowest" if best == rates[0] else "highest" if best == rates[-1] else ""
    return {
        "role": role,
        "remedy": name,
        "lr": best,
        "val_loss": means[best] if math.isfinite(means[best]) else None,
        "border": border if len(rates) > 1 else "only",
        "lrs": rates,
        "seeds": list(seeds),
    }


def _loss(value: object) -> float:
    return value if isinstance(value, float) and math.isfinite(value) else math.inf


def in_words(choice: Json) -> str:
    """Returns a sentence about a choice.

    >>> in_words({"role": "grid", "remedy": "none", "lr": 0.1, "border": "highest", "seeds": [7]})
    'none: rate 0.1, chosen on seeds 7; the highest rate of the grid, so a better one may lie outside'
    """
    part = "" if choice["role"] == "grid" else f"{choice['role']}, "
    edge = f"; the {choice['border']} rate of the grid, so a better one may lie outside" if choice["border"] else ""
    seeds = " ".join(map(str, choice["seeds"]))
    return f"{part}{choice['remedy']}: rate {choice['lr']:g}, chosen on seeds {seeds}{edge}"


def check_choices(old: Sequence[Json], new: Sequence[Json], out: object) -> None:
    """Raises RunDirectoryError where a remedy was compared at another rate in the directory before."""
    before = {(choice["role"], choice["remedy"]): choice["lr"] for choice in old}
    for choice in new:
        rate = before.get((choice["role"], choice["remedy"]), choice["lr"])
        if rate != choice["lr"]:
            raise RunDirectoryError(
                f"{out} compares {choice['remedy']} at rate {rate:g}, and with more rates or tuning seeds "
                f"{choice['lr']:g} is chosen. Choose another directory; the compared runs were not changed."
            )
