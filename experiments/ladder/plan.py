"""The plan of the ladder, committed before its first run: sizes, arms, rates, seeds, steps, questions and margins.

What was known when it was written: every result of docs/claims.md and docs/results, all of them at widths 16 to 256,
and an audit of them. The runs of the ladder have seeds of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from qkeel.lab import DataConfig, ModelConfig, OptimConfig, RunConfig

# Arm -> remedy. frozen_qk is the control: q and k at their first values.
ARMS: Mapping[str, str] = {
    "none": "none",
    "frozen_qk": "frozen_qk",
    "qk_norm": "qk_norm",
    "lalr": "lalr:tau=0.1",
    "qk_clip": "qk_clip:threshold=30",
    "autopilot": "autopilot",
}
# The policy of the autopilot was replaced when 0.13M and 1M were done, and no 10M run of it had begun. All rungs show
# the present policy. The runs of the first one at 0.13M and 1M are in `FIRST_POLICY`, and predictions made from them do
# not count; those of the present policy are made anew, before its first run on a rung.
AUTOPILOT, FIRST_POLICY = "autopilot", "first-policy"
Role = Literal["tuned", "above", "hot"]
FIRST_SEED = 5000  # no earlier study has seeds from here on
CORPUS = "1233677bc7b342c4ce0cad4736fe6d15c55cc2615e07e3a0c54b1a9f59e6a4ad"  # the bytes of CPython 3.11.7's library


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One size: its model, its data, how long it trains, at which rates, on how many seeds.

    `roles` are the rates that questions are asked at. "tuned" is 0.012 · 64 / width, rounded: 0.012 was best at width
    64 in the transfer study, and there the best rate fell about as 1 / width. "above" is 2.5 to 3.3 times that, "hot"
    8 to 10 times. They are fixed here, so nothing is chosen on the runs that are judged.
    """

    name: str
    model: ModelConfig
    data: DataConfig
    steps: int
    lrs: tuple[float, ...]
    roles: Mapping[Role, float]
    seeds: int
    points: tuple[tuple[str, float], ...] = ()
    """Arms and rates that are run, in this order, where that is not every arm at every rate."""
    accumulate: int = 1
    """Parts that a step is computed in: where products fill a core, four parts take 0.85 of the time of one (measured
    at 10M and 124M), for their numbers stay in the cache. bf16 would take 0.45, on processors that have it alone, and
    would change the arithmetic from rung to rung: all runs are float32."""
    together: int = 1
    """Seeds of one arm whose runs are done one after the other."""
    checkpoint_every: int = 100

    @property
    def parameters(self) -> int:
        """Parameters of the blocks' matrices and of the tables."""
        model = self.model
        tables = (1 if model.tied else 2) * (self.data.vocab_size or 256) * model.d_model
        return 12 * model.n_layers * model.d_model**2 + tables

    def config(self, arm: str, lr: float, seed: int) -> RunConfig:
        """The configuration of one run."""
        return RunConfig(
            model=self.model,
            data=self.data,
            optim=OptimConfig(lr=lr),
            remedy=ARMS[arm],
            seed=seed,
            steps=self.steps,
            accumulate=self.accumulate,
            log_every=self.steps // 20,
            checkpoint_every=self.checkpoint_every,
            device="cpu",
            dtype="fp32",
        )


def _data(context: int, batch: int, vocab_size: int | None = None) -> DataConfig:
    """The data of a rung: bytes, or with a `vocab_size` the byte pairs that `byte_pairs.write_tokens` writes."""
    return DataConfig(context=context, batch=batch, windows="once", vocab_size=vocab_size)


RUNGS: Mapping[str, Rung] = {
    rung.name: rung
    for rung in (
        Rung(
            name="0.13M",
            model=ModelConfig(d_model=64, n_layers=2, n_heads=4),
            data=_data(32, 32),
            steps=1000,
            lrs=(0.003, 0.006, 0.012, 0.03, 0.1, 0.3, 1.0),
            roles={"tuned": 0.012, "above": 0.03, "hot": 0.1},
            seeds=8,
            together=2,
        ),
        Rung(
            name="1M",
            model=ModelConfig(d_model=128, n_layers=5, n_heads=4),
            data=_data(128, 16),
            steps=500,
            lrs=(0.002, 0.006, 0.02, 0.06),
            roles={"tuned": 0.006, "above": 0.02, "hot": 0.06},
            seeds=4,
        ),
        Rung(
            name="10M",
            model=ModelConfig(d_model=320, n_layers=8, n_heads=5),
            data=_data(128, 16),
            steps=300,
            lrs=(0.0025, 0.008, 0.025),
            roles={"tuned": 0.0025, "above": 0.008, "hot": 0.025},
            seeds=2,
            accumulate=4,
            checkpoint_every=25,
        ),
        Rung(
            name="124M",
            model=ModelConfig(d_model=768, n_layers=12, n_heads=12, tied=True),
            data=_data(128, 8, 50257),
            steps=200,
            lrs=(0.001, 0.01),
            roles={"tuned": 0.001, "hot": 0.01},
            seeds=1,
            points=(
                *(("none", 0.01), ("qk_norm", 0.01), ("none", 0.001), ("qk_norm", 0.001)),
                *(("lalr", 0.01), ("autopilot", 0.01), ("frozen_qk", 0.01)),
            ),
            accumulate=4,
            checkpoint_every=20,
        ),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One run: where it stands in the plan."""

    rung: str
    arm: str
    lr: float
    seed: int

    @property
    def config(self) -> RunConfig:
        """Its configuration."""
        return RUNGS[self.rung].config(self.arm, self.lr, self.seed)


def units(rung: Rung) -> Iterator[list[Point]]:
    """Runs that train at once, seeds outermost: what is done when time is over is balanced over arms and rates."""
    seeds = range(FIRST_SEED, FIRST_SEED + rung.seeds)
    for first in seeds[:: rung.together]:
        own = range(first, first + rung.together)
        if rung.points:
            yield from ([Point(rung.name, arm, lr, seed)] for seed in own for arm, lr in rung.points)
            continue
        for arm in ARMS:
            points = [Point(rung.name, arm, lr, seed) for seed in own for lr in rung.lrs]
            yield from ([point] for point in points) if arm == "autopilot" else [points]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A number of every rung, by seed, and the statement about it: value = a + b · ln N, N the number of parameters.

    `left` less `right` at the rate of `role`: of held-out losses (nats per byte), or, where `logits`, the logarithm of
    the largest logit of `left` alone. `slope` is the standard deviation that b is expected to have around 0 before any
    rung is run, per unit of ln N, and `scatter` that of a rung around the line for reasons other than seeds (text,
    context, depth, steps and heads change with the rung). `margin` is the smallest value that matters.
    """

    name: str
    left: str
    right: str | None
    role: Role
    slope: float
    scatter: float
    margin: float
    logits: bool = False

    @property
    def of_autopilot(self) -> bool:
        """Whether it is about the autopilot."""
        return AUTOPILOT in (self.left, self.right)


# 0.01 nats per byte: training a run by another path, which rounds otherwise, moves its loss by up to 0.013 at two to
# three times the tuned rate, so nobody could rely on a smaller difference.
LOSS_MARGIN = 0.01
LOGIT_MARGIN = math.log(1.1)  # ten per cent of a largest logit; seeds differ by more
# At the tuned rate the cost of QK-norm over five sizes from 12,000 to 786,000 parameters had a standard deviation of
# 0.036, or 0.015 without the widest model of one block (gain-fit.csv, gain-test.csv): slope 0.01, scatter 0.02.
# At hot rates gains were 0.1 to 0.3 and differed by up to 0.1 between sizes.
COOL, WARM = (
    {"slope": 0.01, "scatter": 0.02, "margin": LOSS_MARGIN},
    {"slope": 0.03, "scatter": 0.05, "margin": LOSS_MARGIN},
)
# The frozen law of logits has a coefficient of 1.5 on ln width and 0.3 on ln blocks: about 0.7 per unit of ln N.
LOGITS: dict[str, Any] = {"slope": 0.7, "scatter": 0.5, "margin": LOGIT_MARGIN}


def _differences(pairs: Sequence[tuple[str, str]], role: Role) -> Iterator[Question]:
    known: dict[str, Any] = {**(COOL if role == "tuned" else WARM)}
    for left, right in pairs:
        yield Question(name=f"{left} - {right}, {role}", left=left, right=right, role=role, **known)


QUESTIONS: Sequence[Question] = (
    *_differences([("qk_norm", "none"), ("lalr", "none"), ("autopilot", "none")], "tuned"),
    *_differences([("lalr", "qk_norm"), ("none", "frozen_qk"), ("qk_norm", "frozen_qk")], "tuned"),
    *_differences([("qk_norm", "none"), ("lalr", "qk_norm"), ("autopilot", "qk_norm")], "above"),
    *_differences([("qk_norm", "none"), ("lalr", "none"), ("qk_clip", "none"), ("autopilot", "none")], "hot"),
    *_differences([("lalr", "qk_norm"), ("autopilot", "qk_norm")], "hot"),
    *_differences([("none", "frozen_qk"), ("qk_norm", "frozen_qk"), ("lalr", "frozen_qk")], "hot"),
    Question(name="ln z of none, tuned", left="none", right=None, role="tuned", logits=True, **LOGITS),
    Question(name="ln z of none, above", left="none", right=None, role="above", logits=True, **LOGITS),
    Question(name="ln z of none, hot", left="none", right=None, role="hot", logits=True, **LOGITS),
)
LEVEL = 0.9  # of predictions; over all rungs and questions 84 to 96 % of them are to hold, not merely 85 % or more
