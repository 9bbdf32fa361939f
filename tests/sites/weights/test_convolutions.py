"""Rows of convolutions make heads as rows of a matrix do; a batch norm behind them is a norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkeel import apply, find_sites
from qkeel.errors import RefusedError
from qkeel.sites import AttentionSite

H, D, C = 2, 4, 8


class Images(nn.Module):
    """Attention between the places of an image [b c y x] whose queries and keys two modules make."""

    def __init__(self, query: nn.Module, key: nn.Module) -> None:
        super().__init__()
        self.query, self.key = query, key

    def forward(self, x: Tensor) -> Tensor:
        q, k = (
            layer(x).unflatten(1, (H, D)).flatten(3).mT
            for layer in (self.query, self.key)
        )
        return (q @ k.mT / 2).softmax(-1) @ k


def separable() -> nn.Module:
    """CvT's: one channel at a time, a norm, and one place at a time."""
    return nn.Sequential(
        nn.Conv2d(C, C, 3, padding=1, groups=C),
        nn.BatchNorm2d(C),
        nn.Conv2d(C, H * D, 1),
    )


def normed() -> nn.Module:
    """LeViT's."""
    return nn.Sequential(nn.Conv2d(C, H * D, 1, bias=False), nn.BatchNorm2d(H * D))


def image() -> Tensor:
    return torch.randn(3, C, 3, 5, generator=torch.Generator().manual_seed(1))


def made(
    query: nn.Module, key: nn.Module | None = None, *, training: bool = False
) -> Images:
    torch.manual_seed(0)
    model = Images(query, nn.Conv2d(C, H * D, 1) if key is None else key)
    for p in model.parameters():
        nn.init.normal_(p)
    return model.train(training)


def site_of(model: nn.Module) -> AttentionSite:
    (site,) = find_sites(model, image())
    return site


@pytest.mark.parametrize("training", [False, True])
def test_the_nearest_convolution_whose_rows_are_heads_decides(training: bool) -> None:
    model = made(separable(), nn.Conv2d(C, H * D, 3, padding=1), training=training)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    site = site_of(model)
    (term,) = site.terms
    assert (site.verified, site.normed, site.n_heads) == (True, False, H)
    assert [s.parameter for s in (*term.query, *term.key)] == [
        "query.2.weight",
        "key.weight",
    ]
    assert term.query[0].index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (term.query[0].bias, term.key[0].bias) == ("query.2.bias", "key.bias")
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "of",
    [normed, lambda: nn.Sequential(nn.Conv2d(C, H * D, 1), nn.GroupNorm(H, H * D))],
)
def test_a_norm_behind_a_convolution_is_one_and_its_rows_are_known(
    of: object, training: bool
) -> None:
    assert callable(of)
    model = made(of(), training=training)
    site = site_of(model)
    assert (site.verified, site.normed, site.query[0].parameter) == (
        True,
        True,
        "query.0.weight",
    )
    for remedy in ("lalr", "qk_clip"):
        with pytest.raises(RefusedError, match="a norm"):
            apply(
                model,
                remedy,
                torch.optim.SGD(model.parameters(), lr=0.1),
                batch=image(),
            )


def test_heads_that_a_convolution_mixes_before_the_product_have_its_rows() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.mix = nn.Conv2d(C, H * D, 1), nn.Conv2d(H, H, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (
                self.mix(self.project(x).flatten(2).unflatten(1, (H, D)))
                .flatten(1, 2)
                .unflatten(2, (3, 5))
            )

    (term,) = site_of(model := made(Mixed())).terms
    assert [(s.parameter, s.index.tolist()) for s in term.query] == [
        ("query.project.weight", [[*range(H * D)]]),
        ("query.mix.weight", [[0], [1]]),
    ]
    assert site_of(model).verified


def test_a_transposed_convolution_has_no_rows_of_heads() -> None:
    site = site_of(made(nn.ConvTranspose2d(C, H * D, 1)))
    assert site.terms == ()
    assert (
        "no matrix product with a parameter lies between the module's input and q"
        in site.why
    )


def test_a_place_that_is_not_projected_is_told() -> None:
    class First(nn.Module):
        """RvT's: the class token passes by the convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(C, H * D, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((x[:, :, :1], self.project(x[:, :, 1:])), 2)

    assert (
        "with the known query rows set to zero, its logits still change"
        in site_of(made(First())).unverified
    )


def test_a_norm_of_channels_is_refused() -> None:
    model = made(nn.Conv2d(C, H * D, 1))
    with pytest.raises(RefusedError, match="no module outputs complete heads"):
        apply(model, "query_norm", batch=image())
    with pytest.raises(RefusedError, match="the keys and the values at once"):
        apply(model, "qk_norm", batch=image())


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_clip_scales_output_channels_in_any_memory_format(
    form: torch.memory_format,
) -> None:
    model = made(nn.Conv2d(C, H * D, 3, padding=1), training=True).to(
        memory_format=form
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    logits: list[Tensor] = []

    def softmax(_: nn.Module, args: tuple[Tensor]) -> None:
        q, k = (
            f(args[0]).unflatten(1, (H, D)).flatten(3).mT
            for f in (model.query, model.key)
        )
        logits.append((q @ k.mT / 2).detach())

    softmax(model, (image(),))
    top = logits[0].amax((0, 2, 3))
    threshold = float(top.max()) / 2
    with apply(model, f"qk_clip:threshold={threshold}", optimizer, batch=image()):
        F.mse_loss(out := model(image()), torch.zeros_like(out)).backward()
        optimizer.step()
    softmax(model, (image(),))
    gamma = (threshold / top).clamp_max(1.0)
    torch.testing.assert_close(
        logits[1], logits[0] * gamma[:, None, None], rtol=1e-4, atol=1e-5
    )


class PooledHeads(nn.Module):
    """As MViT v2: a convolution that is the same for all heads pools what a projection made."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.pool_q, self.pool_k = (
            nn.Conv1d(4, 4, 3, padding=1, groups=4, bias=False) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        q, k = (
            pool(y.flatten(0, 1).mT).mT.unflatten(0, (-1, 4))
            for pool, y in ((self.pool_q, q), (self.pool_k, k))
        )
        return ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_heads_that_share_a_convolution_are_those_of_what_it_pools() -> None:
    torch.manual_seed(0)
    (site,) = find_sites(PooledHeads(), torch.randn(2, 6, 16))
    assert site.n_heads == 4
