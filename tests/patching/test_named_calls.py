"""Where attention is known, it is seen by its name or by a mode around its modules, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import bias
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import qkeel
from qkeel.functional.statistics import LogitStats
from qkeel.sites import Tap

PLAIN = (
    F.scaled_dot_product_attention
)  # as a module has it that imports the function itself
PASSES = 6  # the first two are searched whole


class Layer(nn.Module):
    """Attention whose call of torch's function is given."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.call = call
        self.modes: list[int] = []  # how many modes each call ran under

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        self.modes.append(len(_get_current_function_mode_stack()))
        return x + self.call(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two layers."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(call) for _ in range(2))
        self.outside: list[
            int
        ] = []  # how many modes each pass ran under, outside its layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.outside.append(len(_get_current_function_mode_stack()))
        return x

    @property
    def modes(self) -> list[int]:
        first = self.layers[0]
        assert isinstance(first, Layer)
        return first.modes


def by_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def imported(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return PLAIN(q, k, v, is_causal=True)


def batch() -> Tensor:
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))


def read(tap: Tap) -> dict[str, LogitStats]:
    return dict(tap.read())


def same(a: dict[str, LogitStats], b: dict[str, LogitStats]) -> bool:
    """Whether two passes showed the same sites with the same numbers."""
    pairs = [(a[name].tensors(), b[name].tensors()) for name in a if name in b]
    return [*a] == [*b] == ["layers.0", "layers.1"] and all(
        x[field].equal(y[field])
        for x, y in pairs
        for field in ("max_logit", "n_pairs", "entropy")
    )


def known(model: Model) -> Tap:
    """A tap that knows where the attention of a model is."""
    tap = Tap(model)
    for _ in range(PASSES):
        model(batch())
        first = read(tap)
        assert [*first] == ["layers.0", "layers.1"]
    return tap


@pytest.fixture
def whole() -> dict[str, LogitStats]:
    """What a pass that is searched whole shows."""
    model = Model(by_name)
    with Tap(model) as tap:
        model(batch())
        return read(tap)


def test_where_attention_is_known_no_mode_is_around_its_module(
    whole: dict[str, LogitStats],
) -> None:
    model = Model(by_name)
    with known(model) as tap:
        model(batch())
        assert same(read(tap), whole)
    assert model.modes[0] == 1  # searched
    assert model.modes[-1] == 0
    assert F.scaled_dot_product_attention is PLAIN


def test_a_function_that_its_module_has_imported_is_seen_as_before(
    whole: dict[str, LogitStats],
) -> None:
    model = Model(imported)
    with known(model) as tap:
        model(batch())
        assert same(read(tap), whole)
    assert (model.modes[-1], model.outside[-1]) == (1, 0)


def test_two_taps_see_the_same_calls(whole: dict[str, LogitStats]) -> None:
    model = Model(by_name)
    with known(model) as one, known(model) as two:
        one.read()  # of the passes by which the second one knows
        model(batch())
        assert model.modes[-1] == 0
        assert same(read(one), whole)
        assert same(read(two), whole)
    assert F.scaled_dot_product_attention is PLAIN


def test_a_function_that_somebody_puts_in_its_place_meanwhile_is_called_and_seen(
    whole: dict[str, LogitStats], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = Model(by_name), list[object]()

    def theirs(*args: Tensor, **kwargs: bool) -> Tensor:
        calls.append(args)
        return PLAIN(*args, **kwargs)

    with known(model) as tap:
        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
        model(batch())
        assert same(read(tap), whole)
        assert len(calls) == 2


class Scaled(TorchFunctionMode):
    """A mode that changes the call of attention, as some remedies do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is PLAIN:
            args = (3 * args[0], *args[1:])
        return func(*args, **(kwargs or {}))


def test_what_a_mode_inside_the_module_makes_of_the_call_is_what_is_measured() -> None:
    inside = False

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not inside:
            return by_name(q, k, v)
        with Scaled():
            return by_name(q, k, v)

    model = Model(call)
    with known(model) as tap:
        inside = True
        model(batch())  # finds that attention is computed otherwise now
        tap.read()
        out = model(batch())
        seen = read(tap)
    model = Model(call)
    with Tap(model) as tap:
        assert model(batch()).equal(out)
        assert same(seen, read(tap))


def test_a_remedy_that_comes_when_attention_is_known_shows_in_the_statistics() -> None:
    model = Model(by_name)
    with known(model) as tap:
        before = tap.calls_seen["train"]
        qkeel.apply(model, "softcap:cap=0.01", batch=batch())
        for _ in range(
            2
        ):  # the first may find that attention is computed otherwise now
            model(batch())
            tap.read()
        model(batch())
        seen = read(tap)
        assert tap.calls_seen["train"] > before
    for stats in seen.values():
        assert stats.capped_max_logit.max() <= 0.01
        assert stats.max_logit.max() > 0.01


def test_a_call_in_another_thread_is_not_counted() -> None:
    results: list[Tensor] = []
    q = torch.randn(1, 2, 4, 8)

    def call(a: Tensor, k: Tensor, v: Tensor) -> Tensor:
        thread = threading.Thread(
            target=lambda: results.append(F.scaled_dot_product_attention(q, q, q))
        )
        thread.start()
        thread.join()
        return by_name(a, k, v)

    model = Model(call)
    with known(model) as tap:
        before = tap.calls_seen["train"]
        model(batch())
        assert tap.calls_seen["train"] == before + 2
    assert all(x.equal(PLAIN(q, q, q)) for x in results)


def test_a_pass_that_fails_leaves_no_mode(whole: dict[str, LogitStats]) -> None:
    failing = False

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if failing:
            raise RuntimeError("out of luck")
        return by_name(q, k, v)

    model = Model(call)
    with known(model) as tap:
        failing = True
        with pytest.raises(RuntimeError, match="luck"):
            model(batch())
        assert F.scaled_dot_product_attention is PLAIN
        failing = False
        model(batch())
        assert same(read(tap), whole)


@pytest.mark.parametrize("name", ["causal_lower_right", "causal_upper_left"])
def test_a_mask_object_is_called_as_without_a_tap_and_seen(name: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = getattr(bias, name)(4, 6)
        return torch.cat(
            [
                F.scaled_dot_product_attention(q[:, :, :4], k, v, attn_mask=mask),
                v[:, :, 4:],
            ],
            2,
        )

    model = Model(call)
    out = model(batch())
    with Tap(model) as tap:
        for _ in range(PASSES):
            assert model(batch()).equal(out)
            stats = read(tap)
            assert [*stats] == ["layers.0", "layers.1"]
            visible = torch.ones(4, 6).tril(2 if name == "causal_lower_right" else 0)
            assert stats["layers.0"].n_pairs.tolist() == [2 * int(visible.sum())] * 2
