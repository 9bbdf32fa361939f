"""The tiny texts, pictures, tokenizer and model that the programs train on: python -m tools.programs.data CHECKOUTS"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

VOCABULARY = 300


def text_of(checkouts: Path) -> str:
    """Prose that is there: litgpt's tutorials, in ASCII."""
    parts = [
        path.read_text(errors="ignore")
        for path in sorted((checkouts / "litgpt/tutorials").rglob("*.md"))
    ]
    return "O God, O God!\n" + "".join(
        c for c in "".join(parts) if ord(c) < 127
    )  # what minGPT's sample begins with


def write_texts(checkouts: Path, text: str) -> None:
    (checkouts / "nanoGPT/data/shakespeare_char/input.txt").write_text(text)
    (checkouts / "minGPT/projects/chargpt/input.txt").write_text(text[:100_000])
    words = checkouts / "examples/word_language_model/data/tiny"
    words.mkdir(parents=True, exist_ok=True)
    every = text.split()
    for name, n in (("train", 5200), ("valid", 400), ("test", 400)):
        (words / f"{name}.txt").write_text(
            " \n".join(" ".join(every[i : i + 20]) for i in range(0, n, 20))
        )
    long = checkouts / "x-transformers/data"
    long.mkdir(parents=True, exist_ok=True)
    with gzip.open(long / "enwik8.gz", "wb", compresslevel=1) as file:
        file.write((text * (96_000_000 // len(text) + 1))[:96_000_000].encode())


def write_data(folder: Path, text: str) -> None:
    (folder / "text.txt").write_text(text[:60_000])
    lines = [line for line in text.split("\n") if len(line) > 60][:200]
    rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    for name in ("sft/train.jsonl", "lingua/dclm_baseline_1.0/tiny.chunk.00.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(rows)
    (folder / "litgpt").mkdir(exist_ok=True)
    for i in range(2):
        (folder / f"litgpt/{i}.txt").write_text(text[i * 30_000 : (i + 1) * 30_000])
    import pyarrow
    from pyarrow import parquet

    shards = folder / "nanochat/base_data_climbmix"
    shards.mkdir(parents=True, exist_ok=True)
    for i in (0, 6542):  # the last one is its validation split
        parquet.write_table(
            pyarrow.table({"text": lines * 5}),
            shards / f"shard_{i:05d}.parquet",
            row_group_size=50,
        )


def write_pictures(folder: Path) -> None:
    from PIL import Image

    drawn = random.Random(0)
    for split, n in (("train", 40), ("validation", 4)):
        for name, low, high in (("dark", 0, 156), ("light", 100, 256)):
            place = folder / "images" / split / name
            place.mkdir(parents=True, exist_ok=True)
            for i in range(n):
                pixels = bytes(drawn.randrange(low, high) for _ in range(32 * 32 * 3))
                Image.frombytes("RGB", (32, 32), pixels).save(place / f"{i}.png")


def write_tokenizer_and_model(folder: Path, text: str) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special, letters = ["<s>", "</s>", "<pad>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=letters
    )
    made.train_from_iterator([text[:50_000]], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "tinyllama")
    tokenizer.save_pretrained(folder / "tinyllama")


def main(checkouts: Path) -> None:
    folder = checkouts / "data"
    folder.mkdir(exist_ok=True)
    text = text_of(checkouts)
    write_tokenizer_and_model(folder, text)
    write_data(folder, text)
    write_pictures(folder)
    write_texts(checkouts, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
