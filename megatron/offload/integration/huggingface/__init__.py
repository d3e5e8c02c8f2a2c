# SPDX-License-Identifier: Apache-2.0
"""Activation offload in transformers' Trainer, TRL and Axolotl: `OffloadCallback`.

Accelerate and PEFT need nothing of their own: `offload_activations` takes their models.
"""

from __future__ import annotations

from megatron.offload.integration.missing_library import named

with named("transformers"):
    from megatron.offload.integration.huggingface.callback import OffloadCallback

__all__ = ["OffloadCallback"]
