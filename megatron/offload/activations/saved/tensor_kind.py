# SPDX-License-Identifier: Apache-2.0
"""What kind of tensor one is, as far as its bytes are concerned (`kind_of`), and `without_graph`.

The cache, records and hooks ask them about each saved tensor.

Note [Asked without releasing the GIL]
Most methods of a tensor release the GIL, and then wait to get it back: ten microseconds a call
while the dispatcher starts transfers. For a plain tensor, all that is asked here follows from its
dispatch keys. So we call the methods once for each set of keys, of which a training has a handful.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class TensorKind(NamedTuple):
    """What a tensor is, whatever its Python type and its device."""

    has_plain_storage: bool  # strided, not quantized, with memory
    is_all_bytes: bool  # and what it holds is in these bytes: neither nested nor lazy
    is_inference: bool  # it has no versions


_BY_KEYS = (torch.Tensor, torch.nn.Parameter)  # a subclass may answer anything

kinds: dict[int, TensorKind] = {}  # those of plain tensors, by keys
_dispatch_keys = torch._C._dispatch_keys


def kind_of(tensor: torch.Tensor) -> TensorKind:
    """The kind of a tensor."""
    if type(tensor) not in _BY_KEYS:
        return _look_at(tensor)
    keys: int = _dispatch_keys(tensor).raw_repr()
    kind = kinds.get(keys)
    if kind is None:
        kind = kinds[keys] = _look_at(tensor)
    return kind


def _look_at(tensor: torch.Tensor) -> TensorKind:
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    is_all_bytes = (
        is_plain
        and not tensor.is_nested
        and not tensor._is_zerotensor()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
    return TensorKind(is_plain, is_all_bytes, tensor.is_inference())


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """What `detach` returns, the same bytes and version counter, without releasing the GIL.

    Args:
        tensor: of no subclass.
    """
    detached: torch.Tensor = torch.Tensor._make_subclass(torch.Tensor, tensor)
    return detached
