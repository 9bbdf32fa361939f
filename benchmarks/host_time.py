"""The host's time of a training step that is watched or remedied: milliseconds and Python calls per layer over the
plain step.

Launches and bytes say what a device pays. Where a step is short, the host pays more: Python's functions, modes and
hooks. Here a step is forward, backward and fused AdamW of a model of width 64 on few tokens, so that next to nothing
but the host is timed, by process CPU time and in turns with the plain step; and every call of a Python function in it
is counted, which comes out the same on every machine. What a search for attention takes, in `find_sites` and `apply`,
is given in plain steps of the same model, with the number of its forward passes.

python -m benchmarks.host_time [--only llama] [--parts 'watch(stats="entropy")'] [--searches]
"""

from __future__ import annotations

import cProfile
import dataclasses
import functools
import importlib.util
import pstats
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import qkeel
from benchmarks.measure import Bench, take_turns
from qkeel.errors import QkeelError
from qkeel.monitor import Adaptive, Every, LogSpaced
from qkeel.nn import Decoder, DecoderConfig

WIDTH, HEADS, TOKENS, BATCH, VOCABULARY = 64, 4, 32, 2, 128
NEVER = 1 << 40  # steps: never again after the first
STEPS = 5  # in a row, each time that a case has its turn
WARM = 4  # steps before: the search for attention, and the passes that are searched whole
Watcher = Callable[[nn.Module, Optimizer, Tensor], object]


def transformers_model(kind: str, layers: int, attention: str = "sdpa") -> nn.Module:
    """A causal language model of transformers: "Llama", "GPT2" or "Qwen3"."""
    import transformers

    sizes: dict[str, object] = {"vocab_size": VOCABULARY, "attn_implementation": attention}
    if kind == "GPT2":
        sizes |= {"n_embd": WIDTH, "n_layer": layers, "n_head": HEADS, "n_positions": 2 * TOKENS}
    else:
        sizes |= {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 2 * TOKENS}
    if kind == "Qwen3":
        sizes["head_dim"] = WIDTH // HEADS
    name = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes))


class Own(nn.Module):
    """A Decoder of qkeel's modules, called as the models of transformers are."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        config = DecoderConfig(vocab_size=VOCABULARY, d_model=WIDTH, n_layers=layers, n_heads=HEADS)
        self.decoder = Decoder(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder(input_ids)


MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "transformers' Llama, SDPA": lambda layers: transformers_model("Llama", layers),
    "transformers' Llama, eager": lambda layers: transformers_model("Llama", layers, "eager"),
    "transformers' GPT-2": lambda layers: transformers_model("GPT2", layers),
    "transformers' Qwen3": lambda layers: transformers_model("Qwen3", layers),
    "qkeel's Decoder": Own,
}


def watched(**options: object) -> Watcher:
    """A watcher by `qkeel.watch` with these options."""
    return lambda model, optimizer, _: qkeel.watch(model, optimizer, **options)  # type: ignore[arg-type]


def applied(remedy: str) -> Watcher:
    """A watcher by a remedy."""
    return lambda model, optimizer, ids: qkeel.apply(remedy, model, optimizer, example=ids)


def recorded(model: nn.Module, optimizer: Optimizer, _: Tensor) -> object:
    """A watcher that writes a run directory, into a place that is deleted with the watcher."""
    place = tempfile.TemporaryDirectory()
    return qkeel.watch(model, optimizer, stats="entropy", sinks=Path(place.name) / "run"), place


def by_hand(model: nn.Module, optimizer: Optimizer, _: Tensor) -> object:
    """The hook that people write: F.scaled_dot_product_attention replaced, maxima and entropies from T×T scores."""
    plain, found = F.scaled_dot_product_attention, list[Tensor]()

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: object, **kw: object
    ) -> Tensor:
        with torch.no_grad():
            scale = kw.get("scale") or q.shape[-1] ** -0.5
            scores = q @ k.mT * scale
            if kw.get("is_causal"):
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            weights = scores.softmax(-1)
            entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
            found.append(torch.stack([scores.amax((0, 2, 3)), entropy.mean((0, 2))]))
        return plain(q, k, v, attn_mask, *args, **kw)  # type: ignore[arg-type]

    def read(*_: object) -> None:
        if found:
            torch.stack(found).numpy()
        found.clear()

    F.scaled_dot_product_attention = attention
    optimizer.register_step_post_hook(read)
    return _Undone(lambda: setattr(F, "scaled_dot_product_attention", plain))


def clipped_as_megatron(model: nn.Module, optimizer: Optimizer, _: Tensor) -> object:
    """QK-Clip as Megatron-LM and torchtitan do it, on a CPU: each layer's largest logits kept in a list, read on the
    host one layer after the other when the optimizer has stepped, and compared with the threshold.

    Their kernels return these maxima; here they are read from q and k, as torchtitan's FlexAttention does on a CPU."""
    plain, found = F.scaled_dot_product_attention, list[Tensor]()

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *args: object, **kw: object
    ) -> Tensor:
        with torch.no_grad():
            scores = q @ k.mT * (kw.get("scale") or q.shape[-1] ** -0.5)
            if kw.get("is_causal"):
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
            found.append(scores.amax((0, 2, 3)))
        return plain(q, k, v, attn_mask, *args, **kw)  # type: ignore[arg-type]

    @torch.no_grad()
    def clip(*_: object) -> None:
        for top in found:
            gamma = torch.where(top > 1e9, 1e9 / top, 1.0)  # deep models pass 100 within the steps that are timed
            if torch.any(gamma < 1.0):
                raise AssertionError("no logit of this benchmark is over the threshold")
        found.clear()

    F.scaled_dot_product_attention = attention
    optimizer.register_step_post_hook(clip)
    return _Undone(lambda: setattr(F, "scaled_dot_product_attention", plain))


@dataclasses.dataclass(frozen=True)
class _Undone:
    """What a case has changed outside its own model: put back at the end of each of its turns, and made again."""

    undo: Callable[[], None]


WATCHERS: Mapping[str, Watcher] = {
    "watch()": watched(),
    'watch(stats="entropy")': watched(stats="entropy"),
    'watch(stats="max")': watched(stats="max"),
    'watch(stats="entropy"), a run directory': recorded,
    "watch(every=10)": watched(every=10),
    'watch(stats="entropy", every=10)': watched(stats="entropy", every=10),
    "watch(LogSpaced)": watched(every=LogSpaced()),
    "watch(Adaptive), a bracket each step": watched(every=Adaptive(least=NEVER, most=NEVER)),
    "watch, no step measured": watched(every=Every(NEVER)),
    "autopilot": lambda model, optimizer, ids: qkeel.autopilot(model, optimizer, example=ids),
    'watch(stats="entropy") and qk_clip': lambda model, optimizer, ids: (
        qkeel.watch(model, optimizer, stats="entropy"),
        qkeel.apply("qk_clip", model, optimizer, example=ids),
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


def applied_and_removed(remedy: str) -> Watcher:
    """A watcher that applies a remedy and removes it at once."""
    return lambda model, optimizer, ids: qkeel.apply(remedy, model, optimizer, example=ids).remove()


# What looks for attention in a model: once, not in every step.
SEARCHES: Mapping[str, Watcher] = {
    "find_sites": lambda model, _, ids: qkeel.find_sites(model, ids),
    'apply("qk_norm")': applied_and_removed("qk_norm"),
    'apply("qk_clip")': applied_and_removed("qk_clip"),
    'apply("lalr")': applied_and_removed("lalr"),
    'apply("softcap")': applied_and_removed("softcap"),
}


class Case:
    """One model in training, watched or not."""

    def __init__(self, model: Callable[[int], nn.Module], layers: int, watcher: Watcher | None) -> None:
        torch.manual_seed(0)
        self.model, self.layers = model(layers), layers
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
        self._watcher, self._handle = watcher, None
        with self._watched():
            for _ in range(WARM):
                self.step()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self._handle is None and self._watcher is not None:
            self._handle = self._watcher(self.model, self.optimizer, self.ids)
        yield
        if isinstance(self._handle, _Undone):
            self._handle.undo()
            self._handle = None
            self.optimizer._optimizer_step_post_hooks.clear()

    def step(self) -> None:
        """One training step."""
        out = self.model(self.ids)
        logits = out if isinstance(out, Tensor) else out.logits
        F.cross_entropy(logits.flatten(0, 1), self.ids.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self) -> None:
        with self._watched():
            for _ in range(STEPS):
                self.step()

    def python_calls(self, steps: int = 20) -> float:
        """Returns how many Python functions a step calls, generators counted each time that they go on."""
        count = 0

        def note(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        with self._watched():
            before = sys.getprofile()
            sys.setprofile(note)
            try:
                for _ in range(steps):
                    self.step()
            finally:
                sys.setprofile(before)
        return count / steps


def per_layer(
    model: Callable[[int], nn.Module], watchers: Mapping[str, Watcher], layers: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Returns, by case, milliseconds and Python calls per layer over the plain step, and the ratio to it."""
    cases = {"plain": Case(model, layers, None)} | {name: Case(model, layers, w) for name, w in watchers.items()}
    times = {row.name: row for row in take_turns(dict(cases), rounds, warmup=1)}
    calls = {name: case.python_calls() for name, case in cases.items()}
    found = {}
    for name in cases:
        over = [(a - b) / STEPS / layers for a, b in zip(times[name].times, times["plain"].times)]
        found[name] = {
            "ms": statistics.median(times[name].times) / STEPS,
            "ratio": times[name].ratio,
            "ms_per_layer": statistics.median(over),
            "least_ms_per_layer": (min(times[name].times) - min(times["plain"].times)) / STEPS / layers,
            "calls": calls[name],
            "calls_per_layer": (calls[name] - calls["plain"]) / layers,
        }
    return found


def passes_of(search: Watcher, model: nn.Module, optimizer: Optimizer, ids: Tensor) -> int:
    """Returns how many forward passes of the whole model a search takes."""
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        search(model, optimizer, ids)
    finally:
        hook.remove()
    return passes


def searched(model: Callable[[int], nn.Module], layers: int, rounds: int) -> dict[str, dict[str, float]]:
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


# The parts of a step that is watched, by the file in src/qkeel and the function that begins them.
PARTS = {
    "a pass begins": ("patching/forward.py", "_enter"),
    "a pass ends": ("patching/forward.py", "_leave"),
    "calls of attention, with their own time": ("capture/intercept.py", "__torch_function__"),
    "statistics of calls": ("sites/tap.py", "_plain"),
    "statistics of rows, for all sites": ("capture/calls.py", "_reduce"),
    "hidden states": ("monitor/token_classes.py", "_take"),
    "weights and gradients": ("monitor/measure.py", "read_weights"),
    "the step ends": ("monitor/monitor.py", "after"),
    "to the host": ("monitor/gather.py", "alone"),
    "from there": ("monitor/gather.py", "result"),
    "record, rules and sinks": ("monitor/journal.py", "add"),
    "rules": ("monitor/alarms.py", "update"),
    "qk_clip after the step": ("remedies/qk_clip.py", "after_step"),
}


def parts(case: Case) -> dict[str, float]:
    """Returns, in per cent of a step under Python's profiler, what each part takes; parts lie in one another."""
    profile = cProfile.Profile()
    with case._watched():
        profile.enable()
        for _ in range(4 * STEPS):
            case.step()
        profile.disable()
    stats = pstats.Stats(profile)
    rows = stats.stats  # type: ignore[attr-defined]
    whole = max(row[3] for (_, _, name), row in rows.items() if name == "step")
    found = {}
    for part, (file, function) in PARTS.items():
        taken = sum(row[3] for (path, _, name), row in rows.items() if path.endswith(file) and name == function)
        found[part] = 100 * taken / whole
    return found


def main(arguments: list[str] | None = None) -> None:
    """Prints and writes the tables."""
    flags = {
        "--only": {"default": "", "metavar": "WORDS", "help": "models whose name holds these words"},
        "--cases": {"default": "", "metavar": "WORDS", "help": "cases whose name holds these words; nothing written"},
        "--parts": {"default": "", "metavar": "CASE", "help": "the parts of a step in this case; nothing written"},
        "--layers": {"default": "2,8,32", "help": "numbers of layers"},
        "--searches": {"action": "store_true", "help": "find_sites and remedies that look for sites; nothing written"},
    }
    bench = Bench("host_time", __doc__, arguments, rounds=9, writes=True, flags=flags)
    warnings.simplefilter("ignore")
    options = bench.options
    sizes = [2] if bench.toy else [int(n) for n in options.layers.split(",")]
    known = {name: model for name, model in MODELS.items() if options.only.lower() in name.lower()}
    if importlib.util.find_spec("transformers") is None or bench.toy:
        known = {name: model for name, model in known.items() if "transformers" not in name}
    if options.parts:
        for name, model in known.items():
            for layers in sizes:
                shares = parts(Case(model, layers, WATCHERS[options.parts]))
                bench.numbers(f"{name}, {layers} layers, {options.parts}: per cent of a step", shares)
        return
    if options.searches:
        for name, model in known.items():
            for layers in sizes:
                print_searches(f"{name}, {layers} layers", searched(model, layers, bench.rounds))
        return
    tables: dict[str, object] = {}
    searches: dict[str, dict[str, dict[str, float]]] = {}
    for name, model in known.items():
        peers = PEERS if name == "transformers' Llama, SDPA" else {}
        watchers = {case: w for case, w in {**WATCHERS, **peers}.items() if options.cases in case}
        if bench.toy:
            watchers = {case: watchers[case] for case in ("watch()", "qk_clip")}
        for layers in sizes:
            title = f"{name}, {layers} layers"
            tables[title] = found = per_layer(model, watchers, layers, bench.rounds)
            print(f"\n{title}: over the plain step, per layer")
            for case, row in found.items():
                print(
                    f"  {case:<48} {row['ms_per_layer']:8.3f} ms (least {row['least_ms_per_layer']:7.3f}) "
                    f"{row['calls_per_layer']:9.1f} calls   step {row['ms']:8.2f} ms, ratio {row['ratio']:6.3f}",
                    flush=True,
                )
            if not options.cases and not bench.toy:
                searches[title] = searched(model, layers, bench.rounds)
                print_searches(title, searches[title])
    if not options.cases:
        size = {"width": WIDTH, "tokens": TOKENS, "batch": BATCH}
        bench.write(
            "host-time", about={**size, "models": list(known), "layers": sizes}, tables=tables, searches=searches
        )


if __name__ == "__main__":
    main()
