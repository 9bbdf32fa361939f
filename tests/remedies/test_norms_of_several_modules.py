"""qk_norm where several modules make the heads of a side, keys are a table, or a logit sums over tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkeel
from qkeel.errors import RefusedError
from qkeel.spec import RMSNorm

H, D, M, T = 4, 8, 32, 6


def parts(x: Tensor) -> Tensor:
    """[b h t d] of [b t (h d)]."""
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def unit(x: Tensor) -> Tensor:
    """RMS norm without a gain."""
    return RMSNorm(gain="none").normalise(x)


class Attention(nn.Module):
    """Attention of one of several kinds; `logits` is what it computes them to be, of q and k that are made as given."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.q, self.k, self.v, self.more_q, self.more_k = (
            nn.Linear(M, M) for _ in range(5)
        )
        self.relative, self.down = nn.Embedding(2 * T, D), nn.Linear(M, 2, bias=False)
        self.lora = nn.Linear(2, M, bias=False)
        if kind == "adapter at zero":
            nn.init.zeros_(self.lora.weight)

    def made(self, x: Tensor) -> dict[str, Tensor]:
        """What the projections make, by name."""
        return {name: getattr(self, name)(x) for name in ("q", "k", "more_q", "more_k")}

    def logits(self, y: dict[str, Tensor]) -> Tensor:
        q, k, more_q, more_k = (
            parts(y[name]) for name in ("q", "k", "more_q", "more_k")
        )
        if self.kind == "two streams":  # as SD3: tokens of an image and of a text
            return torch.cat([q, more_q], 2) @ torch.cat([k, more_k], 2).mT * D**-0.5
        if self.kind == "two products":
            return (q @ k.mT + more_q @ more_k.mT) * D**-0.5
        if self.kind == "table":  # Shaw
            far = torch.arange(T)[:, None] - torch.arange(T) + T
            return (
                q @ k.mT + torch.einsum("bhtd,tsd->bhts", q, self.relative(far))
            ) * D**-0.5
        if (
            self.kind == "tied rows"
        ):  # MSA Transformer: a logit sums over the sequences too
            return torch.einsum("bhtd,bhsd->hts", q, k)[None] * D**-0.5
        return q @ k.mT * D**-0.5  # an adapter next to its base

    def forward(self, x: Tensor) -> Tensor:
        y = self.made(x)
        if self.kind.startswith("adapter"):
            y["q"] = y["q"] + self.lora(self.down(x))
        z = self.logits(y)
        v = parts(self.v(x))
        v = torch.cat([v] * (z.shape[-1] // T), 2)
        return (z.softmax(-1) @ v).transpose(1, 2).flatten(2)


KINDS = {
    "two streams": 4,
    "two products": 4,
    "table": 2,
    "tied rows": 2,
}  # and how many norms each gets


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_heads_normed_where_they_are_made(kind: str) -> None:
    model, x = Attention(kind).double(), torch.randn(2, T, M, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names, untouched = list(model.state_dict()), model(x)
    handle = qkeel.apply(model, "qk_norm", optimizer, batch=x)
    added = {n: p for n, p in model.named_parameters() if n not in names}
    assert len(added) == KINDS[kind]
    assert {id(p) for p in added.values()} <= {
        id(p) for group in optimizer.param_groups for p in group["params"]
    }
    with torch.no_grad():
        for gain in added.values():
            assert gain.shape == (D,)
    handle.remove()
    normed = {
        name: unit(y.unflatten(-1, (H, D))).flatten(-2)
        for name, y in model.made(x).items()
    }
    z = model.logits(normed)
    v = torch.cat([parts(model.v(x))] * (z.shape[-1] // T), 2)
    expected = (z.softmax(-1) @ v).transpose(1, 2).flatten(2)
    assert (list(model.state_dict()), torch.equal(model(x), untouched)) == (names, True)
    with qkeel.apply(model, "qk_norm", batch=x):
        torch.testing.assert_close(model(x), expected)
    assert not torch.allclose(untouched, expected)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("adapter", "a sum of several outputs"), ("adapter at zero", "is zero")],
)
def test_outputs_of_several_modules_that_are_added_up_are_refused(
    kind: str, reason: str
) -> None:
    model, x = Attention(kind), torch.randn(2, T, M)
    names, y = list(model.state_dict()), model(x)
    with pytest.raises(RefusedError, match=reason):
        qkeel.apply(model, "qk_norm", batch=x)
    assert (list(model.state_dict()), torch.equal(model(x), y)) == (names, True)


def test_heads_concatenated_from_two_modules_are_refused() -> None:
    """As in latent attention: a norm of each part would be none of the head."""

    class Concatenated(Attention):
        def logits(self, y: dict[str, Tensor]) -> Tensor:
            q, k = (torch.cat([parts(y[n]), parts(y[f"more_{n}"])], -1) for n in "qk")
            return q @ k.mT / 4

    with pytest.raises(
        RefusedError,
        match="not the output of a single module: they are computed by more_q, q",
    ):
        qkeel.apply(Concatenated(""), "qk_norm", batch=torch.randn(2, T, M))


def test_a_bias_that_is_added_after_the_product_with_its_weight_is_refused() -> None:
    """The norm would come before the bias."""

    class Later(Attention):
        def made(self, x: Tensor) -> dict[str, Tensor]:
            late = {
                n: F.linear(x, m.weight) + m.bias
                for n, m in (("q", self.q), ("k", self.k))
            }
            return {**Attention.made(self, x), **late}

    with pytest.raises(
        RefusedError, match="something other than the module that holds the weights"
    ):
        qkeel.apply(Later("plain"), "qk_norm", batch=torch.randn(2, T, M))


class Pooled(nn.Module):
    """Attention whose q and k are channels of convolutions over tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Conv1d(M, M, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            conv(x.mT).unflatten(1, (H, D)).transpose(2, 3)
            for conv in (self.q, self.k, self.v)
        )
        return ((q @ k.mT * D**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_heads_that_are_channels_of_a_convolution_are_refused() -> None:
    with pytest.raises(
        RefusedError,
        match="the queries are not the last dimension of a module's output",
    ):
        qkeel.apply(Pooled(), "qk_norm", batch=torch.randn(2, T, M))
