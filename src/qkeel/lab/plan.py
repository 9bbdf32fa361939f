"""Plans of studies: grids, planned runs, and what a study varies. `execute` runs a plan, `train` trains one run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, final

from qkeel.errors import InvalidTypeError, InvalidValueError, check
from qkeel.lab.config import SETTINGS, RunConfig, variants, with_values
from qkeel.options import Json, Term, parse

# The plan of a study: a product of remedies, learning rates and seeds, and tests of the trained weights.

# The annotation of a list -> the types of its values.
_KINDS: dict[str, tuple[type, ...]] = {
    "Sequence[str]": (str,),
    "Sequence[int]": (int,),
    "Sequence[float]": (int, float),
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The axes of a study, which has one run for every combination of a remedy, a learning rate and a seed.

    Remedies keep their order, rates and seeds are sorted, and duplicates are removed. In studies that compare forms of
    attention, the forms take the place of remedies.

    Every other non-empty axis (blocks, optimizers, data mixes, settings) divides the study into parts, one per
    combination of values. Remedies are compared only within a part, because the same learning rate has a different
    effect with a different optimizer or width.

    >>> Grid(remedies=["none"], lrs=[0.1, 0.01], seeds=[1, 0]).lrs
    (0.01, 0.1)
    """

    remedies: Sequence[str]  #: spec strings, such as "qk_clip:threshold=100"
    lrs: Sequence[float]  #: peak learning rates
    seeds: Sequence[int]  #: seeds of the initial weights and the batches
    blocks: Sequence[str] = ()  #: "mha", "mla", "gau"
    optimizers: Sequence[str] = ()  #: "adamw", "sgd", "muon"
    mixes: Sequence[str] = ()  #: names of mixes of text and images
    d_model: Sequence[int] = ()  #: width of the model
    n_layers: Sequence[int] = ()  #: number of blocks
    n_heads: Sequence[int] = ()  #: number of query heads per block
    head_dim: Sequence[int] = ()  #: width of one head
    context: Sequence[int] = ()  #: number of tokens per sequence
    batch: Sequence[int] = ()  #: number of sequences per step
    steps: Sequence[int] = ()  #: number of optimizer steps per run
    schedule: Sequence[str] = ()  #: "constant", "cosine" or "wsd"
    weight_decay: Sequence[float] = ()  #: weight decay of matrices, at least 0
    decay: Sequence[str] = ()  #: "coupled" or "independent" weight decay

    def __post_init__(self) -> None:
        _settle_lists(self)
        for name in ("remedies", "lrs", "seeds"):
            if not getattr(self, name):
                raise InvalidValueError(f"expected at least one of {name}, got none")
        object.__setattr__(self, "lrs", tuple(sorted({float(lr) for lr in self.lrs})))
        object.__setattr__(self, "seeds", tuple(sorted(self.seeds)))

    def settings(self) -> Json:
        """Returns the values of each axis that is a setting; an empty axis takes its value from the configuration."""
        return {axis: getattr(self, axis) for axis in SETTINGS}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LongContexts:
    """Tests of each trained run on held-out text: post-hoc methods at several lengths.

    The methods are those of `AttentionSpec.extrapolate`, as parsed by Method: 'rerope:window=16' applies to all forms,
    'kna/ntk' applies to one form, and 'baseline/pi@256' continues training at 256 tokens. Lengths are multiples of the
    training length.

    >>> LongContexts(posthoc=["none", "kna/ntk"]).of("qna").posthoc
    ('none',)
    """

    posthoc: Sequence[str] = ("none", "rerope", "ntk")  #: the methods, as strings
    test_lengths: Sequence[int] = (512,)  #: lengths in tokens
    sequences: int = 64  #: number of held-out sequences, at least 1
    continue_steps: int = 100  #: number of steps of continued training

    def __post_init__(self) -> None:
        _settle_lists(self)
        if not (self.posthoc and self.test_lengths):
            raise InvalidTypeError(
                f"expected a list of methods and a list of lengths, got {self}"
            )
        methods = dict.fromkeys(str(Method.parse(text)) for text in self.posthoc)
        object.__setattr__(self, "posthoc", tuple(methods))
        object.__setattr__(self, "test_lengths", tuple(sorted(self.test_lengths)))
        for name in ("sequences", "continue_steps"):
            value = getattr(self, name)
            # isinstance would let True through.
            if type(value) is not int:
                raise InvalidTypeError(
                    f"expected a whole number for {name}, got {value!r}"
                )
            check(value >= 1, f"at least 1 for {name}", value)

    def of(self, form: str) -> Self:
        """Returns the tests of one form, whose only method is "none" if no method applies to it."""
        methods = [Method.parse(text) for text in self.posthoc]
        labels = [method.label for method in methods if method.form in ("", form)]
        return dataclasses.replace(self, posthoc=labels or ["none"])

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """Every method at every length."""
        return list(itertools.product(self.posthoc, self.test_lengths))

    def check(self, train_length: int) -> None:
        """Raises InvalidValueError unless every length is a multiple of the training length."""
        for length in self.test_lengths:
            if length < train_length or length % train_length:
                raise InvalidValueError(
                    f"expected test lengths that are multiples of the training length {train_length}, got {length}"
                )
        for text in self.posthoc:
            at = Method.parse(text).trained_at
            if at and (at <= train_length or at % train_length):
                raise InvalidValueError(
                    f"expected continued training at a larger multiple of the training length {train_length}, got {at}"
                )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Primary:
    """The primary comparison of a study, which is named before its runs: two remedies by held-out loss, paired by seed.

    Only this comparison is judged, by one 95 % interval. All other comparisons are secondary, and the page gives their
    intervals without a verdict.
    """

    remedy: str  #: spec string of the remedy
    baseline: str = "none"  #: spec string of the remedy with which it is compared
    lr: float  #: learning rate of both

    def holds(self, run: PlannedRun) -> bool:
        """True if a run is part of the comparison."""
        return (
            run.role == "grid"
            and run.name in (self.remedy, self.baseline)
            and run.config.optim.lr == self.lr
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a study. `role` distinguishes runs with a different length, model or optimizer from the runs of the
    grid.

    `form` names the attention in studies that compare forms instead of remedies. `part` names the values of the grid's
    axes that distinguish the run's part of the study from other parts; it is included in the name of the role.

    >>> PlannedRun(config=RunConfig(seed=3)).title
    'none, lr 0.01, seed 3'
    """

    config: RunConfig
    role: str = "grid"
    form: str = ""
    part: str = ""

    @property
    def name(self) -> str:
        """What the study compares: the attention form, or the remedy."""
        return self.form or self.config.remedy

    @property
    def title(self) -> str:
        """Role, name, rate and seed, which identify the run within its study."""
        role = "" if self.role == "grid" else f"{self.role}, "
        return (
            f"{role}{self.name}, lr {self.config.optim.lr:g}, seed {self.config.seed}"
        )

    def entry(self) -> Json:
        """The run's entry in study.json."""
        config = self.config
        about = {
            "run_id": config.run_id,
            "remedy": self.name,
            "lr": config.optim.lr,
            "seed": config.seed,
            "role": self.role,
        }
        return {**about, "part": self.part} if self.part else about


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The name of a study, its grid, and its runs in the order of its table, with resolved configurations."""

    name: str  #: name of the study
    grid: Grid  #: the axes
    runs: Sequence[PlannedRun]  #: the runs, in the order of the table
    #: tests at longer lengths, or None for no tests
    contexts: LongContexts | None = None
    #: the primary comparison of the study, if it has one
    primary: Primary | None = None

    def bases(self) -> dict[str, Json]:
        """Returns, per role, the configuration that its runs share, without remedy, rate and seed."""
        return {
            run.role: shared(run.config, but_attention=bool(run.form))
            for run in self.runs
        }


Request = tuple[RunConfig, Grid, LongContexts | None]
# Options by name, from a command line.
StudyOptions = Mapping[str, Any]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class StudyOption:
    """An option of a study: a flag of its command.

    `kind` is the type, like int or list[str]; a list takes several words, and bool is a switch. `about` is the help
    text, including the default.
    """

    name: str
    kind: object
    about: str


AXIS_OPTIONS = (
    StudyOption("remedies", list[str], "Spec strings of the remedies."),
    StudyOption("lrs", list[float], "Peak learning rates."),
    StudyOption("seeds", list[int], "Seeds for weights and batches [default: 0 1 2]."),
)
OPTIMIZERS = StudyOption(
    "optimizers",
    list[Literal["adamw", "sgd", "muon"]],
    "Optimizers to compare [default for mla: adamw muon].",
)


def on_axes(base: RunConfig, default: Grid, given: StudyOptions) -> Request:
    """Returns the request for a study whose options are axes, where the given options override the default grid."""
    axes = {
        name: given.get(name) or values
        for name, values in dataclasses.asdict(default).items()
    }
    return base, Grid(**axes), None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study: its default grid, how a grid is turned into runs, and the options of its command.

    name, line: the name of its command and its line in the list of commands. help: text that follows the line in the
    help of the command. runs: creates the runs of a grid from one configuration. base: the default configuration, if it
    is not RunConfig(). request: turns the given options and the default grid into a configuration, a grid and contexts.
    decides: (section, name) of the settings that the study sets itself, which are therefore not flags of its command.
    out: the default directory, if it is not runs/NAME. primary: the primary comparison of the study; if it is None, all
    comparisons are judged together.

    To add a study, define a `Study` in `lab.studies` and add it to the table there; `make_plan` also takes one that is
    in no table.
    """

    name: str
    line: str
    help: str = ""
    grid: Grid
    runs: Callable[[RunConfig, Grid], Sequence[PlannedRun]]
    base: RunConfig | None = None
    contexts: LongContexts | None = None
    options: Sequence[StudyOption] = AXIS_OPTIONS
    request: Callable[[RunConfig, Grid, StudyOptions], Request] = on_axes
    decides: Collection[tuple[str, str]] = (("optim", "lr"),)
    out: str = ""
    primary: Primary | None = None

    def plan(
        self,
        base: RunConfig | None,
        grid: Grid | None,
        contexts: LongContexts | None = None,
    ) -> Plan:
        """Returns the study's plan; arguments that are None default to the study's own."""
        grid = grid or self.grid
        runs = []
        base = base or self.base or RunConfig()
        for part, variant in variants(base, grid.settings()):
            for run in self.runs(variant, grid):
                role = "" if run.role == "grid" else run.role
                names = ", ".join(filter(None, (role, part)))
                runs.append(dataclasses.replace(run, role=names or "grid", part=part))
        primary = self.primary
        if primary is not None:
            sides = {run.name for run in runs if primary.holds(run)}
            if sides != {primary.remedy, primary.baseline}:
                # The grid lacks a side of the comparison.
                primary = None
        return Plan(
            name=self.name,
            grid=grid,
            runs=runs,
            # A study without tests of its own has no use for those of a caller.
            contexts=self.contexts and (contexts or self.contexts),
            primary=primary,
        )


def _settle_lists(lists: Any) -> None:
    """Turns each list of a dataclass into a tuple without duplicates; raises InvalidTypeError if it is none."""
    for field in dataclasses.fields(lists):
        kinds = _KINDS.get(str(field.type))
        if kinds is None:
            continue
        values = getattr(lists, field.name)
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise InvalidTypeError(f"expected a list of {field.name}, got {values!r}")
        values = tuple(dict.fromkeys(values))
        for value in values:
            # True is an int, but not a seed.
            if not isinstance(value, kinds) or isinstance(value, bool):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise InvalidTypeError(
                    f"expected {names} in {field.name}, got {value!r}"
                )
        object.__setattr__(lists, field.name, values)


def shared(config: RunConfig, *, but_attention: bool = False) -> Json:
    """Returns the identity of a configuration without the values that a grid varies."""
    values = config.identity()
    varied = [("optim", "lr"), *([("model", "attention")] if but_attention else [])]
    for section, name in varied:
        del values[section][name]
    del values["remedy"], values["seed"]
    return values


def parts(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns one `product` per combination of the grid's blocks and optimizers, which are its role.

    If the grid has neither, it returns one product with the role "grid".
    """
    if not grid.blocks and not grid.optimizers:
        return product(base, grid)
    runs = []
    combinations = itertools.product(
        grid.optimizers or (base.optim.name,), grid.blocks or (base.model.block,)
    )
    for optimizer, block in combinations:
        config = with_values(base, model={"block": block}, optim={"name": optimizer})
        runs += product(config, grid, f"{block}, {optimizer}")
    return runs


def product(base: RunConfig, grid: Grid, role: str = "grid") -> list[PlannedRun]:
    """Returns the runs remedies × rates × seeds, in this order, each as a variant of `base`.

    >>> runs = product(RunConfig(), Grid(remedies=["none"], lrs=[0.1, 0.01], seeds=[0]))
    >>> [run.title for run in runs]
    ['none, lr 0.01, seed 0', 'none, lr 0.1, seed 0']
    """
    runs = []
    for remedy, lr, seed in itertools.product(grid.remedies, grid.lrs, grid.seeds):
        config = with_values(base, remedy=remedy, optim={"lr": lr}, seed=seed)
        runs.append(PlannedRun(config=config, role=role))
    return runs


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A post-hoc method, [FORM/]METHOD[+METHOD][@LENGTH], with options as in rerope:window=16+log_n.

    The methods are those of AttentionSpec.extrapolate and are applied one after the other. Without a form, they apply
    to all forms; with a length, training continues at that length with the changed attention.
    """

    terms: tuple[Term, ...]
    form: str = ""
    trained_at: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a method.

        >>> str(Method.parse("baseline/abf:base=500000@256"))
        'baseline/abf:base=500000@256'
        """
        if not isinstance(text, str):
            raise InvalidTypeError(
                f"expected a post-hoc method like 'rerope:window=16', got {type(text).__name__}"
            )
        form, _, method = text.rpartition("/")
        name, at, length = method.partition("@")
        if at and not (length.isdigit() and int(length) > 0):
            raise InvalidValueError(
                f"expected a length in tokens after the @, as in pi@256, got {text!r}"
            )
        return cls(terms=parse(name), form=form, trained_at=int(length) if at else 0)

    @property
    def label(self) -> str:
        """The method without its form."""
        name = "+".join(map(str, self.terms))
        return f"{name}@{self.trained_at}" if self.trained_at else name

    def __str__(self) -> str:
        return f"{self.form}/{self.label}" if self.form else self.label
