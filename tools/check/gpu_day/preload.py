# SPDX-License-Identifier: Apache-2.0
"""Imported by the process that jobs are forked from: what most of them need. Computes nothing.

What is missing here is said by the job that needs it. The compiler, of which several jobs need two
seconds of imports, only by a PyTorch without CUDA: whether any of it begins that is untried.
"""

from __future__ import annotations

import contextlib
import importlib

import torch

_COMPILER = (
    "torch._functorch.partitioners",
    "torch._inductor.codecache",
    "torch._inductor.decomposition",
    "torch._inductor.lowering",
    "torch._inductor.pattern_matcher",
    "torch.distributed.tensor.experimental",
)
for _name in (
    *(_COMPILER if torch.version.cuda is None else ()),
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
