"""transformers' own modelling tests on three models, with the remedies of QKEEL_REMEDIES applied to each one built.

Not collected by itself: `test_mixin` runs it in processes of its own, once without a remedy and once with it.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import torch
import transformers as t
from safetensors.torch import load_file

import qkeel

REMEDIES = os.environ.get("QKEEL_REMEDIES", "none")


def _mixin() -> type:
    """ModelTesterMixin of the source archive, which has neither of the two mixins that it imports beside itself."""
    sys.path[:0] = [os.environ["QKEEL_TRANSFORMERS_SOURCE"]]
    for package, name in {
        "exporters.test_export": "ExportTesterMixin",
        "generation.test_utils": "GenerationTesterMixin",
    }.items():
        parent, _, leaf = package.partition(".")
        sys.modules[f"tests.{parent}"] = types.ModuleType(f"tests.{parent}")
        sys.modules[f"tests.{package}"] = types.ModuleType(f"tests.{parent}.{leaf}")
        setattr(sys.modules[f"tests.{package}"], name, type(name, (), {}))
    return importlib.import_module("tests.test_modeling_common").ModelTesterMixin


Mixin = _mixin()


def treated(cls: type[Any]) -> type[Any]:
    """A class of models under the same name, each with the remedies on it: when made, and when read from a file."""
    if REMEDIES == "none":
        return cls

    def example(model: Any) -> torch.Tensor:
        return torch.arange(5, device=model.device)[None] % model.config.vocab_size

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        if not any(p.is_meta for p in self.parameters()):
            qkeel.apply(self, REMEDIES, batch=example(self))

    def from_pretrained(own: Any, *args: Any, **kwargs: Any) -> Any:
        found = super(made, own).from_pretrained(*args, **kwargs)
        model, info = found if isinstance(found, tuple) else (found, {"missing_keys": set(), "unexpected_keys": set()})
        theirs = set(model.state_dict())
        qkeel.apply(model, REMEDIES, batch=example(model))
        ours = {name: x for name, x in model.state_dict().items() if name not in theirs}
        given = kwargs.get("state_dict")
        if given is None:
            given = _saved(args[0] if args else kwargs["pretrained_model_name_or_path"])
        model.load_state_dict({name: given[name] for name in ours if name in given}, strict=False)
        info["missing_keys"] |= set(ours) - set(given)
        info["unexpected_keys"] -= set(ours)
        return found

    body = {"__init__": init, "from_pretrained": classmethod(from_pretrained), "__module__": cls.__module__}
    made: Any = type(cls.__name__, (cls,), body)
    return made


def _saved(path: str) -> dict[str, torch.Tensor]:
    return {name: x for file in Path(path).glob("*.safetensors") for name, x in load_file(file).items()}


class Tester:
    """Sizes, a config and inputs, as the mixin asks for them."""

    batch_size, seq_length, num_hidden_layers, hidden_size, num_attention_heads = 3, 7, 2, 32, 4
    is_training, pad_token_id = True, 0

    def __init__(self, config: type[Any], options: dict[str, Any]) -> None:
        self.config, self.options = config, options

    def get_config(self) -> Any:
        """Small, of 99 tokens."""
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return self.config(vocab_size=99, **special, **self.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        """And random tokens."""
        shape = (self.batch_size, self.seq_length)
        return self.get_config(), {
            "input_ids": torch.randint(3, 99, shape),
            "attention_mask": torch.ones(shape).tril().long(),
        }


LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 37, "n_positions": 512}


class Llama(Mixin, unittest.TestCase):
    def setUp(self) -> None:
        self.model_tester = Tester(t.LlamaConfig, LLAMA)

    all_model_classes = tuple(map(treated, (t.LlamaModel, t.LlamaForCausalLM, t.LlamaForSequenceClassification)))


class Qwen2(Mixin, unittest.TestCase):
    def setUp(self) -> None:
        self.model_tester = Tester(t.Qwen2Config, LLAMA)

    all_model_classes = tuple(map(treated, (t.Qwen2Model, t.Qwen2ForCausalLM)))


class GPT2(Mixin, unittest.TestCase):
    def setUp(self) -> None:
        self.model_tester = Tester(t.GPT2Config, GPT2_SIZES)

    all_model_classes = tuple(map(treated, (t.GPT2Model, t.GPT2LMHeadModel)))
