"""Bad input to find_sites gets one clear error: what was expected, what came, what to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkeel import find_sites
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError
from qkeel.nn import Attention


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        q, k, v = (y.unflatten(2, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=2))
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"expected a torch\.nn\.Module to find attention in, got dict"):
        find_sites({}, torch.ones(1, 2, 16))  # type: ignore[arg-type]


def test_a_foreign_model_without_an_example_is_told_how_its_forward_is_called() -> None:
    with pytest.raises(
        RefusedError,
        match=r"give an example batch, find_sites\(model, ...\), as forward\(x: .*Tensor.*, scale.*takes it",
    ):
        find_sites(Plain())


def test_an_example_on_another_device_is_refused_before_anything_runs() -> None:
    ran: list[None] = []
    model = Plain()
    model.register_forward_pre_hook(lambda *_: ran.append(None))
    with pytest.raises(
        InvalidValueError, match=r"on the model's device, cpu; got a tensor of shape \(1, 3, 16\) on meta.*to\('cpu'\)"
    ):
        find_sites(model, torch.ones(1, 3, 16, device="meta"))
    with pytest.raises(InvalidValueError, match=r"on the model's device, meta; got .* on cpu"):
        find_sites(Plain().to("meta"), {"x": [torch.ones(1, 3, 16)]})
    assert ran == []


def test_a_number_may_be_anywhere() -> None:
    assert len(find_sites(Plain(), torch.ones(1, 3, 16), scale=torch.tensor(0.5))) == 1


def test_a_missing_or_misshapen_argument_is_reported_with_the_forwards_arguments() -> None:
    for example, cause in (((torch.ones(1, 3, 5),), "RuntimeError: mat1 and mat2"), ((None,), "TypeError")):
        with pytest.raises(InvalidValueError, match=rf"(?s)forward pass of Plain .*{cause}.*its forward takes \(x"):
            find_sites(Plain(), *example)
    with pytest.raises(InvalidValueError, match="missing 1 required positional argument: 'x'"):
        find_sites(Plain(), scale=1.0)


def test_after_an_example_that_fails_the_model_is_as_it_was() -> None:
    model = Plain().requires_grad_(False)
    with pytest.raises(InvalidValueError):
        find_sites(model, torch.ones(1, 3, 5))
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.overrides._get_current_function_mode() is None


def test_a_model_without_attention_is_refused_with_what_was_tried() -> None:
    with pytest.raises(
        RefusedError, match=r"saw no attention.*flex_attention.*there was no product of two activations"
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
