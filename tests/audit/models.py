"""Tiny transformers models saved with save_pretrained, and the q and k weights of each head by other means."""

import contextlib
import io
import logging

import torch
import transformers

HEADS = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**HEADS, num_key_value_heads=2, vocab_size=32),
    "gpt2": transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=32, bos_token_id=0, eos_token_id=0
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**HEADS, vocab_size=32),
    "phi3": transformers.Phi3Config(
        **HEADS, num_key_value_heads=2, vocab_size=32, pad_token_id=0
    ),
    "falcon": transformers.FalconConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **HEADS,
        moe_intermediate_size=8,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        vocab_size=32,
    ),
}


def build(name):
    """The model with weights large enough to tell heads apart, gains and biases away from 1 and 0."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name], attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def save(name, folder, **options):
    """Build and save_pretrained, without its progress bar."""
    model = build(name)
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, **options)
    return model


def projections(name, model, layer):
    """W_Q, W_K [heads rows inputs] in float64, cut out as each modeling file cuts its outputs."""
    weights = {k: v.double() for k, v in model.state_dict().items()}

    def weight(end):
        return next(
            v for k, v in weights.items() if f".{layer}." in k and k.endswith(end)
        )

    if name == "gpt2":
        q, k, _ = weight("c_attn.weight").T.reshape(3, 4, 8, 32)
    elif name == "gpt_neox":
        q, k, _ = weight("query_key_value.weight").reshape(4, 3, 8, 32).unbind(1)
    elif name == "falcon":
        fused = weight("query_key_value.weight").reshape(2, 4, 8, 32)
        q, k = fused[:, :2].flatten(0, 1), fused[:, 2]
    elif name == "phi3":
        q, k, _ = weight("qkv_proj.weight").reshape(8, 8, 32).split([4, 2, 2])
    elif name == "deepseek_v3":
        q = weight("q_b_proj.weight").reshape(4, 12, 12)[:, :8]
        k = weight("kv_b_proj.weight").reshape(4, 14, 10)[:, :8]
    else:
        q, k = (weight(f"{x}_proj.weight").reshape(-1, 8, 32) for x in "qk")
    return q, k.repeat_interleave(4 // len(k), 0)
