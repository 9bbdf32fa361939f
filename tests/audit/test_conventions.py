"""For every model type that `check` may call healthy by its weights, the bounds of a scan hold and say something."""

import contextlib
import io
import logging

import pytest
import torch
import transformers

from qkeel.audit.checkpoint_config import VERIFIED
from qkeel.audit.scan import scan

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL = {"layer_types": ["full_attention", "full_attention"]}
FEW_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 2,
}
GEMMA_LAYERS = {
    "head_dim": 16,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OWN = {
    "vocab_size": 64,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
}
# Model type, and the options in which its models differ in what a bound needs.
CASES = (
    ("llama", {"attention_bias": True}),
    ("llama", {"rope_parameters": YARN}),
    ("mistral", {"head_dim": 8}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 10}),
    ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 10}),
    (
        "gemma3n_text",
        {
            **GEMMA_LAYERS,
            "intermediate_size": [48, 48],
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
    ),
    ("gemma4_text", {**GEMMA_LAYERS, "global_head_dim": 16}),
    (
        "qwen3_next",
        {"head_dim": 16, **FULL, **FEW_EXPERTS, "shared_expert_intermediate_size": 8},
    ),
    ("qwen3_5_text", {"head_dim": 16, **FULL}),
    (
        "qwen3_5_moe_text",
        {"head_dim": 16, **FULL, **FEW_EXPERTS, "shared_expert_intermediate_size": 8},
    ),
    ("olmo2", {}),
    (
        "olmo3",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
    ),
    ("cohere2", {}),
    ("phi", {"qk_layernorm": True}),
    ("phi", {}),
    ("phi3", {}),
    (
        "phi3",
        {
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                **PLAIN,
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
        },
    ),
    ("granite", {"attention_multiplier": 0.3}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 12, "attention_bias": True}),
    (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    (
        "deepseek_v2",
        {
            **LATENT,
            "q_lora_rank": 12,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    (
        "falcon_h1",
        {
            "head_dim": 8,
            "key_multiplier": 3.0,
            "attention_in_multiplier": 2.0,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
    ),
    (
        "ministral3",
        {
            "head_dim": 8,
            "rope_parameters": {
                **YARN,
                "llama_4_scaling_beta": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    ("gpt_oss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ("glm4", {"head_dim": 8}),
    ("nemotron", {}),
    ("starcoder2", {}),
    ("persimmon", {"num_key_value_heads": 4, "qk_layernorm": True}),
    ("smollm3", {}),
    ("exaone4", FULL),
    ("gpt_neox", {"num_key_value_heads": 4}),
    ("gpt2", OWN),
    ("gpt2", {**OWN, "scale_attn_by_inverse_layer_idx": True}),
    ("gpt_bigcode", OWN),
)
IDS = [f"{kind}-{i}" for i, (kind, _) in enumerate(CASES)]


def test_every_type_whose_bounds_count_as_verified_is_compared_here():
    assert {kind for kind, _ in CASES} == VERIFIED


def logits(model, tokens):
    """The largest |logit| of each head [heads], by module, in float64, from the q and k that arrive at attention."""
    seen = {}
    names = {module: name for name, module in model.named_modules()}

    def attention(
        module,
        query,
        key,
        value,
        mask,
        **options,
    ):
        share = query.shape[1] // key.shape[1]
        k, v = (
            key.repeat_interleave(share, 1).double(),
            value.repeat_interleave(share, 1).double(),
        )
        scale = options.get("scaling")
        z = (
            query.double()
            @ k.mT
            * (query.shape[-1] ** -0.5 if scale is None else scale)
        )
        seen[names[module]] = z.abs().amax((0, 2, 3))
        later = torch.ones(z.shape[-2:], dtype=torch.bool).triu(1)
        out = z.masked_fill(later, -torch.inf).softmax(-1) @ v
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("qkeel_test_logits", attention)
    model.set_attn_implementation("qkeel_test_logits")
    with torch.no_grad():
        model(tokens)
    return seen


def built(kind, options):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    own = options if "n_embd" in options else {**SIZES, **options}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **own)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def saved(model, folder):
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    return scan(folder)


def compare(found, seen, least, seed):
    assert found.unknown == ()
    assert len(found.sites) == len(seen) == 2
    for site in found.sites:
        assert site.assumed == ()
        (real,) = (
            z for name, z in seen.items() if f"{name}.".startswith(f"{site.name}.")
        )
        bound = torch.tensor(site.bounds(), dtype=torch.float64)
        assert (real <= bound * (1 + 1e-5)).all(), (site.name, real, bound, seed)
        assert (real / bound).max() > least, (site.name, real, bound, seed)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=IDS)
def test_no_logit_is_over_the_bound_and_the_worst_weights_reach_it(
    kind, options, tmp_path
):
    """Random weights; then rows of q and k that all read one direction, and a residual stream that has it alone."""
    model = built(kind, options)
    seed = torch.seed() % 2**31
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 64, (2, 40), generator=random)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                0.4 * torch.randn(p.shape, generator=random)
                + (0.3 if p.ndim == 1 and "norm" in name else 0)
            )
    compare(saved(model, tmp_path / "random"), logits(model, tokens), 1e-4, seed)
    direction = torch.ones(32)
    direction[1::2] = -1
    tables = ("embed_tokens", "wte", "embed_in", "word_embeddings")
    projections = (
        "q_proj",
        "k_proj",
        "qkv_proj",
        "query_key_value",
        "q_a_proj",
        "kv_a_proj",
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            rows = torch.rand(max(p.shape), generator=random) + 0.5
            is_matrix = p.ndim == 2
            new = torch.zeros_like(p)  # so the residual stream keeps its direction
            if is_matrix and "per_layer" not in name and any(x in name for x in tables):
                new = direction.expand_as(p)
            elif "norm" in name or "ln_" in name:
                new = torch.full_like(p, 0.5 if name.endswith("weight") else 0.0)
            elif "q_b_proj" in name or "kv_b_proj" in name:
                new = rows[: p.shape[0], None].expand_as(p)
            elif is_matrix and "c_attn" in name and p.shape[0] == 32:
                new = rows * direction[:, None]
            elif (
                is_matrix
                and any(x in name for x in (*projections, "c_attn"))
                and p.shape[1] == 32
            ):
                new = rows[: p.shape[0], None] * direction
            p.copy_(new)
    compare(saved(model, tmp_path / "worst"), logits(model, tokens), 0.2, seed)
