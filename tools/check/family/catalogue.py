# SPDX-License-Identifier: Apache-2.0
"""The families of the transformers that is installed: `families`, of its own automatic classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers.models.auto import modeling_auto

# What a family is tried as is the first of these that has it.
_TASKS = (
    ("seq2seq", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("audio", "SPEECH_SEQ_2_SEQ"),
    ("multimodal", "MULTIMODAL_LM"),
    ("multimodal", "IMAGE_TEXT_TO_TEXT"),
    ("causal", "CAUSAL_LM"),
    ("audio", "CTC"),
    ("audio", "AUDIO_CLASSIFICATION"),
    ("vision", "IMAGE_CLASSIFICATION"),
    ("vision", "VIDEO_CLASSIFICATION"),
    ("vision", "SEMANTIC_SEGMENTATION"),
    ("vision", "UNIVERSAL_SEGMENTATION"),
    ("vision", "OBJECT_DETECTION"),
    ("vision", "DEPTH_ESTIMATION"),
    ("vision", "IMAGE"),
    ("audio", "TEXT_TO_SPECTROGRAM"),
    ("audio", "TEXT_TO_WAVEFORM"),
    ("multimodal", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    ("multimodal", "VISUAL_QUESTION_ANSWERING"),
)
KINDS = ("causal", "seq2seq", "vision", "audio", "multimodal")


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.

    Attributes:
        name: the model type.
        kind: one of `KINDS`.
        model: the name of the class that is trained.
    """

    name: str
    kind: str
    model: str


def families() -> dict[str, Family]:
    """All that are tried, by their names, kind after kind."""
    found: dict[str, Family] = {}
    for kind, task in _TASKS:
        for name, models in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
            model = models if isinstance(models, str) else models[0]
            found.setdefault(name, Family(name, kind, model))
    return {
        one.name: one
        for one in sorted(found.values(), key=lambda one: (KINDS.index(one.kind), one.name))
    }


def chosen(names: Iterable[str]) -> list[Family]:
    """Those with these names, in the order of `families`.

    Raises:
        ValueError: there is none of a name.
    """
    every, wanted = families(), set(names)
    if unknown := sorted(wanted - every.keys()):
        raise ValueError(
            f"transformers has no family {', '.join(unknown)} of a kind that is tried; give names "
            "such as llama or t5 (its model types)"
        )
    return [one for name, one in every.items() if name in wanted]
