"""What each step adds to the weights behind the heads, as a watched model's record has it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.monitor.test_weights import KINDS, built

import qkeel
from qkeel.errors import InvalidValueError
from qkeel.monitor.weight_norms import WeightNorms
from qkeel.spec import AttentionSpec, RMSNorm

FIELDS = [
    f"{part}_{of}"
    for part in ("delta2", "delta3")
    for of in ("spectral_norm", "stable_rank", "singular_entropy")
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_watched_models_steps_are_those_of_its_dense_products(kind: str) -> None:
    model, (q, k), example = built(kind)
    q, k = q.clone(), k.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with qkeel.watch(model, optimizer, stats="max+updates") as monitor:
        out = model(example)
        (out if isinstance(out, torch.Tensor) else out[0]).square().sum().backward()
        optimizer.step()
        heads = {name: x[0, 0] for name, x in monitor.history.heads.items()}
    now, key = KINDS[kind][1](model)
    second = (now - q).mT @ k + q.mT @ (key - k)
    third = (now - q).mT @ (key - k)
    for part, matrix in (("delta2", second), ("delta3", third)):
        sigma = torch.linalg.svdvals(matrix)
        share = sigma.square() / sigma.square().sum(-1, keepdim=True)
        np.testing.assert_allclose(
            heads[f"{part}_spectral_norm"], sigma[:, 0], rtol=1e-6
        )
        np.testing.assert_allclose(
            heads[f"{part}_stable_rank"], 1 / share[:, 0], rtol=1e-6
        )
        np.testing.assert_allclose(
            heads[f"{part}_singular_entropy"],
            -torch.special.xlogy(share, share).sum(-1),
            rtol=1e-5,
        )
    if "mla" not in kind:
        ratio = (now - q).flatten(1).norm(dim=1) / q.flatten(1).norm(dim=1)
        np.testing.assert_allclose(heads["query_update_ratio"], ratio, rtol=1e-6)


@pytest.mark.parametrize("gain", ["dim", "one_plus_dim", "head", "head_dim", "scalar"])
def test_the_gains_of_a_norm_multiply_the_rows_of_the_weights(gain: str) -> None:
    torch.manual_seed(3)
    model = qkeel.nn.Attention(
        16, 4, 2, spec=AttentionSpec(norm=RMSNorm(gain=gain))
    ).double()  # type: ignore[arg-type]
    gains = [p for name, p in model.named_parameters() if "norm" in name]
    assert len(gains) == 2
    with torch.no_grad():
        for p in gains:
            p.add_(torch.rand_like(p))

    def dense() -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for weight, g, n in zip(
            (model.q_proj.weight, model.k_proj.weight), gains, (4, 2)
        ):
            rows = weight.detach().unflatten(0, (n, -1))
            own = g.detach() + (gain == "one_plus_dim")
            found.append(
                (rows * own.expand(n, 4)[..., None]).repeat_interleave(4 // n, 0)
            )
        return found[0], found[1]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with qkeel.watch(model, optimizer, stats="max+updates") as monitor:
        q, k = dense()
        model(torch.randn(2, 5, 16, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        now, key = dense()
        heads = {name: x[0, 0] for name, x in monitor.history.heads.items()}
    for part, matrix in (
        ("delta2", (now - q).mT @ k + q.mT @ (key - k)),
        ("delta3", (now - q).mT @ (key - k)),
    ):
        np.testing.assert_allclose(
            heads[f"{part}_spectral_norm"],
            torch.linalg.matrix_norm(matrix, 2),
            rtol=1e-6,
        )


def test_nothing_changes_for_the_model_and_nothing_is_measured_unless_it_is_named() -> (
    None
):
    torch.manual_seed(0)
    first = qkeel.nn.Attention(16, 2)
    second = copy.deepcopy(first)
    for model, stats in ((first, "all+updates"), (second, True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with qkeel.watch(model, optimizer, stats=stats) as monitor:
            for seed in range(2):
                model(
                    torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(seed))
                ).sum().backward()
                optimizer.step()
            assert bool(set(FIELDS) & set(monitor.history.heads)) == (stats != True)  # noqa: E712
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a, b)
    with pytest.raises(InvalidValueError, match="optimizer"):
        qkeel.watch(first, stats="all+updates")


def test_a_site_whose_weights_cannot_be_multiplied_is_named_in_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WeightNorms, "multiplied", [])
    model = qkeel.nn.Decoder(qkeel.nn.DecoderConfig(vocab_size=20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with qkeel.watch(model, optimizer, stats="all+updates") as monitor:
        expected = r"the change that a step causes is not measured for blocks\.0\.attention, blocks"
        with pytest.warns(UserWarning, match=expected):
            one_step(model, optimizer)
        one_step(model, optimizer)  # warns once
        assert not set(FIELDS) & set(monitor.history.heads)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randint(0, 20, (2, 8))).square().mean().backward()
    optimizer.step()
