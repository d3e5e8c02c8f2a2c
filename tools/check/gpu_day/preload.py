# SPDX-License-Identifier: Apache-2.0
"""Imported by the process that jobs are forked from: what most of them need. Computes nothing.

What is missing here is said by the job that needs it.
"""

from __future__ import annotations

import contextlib
import importlib

for _name in (
    "torch",
    "transformers.models.llama.modeling_llama",
    "trl.models.activation_offloading",
    "megatron.offload.integration.torch.door",
    "megatron.offload.integration.torch.optimizer",
    "check.gpu_day.training",
    "check.gpu_day.bits",
    "check.gpu_day.machine",
):
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
