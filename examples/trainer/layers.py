# SPDX-License-Identifier: Apache-2.0
"""Which implementation of a layer is built: Transformer Engine's, or core's with torch's attention.

The models' files ask; what a layer consists of stays in megatron-core's specs.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import logging

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from .attention import SdpaAttention

_log = logging.getLogger(__name__)


@functools.cache
def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers can be used; says so once where only CUDA is there."""
    if not torch.cuda.is_available():
        return False
    if importlib.util.find_spec("transformer_engine") is None:
        _log.info("no Transformer Engine here: core's own layers with torch's attention")
        return False
    return True


def with_torch_attention(spec: ModuleSpec) -> ModuleSpec:
    """A copy of one of core's local layer specs in which every attention is torch's fused one."""
    spec = copy.deepcopy(spec)
    for name in ("self_attention", "cross_attention"):
        attention = getattr(spec.submodules, name)
        if isinstance(attention, ModuleSpec):
            attention.submodules.core_attention = SdpaAttention
    return spec
