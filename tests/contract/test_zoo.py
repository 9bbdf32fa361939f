"""Sixty architectures of transformers, drawn once: each attention is seen, with the entropies of its weights.

The models and what they give away are built by tools/zoo, which knows nothing of qkeel.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from tools.zoo.build import build
from tools.zoo.overrides import UNRETURNED
from tools.zoo.reference import given_away
from tools.zoo.tables import TABLES, Entry, entries
from torch import Tensor, nn

from qkeel import watch

# random.Random(20261128).sample(sorted(names), 60) of the 374 classes that passed in internals/zoo.md of c5b7e68e.
DRAWN = [
    "MusicgenMelodyForCausalLM",
    "CwmForCausalLM",
    "CohereAsrForConditionalGeneration",
    "ApertusForCausalLM",
    "SwitchTransformersForConditionalGeneration",
    "MarianForCausalLM",
    "MPNetForMaskedLM",
    "LiltForQuestionAnswering",
    "Qwen3MoeForCausalLM",
    "Wav2Vec2ForCTC",
    "BlenderbotForConditionalGeneration",
    "Gemma4AssistantForCausalLM",
    "LightOnOcrForConditionalGeneration",
    "CohereCompassForCausalLM",
    "T5GemmaForConditionalGeneration",
    "PLBartForCausalLM",
    "Exaone4ForCausalLM",
    "OlmoHybridForCausalLM",
    "GotOcr2ForConditionalGeneration",
    "XmodForCausalLM",
    "SamModel",
    "BigBirdForMaskedLM",
    "ProphetNetForCausalLM",
    "Data2VecTextForMaskedLM",
    "Gemma3ForCausalLM",
    "UMT5ForConditionalGeneration",
    "MiniCPMOcrForConditionalGeneration",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
    "SmolLM3ForCausalLM",
    "LagunaForCausalLM",
    "Dots3NoteForCausalLM",
    "CodeGenForCausalLM",
    "UniSpeechForCTC",
    "JinaEmbeddingsV3ForMaskedLM",
    "SpeechEncoderDecoderModel",
    "GPTNeoXJapaneseForCausalLM",
    "ExaoneMoeForCausalLM",
    "Ministral3ForCausalLM",
    "BartForCausalLM",
    "DeformableDetrForObjectDetection",
    "EsmForMaskedLM",
    "LongcatFlashForCausalLM",
    "LukeForMaskedLM",
    "Glm4vMoeForConditionalGeneration",
    "IJepaForImageClassification",
    "SqueezeBertForMaskedLM",
    "GPTNeoXForCausalLM",
    "WhisperForConditionalGeneration",
    "Gemma2ForCausalLM",
    "ParakeetForCTC",
    "NomicBertForMaskedLM",
    "LongT5ForConditionalGeneration",
    "FuyuForCausalLM",
    "BlenderbotSmallForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "ChineseCLIPModel",
    "CLIPForImageClassification",
    "RobertaPreLayerNormForMaskedLM",
    "Llama4ForCausalLM",
]
ENTRIES = {
    entry.class_name: entry for table in reversed(TABLES) for entry in entries(table)
}


def nearest(reference: Tensor, seen: list[Tensor]) -> tuple[float, int]:
    """The distance of the nearest of `seen` [h], and its place; a reference [2 h] has two readings, h = 1 a mean."""
    heads = reference.shape[1]
    distances = []
    for entropy in seen:
        same = entropy if len(entropy) == heads else entropy.mean(0, keepdim=True)
        distances.append(
            float((same - reference).abs().amax(-1).min())
            if heads in (1, len(entropy))
            else torch.inf
        )
    return min((distance, place) for place, distance in enumerate(distances))


def built(entry: Entry) -> nn.Module:
    """With the fused kernel where transformers has it for this class."""
    try:
        return build(entry, "sdpa")
    except ValueError:
        return build(entry, "eager")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWN)
def test_every_attention_is_a_site_with_the_entropy_of_its_weights(name: str) -> None:
    entry = ENTRIES[name]
    model, reference = built(entry), build(entry, "eager")
    reference.load_state_dict(model.state_dict())
    batch = entry.maker(model)
    with watch(model) as monitor, torch.no_grad():
        model(**batch)
        read = monitor.read()
    seen, modules = (
        [stats.entropy for stats in read.values()],
        {name.partition("#")[0] for name in read},
    )
    given = given_away(reference, batch, name)
    unreturned = UNRETURNED.get(name, (0, ""))[0]
    assert len(given.weights) + unreturned in (
        len(seen),
        len(modules),
    )  # two streams of one module share weights
    for weights in sorted(given.weights, key=lambda entropy: -entropy.shape[1]):
        distance, place = nearest(weights, seen)
        assert distance < 1e-4
        del seen[place]
    for (
        entropy
    ) in seen:  # what softmax kernels made stands in for weights that nobody gives away
        assert (
            min(
                float((entropy.mean() - kernel).abs().amax(-1).min())
                for kernel in given.kernels
            )
            < 1e-4
        )
