# SPDX-License-Identifier: Apache-2.0
"""Tensors that have a shape and no bytes, for the places of tensors that are on a tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

_T = TypeVar("_T", bound=torch.Tensor)


def without_bytes(
    kind: type[_T],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> _T:
    """A tensor without bytes, of a type whose `__torch_dispatch__` handles all operations."""
    make: Any = torch.Tensor._make_wrapper_subclass
    made: _T = make(kind, shape, strides=stride, dtype=dtype, device=device)
    return made


def all_nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor whose only element, NaN, shows at all indices."""
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)
