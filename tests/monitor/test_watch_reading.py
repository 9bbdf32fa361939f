"""What a monitor says is so: numbers against an oracle in float64, every pass counted once and where it belongs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.watch.small import Small, batch, hooks, small
from tests.quick import one_in
from torch import Tensor, nn

from qkeel import watch
from qkeel.errors import (
    AlreadyAppliedError,
    InvalidTypeError,
    InvalidValueError,
    QkeelError,
    QkeelWarning,
)
from qkeel.functional.statistics import TENSORS, LogitStats
from qkeel.monitor import Adaptive, History, LogSpaced, Rule
from qkeel.monitor.token_classes import MaskSource, QueryMaskSource
from qkeel.nn import Attention


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    """One optimizer step over some micro-batches."""
    for seed in seeds:
        model(batch(seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def setup(**options: Any) -> tuple[Small, torch.optim.Optimizer, Any]:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, watch(model, optimizer, **options)


def counts(stats: dict[str, LogitStats]) -> list[list[int]]:
    return [s.n_queries.tolist() for s in stats.values()]


def close(a: LogitStats, b: LogitStats) -> None:
    for field in TENSORS:
        torch.testing.assert_close(
            getattr(a, field).double(), getattr(b, field).double(), rtol=1e-5, atol=1e-6
        )


# --- what is counted where ------------------------------------------------------------------------------------------


def test_reading_gives_what_came_since_the_last_read_per_site_on_the_cpu() -> None:
    model, optimizer, monitor = setup()
    assert monitor.read() == {}
    step(model, optimizer, 0)
    model(batch(1)).sum().backward()
    stats = monitor.read()
    assert list(stats) == ["blocks.0", "blocks.1"]
    assert counts(stats) == [[20, 20]] * 2
    assert monitor.read() == {}
    for s in stats.values():
        assert s.max_logit.shape == s.entropy.shape == s.key_norm.shape == (2,)
        assert s.max_logit.device.type == "cpu"
        assert not s.max_logit.requires_grad


def test_reads_in_the_middle_of_steps_lose_and_repeat_nothing() -> None:
    model, optimizer, monitor = setup()
    whole = watch(small())
    reads = []
    for seeds in ((0, 1), (2, 3), (4, 5)):
        for seed in seeds:
            model(batch(seed)).square().mean().backward()
            if seed in (0, 3):
                reads.append(monitor.read())
        optimizer.step()
        optimizer.zero_grad()
    reads.append(monitor.read())
    assert [counts(r) for r in reads] == [
        [[10, 10]] * 2,
        [[30, 30]] * 2,
        [[20, 20]] * 2,
    ]
    assert monitor.active
    assert monitor.history.steps.tolist() == [0, 1, 2]
    assert whole.active


def test_evaluation_is_kept_apart_and_recorded_once_at_the_step_it_was_made_after() -> (
    None
):
    records: list[tuple[int, str]] = []
    model, optimizer, monitor = setup(every=2)
    write, journal = monitor._journal.add, monitor._journal

    def add(number: int, phase: Any, measured: Any) -> None:
        records.append((number, phase))
        write(number, phase, measured)

    journal.add = add
    for i in range(5):
        step(model, optimizer, i)
        if i in (0, 3):
            model.eval()
            with torch.no_grad():
                for seed in (7, 8):
                    model(batch(seed))
            if i == 3:
                assert (
                    counts(monitor.read("eval")) == [[20, 20]] * 2
                )  # every second of the 4 passes
            model.train()
    assert counts(monitor.read("train")) == [[30, 30]] * 2
    assert monitor.read("eval") == {}
    monitor.remove()
    assert records == [
        (0, "train"),
        (1, "eval"),
        (2, "train"),
        (4, "eval"),
        (4, "train"),
    ]


def test_a_read_without_a_phase_prefers_training() -> None:
    model = small()
    with watch(model) as monitor:
        model.eval()
        model(batch(0))
        model(batch(1))
        model.train()
        model(batch(2))
        assert counts(monitor.read()) == [[10, 10]] * 2
        assert counts(monitor.read()) == [[20, 20]] * 2
        assert monitor.read() == {}


def test_micro_batches_are_one_big_batch() -> None:
    x = batch(0, b=6)
    samples, reads = [], []
    for parts in (1, 3):
        model, optimizer, monitor = setup()
        for part in x.chunk(parts):
            (model(part).square().mean() / parts).backward()
        optimizer.step()
        samples.append(monitor.sample)
        reads.append(monitor.read())
    for name in reads[0]:
        close(reads[0][name], reads[1][name])
    assert samples[0].heads.keys() == samples[1].heads.keys()
    for name, values in samples[0].heads.items():
        np.testing.assert_allclose(
            values, samples[1].heads[name], rtol=2e-4, atol=1e-6, err_msg=name
        )


def test_the_loss_that_a_model_returns_is_recorded_as_the_mean_over_micro_batches() -> (
    None
):
    class Judged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = self.body(x)
            return (out - x).square().mean(), out

    model = Judged()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as monitor:
        losses = []
        for seed in (0, 1):
            loss = model(batch(seed))[0]
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        assert monitor.sample is not None
        assert monitor.sample.values["train_loss"] == pytest.approx(
            sum(losses) / 2, rel=1e-6
        )
        assert monitor.sample.values["lr"] == 0.1


@pytest.mark.parametrize(
    ("every", "measured"),
    one_in(
        [
            (1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
            (3, [0, 3, 6, 9]),
            (LogSpaced(per_decade=4), [0, 1, 2, 3, 6, 10]),
            (Adaptive(least=2, most=4, change=1e9), [0, 4, 8]),
            (Adaptive(least=3, most=50, change=1e-12), [0, 3, 6, 9]),
        ],
        2,
    ),
)
def test_a_cadence_says_which_steps_are_measured(
    every: Any, measured: list[int]
) -> None:
    model, optimizer, monitor = setup(every=every)
    for i in range(11):
        step(model, optimizer, i, i + 50)
    assert monitor.history.steps.tolist() == measured
    assert counts(monitor.read()) == [[20 * len(measured)] * 2] * 2


@pytest.mark.parametrize(
    ("every", "measured"),
    [
        (1, [0, 1, 2, 3, 4]),
        (3, [0, 3]),
        (Adaptive(least=3, most=9, change=1e-12), [0, 3]),
    ],
)
def test_without_an_optimizer_each_training_pass_is_a_step(
    every: Any, measured: list[int]
) -> None:
    model = small()
    with watch(model, every=every) as monitor:
        for i in range(5):
            model(batch(i))
        assert monitor.history.steps.tolist() == measured


def test_passes_without_a_step_of_the_watched_optimizer_are_no_silent_end() -> None:
    """The script made another optimizer after `watch`."""
    model, optimizer, monitor = setup()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    del optimizer
    for i in range(3):
        model(batch(i)).sum().backward()
        other.step()
    with pytest.warns(
        QkeelWarning,
        match="the optimizer that is watched took no step, so nothing was recorded",
    ):
        monitor.close()
    assert not len(monitor.history)


def test_a_step_without_a_pass_warns_once_and_measures_again_when_one_comes() -> None:
    model, optimizer, monitor = setup()
    model.forward(batch(0)).sum().backward()
    with pytest.warns(
        QkeelWarning, match="no forward pass of the watched model was seen"
    ):
        optimizer.step()
    optimizer.step()
    step(model, optimizer, 0)
    assert monitor.history.steps.tolist() == [2]
    optimizer.step()
    assert monitor.history.steps.tolist() == [2]
    assert monitor.active


def test_several_models_and_a_model_inside_a_model_are_watched_at_once() -> None:
    outer, other = nn.Sequential(small(0), small(1)), small(2)
    with watch(outer) as a, watch(outer[1]) as b, watch(other) as c:
        outer(other(batch(0)))
        whole, part, alone = a.read(), b.read(), c.read()
    assert list(whole) == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]
    for name in ("blocks.0", "blocks.1"):
        close(whole[f"1.{name}"], part[name])
    assert list(alone) == ["blocks.0", "blocks.1"]
    assert hooks(outer) == hooks(other) == []


def test_inference_mode_and_no_grad_are_measured_like_any_pass() -> None:
    model = small().eval()
    with watch(model) as monitor:
        with torch.inference_mode():
            model(batch(0))
        with torch.no_grad():
            model(batch(0))
        model(batch(0))
        assert counts(monitor.read()) == [[30, 30]] * 2
        assert len(monitor.sites) == 2
        assert all(site.terms for site in monitor.sites)


# --- padded batches -------------------------------------------------------------------------------------------------


class Padded(nn.Module):
    """One causal attention that hides padded keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, :].bool()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def oracle(model: Padded, x: Tensor, mask: Tensor) -> dict[str, list[float]]:
    """Per head in float64, row by row, over the rows that count."""
    found: dict[str, list[float]] = {
        n: [] for n in ("max", "min", "mean", "entropy", "query_norm", "key_norm")
    }
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)
        logits, entropies, queries, keys = [], [], [], []
        for b in range(len(x)):
            q = (
                x[b].double() @ model.q.weight[part].double().T
                + model.q.bias[part].double()
            )
            k = (
                x[b].double() @ model.k.weight[part].double().T
                + model.k.bias[part].double()
            )
            real = [i for i in range(len(q)) if mask[b, i]]
            keys += [k[j].norm().item() for j in real]
            for i in real:
                row = [(q[i] @ k[j]).item() / 2 for j in real if j <= i]
                top = max(row)
                total = sum(math.exp(z - top) for z in row)
                weights = [math.exp(z - top) / total for z in row]
                entropies.append(-sum(w * math.log(w) for w in weights))
                queries.append(q[i].norm().item())
                logits += row
        found["max"].append(max(logits))
        found["min"].append(min(logits))
        found["mean"].append(sum(logits) / len(logits))
        found["entropy"].append(sum(entropies) / len(entropies))
        found["query_norm"].append(sum(queries) / len(queries))
        found["key_norm"].append(sum(keys) / len(keys))
    return found


def by_name(given: Tensor) -> MaskSource:
    return "attention_mask"


def by_function(given: Tensor) -> MaskSource:
    return lambda x, attention_mask=None: attention_mask


def by_tensor(given: Tensor) -> MaskSource:
    return given


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("way", [by_name, by_function, by_tensor])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_count_nowhere(
    way: Callable[[Tensor], MaskSource], side: str, named: bool
) -> None:
    model, x = Padded().eval(), batch(3, b=3, t=6)
    lengths = torch.tensor([6, 4, 1])
    mask = torch.arange(6) < lengths[:, None]
    mask = (mask.flip(1) if side == "left" else mask).long()
    with watch(model, query_mask=way(mask)) as monitor:
        model(x, attention_mask=mask) if named else model(x, mask)
        (stats,) = monitor.read().values()
    expected = oracle(model, x, mask)
    assert stats.n_queries.tolist() == [11, 11]
    assert stats.n_pairs.tolist() == [21 + 10 + 1] * 2
    for name, value in {
        "max": stats.max_logit,
        "min": stats.min_logit,
        "mean": stats.mean_logit,
        "entropy": stats.entropy,
        "query_norm": stats.query_norm,
        "key_norm": stats.key_norm,
    }.items():
        torch.testing.assert_close(
            value.double(), torch.tensor(expected[name]).double(), rtol=2e-6, atol=2e-6
        )


def test_a_name_that_the_forward_does_not_take_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="attention_maks"):
        watch(Padded(), query_mask="attention_maks")


def test_a_mask_that_fits_no_attention_is_warned_of_once() -> None:
    model, x = Padded().eval(), batch(3, b=3, t=6)
    mask = torch.ones(3, 5)
    with watch(model, query_mask=lambda *_: mask) as monitor, torch.no_grad():
        with pytest.warns(
            UserWarning,
            match=r"query_mask applies to no attention.*\[3 6\], got \[3, 5\]",
        ):
            model(x)
        assert all(stats.n_queries.eq(18).all() for stats in monitor.read().values())
        model(x)  # a second warning would be an error


def test_a_mask_of_numbers_that_are_added_to_scores_is_refused() -> None:
    mask = torch.tensor([[0.0, 0.0, -1e9]])
    with pytest.raises(InvalidValueError, match="numbers below 0"):
        watch(Padded(), query_mask=mask)
    with pytest.raises(InvalidValueError, match="numbers below 0"):
        QueryMaskSource("mask").of((), {"mask": mask})
    assert torch.equal(QueryMaskSource(mask >= 0).of((), {}), mask == 0)  # type: ignore[arg-type]


# --- what is not a plain call ---------------------------------------------------------------------------------------


def test_a_functional_call_is_measured_with_the_weights_it_was_given() -> None:
    model = small()
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}
    with watch(model) as monitor:
        torch.func.functional_call(model, doubled, (batch(0),))
        seen = monitor.read()
    model.load_state_dict(doubled)
    with watch(model) as monitor:
        model(batch(0))
        for name, stats in monitor.read().items():
            close(stats, seen[name])


@pytest.mark.filterwarnings(
    "ignore::qkeel.errors.QkeelWarning", "ignore:There is a performance drop"
)
@pytest.mark.parametrize("transform", ["grad", "vmap", "per_sample"])
def test_torch_func_runs_on_and_its_numbers_are_right_or_none(transform: str) -> None:
    model = small()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).square().mean()

    act: Any = {
        "grad": lambda: torch.func.grad(loss)(parameters, batch(0))[
            "blocks.0.q.weight"
        ],
        "vmap": lambda: torch.func.vmap(lambda x: model(x[None])[0])(batch(0)),
        "per_sample": lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(
            parameters, batch(0)[:, None]
        )["blocks.0.q.weight"],
    }[transform]
    expected = act()
    with watch(model) as plain:
        model(batch(0))
        reference = plain.read()
    with watch(model) as monitor:
        assert torch.equal(act(), expected)
        seen = monitor.read()
        for name, stats in seen.items():
            if stats.n_queries.tolist() == [10, 10]:
                close(stats, reference[name])
            else:
                assert stats.n_queries.sum() == 0, "half a truth"
        if monitor.active:
            model(batch(0))
            for name, stats in monitor.read().items():
                close(stats, reference[name])
    assert hooks(model) == []


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrap", [Wrapper, nn.DataParallel])
@pytest.mark.parametrize("inside", [True, False])
def test_a_model_in_a_wrapper_is_watched_from_either_side(
    wrap: Callable[[nn.Module], nn.Module], inside: bool
) -> None:
    model = small()
    outside = wrap(model)
    with watch(model if inside else outside) as monitor:
        outside(batch(0))
        assert counts(monitor.read()) == [[10, 10]] * 2


# --- bad arguments --------------------------------------------------------------------------------------------------

MODEL = small()
BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[QkeelError], str]] = [
    (("model",), {}, InvalidTypeError, "torch.nn.Module"),
    ((Small,), {}, InvalidTypeError, "torch.nn.Module"),
    ((MODEL, "adam"), {}, InvalidTypeError, "Optimizer"),
    ((MODEL, list(MODEL.parameters())), {}, InvalidTypeError, "Optimizer"),
    (
        (MODEL, torch.optim.SGD(small().parameters())),
        {},
        InvalidValueError,
        "any of the model's parameters",
    ),
    ((MODEL,), {"every": 0}, InvalidValueError, "at least 1"),
    ((MODEL,), {"every": -3}, InvalidValueError, "at least 1"),
    ((MODEL,), {"every": 2.0}, InvalidTypeError, "whole number"),
    ((MODEL,), {"every": "3"}, InvalidTypeError, "whole number"),
    ((MODEL,), {"every": None}, InvalidTypeError, "whole number"),
    ((MODEL,), {"every": True}, InvalidTypeError, "whole number"),
    ((MODEL,), {"sinks": 3}, InvalidTypeError, "sinks"),
    ((MODEL,), {"sinks": [3]}, InvalidTypeError, "sinks"),
    ((MODEL,), {"sinks": None}, InvalidTypeError, "sinks"),
    ((MODEL,), {"rules": ["ceiling"]}, InvalidTypeError, "rules"),
    ((MODEL,), {"rules": 3}, InvalidTypeError, "rules"),
    ((MODEL,), {"query_mask": 3}, InvalidTypeError, "query_mask"),
    ((MODEL,), {"query_mask": "no such name"}, InvalidValueError, "no such name"),
    ((MODEL,), {"query_mask": torch.ones(3)}, InvalidValueError, "shape"),
    ((MODEL,), {"planned": 3}, InvalidTypeError, "PlannedRates"),
]


@pytest.mark.parametrize(("args", "options", "error", "words"), BAD)
def test_a_bad_argument_is_one_clear_error(
    args: tuple[Any, ...], options: dict[str, Any], error: type[QkeelError], words: str
) -> None:
    with pytest.raises(error, match=words):
        watch(*args, **options)
    assert hooks(MODEL) == []


class Quiet(Rule):
    @property
    def name(self) -> str:
        return "quiet"

    def check(self, history: History) -> None:
        return None


def test_one_rule_is_a_list_of_one() -> None:
    model = small()
    with watch(model, rules=Quiet(source="")) as monitor:  # type: ignore[arg-type]
        model(batch(0))
        assert [r.name for r in monitor._journal.log.rules] == ["quiet"]


def test_a_model_is_watched_once() -> None:
    model = small()
    with watch(model):
        for same in (
            model,
            nn.DataParallel(model),
            torch.compile(model, backend="eager"),
        ):
            with pytest.raises(AlreadyAppliedError, match="already watched"):
                watch(same)  # type: ignore[arg-type]
    watch(model).remove()


def test_a_model_without_attention_is_told_once_what_was_looked_for() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with watch(model) as monitor:
        with pytest.warns(QkeelWarning, match="scaled_dot_product_attention") as record:
            model(batch(0))
        assert len(record) == 1
        assert not monitor.active
        model(batch(0))
    assert hooks(model) == []


def test_a_pass_without_attention_among_others_is_no_fault() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small()

        def forward(self, x: Tensor, skip: bool) -> Tensor:
            return x if skip else self.body(x)

    model = Sometimes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as monitor:
        for skip in (False, True, False):
            model(batch(0), skip)
            monitor.read()
            optimizer.step()
        assert monitor.active
        assert monitor.history.steps.tolist() == [0, 2]


def test_inputs_on_another_device_are_the_models_own_error() -> None:
    model = small()
    with watch(model) as monitor:
        with pytest.raises(RuntimeError, match=r"meta|device"):
            model(batch(0).to("meta")).sum().item()
        model(batch(0))
        assert counts(monitor.read()) == [[10, 10]] * 2


# --- the largest logits alone ---------------------------------------------------------------------------------------


class WrittenOut(nn.Module):
    """Attention as a matrix product and a softmax, with two query heads to a key head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k))
        k = k.repeat_interleave(2, 1)
        return ((q @ k.mT / 2).softmax(-1) @ k).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "make", [small, WrittenOut, lambda: nn.Sequential(Attention(8, 4, 2))]
)
def test_the_maxima_alone_are_those_of_everything_and_nothing_else_is_recorded(
    make: Callable[[], nn.Module],
) -> None:
    model, found = make(), {}
    for stats in (True, "max"):
        with watch(model, stats=stats) as monitor:
            model(30 * batch(0))
            model(batch(1))
            table, tops = monitor.table(), monitor.history.series("max_logit")
            sample = monitor.sample
            assert sample is not None
            found[stats] = (
                {name: x for name, x in sample.heads.items() if not np.isnan(x).all()},
                tops,
            )
        assert "max logit" in table
    assert {"max_logit", "entropy"} <= found[True][0].keys()
    assert {*found["max"][0]} - {"non_finite"} == {"max_logit"}
    np.testing.assert_allclose(found["max"][1], found[True][1], rtol=1e-5, atol=1e-6)
