"""An experiment confirms which weights make each head, and says where they do not, or not they alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from qkeel import apply, find_sites
from qkeel.errors import RefusedError
from qkeel.nn import Attention
from qkeel.sites import AttentionSite, HeadSlice, QKProduct
from qkeel.sites.trace import traced

H, D, M = 4, 8, 32
Scores = Callable[..., Tensor]


class Parts(nn.Module):
    """q, k and v of x and what a score may be made of; `scores` makes it."""

    def __init__(self, scores: Scores, groups: int = H) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.n_heads, self.scores = H, scores
        self.q, self.k, self.v, self.q2, self.k2 = (
            nn.Linear(M, n * D) for n in (H, groups, groups, H, groups)
        )
        self.table = nn.Parameter(torch.randn(6, 6, D))
        self.mix = nn.Conv2d(H, H, 1)
        self.gain = nn.Parameter(torch.rand(D))
        self.register_buffer("calls", torch.zeros(()))

    def heads(self, x: Tensor, layer: nn.Module) -> Tensor:
        x = layer(x).unflatten(-1, (-1, D)).transpose(1, 2)
        return x.repeat_interleave(H // x.shape[1], 1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z = (
            self.scores(self, self.heads(x, self.q), self.heads(x, self.k))
            if self.scores is not two
            else two(self, x)
        )
        return (z.softmax(-1) @ self.heads(x, self.v)).transpose(1, 2).flatten(2)


def plain(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
    return F.dropout(q, 0.3) @ k.mT / 3 + torch.randn(1, H, 1, 1)


def two(parts: Parts, x: Tensor) -> Tensor:
    q, k, q2, k2 = (
        parts.heads(x, layer) for layer in (parts.q, parts.k, parts.q2, parts.k2)
    )
    return q @ k.mT + q2 @ k2.mT


def with_table(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT + torch.einsum("bhtd,tsd->bhts", q, parts.table)


def talking(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
    z = q @ k.mT
    return z + parts.mix(z)


def gated_positions(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT + q.detach().amax(-1, keepdim=True) * parts.table.detach().sum(-1)


def normed(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
    return F.normalize(q, dim=-1) @ (F.rms_norm(k, (D,)) * parts.gain).mT


def flat_norm(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
    q = (
        F.layer_norm(q.transpose(1, 2).flatten(2), (H * D,))
        .unflatten(-1, (H, D))
        .transpose(1, 2)
    )
    return q @ k.mT


def biased(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return (q @ k.mT + parts.table.sum(-1)).masked_fill(hidden, -torch.inf)


def in_pieces(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
    turned = torch.empty_like(q)
    turned[..., ::2], turned[..., 1::2] = -q[..., 1::2], q[..., ::2]
    z = torch.zeros(q.shape[0], H, 6, 6)
    z += turned @ k.mT
    return z.div_(3)


def of_itself(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
    return q @ q.mT


def x() -> Tensor:
    return torch.randn(2, 6, M, generator=torch.Generator().manual_seed(1))


def site_of(model: nn.Module) -> AttentionSite:
    (site,) = find_sites(model, x())
    assert site.terms, site.why
    return site


CONFIRMED: dict[str, Callable[[], nn.Module]] = {
    "dropout and noise": lambda: Parts(plain),
    "grouped keys": lambda: Parts(plain, groups=2),
    "one key head": lambda: Parts(plain, groups=1),
    "norms per head": lambda: Parts(normed),
    "a norm over all heads": lambda: Parts(flat_norm),
    "a bias and a mask": lambda: Parts(biased),
    "written in place": lambda: Parts(in_pieces),
    "a second product": lambda: Parts(two),
    "queries that are the keys": lambda: Parts(of_itself),
    "a learned table of relative positions": lambda: Parts(with_table),
    "nn.MultiheadAttention": lambda: nn.TransformerEncoderLayer(M, H, batch_first=True),
    "half precision": lambda: nn.TransformerEncoderLayer(
        M, H, batch_first=True, dtype=torch.bfloat16
    ),
}


@pytest.mark.parametrize("name", CONFIRMED)
def test_weights_that_make_the_logits_are_confirmed_and_the_model_is_bit_for_bit_what_it_was(
    name: str,
) -> None:
    model = CONFIRMED[name]()
    example = x().to(next(model.parameters()).dtype)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    torch.manual_seed(3)
    stream = torch.get_rng_state()
    (site,) = find_sites(model, example)
    assert (site.verified, site.unverified) == (True, "")
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [p._version for p in model.parameters()] == versions


def test_zeros_that_hide_weights_are_filled_in_copies() -> None:
    model = Parts(plain)
    nn.init.zeros_(model.q.weight)
    nn.init.zeros_(model.q.bias)
    assert site_of(model).verified
    assert not model.q.weight.any()


def test_a_weight_that_is_computed_from_another_is_followed() -> None:
    model = Parts(plain)
    weight_norm(model.q)
    site = site_of(model)
    assert "parametrizations" in site.query[0].parameter
    assert site.verified


UNKNOWN = r"(it is not known which (rows of which weights belong to its heads: |weights produce the queries \()).*"
DOUBTFUL: dict[str, tuple[Scores, str]] = {
    "positions gated outside the graph": (
        gated_positions,
        "the weights of its heads are not confirmed: with the known key rows set to zero, its logits still change "
        "from key to key ",
    ),
    "talking heads": (
        talking,
        UNKNOWN
        + "a term added to its scores depends on the input and is not a product",
    ),
}


@pytest.mark.parametrize("name", DOUBTFUL)
@pytest.mark.parametrize(
    "remedy",
    [
        "lalr",
        "qk_clip",
        "qk_lr",
        "qk_weight_decay:decay=0.1",
        "spectral_cap",
        "qk_norm",
    ],
)
def test_weights_that_do_not_make_the_logits_alone_are_not_changed_per_head(
    name: str, remedy: str
) -> None:
    scores, why = DOUBTFUL[name]
    model = Parts(scores)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(RefusedError, match=why):
        apply(model, remedy, optimizer, batch=x())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_of_a_sum_of_products_every_term_is_needed_and_changed() -> None:
    model = Parts(two)
    site = site_of(model)
    made = [(term.query[0].parameter, term.key[0].parameter) for term in site.terms]
    assert made == [("q.weight", "k.weight"), ("q2.weight", "k2.weight")]
    for term in site.terms:
        assert "part of them comes from other weights" in planted(model, terms=(term,))
    crossed = [
        QKProduct(query=a.query, key=b.key)
        for a, b in zip(site.terms, site.terms[::-1])
    ]
    order = [0, 2, 1, 3]
    wrong = QKProduct(
        query=tuple(swapped(s, order) for s in site.terms[1].query),
        key=site.terms[1].key,
    )
    assert "changed the logits of heads" in planted(model, terms=(site.terms[0], wrong))
    assert (
        planted(model, terms=tuple(crossed)) == ""
    )  # the same rows, and only heads are told apart
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with apply(model, "qk_clip:threshold=0.001", optimizer, batch=x()):
        before = {n: p.clone() for n, p in model.named_parameters()}
        model(x()).sum().backward()
        optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {"q.weight", "k.weight", "q2.weight", "k2.weight"} <= changed
    assert "v.weight" not in changed


def test_a_gate_that_scores_are_added_to_in_place_is_told() -> None:
    class Gated(Parts):
        def forward(self, x: Tensor) -> Tensor:
            z = self.heads(x, self.q2).amax(-1, keepdim=True) * torch.arange(6.0)
            z += self.heads(x, self.q) @ self.heads(x, self.k).mT
            return (z.softmax(-1) @ self.heads(x, self.v)).transpose(1, 2).flatten(2)

    (site,) = find_sites(Gated(plain), x())
    assert not site.verified
    assert "depends on the input" in site.why


def test_a_remedy_on_the_call_needs_no_weights() -> None:
    model = Parts(talking)
    with apply(model, "softcap:cap=3", batch=x()):
        assert model(x()).isfinite().all()


def planted(model: nn.Module, **changes: object) -> str:
    """Why the experiment does not confirm a site in which something is changed by hand."""
    site = dataclasses.replace(site_of(model), **changes)
    return traced(model, (x(),), {}, expected=True).verified([site])[0].unverified


def swapped(s: HeadSlice, order: list[int]) -> HeadSlice:
    return dataclasses.replace(s, index=s.index[order])


def test_planted_faults_are_seen() -> None:
    model = Parts(plain)
    (term,) = site_of(model).terms
    (q,), (k,) = term.query, term.key
    order = [0, 2, 1, 3]
    for wrong in (
        QKProduct(query=(swapped(q, order),), key=(k,)),
        QKProduct(query=(q,), key=(swapped(k, order),)),
    ):
        assert "changed the logits of heads" in planted(model, terms=(wrong,))
    other = dataclasses.replace(q, parameter="v.weight", bias="v.bias")
    assert "changed the logits of no head" in planted(
        model, terms=(QKProduct(query=(other,), key=(k,)),)
    )
    more = QKProduct(query=(other,), key=(k,))
    assert "rows of v.weight" in planted(model, terms=(term, more))
    half = dataclasses.replace(q, index=q.index[:, : D // 2])
    assert "part of them comes from other weights" in planted(
        model, terms=(QKProduct(query=(half,), key=(k,)),)
    )
    assert "heads instead of 2" in planted(model, n_heads=2)
    assert "did not contain its attention call" in planted(model, name="elsewhere")


def test_rows_that_are_not_there_are_a_reason_and_no_crash() -> None:
    model = Parts(plain)
    (term,) = site_of(model).terms
    beyond = dataclasses.replace(term.query[0], index=term.query[0].index + 1000)
    why = planted(model, terms=(QKProduct(query=(beyond,), key=term.key),))
    assert "cannot run again: IndexError" in why


def test_of_a_shared_layer_each_use_is_confirmed_by_itself() -> None:
    layer = Parts(plain)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = layer, Parts(biased)
            self.other.q.weight = layer.q.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.layer(self.layer(x)))

    assert [site.verified for site in find_sites(Twice(), x())] == [True, True]


def test_own_modules_need_no_experiment() -> None:
    assert [site.verified for site in find_sites(Attention(16, 4))] == [True]
    (site,) = find_sites(nn.Sequential(Attention(M, H)), x())
    assert site.verified


def test_weights_that_are_unknown_are_not_verified() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])

    (site,) = find_sites(Sum(), x())
    assert (site.terms, site.verified, site.unverified) == ((), False, "")
    assert site.why


def test_a_bias_of_several_parts_is_zeroed_with_its_rows() -> None:
    """BEiT's and EVA's: q_bias, 0; rotated, so that it is no number per key."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qk, self.q_bias = (
                nn.Linear(M, 2 * H * D, bias=False),
                nn.Parameter(torch.randn(H * D)),
            )

        def forward(self, x: Tensor) -> Tensor:
            bias = torch.cat((self.q_bias, torch.zeros(H * D)))
            parts = (
                F.linear(x, self.qk.weight, bias)
                .unflatten(-1, (2, H, D))
                .permute(2, 0, 3, 1, 4)
            )
            angle = torch.arange(6.0)[:, None]
            q, k = (
                torch.cat((-y[..., 4:], y[..., :4]), -1) * angle.sin() + y * angle.cos()
                for y in parts
            )
            return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)

    site = site_of(Joined())
    assert (site.query[0].bias, site.verified) == ("q_bias", True)


def test_positions_that_the_model_gives_to_a_layer_are_no_part_of_its_input() -> None:
    """XLNet's: a bias that is added to the query meets projected positions; neither depends on the tokens."""

    class Layer(Parts):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
            q, k, r = (
                self.heads(x, self.q),
                self.heads(x, self.k),
                self.heads(positions, self.k2),
            )
            return (
                ((q @ k.mT + (q + self.gain) @ r.mT * self.far).softmax(-1) @ k)
                .transpose(1, 2)
                .flatten(2)
            )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(plain)
            self.layer.register_buffer("far", torch.randn(6, 6))
            self.positions = torch.randn(1, 6, M)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, self.positions)

    (site,) = find_sites(Model(), x())
    assert (site.verified, site.unverified) == (True, "")
    assert len(site.terms) == 2


def test_an_input_whose_rows_share_memory_is_changed_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(M, M), Parts(plain)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.first(x[:1]).expand(3, -1, -1))

    (site,) = find_sites(Model(), x())
    assert (site.verified, site.unverified) == (True, "")


def relative(parts: Parts, q: Tensor) -> Tensor:
    """SAM's: a mask that is a product of the queries and a table."""
    return torch.einsum("bhtd,tsd->bhts", q, parts.table)


def of_the_largest(parts: Parts, q: Tensor) -> Tensor:
    return q.detach().amax(-1, keepdim=True) * torch.arange(6.0)


@pytest.mark.parametrize(
    ("mask", "verified"), [(relative, True), (of_the_largest, False)]
)
def test_a_mask_of_a_fused_function_may_be_a_product(
    mask: Scores, verified: bool
) -> None:
    class Fused(Parts):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.heads(x, layer) for layer in (self.q, self.k, self.v))
            return (
                F.scaled_dot_product_attention(q, k, v, attn_mask=mask(self, q))
                .transpose(1, 2)
                .flatten(2)
            )

    site = site_of(Fused(plain))
    keys = [term.key[0].parameter for term in site.terms]
    assert (site.verified, keys) == (
        verified,
        ["k.weight", "table"] if verified else ["k.weight"],
    )


def test_learned_keys_that_are_normed_are_told() -> None:
    def memory(parts: Parts, q: Tensor, k: Tensor) -> Tensor:
        learned = F.normalize(parts.table[:H, :2], dim=-1).expand(len(k), -1, -1, -1)
        return q @ torch.cat((learned, k[:, :, 2:]), 2).mT

    assert (
        "with the known key rows set to zero, its logits still change"
        in site_of(Parts(memory)).unverified
    )
