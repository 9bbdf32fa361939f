"""The host's time of a training step that is watched or remedied: milliseconds, Python calls and torch's operators per
layer over the plain step.

Launches and bytes say what a device pays. Where a step is short, the host pays more: Python's functions, torch's
operators, modes and hooks. Here a step is forward, backward and fused AdamW of a model of width 64 on few tokens, so
that next to nothing but the host is timed, as processor time of the process.

Steps with and without the hooks of a watcher are taken by the same model and optimizer, in blocks of four that follow
each other. The first step of a block is not timed, and the fastest of the others counts, because what disturbs a step
only adds to it. The figure of a case is the median over pairs of blocks of their difference, with the 95 % interval of
that median by order statistics, which holds for any distribution of the noise. A goal holds if the whole interval is
within it, is missed if the whole interval is beyond it, and is undecided otherwise. The row of the plain step compared
with itself shows what the method finds where there is nothing to find.

Calls of Python functions and operators of torch come out the same on every machine. What a search for attention takes,
in `find_sites` and `apply`, is given in plain steps of the same model, with the number of its forward passes.

python -m benchmarks.host_time [--only llama] [--seconds 200] [--searches]
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import qkeel
from benchmarks.hook_by_hand import by_hand
from benchmarks.measure import Bench, median_interval, take_turns
from qkeel.errors import QkeelError
from qkeel.lab.build_run import resolve
from qkeel.lab.checkpoint import RunState
from qkeel.lab.config import RunConfig
from qkeel.lab.train import train_step
from qkeel.monitor import Adaptive, Every, LogSpaced
from qkeel.nn import Decoder, DecoderConfig

WIDTH, HEADS, TOKENS, BATCH, VOCABULARY = 64, 4, 32, 2, 128
NEVER = 1 << 40  # steps: never again after the first
STEPS = 3  # timed in a row, of which the fastest counts; passes that are searched as a whole are so left out
PERIOD = (
    10  # steps in a row, of which the mean counts, where not every step does the same
)
WARM = 6  # watched steps before: the search for attention, and the passes that are searched as a whole
Watcher = Callable[[nn.Module, Optimizer, Tensor], object]


def transformers_model(kind: str, layers: int, attention: str = "sdpa") -> nn.Module:
    """A causal language model of transformers: "Llama", "GPT2" or "Qwen3"."""
    import transformers

    sizes: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "attn_implementation": attention,
    }
    if kind == "GPT2":
        sizes |= {
            "n_embd": WIDTH,
            "n_layer": layers,
            "n_head": HEADS,
            "n_positions": 2 * TOKENS,
        }
    else:
        sizes |= {
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": layers,
        }
        sizes |= {
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "max_position_embeddings": 2 * TOKENS,
        }
    if kind == "Qwen3":
        sizes["head_dim"] = WIDTH // HEADS
    name = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes))


class Own(nn.Module):
    """A Decoder of qkeel's modules, called as the models of transformers are."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = DecoderConfig(
            vocab_size=VOCABULARY, d_model=WIDTH, n_layers=layers, n_heads=HEADS
        )
        self.decoder = Decoder(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder(input_ids)


MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "transformers' Llama, SDPA": lambda layers: transformers_model("Llama", layers),
    "transformers' Llama, eager": lambda layers: transformers_model(
        "Llama", layers, "eager"
    ),
    "transformers' GPT-2": lambda layers: transformers_model("GPT2", layers),
    "transformers' Qwen3": lambda layers: transformers_model("Qwen3", layers),
    "qkeel's Decoder": Own,
}


def watched(**options: object) -> Watcher:
    """A watcher by `qkeel.watch` with these options."""
    return lambda model, optimizer, _: qkeel.watch(model, optimizer, **options)  # type: ignore[arg-type]


def applied(remedy: str) -> Watcher:
    """A watcher by a remedy."""
    return lambda model, optimizer, ids: qkeel.apply(
        model, remedy, optimizer, batch=ids
    )


def recorded(model: nn.Module, optimizer: Optimizer, _: Tensor) -> object:
    """A watcher that writes a run directory, into a place that is deleted with the watcher."""
    place = tempfile.TemporaryDirectory()
    return qkeel.watch(
        model, optimizer, stats="max", sinks=Path(place.name) / "run"
    ), place


def clipped_as_megatron(model: nn.Module, optimizer: Optimizer, _: Tensor) -> object:
    """QK-Clip as Megatron-LM and torchtitan do it, on a CPU: each layer's largest logits kept in a list, read on the
    host one layer after the other when the optimizer has stepped, and compared with the threshold.

    Their kernels return these maxima; here they are read from q and k, as torchtitan's FlexAttention does on a CPU."""
    plain, found = F.scaled_dot_product_attention, list[Tensor]()

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *args: object,
        **kw: object,
    ) -> Tensor:
        with torch.no_grad():
            scores = q @ k.mT * (kw.get("scale") or q.shape[-1] ** -0.5)
            if kw.get("is_causal"):
                scores = scores.masked_fill(
                    torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
                )
            found.append(scores.amax((0, 2, 3)))
        return plain(q, k, v, attn_mask, *args, **kw)  # type: ignore[arg-type]

    @torch.no_grad()
    def clip(*_: object) -> None:
        for top in found:
            gamma = torch.where(
                top > 1e9, 1e9 / top, 1.0
            )  # deep models pass 100 within the steps that are timed
            if torch.any(gamma < 1.0):
                raise AssertionError("no logit of this benchmark is over the threshold")
        found.clear()

    F.scaled_dot_product_attention = attention
    return optimizer.register_step_post_hook(clip)


PLAIN = "the plain step, compared with itself"
WATCHERS: Mapping[str, Watcher] = {
    PLAIN: lambda *_: None,
    "watch()": watched(),
    'watch(stats="max")': watched(stats="max"),
    'watch(stats="max"), a run directory': recorded,
    "watch(every=10)": watched(every=10),
    'watch(stats="max", every=10)': watched(stats="max", every=10),
    "watch(LogSpaced)": watched(every=LogSpaced()),
    "watch(Adaptive), between measured steps": watched(
        every=Adaptive(least=NEVER, most=NEVER)
    ),
    "watch, no step measured": watched(every=Every(NEVER)),
    "autopilot": lambda model, optimizer, ids: qkeel.autopilot(
        model, optimizer, batch=ids
    ),
    'watch(stats="max") and qk_clip': lambda model, optimizer, ids: (
        qkeel.watch(model, optimizer, stats="max"),
        qkeel.apply(model, "qk_clip", optimizer, batch=ids),
    ),
    "qk_clip": applied("qk_clip"),
    "lalr": applied("lalr"),
    "lalr+qk_clip": applied("lalr+qk_clip"),
    "qk_lr": applied("qk_lr:factor=0.5"),
    "qk_weight_decay": applied("qk_weight_decay:decay=0.01"),
    "spectral_cap": applied("spectral_cap"),
}
PEERS: Mapping[str, Watcher] = {
    "by hand: maxima and entropies from T×T scores": by_hand,
    "QK-Clip as in Megatron-LM and torchtitan": clipped_as_megatron,
}
PERIODIC = {"watch(every=10)", 'watch(stats="max", every=10)'}
# Milliseconds per layer of transformers' Llama; of these cases the tables consist by default, and of the peers.
GOALS = {
    'watch(stats="max")': 0.5,
    "watch()": 1.0,
    "watch, no step measured": 0.02,
    "qk_clip": 0.15,
    "lalr": 0.05,
}


def applied_and_removed(remedy: str) -> Watcher:
    """A watcher that applies a remedy and removes it at once."""
    return lambda model, optimizer, ids: qkeel.apply(
        model, remedy, optimizer, batch=ids
    ).remove()


# What looks for attention in a model: once, not in every step.
SEARCHES: Mapping[str, Watcher] = {
    "find_sites": lambda model, _, ids: qkeel.find_sites(model, ids),
    'apply("qk_norm")': applied_and_removed("qk_norm"),
    'apply("qk_clip")': applied_and_removed("qk_clip"),
    'apply("lalr")': applied_and_removed("lalr"),
    'apply("softcap")': applied_and_removed("softcap"),
}


class Case:
    """One model in training, whose steps are taken with a watcher's hooks or without them."""

    def __init__(
        self, model: Callable[[int], nn.Module], layers: int, watcher: Watcher | None
    ) -> None:
        torch.manual_seed(0)
        self.model, self.layers = model(layers), layers
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(
            0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1)
        )
        bare = [(table, name, _copied(table[name])) for table, name in self._hooked()]
        self._handle = (
            None if watcher is None else watcher(self.model, self.optimizer, self.ids)
        )
        own = [table[name] for table, name, _ in bare]
        self._slots = [
            (*slot, x)
            for slot, x in zip(bare, own)
            if x is not slot[2] and x != slot[2]
        ]
        self._set(watched=False)
        with self.watched():
            for _ in range(WARM):
                self.step()

    def _hooked(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Everything by which a watcher is called: tables of hooks, observers of modules, torch's function."""
        names = (
            "_forward_pre_hooks",
            "_forward_hooks",
            "_forward_pre_hooks_with_kwargs",
        )
        names += (
            "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called",
            "observers",
        )
        for module in self.model.modules():
            yield from ((vars(module), name) for name in names if name in vars(module))
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            yield vars(self.optimizer), name
        yield F.__dict__, "scaled_dot_product_attention"

    def _set(self, *, watched: bool) -> None:
        for table, name, bare, own in self._slots:
            table[name] = own if watched else bare

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Steps in this context are watched."""
        self._set(watched=True)
        try:
            yield
        finally:
            self._set(watched=False)

    def step(self) -> None:
        """One training step."""
        out = self.model(self.ids)
        logits = out if isinstance(out, Tensor) else out.logits
        F.cross_entropy(logits.flatten(0, 1), self.ids.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self) -> None:
        with self.watched():
            for _ in range(STEPS):
                self.step()

    def milliseconds(self, *, watched: bool, periodic: bool = False) -> float:
        """Returns the processor time of a step: the least of a few after one that is not timed, or their mean."""
        self._set(watched=watched)
        try:
            return _milliseconds(self.step, periodic=periodic)
        finally:
            self._set(watched=False)

    def python_calls(self, steps: int = 20, *, watched: bool = True) -> float:
        """Returns how many Python functions a step calls, generators counted each time that they go on."""
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        self._set(watched=watched)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            for _ in range(steps):
                self.step()
        finally:
            sys.setprofile(before)
            self._set(watched=False)
        return count / steps

    def operators(self, steps: int = 4, *, watched: bool = True) -> float:
        """Returns how many operators of torch a step calls, those that others call included."""
        profile = torch.autograd.profiler.profile(
            use_kineto=False
        )  # the newer one takes seconds to begin
        self._set(watched=watched)
        try:
            with profile:
                for _ in range(steps):
                    self.step()
        finally:
            self._set(watched=False)
        assert profile.function_events is not None
        return sum("::" in event.name for event in profile.function_events) / steps


def _copied(x: Any) -> Any:
    return x if callable(x) else type(x)(x)


def _milliseconds(step: Callable[[], object], *, periodic: bool = False) -> float:
    step()
    times = []
    for _ in range(PERIOD if periodic else STEPS):
        begun = time.process_time_ns()
        step()
        times.append((time.process_time_ns() - begun) / 1e6)
    return statistics.fmean(times) if periodic else min(times)


def per_layer(
    model: Callable[[int], nn.Module],
    watchers: Mapping[str, Watcher],
    layers: int,
    seconds: float,
    goals: Mapping[str, float],
) -> dict[str, dict[str, float | str]]:
    """Returns, by case, milliseconds, Python calls and operators per layer over the plain step."""
    begun = time.perf_counter()
    cases = {name: Case(model, layers, watcher) for name, watcher in watchers.items()}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for turn in itertools.count():
        if turn > 5 and time.perf_counter() - begun > seconds:
            break
        for name, case in cases.items() if turn % 4 < 2 else reversed(cases.items()):
            # Which of the two comes first changes from turn to turn.
            both = [
                case.milliseconds(watched=watched, periodic=name in PERIODIC)
                for watched in ((False, True) if turn % 2 else (True, False))
            ]
            pairs[name].append((both[0], both[1]) if turn % 2 else (both[1], both[0]))
    found: dict[str, dict[str, float | str]] = {}
    for name, case in cases.items():
        over = [(watched - plain) / layers for plain, watched in pairs[name]]
        low, high = median_interval(over)
        calls, operators = (
            [count(4, watched=on) for on in (False, True)]
            for count in (case.python_calls, case.operators)
        )
        found[name] = {
            "plain_ms": statistics.median(plain for plain, _ in pairs[name]),
            "ratio": statistics.median(
                watched / plain for plain, watched in pairs[name]
            ),
            "ms_per_layer": statistics.median(over),
            "low": low,
            "high": high,
            "pairs": len(over),
            "calls_per_layer": (calls[1] - calls[0]) / layers,
            "operators_per_layer": (operators[1] - operators[0]) / layers,
        }
        if name in goals:
            found[name] |= {
                "goal": goals[name],
                "verdict": verdict(low, high, goals[name]),
            }
    return found


def verdict(low: float, high: float, goal: float) -> str:
    """Returns what an interval says of a goal, an upper limit.

    >>> verdict(0.1, 0.2, 0.2), verdict(0.1, 0.2, 0.15), verdict(0.1, 0.2, 0.05)
    ('holds', 'undecided', 'missed')
    """
    return "holds" if high <= goal else "missed" if low > goal else "undecided"


def micro_training(seconds: float) -> dict[str, float | str]:
    """Returns the time of a whole training of the lab's micro model with every step measured, over that without.

    The step is that of the lab, and the watched run has the search for its attention and the closing of the monitor in
    it. Runs take turns."""

    def train(watched: bool) -> float:
        state = RunState(resolve(RunConfig(device="cpu")))
        steps = state.config.steps
        begun = time.process_time_ns()
        monitor = (
            qkeel.watch(state.model, state.optimizer, every=1) if watched else None
        )
        for step in range(steps):
            train_step(state, step)
        if monitor is not None:
            monitor.close()
        return (time.process_time_ns() - begun) / 1e6

    begun, pairs = time.perf_counter(), list[tuple[float, float]]()
    for turn in itertools.count():
        if turn > 5 and time.perf_counter() - begun > seconds:
            break
        both = [
            train(watched) for watched in ((False, True) if turn % 2 else (True, False))
        ]
        pairs.append((both[0], both[1]) if turn % 2 else (both[1], both[0]))
    ratios = [watched / plain for plain, watched in pairs]
    low, high = median_interval(ratios)
    return {
        "plain_ms": statistics.median(plain for plain, _ in pairs),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "pairs": len(pairs),
        "goal": 1.1,
        "verdict": verdict(low, high, 1.1),
    }


def passes_of(
    search: Watcher, model: nn.Module, optimizer: Optimizer, ids: Tensor
) -> int:
    """Returns how many forward passes of the whole model a search takes."""
    passes = (
        itertools.count()
    )  # not a number or a list, which a search puts back as it was

    def count(_module: object, args: object, kwargs: object) -> object:
        next(passes)
        return args, kwargs  # a hook that returns nothing is held back in a search

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        search(model, optimizer, ids)
    finally:
        hook.remove()
    return next(passes)


def searched(
    model: Callable[[int], nn.Module], layers: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Returns, by search, its time in plain steps of the model and in milliseconds, and its forward passes. A search
    that refuses the model is left out."""
    plain = Case(model, layers, None)
    found: dict[str, dict[str, float]] = {}
    for name, search in SEARCHES.items():
        case = Case(model, layers, None)
        given = case.model, case.optimizer, case.ids
        try:
            passes = passes_of(search, *given)
        except QkeelError as error:
            print(f"  {name:<48} refused: {error}")
            continue
        turns = {"plain": plain, name: functools.partial(search, *given)}
        step, row = take_turns(turns, rounds, warmup=1)
        ratios = [STEPS * b / a for a, b in zip(step.times, row.times)]
        found[name] = {
            "ms": statistics.median(row.times),
            "plain_steps": statistics.median(ratios),
            "least_plain_steps": STEPS * min(row.times) / min(step.times),
            "passes": passes,
        }
    return found


def print_searches(title: str, found: Mapping[str, Mapping[str, float]]) -> None:
    """Prints what searches take, in plain steps of the model."""
    print(f"\n{title}: plain steps, median and least")
    for search, row in found.items():
        print(
            f"  {search:<48} {row['plain_steps']:8.2f} plain steps (least {row['least_plain_steps']:6.2f}) "
            f"{row['ms']:9.1f} ms, {row['passes']:.0f} forward passes",
            flush=True,
        )


def show(title: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints a table of `per_layer`."""
    plain = statistics.median(row["plain_ms"] for row in found.values())
    print(
        f"\n{title}: per layer over the plain step of {plain:.2f} ms; median and its 95 % interval"
    )
    for case, row in found.items():
        goal = f"goal {row['goal']:g}: {row['verdict']}" if "goal" in row else ""
        milliseconds = f"{row['ms_per_layer']:7.3f} ms ({row['low']:6.3f} to {row['high']:6.3f}; {row['pairs']} pairs)"
        counts = f"{row['calls_per_layer']:6.1f} calls {row['operators_per_layer']:6.1f} operators"
        print(
            f"  {case:<46} {milliseconds} ratio {row['ratio']:5.3f} {counts}  {goal}",
            flush=True,
        )


def markdown(tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Returns the milliseconds of tables of `per_layer` for docs/benchmarks.md: a row for each case."""
    cases = dict.fromkeys(case for found in tables.values() for case in found)
    lines = [
        f"| ms per layer, median (95 % interval) | {' | '.join(tables)} | goal |",
        "|---" * (len(tables) + 2) + "|",
    ]
    for case in cases:
        cells = []
        for found in tables.values():
            row = found.get(case)
            said = (
                ""
                if row is None
                else f"{row['ms_per_layer']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
            )
            cells.append(
                f"{said} {'' if row is None else row.get('verdict', '')}".strip()
            )
        lines.append(f"| {case} | {' | '.join(cells)} | {GOALS.get(case, '')} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Prints and writes the tables."""
    flags = {
        "--only": {
            "default": "Llama, SDPA",
            "metavar": "WORDS",
            "help": "models whose name holds these words",
        },
        "--cases": {
            "default": "",
            "metavar": "WORDS",
            "help": "cases whose name holds these words; nothing written",
        },
        "--all": {
            "action": "store_true",
            "help": "all cases, not only those with goals and the peers",
        },
        "--layers": {"default": "2,8,32", "help": "numbers of layers"},
        "--add": {
            "action": "store_true",
            "help": "keep the tables that a run of the same day has written",
        },
        "--seconds": {
            "default": 150.0,
            "type": float,
            "help": "of all timed steps together, about",
        },
        "--searches": {
            "action": "store_true",
            "help": "find_sites and remedies that look for sites; nothing written",
        },
    }
    bench = Bench("host_time", __doc__, arguments, rounds=3, writes=True, flags=flags)
    warnings.simplefilter("ignore")
    options = bench.options
    sizes = [2] if bench.toy else [int(n) for n in options.layers.split(",")]
    words = "" if bench.toy else options.only.lower()
    known = {name: model for name, model in MODELS.items() if words in name.lower()}
    if importlib.util.find_spec("transformers") is None or bench.toy:
        known = {
            name: model for name, model in known.items() if "transformers" not in name
        }
    if bench.toy:
        known = dict([*known.items()][:1])
    if options.searches:
        for name, model in known.items():
            for layers in sizes:
                print_searches(
                    f"{name}, {layers} layers", searched(model, layers, bench.rounds)
                )
        return
    seconds = 0.0 if bench.toy else options.seconds / len(known)
    share = {
        layers: layers**0.5 / sum(n**0.5 for n in sizes) for layers in sizes
    }  # deep models take longer a step
    tables: dict[str, object] = {}
    searches: dict[str, dict[str, dict[str, float]]] = {}
    for name, model in known.items():
        watchers = {
            **WATCHERS,
            **(PEERS if name == "transformers' Llama, SDPA" else {}),
        }
        if not (options.all or options.cases):
            watchers = {
                case: w
                for case, w in watchers.items()
                if case in {PLAIN, *GOALS, *PEERS}
            }
        watchers = {case: w for case, w in watchers.items() if options.cases in case}
        if bench.toy:
            watchers = {"qk_clip": watchers["qk_clip"]}
        for layers in sizes:
            title = f"{name}, {layers} layers"
            goals = GOALS if name.startswith("transformers' Llama") else {}
            tables[title] = found = per_layer(
                model, watchers, layers, seconds * share[layers], goals
            )
            show(title, found)
            if not options.cases and not bench.toy:
                searches[title] = searched(model, layers, bench.rounds)
                print_searches(title, searches[title])
    if options.cases:
        return
    training = {} if bench.toy or options.add else micro_training(seconds / 8)
    if training:
        print(
            f"\na whole training of the lab's micro model, watch(every=1): {training['ratio']:.3f} "
            f"({training['low']:.3f} to {training['high']:.3f}; {training['pairs']} pairs) of the plain run of "
            f"{training['plain_ms']:.0f} ms  goal {training['goal']}: {training['verdict']}"
        )
    about = {
        "width": WIDTH,
        "tokens": TOKENS,
        "batch": BATCH,
        "models": list(known),
        "layers": sizes,
    }
    path = bench.write(
        "host-time",
        add=options.add,
        about=about,
        tables=tables,
        searches=searches,
        training=training,
    )
    path.with_suffix(".md").write_text(markdown(json.loads(path.read_text())["tables"]))


if __name__ == "__main__":
    main()
