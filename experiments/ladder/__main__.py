"""`python -m experiments.ladder`: writes docs/ladder.md from the plan, the predictions and the rows that are there."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.files import read_json
from experiments.intervals import largest_stable_lr, quantile
from experiments.ladder.plan import ARMS, AUTOPILOT, FIRST_POLICY, LEVEL, QUESTIONS, RUNGS, Question, units
from experiments.ladder.predict import LEAST
from experiments.ladder.rows import RESULTS, Row, read, values

PAGE = Path(__file__).parents[2] / "docs" / "ladder.md"
_HEAD = """# The ladder: does it hold at 124 million?

Most results on the page of [claims](../experiments/notes/claims.md) come from models of 131,000 parameters, and none
from a large one. This
page asks the same questions of models with 1, 10 and 124 million parameters (GPT-2 small), by a plan that was committed
before its first run: `experiments/ladder/plan.py`. `python -m experiments.ladder.run` trains the runs that are still
missing and writes
this page; it
can be stopped and started at will, and never trains a run twice. The heading of each rung says how many of its runs are
done.

**What was known when the plan was written:** every result of the claims, the laws and their audit, all of them at
widths 16 to 256. No run of the ladder had been trained. Its seeds, from 5000 on, were in no study.

## Plan

Bytes of CPython 3.11.7's standard library; at 124M 50,257 byte pairs learned from it, losses per byte all the same.
No run reads a byte twice. AdamW, fused, warm-up of a tenth, cosine. Every run is float32, on a GPU too (without TF32):
bf16 is faster and would change the arithmetic from rung to rung. On a processor a run has one thread and the compiled
kernels.

"""
_STATEMENT = """

Rates are fixed here, not chosen on the runs: *tuned* is 0.012 · 64 / width, *above* 2.5 to 3.3 times that, *hot* 8 to
10 times. Arms: {arms}.

`frozen_qk` leaves q and k at their first values; at the tuned and the hot rate, losses are compared with it as well as
with no remedy. At 124M the plan has seven runs: `none` and `qk_norm` at both rates, and `lalr`, `autopilot` and
`frozen_qk` at the hot one.

**The statement.** Each difference of losses, and the logarithm of the largest logit, is modelled as a + b · ln N, where
N is the number of parameters, with a scatter of rungs and of seeds. `experiments/ladder/predict.py` predicts the mean
of a rung
from the smaller rungs, with an interval of 90 %, which is written next to the results before the rung's first run. The
frozen laws of [logits](../experiments/notes/results/drift-law.md) and [gains](../experiments/notes/results/gains.md)
predict all four rungs
(`experiments/ladder/results/frozen-laws.json`, in the commit of the plan); their intervals are for single runs.
The plan requires that 84 to 96 % of the measured values, over all rungs and questions, lie in their intervals. A
difference under 0.01 nats counts as none.

**What was changed.** The autopilot's policy was replaced ([why](../experiments/notes/autopilot-drawn.md)) when the
autopilot's runs at 0.13M
and 1M were done and its runs at 10M had not begun. All rungs show the present policy, with predictions that were made
anew before its first run on a rung. Runs of the first policy are in `experiments/ladder/results/first-policy.jsonl`.
Its
predictions for 1M, of which 3 of 4 were right, no longer count.

"""

_ANSWERS = """Losses are held-out losses in nats per byte: means over seeds, with intervals of 90 % by Student's t. At
124M, with one seed, the spread of seeds is that of the other rungs, pooled. For a rung whose runs are not all done, the
table shows what its rows say so far. Depth, context and text change from rung to rung as well as width, so the exponent
is that of all of them together. On the page of claims, attention at a rate of 0.1 ends collapsed in all 8 runs of 150
steps of 256 bytes; here, at the same size and rate, it ends collapsed in 1 of 8 runs of 1,000 steps of 1,024 bytes."""


def plan_table() -> Iterator[str]:
    """A line for each rung."""
    yield "| rung | parameters | width × blocks, heads | context, tokens a step, steps | rates | seeds | runs | done |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, rung in RUNGS.items():
        m, d = rung.model, rung.data
        total, done = sum(len(u) for u in units(rung)), len(read(name))
        yield (
            f"| {name} | {rung.parameters:,} | {m.d_model} × {m.n_layers}, {m.n_heads} of {m.d_model // m.n_heads} | "
            f"{d.context}, {d.batch * d.context:,}, {rung.steps:,} | {', '.join(f'{lr:g}' for lr in rung.lrs)} | "
            f"{rung.seeds} | {total} | {done} |"
        )


def measured(question: Question, rung: str, rows: Sequence[Row] | None = None) -> tuple[str, float | None]:
    """The mean over seeds with its interval of 90 %, and the mean.

    The interval is that of Student's t. A rung of one seed has no spread of its own: the spread of seeds there is that
    of all rungs with several seeds, pooled.
    """
    found = list(values(question, rung, read(rung) if rows is None else rows).values())
    if not found:
        return "", None
    mean = statistics.fmean(found)
    spread, freedom = spread_of_seeds([found])
    if not freedom:
        spread, freedom = spread_of_seeds([list(values(question, name, read(name)).values()) for name in RUNGS])
    if not freedom:
        return written(question, mean), mean
    half = quantile(LEVEL, freedom) * max(spread, LEAST) / math.sqrt(len(found))
    return f"{written(question, mean)} ({written(question, mean - half)} to {written(question, mean + half)})", mean


def spread_of_seeds(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The pooled standard deviation within groups, and its degrees of freedom; (0, 0) if no group has two values."""
    freedom = sum(len(group) - 1 for group in groups if group)
    squares = sum((x - statistics.fmean(group)) ** 2 for group in groups if group for x in group)
    return (math.sqrt(squares / freedom), freedom) if freedom else (0.0, 0)


def written(question: Question, value: float) -> str:
    """A logit itself, a difference of losses with its sign."""
    return f"{math.exp(value):,.3g}" if question.logits else f"{value:+.3f}".replace("-", "−")


def predicted(rung: str) -> dict[str, list[dict[str, Any]]]:
    """What was written before a rung's first run; of a rung that is not begun, the frozen laws alone."""
    path, of_autopilot = (RESULTS / f"predicted-{rung}{end}.json" for end in ("", f"-{AUTOPILOT}"))
    if path.exists():
        known, own = read_json(path), read_json(of_autopilot) if of_autopilot.exists() else {}
        said = {q.name: (own if q.of_autopilot else known).get(q.name) for q in QUESTIONS}
        return {name: found for name, found in said.items() if found is not None}
    return {name: [own] for name, own in read_json(RESULTS / "frozen-laws.json")[rung].items()}


def rung_table(rung: str) -> Iterator[str]:
    """Prediction beside result, question by question."""
    yield "| question | frozen law | fit to the smaller rungs | measured, 90 % | in the intervals |"
    yield "|---|---|---|---|---|"
    said, planned = predicted(rung), {(p.arm, p.lr) for unit in units(RUNGS[rung]) for p in unit}
    for question in QUESTIONS:
        if question.role not in RUNGS[rung].roles:
            continue
        own = {p["source"]: p for p in said.get(question.name, [])}
        texts = [
            ""
            if p is None
            else f"{written(question, p['value'])} ({written(question, p['low'])} to {written(question, p['high'])})"
            for p in (own.get("frozen law"), own.get("line"))
        ]
        text, mean = measured(question, rung)
        lr = RUNGS[rung].roles[question.role]
        if any(arm is not None and (arm, lr) not in planned for arm in (question.left, question.right)):
            text = "not planned"
        held = (
            []
            if mean is None
            else [
                f"{'fit' if s == 'line' else s}: {'yes' if p['low'] <= mean <= p['high'] else '**no**'}"
                for s, p in own.items()
            ]
        )
        name = question.name.replace("ln z", "largest logit")
        yield f"| {name} | {' | '.join(texts)} | {text} | {', '.join(held)} |"


def stable_table(rows: Sequence[Row], rung: str) -> Iterator[str]:
    """How many runs of each arm collapsed, or diverged, at each rate, and the mean loss."""
    yield "| arm | " + " | ".join(f"LR {lr:g}" for lr in RUNGS[rung].lrs) + " | no collapse up to |"
    yield "|---|" + "---|" * (len(RUNGS[rung].lrs) + 1)
    for arm in ARMS:
        cells = []
        for lr in RUNGS[rung].lrs:
            own = [r for r in rows if r["arm"] == arm and r["lr"] == lr]
            losses = [r["val_loss"] for r in own if r["val_loss"] is not None]
            lost, gone = (sum(r[name] for r in own) for name in ("collapsed", "diverged"))
            mean = f"{statistics.fmean(losses):.3f}" if losses else "–"
            cells.append(f"{mean}; {lost} of {len(own)} collapsed, {gone} diverged" if own else "")
        if any(cells):
            largest = largest_stable_lr([row for row in rows if row["arm"] == arm])
            yield f"| {arm} | {' | '.join(cells)} | {'–' if largest is None else f'{largest:g}'} |"


def answers(names: Sequence[str]) -> Iterator[str]:
    """What the page was made to answer, a line for each question and a column for each rung that has runs."""
    yield "| question | " + " | ".join(names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    asked = {question.name: question for question in QUESTIONS}
    texts = {
        "QK-norm at the tuned rate: its loss less that of no remedy": ["qk_norm - none, tuned"],
        "LALR less QK-norm: tuned; above; hot": [f"lalr - qk_norm, {role}" for role in ("tuned", "above", "hot")],
        "No remedy, QK-norm and LALR less frozen q and k, hot": [
            f"{arm} - frozen_qk, hot" for arm in ("none", "qk_norm", "lalr")
        ],
        "Autopilot less QK-norm: above; hot": [f"autopilot - qk_norm, {role}" for role in ("above", "hot")],
    }
    for text, of in texts.items():
        cells = ["; ".join(filter(None, [measured(asked[one], rung)[0] for one in of])) for rung in names]
        yield f"| {text} | {' | '.join(cells)} |"
    old = [first_policy([asked[one] for one in texts["Autopilot less QK-norm: above; hot"]], rung) for rung in names]
    yield f"| The same for the first policy | {' | '.join(old)} |"
    yield f"| Largest rate without a collapse, over that of no remedy | {' | '.join(map(stable_ratios, names))} |"
    yield f"| No remedy at the hot rate | {' | '.join(map(lost, names))} |"
    exponents = ["", *[exponent(*pair) for pair in itertools.pairwise(names)]]
    yield f"| Exponent of the largest logit in width since the rung before, tuned | {' | '.join(exponents)} |"


def first_policy(questions: Sequence[Question], rung: str) -> str:
    """What the runs of the autopilot's first policy say, where there are any."""
    own = [r for r in read(FIRST_POLICY) if r["rung"] == rung]
    rows = [*own, *(r for r in read(rung) if r["arm"] != AUTOPILOT)]
    return "; ".join(measured(question, rung, rows)[0] for question in questions) if own else ""


def stable_ratios(rung: str) -> str:
    """How many times as large a rate each arm trains at without a collapse; "≥" where that is the largest rate run."""
    rows, last = read(rung), max(RUNGS[rung].lrs)
    largest = {arm: largest_stable_lr([r for r in rows if r["arm"] == arm]) for arm in ARMS}
    base = largest.pop("none")
    if base is None:
        return ""
    return ", ".join(f"{arm} {'≥ ' if lr == last else ''}{lr / base:.3g}" for arm, lr in largest.items() if lr)


def lost(rung: str) -> str:
    """How many runs without a remedy collapsed or diverged at the hot rate."""
    own = [r for r in read(rung) if r["arm"] == "none" and r["lr"] == RUNGS[rung].roles["hot"]]
    collapsed, diverged = (sum(r[name] for r in own) for name in ("collapsed", "diverged"))
    return f"{collapsed} of {len(own)} collapsed, {diverged} diverged" if own else ""


def exponent(below: str, rung: str) -> str:
    """d ln z / d ln width between two rungs, with its interval of 90 % from the seeds of both, by Welch's t.

    Of a rung of one seed the spread is the pooled one, as in `measured`.
    """
    question = next(q for q in QUESTIONS if q.logits and q.role == "tuned")
    sides = [list(values(question, name, read(name)).values()) for name in (below, rung)]
    if not all(sides):
        return ""
    apart = math.log(RUNGS[rung].model.d_model / RUNGS[below].model.d_model)
    rise = (statistics.fmean(sides[1]) - statistics.fmean(sides[0])) / apart
    pooled = spread_of_seeds([list(values(question, name, read(name)).values()) for name in RUNGS])
    errors = []  # the variance of each mean, and its degrees of freedom
    for side in sides:
        spread, freedom = pooled if len(side) == 1 else spread_of_seeds([side])
        errors.append((spread**2 / len(side), freedom))
    total = sum(variance for variance, _ in errors)
    if not total or not all(freedom for _, freedom in errors):
        return f"{rise:.2f}".replace("-", "−")
    freedom = int(total**2 / sum(variance**2 / freedom for variance, freedom in errors))  # Welch and Satterthwaite
    half = quantile(LEVEL, freedom) * math.sqrt(total) / apart
    return f"{rise:.2f} ({rise - half:.2f} to {rise + half:.2f})".replace("-", "−")


def machine(row: Row) -> str:
    """What computed a run."""
    device = str(row.get("device", "cpu"))
    return f"{row['cpu']}, {row['kernels']} kernels" if device == "cpu" else device


def page() -> str:
    """The text of docs/ladder.md."""
    arms = ", ".join(f"`{remedy}`" for remedy in ARMS.values())
    lines = [_HEAD + "\n".join(plan_table()), _STATEMENT.format(arms=arms)]
    lines += ["## Answers", "", _ANSWERS, "", *answers([name for name in RUNGS if read(name)]), ""]
    lines += ["## Predictions and results", ""]
    for rung in RUNGS:
        rows, total = read(rung), sum(len(u) for u in units(RUNGS[rung]))
        state = (
            "not run yet"
            if not rows
            else "all runs done"
            if len(rows) == total
            else f"{len(rows)} of {total} runs done"
        )
        lines += [f"### {rung}: {state}", "", *rung_table(rung), ""]
        if rows:
            counted = statistics.fmean(r["bigrams"] for r in rows)
            made = sorted({f"commit {r['commit']}, {machine(r)}, torch {r['torch']}" for r in rows})
            hours = sum(r["cpu_seconds"] for r in rows) / 3600
            lines += [
                f"Mean held-out loss, nats per byte. Bigrams counted in the text that a run reads have {counted:.3f}.",
                "",
                *stable_table(rows, rung),
                "",
                f"Made by {'; '.join(made)}; {hours:.1f} core-hours.",
                "",
            ]
    held = [line for rung in RUNGS for line in rung_table(rung) if ": yes" in line or "**no**" in line]
    if held:
        yes, no = (sum(line.count(word) for line in held) for word in (": yes", "**no**"))
        lines += [
            f"{yes} of {yes + no} intervals of {LEVEL:.0%} contain the measured value ({yes / (yes + no):.0%}); the "
            "plan requires that 84 to 96 % do.",
            "",
        ]
    lines += [
        "**Next:** [Claims](../experiments/notes/claims.md), or "
        "[the law of logits](../experiments/notes/results/drift-law.md)."
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
