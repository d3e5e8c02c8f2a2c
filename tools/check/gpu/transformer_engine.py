# SPDX-License-Identifier: Apache-2.0
"""Section `transformer_engine`: parity of models made of Transformer Engine's layers.

GPT and a mixture of grouped experts, in bf16 and, where the GPU has it, in FP8 with a recipe
that keeps no history from step to step. Skipped where Transformer Engine is not installed; what is
installed and does not work fails.
"""

from __future__ import annotations

import gc
import importlib.util

import torch

from check.gpu.models import start_megatron
from check.gpu.parity import check_model, deterministic
from check.gpu.result import Section
from check.gpu.settings import Settings

_FP8_CAPABILITY = (8, 9)  # Ada and Hopper; blocks of 32 from Blackwell on


def run(settings: Settings, section: Section) -> None:
    """Runs the section: each model that this machine can run."""
    name = "layers of Transformer Engine"
    if not settings.on_gpu:
        section.skip(name, "needs a GPU")
        return
    if importlib.util.find_spec("transformer_engine") is None:
        section.skip(name, "Transformer Engine is not installed")
        return
    import transformer_engine.pytorch  # noqa: F401  # what is broken fails here, with its reason

    start_megatron(settings.device, settings.seed)
    kinds = ["TE GPT", "TE experts"]
    capability = torch.cuda.get_device_capability(settings.device)
    if capability >= _FP8_CAPABILITY:
        kinds += [f"{kind} FP8" for kind in kinds]
    else:
        has = ".".join(map(str, capability))
        section.skip("FP8", f"needs compute capability 8.9 or more, this GPU has {has}")
    with deterministic(strict=False):
        for kind in kinds:
            try:
                check_model(kind, "bf16", settings, section)
            except Exception as error:  # the next one may work
                section.check(f"{kind} bf16", False, f"{type(error).__name__}: {error}")
            gc.collect()
            torch.cuda.empty_cache()
