"""Every form × position × method × cache path: the oracle's numbers, which are those of formulas written out here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.quick import quick
from torch import Tensor

from qkeel import preset, reference
from qkeel.errors import RefusedError
from qkeel.functional.position_biases import xpos_decay
from qkeel.functional.rope import yarn
from qkeel.nn import GAU, Attention
from qkeel.spec import METHODS, POSITIONS, AttentionSpec, layer_specs

FORMS = [
    f"{form}{log}"
    for form in ("baseline", "qna", "kna", "cosa")
    for log in ("", "_logn")
]
LENGTH, TRAINED, DIM = 12, 6, 8
PIECES = (7, 1, 4)


def trained(form: str) -> dict[str, AttentionSpec]:
    """The form under every position by name; of those that place several, each kind of layer."""
    found = {}
    for name in POSITIONS:
        text = "window:window=3" if name == "window" else name
        specs = dict.fromkeys(
            layer_specs(preset(form, train_length=TRAINED), 3, text, TRAINED)
        )
        found.update({f"{name} {i}": spec for i, spec in enumerate(specs)})
    return found


def later(spec: AttentionSpec) -> Iterator[tuple[str, AttentionSpec]]:
    """The spec under every method that does not refuse it."""
    for method in METHODS:
        try:
            yield method, spec.extrapolate(method, factor=2, train_length=TRAINED)
        except RefusedError as refusal:
            said = str(refusal)
            assert method not in ("none", "window")
            assert spec.position.formula() in said or spec.scale.formula() in said, said


def moved(module: Attention | GAU) -> Any:
    """Its learned positions off their start, so that leaving one out shows."""
    for p in module.spec_params().values():
        p.data.mul_(1.5)
    return module.double()


@pytest.mark.parametrize(
    ("form", "causal"),
    quick(
        [*((form, True) for form in FORMS), ("kna_logn", False)],
        lambda case: case[1] != case[0].endswith("logn"),
    ),
)
@torch.no_grad()
def test_every_form_position_and_method_attends_from_a_cache_as_the_oracle_does(
    form: str, causal: bool
) -> None:
    x, seen = (
        torch.randn(
            1,
            LENGTH,
            16,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(0),
        ),
        0,
    )
    for position, start in trained(form).items():
        module = moved(Attention(16, 4, 2, DIM, spec=start))
        projections = (module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (
            project(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
            for project in projections
        )
        for method, spec in later(start):
            module.spec, seen = spec, seen + 1
            cache, end = module.new_cache(), 0
            for part in PIECES:
                rows, end = slice(end, end + part), end + part
                args = q[:, :, rows], k[:, :, :end], v[:, :, :end]
                heads = reference.attend(
                    spec, *args, params=module.spec_params(), causal=causal
                ).out
                truth = module.o_proj(heads.transpose(1, 2).flatten(2))
                ours = module(x[:, rows], cache=cache, causal=causal)
                assert torch.allclose(ours, truth, rtol=0, atol=1e-12), (
                    position,
                    method,
                )
    assert seen >= 70


@pytest.mark.parametrize("form", ["baseline", "kna_logn"])
@torch.no_grad()
def test_a_gau_attends_from_a_cache_as_without(form: str) -> None:
    x = torch.randn(
        2, LENGTH, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    for position, start in trained(form).items():
        module = moved(GAU(10, size=DIM, spec=start))
        for method, spec in later(start):
            if (
                method != "dynamic_ntk"
            ):  # with it, what a token saw of shorter texts is another rotation
                module.spec, cache = spec, module.new_cache()
                parts = [module(part, cache=cache) for part in x.split(PIECES, dim=1)]
                assert torch.allclose(
                    torch.cat(parts, 1), module(x), rtol=0, atol=1e-12
                ), (position, method)


# The formulas, pair by pair


def scale(form: str, i: int) -> float:
    """The factor on q·k of the query at i."""
    if form.startswith("cosa"):
        return (
            4 * math.log(i + 1) if form.endswith("logn") else 4 * math.log(TRAINED / 2)
        )
    plain = 1 / math.sqrt(DIM) if form.startswith("baseline") else 1.0
    return plain * (
        math.log(i + 1) / math.log(TRAINED) if form.endswith("logn") else 1.0
    )


def angles(method: str) -> list[float]:
    """How fast each pair turns under a method, for twice the training length."""
    theta = [10_000 ** (-2 * i / DIM) for i in range(DIM // 2)]
    if method == "pi":
        return [t / 2 for t in theta]
    if method in ("ntk", "abf"):
        return [20_000 ** (-2 * i / DIM) for i in range(DIM // 2)]
    if method == "ntk_fixed":
        return [t * 2 ** (-2 * (i + 1) / DIM) for i, t in enumerate(theta)]
    if method == "ntk_mixed":
        return [
            t * math.exp(-math.log(2) * ((i + 1) / (DIM / 2)) ** 0.625)
            for i, t in enumerate(theta)
        ]
    if method == "dynamic_ntk":
        return [
            (10_000 * (LENGTH / TRAINED) ** (DIM / (DIM - 2))) ** (-2 * i / DIM)
            for i in range(DIM // 2)
        ]
    if method == "yarn":
        return yarn(
            torch.tensor(theta, dtype=torch.float64), 2, TRAINED, base=10_000
        ).tolist()
    return theta


def distance(method: str, i: int, j: int) -> float:
    """What a method takes the distance from j to i for: windows of half the training length, leak of 4."""
    if method == "rerope":
        return min(i - j, 3)
    if method == "leaky_rerope":
        return i - j if i - j < 3 else 3 + (i - j - 3) / 4
    if method == "self_extend" and i - j >= 3:
        return i // 4 - j // 4 + 3 - 3 // 4
    return i - j


def written_out(form: str, method: str, q: Tensor, k: Tensor) -> Tensor:
    """Causal logits [t s] of one head under RoPE, -inf where a key is not seen."""
    normed_q, normed_k = (
        form.startswith(("qna", "cosa")),
        form.startswith(("kna", "cosa")),
    )
    q, k = (
        q / q.norm(dim=-1, keepdim=True) if normed_q else q,
        k / k.norm(dim=-1, keepdim=True) if normed_k else k,
    )
    half, logits = (
        DIM // 2,
        torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64),
    )
    for i in range(LENGTH):
        for j in range(max(0, i - TRAINED + 1) if method == "window" else 0, i + 1):
            factor = scale(form, min(i, TRAINED - 1) if method == "window" else i)
            if method == "yarn":
                factor *= (0.1 * math.log(2) + 1) ** 2
            if method == "log_n":
                factor *= max(1.0, math.log(i + 1) / math.log(TRAINED))
            r, total = distance(method, i, j), 0.0
            for turn, (a, b), (x, y) in zip(
                angles(method), zip(q[i], q[i, half:]), zip(k[j], k[j, half:])
            ):
                total += math.cos(turn * r) * (a * x + b * y) + math.sin(turn * r) * (
                    a * y - b * x
                )
            logits[i, j] = factor * total
    return logits


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_every_form_under_every_method_is_the_formula_pair_by_pair(form: str) -> None:
    rng = torch.Generator().manual_seed(1)
    q, k = (
        torch.randn(LENGTH, DIM, dtype=torch.float64, generator=rng) for _ in range(2)
    )
    spec = preset(form, train_length=TRAINED)
    for method in METHODS:
        if method == "log_n" and form.endswith("logn"):
            with pytest.raises(RefusedError, match="already"):
                spec.extrapolate(method, train_length=TRAINED)
            continue
        changed = spec.extrapolate(method, factor=2, train_length=TRAINED)
        logits = reference.attend(
            changed, q[None, None], k[None, None], k[None, None]
        ).logits[0, 0]
        assert torch.allclose(
            logits, written_out(form, method, q, k), rtol=0, atol=1e-12
        ), method


@torch.no_grad()
def test_positions_that_do_not_rotate_are_their_formulas_pair_by_pair() -> None:
    rng = torch.Generator().manual_seed(2)
    q, k = (
        torch.randn(LENGTH, DIM, dtype=torch.float64, generator=rng) for _ in range(2)
    )
    apart = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).double()
    plain = q @ k.T / math.sqrt(DIM)
    params = {"kerple_a": torch.tensor([0.7]), "kerple_p": torch.tensor([1.3])}
    a, p = (params[name].double() for name in ("kerple_a", "kerple_p"))
    expected = {
        "nope": plain,
        "alibi": plain - 2**-8 * apart,
        "kerple_log": plain - p * torch.log1p(a * apart.abs()),
        "kerple_power": plain - a * apart.abs() ** p,
        "xpos": _xpos(q, k, apart),
    }
    for name, logits in expected.items():
        (spec,) = layer_specs(preset("baseline"), 1, name, TRAINED)
        given = params if name.startswith("kerple") else None
        ours = reference.attend(
            spec, q[None, None], k[None, None], k[None, None], params=given
        ).logits[0, 0]
        assert torch.allclose(
            ours.tril(), logits.tril(), rtol=0, atol=1e-6 if given else 1e-12
        ), name


def _xpos(q: Tensor, k: Tensor, apart: Tensor) -> Tensor:
    logits = torch.zeros_like(apart)
    for i, (turn, kept) in enumerate(zip(angles("none"), xpos_decay(DIM))):
        a, b, x, y = (
            q[:, 2 * i, None],
            q[:, 2 * i + 1, None],
            k[:, 2 * i],
            k[:, 2 * i + 1],
        )
        turned = torch.cos(turn * apart) * (a * x + b * y) + torch.sin(turn * apart) * (
            a * y - b * x
        )
        logits += kept ** (apart / 512) * turned
    return logits / math.sqrt(DIM)
