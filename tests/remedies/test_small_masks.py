"""Remedies on the call leave pairs hidden that a mask of small numbers hides, such as Swin's of -100."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.sites.test_hidden_pairs import CAUSAL, WAYS, B, D, H, T, Windows

import qkeel
from qkeel import reference
from qkeel.errors import RefusedError
from qkeel.spec import AttentionSpec, Softcap


@pytest.mark.parametrize("how", WAYS)
def test_softcap_bends_what_is_visible_and_hides_what_was_hidden(how: str) -> None:
    model, x = Windows(how).double(), torch.randn(B, T, H * D, dtype=torch.float64)
    with torch.no_grad():
        model.qkv.weight.mul_(5)
    y = model(x)
    handle = qkeel.apply(model, "softcap:cap=3", batch=x)
    q, k, v = (z.unflatten(-1, (H, D)).transpose(1, 2) for z in model.qkv(x).chunk(3, -1))
    z = 3 * torch.tanh((q @ k.mT * D**-0.5 + model.bias) / 3)
    w = z.masked_fill(~CAUSAL, -torch.inf).softmax(-1)
    torch.testing.assert_close(model(x), (w @ v).transpose(1, 2).flatten(2))
    restored = copy.deepcopy(model)
    assert torch.equal(restored(x), model(x))
    handle.remove()
    assert torch.equal(model(x), y)


@pytest.mark.parametrize("how", ["one after the other", "in one sum"])
def test_a_hidden_pair_stays_hidden_where_its_logit_has_grown_over_the_mask(how: str) -> None:
    """The mask is known by its place in the forward, not by how low the scores are."""
    model, x = Windows(how), torch.randn(B, T, H * D)
    qkeel.apply(model, "softcap:cap=3", batch=x)
    with torch.no_grad():
        model.qkv.weight.mul_(40)  # logits in the hundreds
    first = model(x)
    changed = x.clone()
    changed[:, -1] += 1.0
    torch.testing.assert_close(model(changed)[:, :-1], first[:, :-1])


class Stable(Windows):
    """Scores the largest score of each row is subtracted, then `after`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        z = (q @ k.mT * D**-0.5).masked_fill(~CAUSAL, -torch.inf)
        if self.how == "in place":
            z -= z.amax(-1, keepdim=True)
        else:
            z = z - z.amax(-1, keepdim=True).detach()
        z = z + self.bias if self.how == "biased later" else z
        return (z.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["", "in place"])
def test_a_cap_bends_the_logits_from_which_the_largest_of_their_row_is_subtracted(how: str) -> None:
    model, x = Stable(how).double(), torch.randn(B, T, H * D, dtype=torch.float64)
    with torch.no_grad():
        model.qkv.weight.mul_(5)
    y = model(x)
    handle = qkeel.apply(model, "softcap:cap=3", batch=x)
    q, k, v = (z.unflatten(-1, (H, D)).transpose(1, 2) for z in model.qkv(x).chunk(3, -1))
    z = 3 * torch.tanh(q @ k.mT * D**-0.5 / 3)
    expected = (z.masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(model(x), expected)
    assert not torch.allclose(y, expected)
    handle.remove()
    assert torch.equal(model(x), y)


def test_scores_to_which_something_is_added_after_that_subtraction_are_refused() -> None:
    with pytest.raises(RefusedError, match="the largest score of each row is subtracted"):
        qkeel.apply(Stable("biased later"), "softcap:cap=3", batch=torch.randn(B, T, H * D))


def test_a_logit_of_q_and_k_as_low_as_a_mask_is_refused_and_one_that_a_mask_hides_is_not() -> None:
    model, x = Windows(""), torch.randn(B, T, H * D)
    with torch.no_grad():
        model.qkv.weight.mul_(400)
    with pytest.raises(RefusedError, match="an unmasked logit is"):
        qkeel.apply(model, "softcap:cap=3", batch=x)

    class Filled(Windows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            z = (q @ k.mT * D**-0.5).masked_fill(~CAUSAL, -1e4)
            return (z.softmax(-1) @ v).transpose(1, 2).flatten(2)

    qkeel.apply(Filled(""), "softcap:cap=3", batch=x)


def test_rows_that_see_no_key_stay_finite() -> None:
    spec = AttentionSpec(cap=Softcap(3.0))
    q = torch.randn(1, 1, 2, 4)
    out = reference.attend(spec, q, q, q, causal=False, mask=torch.full((1, 1, 2, 2), -torch.inf)).out
    assert bool(torch.isfinite(out).all())


class WholeNumbers(Windows):
    """Whole numbers in the sums of scores: a mask of -100, or the places between which a bias is interpolated, as in
    contextual position encoding."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if self.how == "mask":
            return q @ k.mT * D**-0.5 - 100 * (~CAUSAL).long()
        z = (q @ k.mT * D**-0.5).masked_fill(~CAUSAL, -torch.inf)
        place = z.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=T - 1)
        low, high = place.floor().long(), place.ceil().long()
        table = self.bias[..., :1, :].expand_as(z)
        return z + table.gather(-1, high) * (place - low) + table.gather(-1, low) * (1 - (place - low))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return (self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["mask", "places"])
def test_whole_numbers_in_a_sum_of_scores(how: str) -> None:
    model, x = WholeNumbers(how).double(), torch.randn(B, T, H * D, dtype=torch.float64)
    y = model(x)
    with qkeel.apply(model, "softcap:cap=3", batch=x):
        q, k, v = (z.unflatten(-1, (H, D)).transpose(1, 2) for z in model.qkv(x).chunk(3, -1))
        z = q @ k.mT * D**-0.5 if how == "mask" else model.scores(q, k)
        w = (3 * torch.tanh(z / 3)).masked_fill(~CAUSAL, -torch.inf).softmax(-1)
        torch.testing.assert_close(model(x), (w @ v).transpose(1, 2).flatten(2))
        assert copy.deepcopy(model).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(model(x), y)


LATER = ~CAUSAL


class Spelled(Windows):
    """Causal attention whose mask of -100 is written in one of several ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        z = q @ k.mT * D**-0.5
        if self.how == "assignment":
            z[:, :, LATER] = -100.0
        elif self.how == "tensor in where":
            z = torch.where(LATER, torch.full_like(z, -100.0), z)
        elif self.how == "alpha of add":
            z = torch.add(z, LATER, alpha=-100)
        elif self.how == "alpha of sub":
            z = torch.sub(z, LATER.long(), alpha=100)
        elif self.how == "clamp":
            z = z.masked_fill(LATER, -200.0).clamp(min=-100.0)
        elif self.how == "keywords":
            z = z.masked_fill(mask=LATER, value=-100.0)
        elif self.how == "keywords, and padded rows":
            z = z.masked_fill(mask=LATER, value=-100.0)
            z = z.masked_fill((torch.arange(T) >= T // 2)[:, None], -1e9)
        else:
            added = (LATER * -100.0).expand(len(x) * H, T, T)
            z = torch.baddbmm(added, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=D**-0.5).view_as(z)
        return (z.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["assignment", "tensor in where", "alpha of add", "alpha of sub"])
def test_a_mask_in_any_of_these_forms_stays_a_mask(how: str) -> None:
    model, x = Spelled(how).double(), torch.randn(B, T, H * D, dtype=torch.float64)
    qkeel.apply(model, "softcap:cap=3", batch=x)
    q, k, v = (z.unflatten(-1, (H, D)).transpose(1, 2) for z in model.qkv(x).chunk(3, -1))
    z = (3 * torch.tanh(q @ k.mT * D**-0.5 / 3)).masked_fill(LATER, -torch.inf)
    torch.testing.assert_close(model(x), (z.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("how", ["clamp", "keywords", "keywords, and padded rows", "baddbmm"])
@pytest.mark.parametrize("remedy", ["softcap:cap=3", "softpick"])
def test_a_mask_whose_pairs_a_remedy_would_uncover_is_refused(how: str, remedy: str) -> None:
    model, x = Spelled(how), torch.randn(B, T, H * D)
    y = model(x)
    with pytest.raises(RefusedError, match="would become visible"):
        qkeel.apply(model, remedy, batch=x)
    assert torch.equal(model(x), y)


class Paths(Windows):
    """Causal attention with a mask of -100, before which other sums may be computed."""

    def forward(
        self, x: torch.Tensor, pos: torch.Tensor | None = None, bias: float | None = None, *, mask: bool = True
    ) -> torch.Tensor:
        if pos is not None:
            x = x + pos
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.how == "rotated":
            q, k = (y * 0.8 + y.flip(-1) * 0.6 for y in (q, k))
        z = q @ k.mT * D**-0.5
        if bias is not None:
            z = z + bias
        if mask:
            z = z + LATER * -100.0
        if self.how == "largest subtracted":
            z = z - z.amax(-1, keepdim=True)
        return (z.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("how", ["", "largest subtracted"])
@pytest.mark.parametrize("shown", [True, False])
def test_sums_that_only_some_passes_compute_do_not_displace_the_mask(how: str, shown: bool) -> None:
    model, x = Paths(how).double(), torch.randn(B, T, H * D, dtype=torch.float64)
    pos = torch.randn_like(x)
    with torch.no_grad():
        model.qkv.weight.mul_(5)
    qkeel.apply(model, "softcap:cap=3", batch={"x": x, "pos": pos} if shown else x)
    for y, given in ((x + pos, pos), (x, None)):
        q, k, v = (z.unflatten(-1, (H, D)).transpose(1, 2) for z in model.qkv(y).chunk(3, -1))
        z = (3 * torch.tanh(q @ k.mT * D**-0.5 / 3)).masked_fill(LATER, -torch.inf)
        torch.testing.assert_close(model(x, given), (z.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_another_path_to_the_mask_is_refused_and_a_pass_without_a_mask_is_not() -> None:
    model, x = Paths(""), torch.randn(B, T, H * D)
    qkeel.apply(model, "softcap:cap=3", batch=x)
    assert model(x, mask=False).shape == x.shape
    with pytest.raises(RefusedError, match="another path than on the example"):
        model(x, bias=0.5)
    model = Paths("")
    qkeel.apply(model, "softcap:cap=3", batch={"x": x, "bias": 0.5})
    assert model(x, bias=0.5).shape == x.shape
    with pytest.raises(RefusedError, match="another path than on the example"):
        model(x)


def test_sums_of_q_and_k_do_not_stand_for_the_mask_that_a_single_query_needs_not() -> None:
    model, x = Paths("rotated").double(), torch.randn(B, T, H * D, dtype=torch.float64)
    qkeel.apply(model, "softcap:cap=3", batch=x)
    one = x[:, :1]
    torch.testing.assert_close(model(one, mask=False), model.qkv(one).chunk(3, -1)[2])
    moved = torch.cat([x[:, :-1], torch.randn_like(one)], 1)
    torch.testing.assert_close(model(x)[:, :-1], model(moved)[:, :-1])


class Given(Windows):
    """Attention with an additive mask among its arguments."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return ((q @ k.mT * D**-0.5 + mask).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_an_additive_mask_of_one_zero_hides_nothing() -> None:
    model, x = Given(""), torch.randn(B, T, H * D)
    qkeel.apply(model, "softcap:cap=3", batch={"x": x, "mask": LATER * -100.0})
    one = x[:1, :1]
    torch.testing.assert_close(model(one, torch.zeros(1, 1, 1, 1)), model.qkv(one).chunk(3, -1)[2])
