"""Attention that transformers looks up by name is seen, whoever registered it, with the same numbers each time."""

import pytest
import torch
from tests.attention import scores, written
from tests.drawing import randint
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from qkeel import find_sites  # noqa: E402

from .oracle import observed  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings(
        "ignore:_compile flag on create_block_mask:DeprecationWarning"
    ),  # transformers' own
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script:DeprecationWarning"
    ),  # torch's own, where it compiles
]

NAMES = ("eager", "sdpa", "flex_attention", "registered")
IDS = randint(3, 64, (2, 8), seed=0)
KEEP = torch.ones(2, 8, dtype=torch.int64)
KEEP[1, :3] = 0  # padded on the left


def registered(module, query, key, value, attention_mask, **options):
    """A user's own attention function, of logits that the module has scaled by 1/√d."""
    y = written(query, key, value) if attention_mask is None else None
    if y is None:
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        y = (scores(query, key) + attention_mask).softmax(-1) @ value
    return y.transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _names():
    functions, masks = (
        transformers.AttentionInterface,
        transformers.AttentionMaskInterface,
    )
    functions.register("registered", registered)
    masks.register("registered", transformers.masking_utils.eager_mask)
    functions.register("without a mask", registered)
    # Compiled, flex_attention takes a minute on a CPU to compile and computes the same.
    with torch.compiler.set_stance("force_eager"):
        yield
    for name in ("registered", "without a mask"):
        del functions._global_mapping[name]
    del masks._global_mapping["registered"]


def llama(name):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.5,
        attn_implementation=name,
    )
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def watched(model):
    """Statistics per site; watching changes no logit of a token that is not padding."""

    def run():
        return model(input_ids=IDS, attention_mask=KEEP).logits[KEEP == 1]

    calls, logits = observed(run, model)
    assert torch.equal(logits, run())
    return {name: stats for name, _, stats in calls}


@pytest.mark.parametrize("name", NAMES)
def test_statistics_and_sites_are_the_same_under_every_name(name):
    model = llama(name)
    by_site, plain = watched(model), watched(llama("eager"))
    assert list(by_site) == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    for site, stats in by_site.items():
        for field in ("max_logit", "entropy", "query_norm_max"):
            mine, expected = (getattr(x, field) for x in (stats, plain[site]))
            assert_close(mine, expected, rtol=1e-4, atol=1e-5)
        assert stats.n_pairs.tolist() == [36 + 15] * 4  # 8 and 5 tokens, causal
        assert len(stats.key_norm) == 2
    sites = find_sites(model, {"input_ids": IDS, "attention_mask": KEEP})
    assert [s.name for s in sites] == list(by_site)
    for site in sites:
        (query,), (key,) = site.query, site.key
        assert torch.equal(query.index, torch.arange(32).view(4, 8))
        assert torch.equal(key.index, torch.arange(16).view(2, 8))


def test_a_function_registered_without_a_mask_function_is_shown_to_see_everything():
    # transformers then gives it no mask at all, without a word.
    by_site = watched(llama("without a mask"))
    assert [s.n_pairs.tolist() for s in by_site.values()] == [[2 * 64] * 4] * 2
