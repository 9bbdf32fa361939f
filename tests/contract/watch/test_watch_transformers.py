"""A monitor on models of transformers: caches, cross-attention, padded batches, latent keys."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.contract.watch.families import ids, llama, t5

from qkeel import watch
from qkeel.functional.statistics import LogitStats


def test_generating_with_a_cache_counts_every_token_once() -> None:
    model = llama().eval()
    prompt = ids(0, rows=2, t=5)
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    plain = model.generate(prompt, **options)  # type: ignore[operator]
    reads = []
    with watch(model) as monitor:
        assert torch.equal(model.generate(prompt, **options), plain)  # type: ignore[operator]
        stats = monitor.read()
        for _ in range(2):
            model.generate(prompt, **options)  # type: ignore[operator]
            reads.append(monitor.read())
    assert len(stats) == 2
    for s in stats.values():
        # The prompt's 5 rows, then one row for each token but the last; rows see 1..5, then 6, 7, 8 keys.
        assert s.n_queries.tolist() == [2 * (5 + 3)] * 4
        assert s.n_pairs.tolist() == [2 * (15 + 6 + 7 + 8)] * 4
    for name, s in reads[0].items():
        assert torch.equal(s.max_logit, reads[1][name].max_logit)
    whole = model.eval()
    with watch(whole) as monitor:
        whole(plain[:, :-1])
        for name, s in monitor.read().items():
            torch.testing.assert_close(
                s.max_logit, stats[name].max_logit, rtol=1e-5, atol=1e-6
            )
            torch.testing.assert_close(
                s.entropy, stats[name].entropy, rtol=1e-5, atol=1e-6
            )


PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
FIELDS = (
    "max_logit",
    "min_logit",
    "mean_logit",
    "entropy",
    "query_norm",
    "key_norm",
    "n_queries",
    "n_pairs",
)
Stats = Mapping[str, LogitStats]


def grouped(way: str, kv_heads: int = 2) -> nn.Module:
    """A model with 4 query heads whose logits are not all close to 0."""
    torch.manual_seed(0)
    model = llama(num_key_value_heads=kv_heads)
    model.set_attn_implementation(way)  # type: ignore[operator]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                p *= 8
    return model.eval()


def check_same(found: Stats, expected: Stats) -> None:
    assert found.keys() == expected.keys()
    assert len(found) == 2
    for name, s in found.items():
        assert len(s.max_logit) == 4
        for field in FIELDS:
            value, reference = getattr(s, field), getattr(expected[name], field)
            torch.testing.assert_close(
                value, reference, rtol=1e-4, atol=1e-5, msg=f"{name} {field}"
            )


def decoded(
    way: str, kv_heads: int, *, first: bool, plain: bool
) -> tuple[Stats, list[tuple[int, int]]]:
    """The statistics of one decoded token of a batch, padded if not `plain`, with the sites' numbers of heads."""
    model, tokens, mask = (
        grouped(way, kv_heads),
        ids(0, rows=2, t=6),
        torch.ones_like(PADDED) if plain else PADDED,
    )

    def prompt() -> object:
        return model(
            input_ids=tokens[:, :5], attention_mask=mask[:, :5], use_cache=True
        ).past_key_values

    with torch.no_grad():
        cache = prompt()
        with watch(model) as monitor:
            if not first:
                model(input_ids=tokens, attention_mask=mask)
                cache = prompt()
                monitor.read()
            model(input_ids=tokens[:, 5:], attention_mask=mask, past_key_values=cache)
            return monitor.read(), [
                (site.n_heads, site.n_kv_heads) for site in monitor.sites
            ]


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("first", [False, True], ids=["known", "first pass"])
def test_a_decoded_token_whose_heads_transformers_packs_has_the_numbers_of_each_head(
    kv_heads: int, first: bool
) -> None:
    (found, sites), (expected, _) = (
        decoded(way, kv_heads, first=first, plain=False) for way in ("sdpa", "eager")
    )
    check_same(found, expected)
    assert sites == [(4, kv_heads)] * 2


def test_a_token_that_is_packed_without_a_mask_has_the_numbers_of_each_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.integrations import sdpa_attention

    monkeypatch.setattr(
        sdpa_attention, "use_gqa_in_sdpa", lambda *_: False
    )  # as where values are wider than keys
    (found, _), (expected, _) = (
        decoded(way, 2, first=False, plain=True) for way in ("sdpa", "eager")
    )
    check_same(found, expected)


@pytest.mark.parametrize("first", [False, True], ids=["known", "first pass"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_as_many_tokens_as_a_group_has_heads_are_not_taken_for_heads(
    kv_heads: int, first: bool
) -> None:
    t, found = 4 // kv_heads, []
    mask = torch.ones(2, t, dtype=torch.long)
    mask[0, 0] = 0
    for way in ("sdpa", "eager"):
        model = grouped(way, kv_heads)
        with torch.no_grad(), watch(model) as monitor:
            if not first:
                model(input_ids=ids(0, rows=2, t=6), attention_mask=PADDED)
                monitor.read()
            model(input_ids=ids(1, rows=2, t=t), attention_mask=mask)
            found.append(monitor.read())
    check_same(*found)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generating_from_a_padded_batch_counts_the_same_heads_in_every_token(
    cache: str,
) -> None:
    found: list[Stats] = []
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    options |= (
        {"cache_implementation": "static", "disable_compile": True}
        if cache == "static"
        else {}
    )
    for way in ("sdpa", "eager"):
        model = grouped(way)
        with torch.no_grad(), watch(model) as monitor:
            model.generate(ids(0, rows=2, t=6), attention_mask=PADDED, **options)  # type: ignore[operator]
            found.append(monitor.read())
    check_same(*found)


def test_an_encoder_decoder_has_three_kinds_of_sites_and_its_cross_attention_sees_both_lengths() -> (
    None
):
    model = t5().eval()
    with watch(model) as monitor:
        model(input_ids=ids(0, t=7), labels=ids(1, t=5))
        stats = monitor.read()
    pairs = {name: s.n_pairs[0].item() for name, s in stats.items()}
    assert len(pairs) == 6
    for name, n in pairs.items():
        if name.startswith("encoder"):
            assert n == 2 * 7 * 7
        else:
            assert n == 2 * (5 * 7 if "EncDec" in name else 15)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_what_is_said_of_the_real_tokens(side: str) -> None:
    model = llama().eval()
    tokens = ids(0, rows=2, t=6)
    with watch(model) as monitor:
        model(input_ids=tokens)
        expected = monitor.read()
    padding, zeros = (
        torch.zeros(2, 3, dtype=torch.long),
        torch.zeros(2, 3, dtype=torch.long),
    )
    order = (lambda a, b: [b, a]) if side == "left" else (lambda a, b: [a, b])
    padded = torch.cat(order(tokens, padding), 1)
    mask = torch.cat(order(torch.ones_like(tokens), zeros), 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with watch(model, query_mask="attention_mask") as monitor:
        model(input_ids=padded, attention_mask=mask, position_ids=positions)
        for name, s in monitor.read().items():
            for field in (
                "max_logit",
                "min_logit",
                "mean_logit",
                "entropy",
                "query_norm",
                "key_norm",
                "cos_mean",
            ):
                value, reference = getattr(s, field), getattr(expected[name], field)
                torch.testing.assert_close(
                    value, reference, rtol=1e-5, atol=1e-6, msg=f"{name} {field}"
                )
            assert torch.equal(s.n_pairs, expected[name].n_pairs)
