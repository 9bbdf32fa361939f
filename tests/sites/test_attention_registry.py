"""Attention that transformers looks up by name is seen, whoever registered it, with the same numbers each time."""

import pytest
import torch
from tests.drawing import randint
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from qkeel import find_sites  # noqa: E402
from qkeel.capture.calls import statistics  # noqa: E402
from qkeel.capture.intercept import CaptureMode  # noqa: E402

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


def registered(
    module,
    query,
    key,
    value,
    attention_mask,
    **options,
):
    """A user's own attention function."""
    key, value = (
        x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value)
    )
    scores = query @ key.mT * options["scaling"]
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


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
    """Logits of the tokens that are not padding, and statistics per site; watching changes neither."""
    expected = model(input_ids=IDS, attention_mask=KEEP).logits
    found = {}
    with CaptureMode(model, lambda s: found.update({s.name: statistics(s.call)})):
        logits = model(input_ids=IDS, attention_mask=KEEP).logits
    assert torch.equal(logits[KEEP == 1], expected[KEEP == 1])
    return logits, found


@pytest.mark.parametrize("name", NAMES)
def test_statistics_and_sites_are_the_same_under_every_name(name):
    model = llama(name)
    _, found = watched(model)
    _, plain = watched(llama("eager"))
    assert list(found) == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    for site, stats in found.items():
        for field in ("max_logit", "entropy", "query_norm_max"):
            assert_close(
                getattr(stats, field), getattr(plain[site], field), rtol=1e-4, atol=1e-5
            )
        assert stats.n_pairs.tolist() == [36 + 15] * 4  # 8 and 5 tokens, causal
        assert len(stats.key_norm) == 2
    sites = find_sites(model, {"input_ids": IDS, "attention_mask": KEEP})
    assert [s.name for s in sites] == list(found)
    for site in sites:
        assert torch.equal(site.terms[0].query[0].index, torch.arange(32).view(4, 8)), (
            site.why
        )
        assert torch.equal(site.terms[0].key[0].index, torch.arange(16).view(2, 8))


def test_a_function_registered_without_a_mask_function_is_shown_to_see_everything():
    # transformers then gives it no mask at all, without a word.
    _, found = watched(llama("without a mask"))
    assert [s.n_pairs.tolist() for s in found.values()] == [[2 * 64] * 4] * 2
