# SPDX-License-Identifier: Apache-2.0
"""Gradients that are clipped in place: `scale_in_place`, where Megatron has no kernel for it.

The norm, the check for inf and nan and the unscaling make no copies of gradients, whichever library
has the kernels; `docs/states.md` has what was measured. Only Megatron's fallback for clipping, used
without Transformer Engine and Apex, copies each gradient, an embedding's too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def scale_in_place() -> Callable[[], None]:
    """Makes Megatron clip gradients in place, with the same bits; returns what undoes that."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_scale

    if clip_grads.multi_tensor_scale_impl is not local_multi_tensor_scale:
        return lambda: None
    clip_grads.multi_tensor_scale_impl = _scale

    def undo() -> None:
        clip_grads.multi_tensor_scale_impl = local_multi_tensor_scale

    return undo


def _scale(_: int, __: Any, tensors: Sequence[Sequence[torch.Tensor]], scale: Any) -> None:
    """Takes the arguments of `amp_C.multi_tensor_scale`: sources and targets, of equal types."""
    for source, target in zip(tensors[0], tensors[1], strict=True):
        if source is target:
            target.mul_(scale)
        else:
            torch.mul(source, scale, out=target)
