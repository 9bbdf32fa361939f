"""The part of γ that each weight of a logit takes: every product takes the whole γ of its head, or none does."""

import torch
from torch import nn

from qkeel.remedies.logit_factors import logit_factors
from qkeel.sites import AttentionSite, HeadSlice, QKProduct
from qkeel.spec import AttentionSpec

H, G = 4, 2


def weight(name, n, first=0):
    """Rows of n heads, two each."""
    return HeadSlice(
        parameter=name, axis=0, index=torch.arange(2 * n).view(n, 2) + first
    )


Q, Q2, K, K2, KEYS, ONE, ONE2 = (
    weight(name, n)
    for name, n in (
        ("q", H),
        ("q2", H),
        ("k", H),
        ("k2", H),
        ("keys", G),
        ("one", 1),
        ("one2", 1),
    )
)
INPUT = weight("input", 1)  # before the weight that makes heads


def site(
    *terms,
    groups=G,
    key_heads=None,
):
    return AttentionSite(
        name="site",
        module=nn.Identity(),
        spec=AttentionSpec(),
        n_heads=H,
        n_kv_heads=groups,
        head_dim=2,
        terms=tuple(QKProduct(query=(INPUT, q), key=(k,)) for q, k in terms),
        key_heads=key_heads,
    )


def factors(one, gamma, by_group):
    """What each weight is multiplied by, per query head."""
    shares = logit_factors(one, by_group=by_group)
    assert shares is not None
    found = {}
    for share in shares:
        assert len(share.heads) == share.weight.n
        own = gamma[share.heads].amin(1)
        found[share.weight.parameter] = (own.sqrt() if share.root else own)[
            one.used(share.weight.n)
        ]
    assert "input" not in found
    return found


def test_every_product_of_a_head_takes_its_gamma():
    gamma = torch.tensor([0.9, 0.5, 0.25, 1.0], dtype=torch.float64)
    one = torch.ones(H, dtype=torch.float64)
    worst, least = gamma.view(2, 2).amin(1).repeat_interleave(2), gamma.min().expand(H)
    twisted = torch.tensor(
        [0.25, 0.5, 0.25, 0.5], dtype=torch.float64
    )  # heads 0 and 2 share a key, and 1 and 3
    for made, by_group, expected in (
        (site((Q, K), groups=H), False, {"q": gamma.sqrt(), "k": gamma.sqrt()}),
        (site((Q, K), groups=H), True, {"q": gamma.sqrt(), "k": gamma.sqrt()}),
        (site((Q, KEYS)), False, {"q": gamma}),
        (site((Q, KEYS)), True, {"q": worst.sqrt(), "keys": worst.sqrt()}),
        (
            site((Q, KEYS), key_heads=(0, 1, 0, 1)),
            True,
            {"q": twisted.sqrt(), "keys": twisted.sqrt()},
        ),
        (site((Q, ONE), groups=1), False, {"q": gamma}),
        (site((Q, ONE), groups=1), True, {"q": least.sqrt(), "one": least.sqrt()}),
        (
            site((ONE, ONE2), groups=1),
            False,
            {"one": least.sqrt(), "one2": least.sqrt()},
        ),
        # Latent attention: a part of its own, and a part whose key all heads share.
        (
            site((Q, K), (Q2, ONE), groups=H),
            False,
            {"q": gamma.sqrt(), "k": gamma.sqrt(), "q2": gamma},
        ),
        (
            site((Q, K), (Q2, ONE), groups=H),
            True,
            {"q": gamma.sqrt(), "k": gamma.sqrt(), "q2": gamma},
        ),
        # The query of a shared key takes all of γ, so what else it is multiplied by takes none, and its partner all.
        (site((Q, ONE), (Q, K), (Q2, K), groups=H), False, {"q": gamma, "q2": gamma}),
        (site((Q2, K), (Q, K), (Q, ONE), groups=H), False, {"q": gamma, "q2": gamma}),
        (
            site((Q, K), (Q, K2), groups=H),
            False,
            {n: gamma.sqrt() for n in ("q", "k", "k2")},
        ),
    ):
        found = factors(made, gamma, by_group)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=name)
        whole = (
            worst
            if by_group and made.n_kv_heads == G
            else least
            if by_group and made.n_kv_heads == 1
            else gamma
        )
        for term in made.terms:
            product = found.get(term.query[-1].parameter, one) * found.get(
                term.key[-1].parameter, one
            )
            if term.query[-1].n == H and made.key_heads is None:
                torch.testing.assert_close(product, whole)


def test_products_that_no_powers_suit_have_none():
    for made, by_group in (
        (site((Q, ONE), (Q, Q), groups=H), False),  # a weight of power 1 by itself
        (site((Q, ONE), (Q2, ONE), (Q, Q2), groups=H), False),
        (site((KEYS, ONE)), True),  # the key's γ on a weight that heads share
        (site((KEYS, ONE)), False),  # roots on weights of one and of two heads
    ):
        assert logit_factors(made, by_group=by_group) is None
