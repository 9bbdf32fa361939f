"""The programs of the table, with the options that make them tiny."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A program of others, as it is run.

    Args:
        source: repository and commit of the checkout.
        command: what follows `python`, in {here}, the folder `home` of the checkouts; {out} is empty and for its files,
            {data} has the tiny data, {checkouts} the checkouts.
        normal: further options, by which it trains well.
        hot: options in their place at a rate that lets logits grow; None: no such run.
        home: where it is run, in the folder of the checkouts.
        prepare: a command of its own that must have run before, once.
        env: environment variables; see shims/sitecustomize.py.
        needs: what it is given that is not its own, for the page.
        seconds: how long a run may take if that is more than others may.
    """

    source: str
    command: str
    normal: str = ""
    hot: str | None = None
    home: str
    prepare: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: str = "tiny data"
    seconds: float = 0.0


_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_NO_GROUPS = {name: n for name, n in _LLAMA.items() if name != "num_key_value_heads"}
_OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
# run_clm.py: configuration of each family. Those that list a type for each layer refuse fewer layers by an option.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "granite": _LLAMA,
    "gemma": {**_LLAMA, "head_dim": 16},
    "gpt_neox": _NO_GROUPS,
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        **_OPT,
    },
    "olmo2": _LLAMA,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "stablelm": _LLAMA,
}


def _run_clm(family: str) -> Program:
    overrides = ",".join(
        f"{name}={x}" for name, x in {"vocab_size": 300, **FAMILIES[family]}.items()
    )
    return Program(
        source="transformers decba1d2 (a public fork's main of 2026-08-19)",
        home=".",
        command=f"run_clm.py --model_type {family} --config_overrides {overrides} --tokenizer_name {{data}}/tokenizer "
        "--train_file {data}/text.txt --do_train --block_size 32 --per_device_train_batch_size 4 --max_steps 30 "
        "--output_dir {out} --report_to none --use_cpu --logging_steps 1 --save_strategy no --seed 1",
        normal="--learning_rate 1e-3",
        hot="--learning_rate 0.1 --warmup_steps 2",
    )


_WORDS = (
    "main.py --model Transformer --emsize 32 --nhid 32 --nlayers 2 --nhead 2 --epochs 1 --bptt 16 --batch_size 8 "
    "--log-interval 5 --data ./data/tiny --save {out}/model.pt --seed 1"
)

# x-transformers: scripts without options, and the number of rounds after which the table ends them.
_ROUNDS = {
    "train_copy.py": 8,
    "train_free.py": 1,
    "train_gpt_vae.py": 2,
    "train_length_extrapolate.py": 2,
    "train_parity.py": 60,
    "train_belief_state.py": 2,
    "train_with_muon.py": 1,
}
_SHORT = "--num_batches 4 --seq_len 64"
_OPTIONS = {
    "train_enwik8.py": "--num_batches 6 --seq_len 64 --cpu True",
    "train_self_masked_repr.py": f"{_SHORT} --generate_length 16",
    "train_enwik8_xm.py": f"{_SHORT} --cpu True",
    "train_enwik8_lejepa_style.py": f"{_SHORT} --cpu True",
    "train_path_star.py": "--num_train 960 --num_val 32 --epochs 1 --dim 48 --depth 2 --heads 2",
    "train_xl_enwik8.py": f"{_SHORT} --train_seq_len 128 --generate_length 0 --cpu True",
    "train_entropy_tokenizer.py": f"{_SHORT} --cpu True",
}

_HOT = {
    "train_path_star.py": "--learning_rate 0.3"
}  # the others take too few steps, or no rate
_SLOW = {"train_free.py": 900.0}  # its first round ends with a sample of 480 tokens


def _x_transformers(script: str) -> Program:
    env = {
        "PYTHONPATH": "{checkouts}/x-transformers",
        "QKEEL_CUDA": "1",
        "ACCELERATE_USE_CPU": "1",
        "WANDB_MODE": "disabled",
        "QKEEL_SEED": "0",
    }
    rounds = _ROUNDS.get(script)
    return Program(
        source="lucidrains/x-transformers 9252ed78",
        home="x-transformers",
        command=f"{script} {_OPTIONS.get(script, '')}".strip(),
        hot=_HOT.get(script),
        env=env | ({} if rounds is None else {"QKEEL_ROUNDS": str(rounds)}),
        needs="tiny data, a seed, the CPU under CUDA's names"
        + (
            ""
            if rounds is None
            else f", an end after {rounds} round{'s' * (rounds > 1)}"
        ),
        seconds=_SLOW.get(script, 0.0),
    )


# torchtitan: its program with the configuration of its debug model, on one process and on two.
_OVER = {1: "", 2: ", two processes"}


def _torchtitan(processes: int) -> Program:
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29778",
    }
    # With "spmd_types", its default, several processes do not start on torch 2.13.
    several = f"-m torch.distributed.run --standalone --nproc_per_node {processes} "
    return Program(
        source="torchtitan 0.3.0",
        home=".",
        command=f"{several if processes > 1 else ''}-m torchtitan.train --module llama3 --config llama3_debugmodel "
        "--hf_assets_path {data}/tokenizer --dataloader.dataset_path {data}/sft --dump_folder {out} --debug.seed 0 "
        "--training.local_batch_size 2 --training.seq_len 64"
        + (" --parallelism.spmd_backend partial_dtensor" if processes > 1 else ""),
        hot="--optimizer.param-groups.0.optimizer-kwargs.lr 0.3 --training.steps 20",
        env={
            "QKEEL_ACCELERATOR": "1",
            "TORCHDYNAMO_DISABLE": "1",
            **(alone if processes == 1 else {}),
        },
        needs="tiny data, a seed, the CPU as torch's accelerator, no torch.compile",
    )


_LITGPT = """--optimizer '{{"class_path": "torch.optim.AdamW", "init_args": {{"lr": RATE}}}}'"""

PROGRAMS: dict[str, Program] = {
    "nanoGPT": Program(
        source="karpathy/nanoGPT 3adf61e1",
        home="nanoGPT",
        prepare="data/shakespeare_char/prepare.py",
        command="train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=2 "
        "--eval_interval=20 --log_interval=1 --block_size=64 --batch_size=4 --n_layer=2 --n_head=2 --n_embd=32 "
        "--max_iters=40 --lr_decay_iters=40 --dropout=0.0 --warmup_iters=2 --out_dir={out}",
        normal="--learning_rate=1e-3",
        hot="--learning_rate=0.3 --min_lr=0.1",
    ),
    "minGPT, chargpt": Program(
        source="karpathy/minGPT 37baab71",
        home="minGPT/projects/chargpt",
        command="chargpt.py --model.model_type=None --model.n_layer=2 --model.n_head=2 --model.n_embd=32 "
        "--trainer.max_iters=40 --trainer.num_workers=0 --data.block_size=32 --trainer.batch_size=4 "
        "--trainer.device=cpu \"--system.work_dir='{out}'\"",
        normal="--trainer.learning_rate=1e-3",
        hot="--trainer.learning_rate=0.3",
        env={"PYTHONPATH": "{checkouts}/minGPT"},
    ),
    "nanochat, base_train": Program(
        source="karpathy/nanochat 92d63d4e",
        home="nanochat",
        prepare="-m scripts.tok_train --max-chars 50000 --vocab-size 300",
        command="-m scripts.base_train --depth=2 --aspect-ratio=16 --head-dim=16 --max-seq-len=64 "
        "--device-batch-size=2 --total-batch-size=128 --num-iterations=30 --eval-every=-1 --core-metric-every=-1 "
        "--sample-every=-1 --device-type=cpu --window-pattern=L --warmup-steps=2 --model-tag=tiny",
        hot="--matrix-lr=2 --embedding-lr=3",
        env={
            "NANOCHAT_BASE_DIR": "{data}/nanochat",
            "TORCHDYNAMO_DISABLE": "1",
            "WANDB_MODE": "disabled",
        },
        needs="tiny data, no torch.compile",
    ),
    "lingua, apps.main.train": Program(
        source="facebookresearch/lingua 437d680e",
        home="lingua",
        command="-m apps.main.train config=apps/main/configs/debug.yaml dump_dir={out} steps=25 "
        "distributed.fsdp_type=no_shard distributed.compile=false distributed.model_dtype=fp32 model.dim=32 "
        "model.n_layers=2 model.n_heads=2 data.root_dir={data}/lingua data.batch_size=2 "
        "data.prefetch_size=4 data.seq_len=64 data.load_async=false probe_freq=null profiling.run=false "
        "checkpoint.dump.every=1000 checkpoint.eval.every=1000 logging.freq=1 optim.warmup=2 eval=null",
        normal="optim.lr=1e-3",
        hot="optim.lr=0.3",
        env={
            "PYTHONPATH": "{checkouts}/lingua",
            "QKEEL_XFORMERS": "1",
            "QKEEL_CUDA": "1",
            "MASTER_PORT": "29777",
            "WANDB_MODE": "disabled",
        },
        needs="tiny data, the CPU under CUDA's names, names of xformers",
    ),
    "litgpt pretrain": Program(
        source="Lightning-AI/litgpt 26857050",
        home="litgpt",
        command="-m litgpt pretrain pythia-14m --data TextFiles --data.train_data_path {data}/litgpt "
        "--data.num_workers 1 --tokenizer_dir {data}/tokenizer --train.max_tokens 1600 --train.micro_batch_size 2 "
        "--train.global_batch_size 2 --train.max_seq_length 32 --train.lr_warmup_steps 2 --eval.max_iters 1 "
        "--precision 32-true --devices 1 --out_dir {out} --logger_name csv",
        normal=_LITGPT.replace("RATE", "1e-3"),
        hot=_LITGPT.replace("RATE", "0.1") + " --train.min_lr 0.05",
        env={"TORCHDYNAMO_DISABLE": "1"},
        needs="tiny data, no torch.compile",
    ),
    "timm, train.py": Program(
        source="huggingface/pytorch-image-models aa4b5850",
        home="pytorch-image-models",
        command="train.py --data-dir {data}/images --model vit_tiny_patch16_224 --img-size 32 --num-classes 2 -b 4 "
        "--epochs 2 --warmup-epochs 0 --workers 1 --no-prefetcher --device cpu --opt adamw --output {out} --seed 1 "
        "--log-interval 5 --model-kwargs img_size=32 embed_dim=32 depth=2 num_heads=2 patch_size=8",
        normal="--lr 1e-3",
        hot="--lr 0.3",
        needs="tiny pictures",
    ),
    **{f"run_clm.py, {family}": _run_clm(family) for family in FAMILIES},
    **{f"torchtitan{_OVER[n]}": _torchtitan(n) for n in _OVER},
    "trl sft": Program(
        source="huggingface/trl f2cd5771",
        home="trl",
        command="trl/scripts/sft.py --model_name_or_path {data}/tinyllama --dataset_name {data}/sft --max_steps 25 "
        "--per_device_train_batch_size 2 --max_length 32 --use_cpu --report_to none --output_dir {out} "
        "--logging_steps 1 --save_strategy no --bf16 False",
        normal="--learning_rate 1e-3",
        hot="--learning_rate 0.1",
        env={"PYTHONPATH": "{checkouts}/trl"},
        needs="tiny data and model",
    ),
    "word_language_model": Program(
        source="pytorch/examples 77f55b91",
        home="examples/word_language_model",
        command=f"{_WORDS} --use-optimizer",
        normal="--lr 0.001",
        hot="--lr 0.3",
    ),
    "word_language_model without an optimizer": Program(
        source="pytorch/examples 77f55b91",
        home="examples/word_language_model",
        command=_WORDS,
        normal="--lr 1",
    ),
    **{
        f"x-transformers, {script}": _x_transformers(script)
        for script in ("train_copy.py", *_OPTIONS)
    },
    **{
        f"x-transformers, {script}": _x_transformers(script)
        for script in [*_ROUNDS][1:]
    },
}
