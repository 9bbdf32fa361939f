"""The two tables of the zoo: lists of (auto mapping, maker of an example batch). Each class stands in one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers.models.auto import modeling_auto

from tools.zoo import examples

Maker = Callable[[nn.Module], dict[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One architecture: the class `class_name` of transformers and what makes an example batch for it."""

    name: str
    class_name: str
    maker: Maker


CAUSAL: tuple[tuple[str, Maker], ...] = (("CAUSAL_LM", examples.tokens),)
OTHERS: tuple[tuple[str, Maker], ...] = (
    ("MASKED_LM", examples.by_signature),
    ("SEQ_TO_SEQ_CAUSAL_LM", examples.by_signature),
    ("SPEECH_SEQ_2_SEQ", examples.by_signature),
    ("CTC", examples.by_signature),
    ("AUDIO_CLASSIFICATION", examples.by_signature),
    ("IMAGE_CLASSIFICATION", examples.by_signature),
    ("VIDEO_CLASSIFICATION", examples.by_signature),
    ("OBJECT_DETECTION", examples.by_signature),
    ("ZERO_SHOT_OBJECT_DETECTION", examples.by_signature),
    ("SEMANTIC_SEGMENTATION", examples.by_signature),
    ("UNIVERSAL_SEGMENTATION", examples.by_signature),
    ("MASK_GENERATION", examples.by_signature),
    ("DEPTH_ESTIMATION", examples.by_signature),
    ("ZERO_SHOT_IMAGE_CLASSIFICATION", examples.by_signature),
    ("VISUAL_QUESTION_ANSWERING", examples.by_signature),
    ("QUESTION_ANSWERING", examples.by_signature),
    ("IMAGE_TEXT_TO_TEXT", examples.by_signature),
)
_FIXED = """nemo_speechlm fun_asr_nano kyutai_speech_to_text moonshine_streaming granite_speech5_ctc dia t5gemma2
    shieldgemma2 lw_detr pp_doclayout_v2 sapiens2 tipsv2_dpt chmv2 depth_pro zoedepth sam2 sam2_video sam3_tracker
    sam3_video sam_hq deepseek_ocr2 diffusion_gemma dots3_note ernie4_5_vl_moe glm5_next granite_docling hunyuan_vl
    inkling2 llama4 molmo2 muse_glimmer muse_spark nemotron_h_omni unlimited_ocr"""
_INPUTS = """neomme granite_speech granite_speech_plus musicflamingo qwen2_audio qwen3_asr vibevoice vibevoice_asr
    voxtral voxtral_realtime pop2piano deepseek_vl_hybrid instructblip instructblipvideo kimi_k25 kosmos-2 mllama
    paddleocr_vl pi0 pix2struct qwen2_5_omni_thinker qwen3_omni_moe_thinker video_llama_3 chameleon emu3
    granite4_vision"""
_CONVOLUTIONS = """convnext convnextv2 pp_ocrv5_mobile_det pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det
    upernet"""
# Why some classes of these mappings are left out: reason -> model types.
NOT_TAKEN: dict[str, tuple[str, ...]] = {
    "sizes that depend on each other in ways that the rules for tiny models do not know": tuple(
        _FIXED.split()
    ),
    "inputs of their own kind (tiles, several resolutions, vocabulary maps, two streams)": tuple(
        _INPUTS.split()
    ),
    "no finite numbers with random weights": ("d_fine", "deimv2"),
    "convolutions only; others in the table show that nothing is found": tuple(
        _CONVOLUTIONS.split()
    ),
}
TABLES = {"causal": CAUSAL, "others": OTHERS}


def entries(table: str) -> Iterator[Entry]:
    """The architectures of a table: of each model type its first class that no mapping before has listed."""
    taken = {e.class_name for e in entries("causal")} if table != "causal" else set()
    types = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    done: set[str] = set()
    left_out = (
        {name for names in NOT_TAKEN.values() for name in names}
        if table != "causal"
        else set()
    )
    for mapping, maker in TABLES[table]:
        for name, value in getattr(
            modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"
        ).items():
            class_name = value if isinstance(value, str) else value[0]
            # More heads on the same body (question answering with a causal language model) are no new architecture.
            old = (
                class_name in taken
                or name in done
                or name in left_out
                or (mapping == "QUESTION_ANSWERING" and name in types)
            )
            if not old:
                done.add(name)
                if table != "causal":
                    taken.add(class_name)
                yield Entry(name=name, class_name=class_name, maker=maker)
