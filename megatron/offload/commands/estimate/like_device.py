# SPDX-License-Identifier: Apache-2.0
"""What torch would choose on a device that is not there: `LikeDevice`, `no_autocast_on_meta`.

On the meta device attention and dropout take another way than on a GPU or on a CPU, and the ways
save other tensors. While the mode is entered they take the way of the device that is meant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.offload.integration.own_attributes import replaced

_attention = torch.nn.functional.scaled_dot_product_attention


class LikeDevice(TorchFunctionMode):
    """Has attention and dropout save what they save on a device.

    Args:
        kind: `cpu` or `gpu`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._is_cpu = kind == "cpu"

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replaces four functions; all others run as they are."""
        kwargs = kwargs or {}
        if func is _attention:
            return self._attend(*args, **kwargs)
        if func is torch.nn.functional.dropout and not self._is_cpu:
            return _fused_dropout(*args, **kwargs)
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True  # masks have all tokens, positions are those of one sequence
        if func is torch.Tensor.__contains__ and args[0].is_meta:
            return False  # no token is padding
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if self._is_cpu and dropout_p > 0:  # the CPU's fused kernel knows no dropout
            return torch.ops.aten._scaled_dot_product_attention_math(
                *(query, key, value, attn_mask, dropout_p, is_causal),
                scale=scale,
                enable_gqa=enable_gqa,
            )[0]
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        # Fused attention of every device saves the same: its operands, its result and the
        # logarithms of the sums.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
        )[0]


@contextlib.contextmanager
def no_autocast_on_meta() -> Iterator[None]:
    """Has `torch.autocast` do nothing where it is asked for the meta device, which it refuses.

    Models of transformers 4 switch it off around their rotary embeddings, by the device of their
    input; version 5 does not ask. A step of the estimate has no autocast that could be on. Modes do
    not see the call.
    """
    plain: Any = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if device_type == "meta":
            return contextlib.nullcontext()
        return plain(device_type, *args, **kwargs)

    with replaced(torch, autocast=autocast):
        yield


def _fused_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Saves a mask of a byte a value, where a CPU saves the noise in the type of the input."""
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]
