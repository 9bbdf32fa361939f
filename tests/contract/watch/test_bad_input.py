"""Bad input to find_sites gets one clear error: what was expected, what came, what to do."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkeel import apply, find_sites
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError
from qkeel.nn import Attention


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        q, k, v = (
            y.unflatten(2, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=2)
        )
        return (
            F.scaled_dot_product_attention(q, k, v, scale=scale)
            .transpose(1, 2)
            .flatten(2)
        )


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(
        InvalidTypeError,
        match=r"expected a torch\.nn\.Module to find attention in, got dict",
    ):
        find_sites({}, torch.ones(1, 2, 16))  # type: ignore[arg-type]


def test_a_foreign_model_without_an_example_is_told_how_its_forward_is_called() -> None:
    with pytest.raises(
        RefusedError,
        match=r"qkeel.find_sites\(model, batch\), with a batch of the arguments of forward\(x: .*Tensor.*, scale",
    ):
        find_sites(Plain())


def test_an_example_on_another_device_is_refused_before_anything_runs() -> None:
    ran: list[None] = []
    model = Plain()
    model.register_forward_pre_hook(lambda *_: ran.append(None))
    with pytest.raises(
        InvalidValueError,
        match=r"on the model's device, cpu; got a tensor of shape \(1, 3, 16\) on meta.*to\('cpu'\)",
    ):
        find_sites(model, torch.ones(1, 3, 16, device="meta"))
    nested = {"x": [torch.ones(1, 3, 16, device="meta")]}
    for wrong in (
        model,
        Plain().to("meta"),
    ):  # the second is searched in a copy on the CPU
        with pytest.raises(
            InvalidValueError, match=r"on the model's device, cpu; got .* on meta"
        ):
            find_sites(wrong, nested)
    assert ran == []


def test_a_number_may_be_anywhere() -> None:
    assert (
        len(
            find_sites(Plain(), {"x": torch.ones(1, 3, 16), "scale": torch.tensor(0.5)})
        )
        == 1
    )


def test_a_missing_or_misshapen_argument_is_reported_with_the_forwards_arguments() -> (
    None
):
    for example, cause in (
        ((torch.ones(1, 3, 5),), "RuntimeError: mat1 and mat2"),
        ((None,), "TypeError"),
    ):
        with pytest.raises(
            InvalidValueError,
            match=rf"(?s)forward pass of Plain .*{cause}.*its forward takes \(x",
        ):
            find_sites(Plain(), example)
    with pytest.raises(
        InvalidValueError, match="missing 1 required positional argument: 'x'"
    ):
        find_sites(Plain(), {"scale": 1.0})


def test_after_an_example_that_fails_the_model_is_as_it_was() -> None:
    model = Plain().requires_grad_(False)
    with pytest.raises(InvalidValueError):
        find_sites(model, torch.ones(1, 3, 5))
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.overrides._get_current_function_mode() is None


def test_a_model_without_attention_is_refused_with_what_was_tried() -> None:
    with pytest.raises(
        RefusedError,
        match=r"saw no attention.*flex_attention.*no two activations were multiplied.*by hand",
    ):
        find_sites(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2))


def test_sites_are_found_where_gradients_are_switched_off() -> None:
    model = Plain()
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            (site,) = find_sites(model, torch.ones(1, 3, 16))
        assert len(site.terms) == 1


def test_own_modules_and_foreign_ones_are_found_in_one_model() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.foreign = Attention(16, 4), Plain()

        def forward(self, x: Tensor) -> Tensor:
            return self.foreign(self.own(x))

    model = Mixed()
    sites = {s.name: s for s in find_sites(model, torch.randn(1, 3, 16))}
    assert list(sites) == ["own", "foreign"]
    assert sites["own"].terms[0].query[0].parameter == "own.q_proj.weight"
    assert sites["foreign"].terms[0].query[0].parameter == "foreign.qkv.weight"
    assert model.own.observers == []


class Counting(Plain):
    """A buffer, a list and an attribute that each pass changes, noise, and a way that the numbers of x choose."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.other = nn.Linear(16, 48)
        self.seen: list[int] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.mean.lerp_(x.mean((0, 1)), 0.1)
        self.seen.append(len(x))
        self.last = x + torch.randn_like(x)
        if x.shape[-1] != 16:
            raise ValueError("sixteen, please")
        qkv = self.qkv if bool(x.sum() > 0) else self.other
        first, second = (
            super(Counting, self).forward(y, scale) for y in (x, qkv(x)[..., :16])
        )
        return first + second


@pytest.mark.parametrize("width", [16, 5])
def test_a_pass_that_fails_or_chooses_its_way_leaves_nothing_behind(width: int) -> None:
    model = Counting()
    before, stream = (
        {n: t.clone() for n, t in model.state_dict().items()},
        torch.get_rng_state(),
    )
    with ExitStack() as stack:
        if width != 16:
            stack.enter_context(
                pytest.raises(
                    InvalidValueError,
                    match=r"on the example failed: \w+: .*its forward takes",
                )
            )
        sites = find_sites(model, torch.ones(1, 3, width))
        # Two calls of one module are two sites, each with the weights of its own call.
        assert [(s.name, s.verified) for s in sites] == [("", True), ("#2", True)]
        assert [s.query[0].parameter for s in sites] == ["qkv.weight", "qkv.weight"]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert (model.seen, model.last) == ([], None)
    assert torch.equal(torch.get_rng_state(), stream)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_example_of_the_wrong_type_gets_one_error() -> None:
    for batch in (3, "a text"):
        with pytest.raises(
            InvalidTypeError, match=r"expected the batch as a tensor, a tuple .* got "
        ):
            find_sites(Plain(), batch)
        with pytest.raises(
            InvalidTypeError,
            match=r"expected the (batch|example) as a tensor, a tuple .* got ",
        ):
            apply(Plain(), "softcap:cap=3", batch=batch)
