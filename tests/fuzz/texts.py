"""Texts that users and files give: spec strings, JSON, recipes, command lines, headers, configs, corpora."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors.torch import save_file
from tests.fuzz.damage import Damage, damages, inflict
from tests.fuzz.hostile import json_values, numbers, texts, values
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import lay_out, scratch, whole

from qkeel import preset
from qkeel.audit import Geometry, as_json, table
from qkeel.audit.scan import scan
from qkeel.cli.app import main
from qkeel.cli.commands import commands
from qkeel.cli.run import _ENTRIES, as_toml, configure
from qkeel.errors import InvalidValueError, QkeelError
from qkeel.lab import LongContexts, RunConfig
from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig
from qkeel.lab.text import batch, heldout, load
from qkeel.options import parse
from qkeel.records.file_formats import FIELDS, check_parts
from qkeel.records.parse import BITS, parse_json, read_header
from qkeel.remedies.apply import REMEDIES
from qkeel.remedies.apply import parse as parse_remedies
from qkeel.remedies.retrofit import convert
from qkeel.spec import PRESETS

# Spec strings: of remedies, of presets and of positions.


_spec_OPTIONS = ["tau", "cap", "threshold", "over", "gain", "base", "factor", "eps", "alpha", "ratio"]
_spec_OPTIONS += ["window", "train_length"]


def spec_strings() -> SearchStrategy[tuple[str, str]]:
    """Who reads, and the text."""
    name = st.one_of(st.sampled_from([*REMEDIES, *PRESETS]), texts())
    value = st.one_of(numbers().map(str), texts(), st.sampled_from(["true", "head", "layer", "1e400", "0x1", "1_000"]))
    option = st.builds("{}={}".format, st.one_of(st.sampled_from(_spec_OPTIONS), texts()), value)
    term = st.builds(lambda n, options: ":".join([n, ",".join(options)]), name, st.lists(option, max_size=3))
    text = st.one_of(st.lists(term, min_size=1, max_size=3).map("+".join), st.text(":=,+e1.a ", max_size=15), texts())
    return st.tuples(st.sampled_from(["terms", "remedies", "preset", "method"]), text)


def check_spec_strings(case: tuple[str, str]) -> object:
    """Reads the text; what reads it gives a value that can be printed."""
    reader, text = case
    if reader == "terms":
        try:
            terms = parse(text)
        except InvalidValueError:  # an empty name, or a colon without an option
            return None
        assert parse("+".join(map(str, terms))) == terms or "nan" in text.lower()
        return None
    if reader == "preset":
        name, _, rest = text.partition(":")
        return preset(name, **parse(f"x:{rest}")[0].options).explain()
    return LongContexts(posthoc=[text]).posthoc if reader == "method" else str(parse_remedies(text))


# Command lines of `qkeel`: words, flags and values of every command; each ends with a known exit code and a word.


_command_CODES = (0, 1, 2, 3)
_command_FLAGS = [f"--{name.replace('_', '-')}" for name in _ENTRIES]
_command_OTHERS = ["--recipe", "--json", "--help", "--version", "--out", "-o", "--output", "--to", "--n-heads"]
_command_OTHERS += ["--remedies", "--lrs"]
_command_OTHERS += ["--seeds", "--dry-run", "--head-dim", "--every-head", "--tensors-only", "--layout"]
_command_OTHERS += ["--no-tied", "--", "--executor"]
# Commands that train for as long as their flags say are asked for what they are only.
_command_QUICK = ["config", "explain", "presets", "remedies", "report", "scan", "convert"]


def command_lines() -> SearchStrategy[list[str]]:
    """Words after `qkeel`."""
    value = st.one_of(
        numbers().map(str),
        texts(),
        st.sampled_from([*PRESETS, *REMEDIES, "a.toml", ".", "/dev/null", "/dev/zero", "cpu"]),
    )
    flag = st.one_of(
        st.tuples(st.sampled_from([*_command_FLAGS, *_command_OTHERS]), value),
        st.tuples(st.builds("{}={}".format, st.sampled_from([*_command_FLAGS, *_command_OTHERS]), value)),
        st.tuples(value),
    )
    words = st.lists(flag, max_size=4).map(lambda flags: [word for flag in flags for word in flag])
    slow = st.tuples(
        st.sampled_from([c for c in commands() if c not in _command_QUICK]),
        st.sampled_from(["--help", "--steps=x"]),
    )
    return st.one_of(
        st.builds(lambda command, rest: [command, *rest], st.sampled_from(_command_QUICK), words),
        st.builds(lambda rest: ["config", *rest], words),
        slow.map(lambda pair: [*pair[0].split(), pair[1]]),
        st.builds(lambda first, rest: [first, *rest], texts().filter(lambda t: t not in commands()), words),
    )


def check_command_lines(words: list[str]) -> None:
    """Runs the line in an empty directory; the page, the recipe or the error is on the right stream."""
    words = [word.replace("\x00", "") for word in words]  # no system passes these on
    out, err = io.StringIO(), io.StringIO()
    with scratch() as place, contextlib.chdir(place), _command_streams(out, err):
        Path("a.toml").write_text("steps = 3\n", encoding="utf-8")
        before = sys.argv
        try:
            sys.argv = ["qkeel", *words]
            code = main(words)
        except QkeelError as error:  # main prints these
            raise AssertionError("an error went past the command line") from error
        finally:
            sys.argv = before
            assert not [name for name in os.listdir(place) if name.endswith(".part")]
    assert code in _command_CODES, code
    assert code in (0, 3) or err.getvalue().strip(), f"exit code {code} without a word"
    assert code == 0 or not out.getvalue().strip() or code == 1, "a refused line prints to stderr alone"
    assert "Traceback" not in err.getvalue()
    (out.getvalue() + err.getvalue()).encode("utf-8")


@contextlib.contextmanager
def _command_streams(out: io.StringIO, err: io.StringIO):
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


# Recipes: TOML of any kind as configuration; what `qkeel config` prints is the same configuration again.


_recipe_SECTIONS = {
    "data": DataConfig,
    "optim": OptimConfig,
    "model": ModelConfig,
    "images": ImagesConfig,
    "study": None,
}
_recipe_RAW = [
    "[" * 2000,
    "a = " + "[" * 2000,
    "a = " + "9" * 5000,
    "a = 1e999",
    "steps = 2020-01-01",
    "[[data]]",
    "[data]\n[data]",
]
_recipe_RAW += ["steps = 1\nsteps = 2", "\xff", 'remedy = """a\nb"""', "a.b.c = 1", "steps = 0x10", "steps = inf"]
_recipe_RAW += ["steps = nan", "\x00"]


def recipes() -> SearchStrategy[str]:
    """The text of a recipe."""
    value = st.one_of(
        numbers().map(repr),
        texts().map(_recipe_quoted),
        st.sampled_from(["true", "[]", "{}", "2020-01-01", "[1, 'a']", "00:00:00"]),
    )
    top = _recipe_lines(RunConfig, value)
    parts = [
        st.builds("[{}]\n{}".format, st.just(name), _recipe_lines(cls, value) if cls else _recipe_axes(value))
        for name, cls in _recipe_SECTIONS.items()
    ]
    tables = st.lists(st.one_of(parts), max_size=2).map("\n".join)
    return st.one_of(*4 * [st.builds("{}\n{}".format, top, tables)], st.sampled_from(_recipe_RAW), st.text(max_size=30))


def _recipe_lines(cls: type, hostile: SearchStrategy[str]) -> SearchStrategy[str]:
    """Settings of a table, each once; most have a value that the field has or may have."""
    fields = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.tuples(*(_recipe_line(name, fields[name], hostile) for name in names))).map(
        "\n".join
    )


def _recipe_line(name: str, default: Any, hostile: SearchStrategy[str]) -> SearchStrategy[str]:
    if isinstance(default, bool):
        usual = st.sampled_from(["true", "false"])
    elif isinstance(default, float):
        usual = st.sampled_from([repr(default), "0.5", "0.25", "1", "0"])
    elif isinstance(default, int):
        usual = st.sampled_from([str(default), "1", "2", "8", "64"])
    else:
        usual = st.one_of(st.just(_recipe_quoted(default or "none")), texts().map(_recipe_quoted))
    return st.one_of(usual, usual, usual, hostile).map(f"{name} = {{}}".format)


def _recipe_axes(value: SearchStrategy[str]) -> SearchStrategy[str]:
    return st.lists(st.builds("{} = {}".format, st.sampled_from(["lrs", "seeds"]), value), max_size=2).map("\n".join)


def _recipe_quoted(text: str) -> str:
    escaped = "".join(c if c.isalnum() else f"\\U{ord(c):08x}" for c in text if not 0xD800 <= ord(c) < 0xE000)
    return f'"{escaped}"'


def check_recipes(text: str) -> None:
    """Reads the recipe; prints it; the print is TOML and reads as the same configuration."""
    with scratch() as place:
        recipe = place / "a.toml"
        recipe.write_text(text, encoding="utf-8", errors="replace")
        config, study = configure(SimpleNamespace(), recipe)
        assert isinstance(study, dict)
        printed = as_toml(config)
        read: dict[str, Any] = tomllib.loads(printed)
        assert RunConfig.from_dict(read) == config, printed


# JSON texts: what the strict parser takes is what Python's takes; what it refuses it refuses with a reason.


def json_texts() -> SearchStrategy[tuple[bytes, str]]:
    """A text, and the file whose fields it may have."""
    named = sorted({name for fields in FIELDS.values() for name in fields} - {"*"})
    table = st.dictionaries(st.sampled_from(named), values(), max_size=5).map(json.dumps)
    text = st.one_of(json_values(), table).map(lambda t: t.encode("utf-8", "surrogatepass"))
    raw = st.one_of(text, st.binary(max_size=30), st.text('{}[]",:0123456789.eE+-tfn\\u ', max_size=30).map(str.encode))
    return st.tuples(raw, st.sampled_from(sorted(FIELDS)))


def check_json_texts(case: tuple[bytes, str]) -> None:
    """Reads the text and checks the fields."""
    text, file = case
    value = parse_json(text, file)
    assert json.dumps(value) == json.dumps(json.loads(text))
    check_parts(value, file, file)


# Safetensors files: what the header's parser takes, the format's own library takes, with the same tensors.


_header_NAMES = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "a",
    "__metadata__",
    "é",
]


def headers() -> SearchStrategy[tuple[bytes, int]]:
    """A header's text and how many bytes follow; half of them nearly sound."""
    return st.one_of(
        _header_sound(),
        _header_strange(),
        st.tuples(st.binary(max_size=40), st.integers(0, 64)),
    )


@st.composite
def _header_sound(draw: st.DrawFn) -> tuple[bytes, int]:
    """Tensors one after the other, with at most one field changed."""
    table: dict[str, Any] = {}
    place = 0
    for name in draw(st.lists(st.sampled_from(_header_NAMES), max_size=3, unique=True)):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        count = 1
        for n in shape:
            count *= n
        size = (count * BITS[dtype] + 7) // 8
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    if table and draw(st.booleans()):
        entry = table[draw(st.sampled_from(sorted(table)))]
        entry[draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = draw(values())
    text = json.dumps(table).encode("utf-8", "surrogatepass")
    return text + b" " * draw(st.integers(0, 8)), max(0, place + draw(st.sampled_from([0, 0, 0, 1, -1])))


def _header_strange() -> SearchStrategy[tuple[bytes, int]]:
    offsets = st.lists(numbers(), min_size=1, max_size=3)
    entry = st.fixed_dictionaries(
        {"dtype": st.one_of(st.sampled_from(sorted(BITS)), texts()), "shape": st.lists(numbers(), max_size=3)},
        optional={"data_offsets": offsets},
    )
    table = st.dictionaries(st.one_of(st.sampled_from(_header_NAMES), texts()), st.one_of(entry, values()), max_size=3)
    return st.tuples(table.map(lambda t: json.dumps(t).encode("utf-8", "surrogatepass")), st.integers(0, 64))


def check_safetensors_headers(case: tuple[bytes, int]) -> None:
    """Reads the header twice, and scans what holds tensors."""
    text, size = case
    with scratch() as place:
        file = place / "a.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
        found = read_header(file)
        with safetensors.safe_open(file, framework="pt") as other:
            assert set(other.keys()) == set(found.tensors)
            for name, entry in found.tensors.items():
                kept = other.get_slice(name)
                assert (kept.get_dtype(), tuple(kept.get_shape())) == (entry.dtype, entry.shape)
        scan(file, heads=False)


# The config.json and the index next to a checkpoint, of hostile hands, for `scan` and `retrofit`.


CHECKPOINT: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
_checkpoint_MORE = ["query_pre_attn_scalar", "attention_multiplier", "qk_nope_head_dim", "qk_rope_head_dim"]
_checkpoint_MORE += ["v_head_dim", "text_config"]
_checkpoint_MORE += ["layer_types", "rope_parameters", "original_max_position_embeddings", "attn_config"]
_checkpoint_MORE += ["multi_query", "dtype"]


def _checkpoint_make(place: Path) -> None:
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}
    tensors = {f"model.layers.0.self_attn.{n}_proj.weight": torch.ones(s) for n, s in shapes.items()}
    tensors |= {f"model.layers.0.mlp.{n}_proj.weight": torch.ones(8, 8) for n in ("gate", "up", "down")}
    names = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    tensors |= {f"{n}.weight": torch.ones(8) for n in names}
    tensors |= {"model.embed_tokens.weight": torch.ones(5, 8), "lm_head.weight": torch.ones(5, 8)}
    save_file(tensors, place / "model-1.safetensors")
    (place / "config.json").write_text(json.dumps(CHECKPOINT))
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def checkpoints() -> SearchStrategy[tuple[dict[str, Any], Damage | None, str]]:
    """Changed settings, damage to a file, and what reads them."""
    settings = st.dictionaries(st.sampled_from([*CHECKPOINT, *_checkpoint_MORE]), values(), max_size=3)
    file = st.sampled_from(["config.json", "model.safetensors.index.json", "model-1.safetensors"])
    harm = st.one_of(st.none(), st.tuples(file, damages()))
    return st.tuples(settings, harm, st.sampled_from(["scan", "qwen3", "olmo2", "gemma3"]))


def check_checkpoint_configs(case: tuple[dict[str, Any], Any, str]) -> None:
    """Scans or converts the folder."""
    settings, harm, reader = case
    with scratch() as place:
        source = place / "model"
        lay_out(whole(_checkpoint_make), source)
        (source / "config.json").write_text(json.dumps({**CHECKPOINT, **settings}))
        if harm is not None:
            inflict(source / harm[0], harm[1])
        if reader == "scan":
            found = scan(source, flags=Geometry())
            json.dumps(as_json(found))
            table(found, every_head=True, tensors=True)
            return
        try:
            convert(source, reader, place / "out")
        finally:
            assert not list(place.glob(".*"))


# Files of training data: text and tokens; read as a corpus or refused.


_data_ENDS = [
    "a.txt",
    "a.bin",
    "a.bin#uint8",
    "a.bin#x",
    ".",
    "*.txt",
]


def corpora() -> SearchStrategy[tuple[str, bytes, Any, int]]:
    """The source as a user names it, the bytes of the file, damage, and the vocabulary's size."""
    line = st.one_of(values().map(json.dumps), st.builds(lambda v: json.dumps({"text": v}), values()))
    lines = st.lists(line, max_size=6).map(lambda rows: "\n".join(rows).encode("utf-8", "surrogatepass"))
    text = st.one_of(lines, st.binary(max_size=200), st.text(max_size=100).map(lambda t: t.encode("utf-8")))
    harm = st.one_of(st.none(), damages())
    return st.tuples(st.sampled_from(_data_ENDS), text, harm, st.sampled_from([0, 1, 256, 70_000]))


def check_data_files(case: tuple[str, bytes, Any, int]) -> None:
    """Loads the corpus and takes a batch and the held-out windows."""
    name, content, harm, size = case
    with scratch() as place:
        file = place / name.partition("#")[0].replace("*", "a")
        if name != ".":
            file.write_bytes(content * 3)
            if harm is not None:
                inflict(file, harm)
        config = DataConfig(source=str(place / name), context=4, batch=2, vocab_size=size or None)
        corpus = load(config)
        assert batch(corpus, config, 0, 0).shape == (2, 5)
        assert heldout(corpus, 4, 3).max() < corpus.vocab_size


CLASSES: dict[str, Hunt] = {
    "spec-strings": Hunt(inputs=spec_strings, check=check_spec_strings),
    "command-lines": Hunt(inputs=command_lines, check=check_command_lines, few=60),
    "recipes": Hunt(inputs=recipes, check=check_recipes),
    "json": Hunt(inputs=json_texts, check=check_json_texts),
    "safetensors": Hunt(inputs=headers, check=check_safetensors_headers),
    "checkpoint-configs": Hunt(inputs=checkpoints, check=check_checkpoint_configs),
    "data": Hunt(inputs=corpora, check=check_data_files),
}
