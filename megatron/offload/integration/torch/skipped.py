# SPDX-License-Identifier: Apache-2.0
"""What stands for results that were not computed: `SkippedTensor`, `UnfilledLayer`.

`frozen_pass.py` makes them where it skips modules whose last result it has. What a model does
between these modules, or with what it collects of them, may need the values in between: any use
but a look at shape and type has them computed then, from the arguments that the modules got. So a
use costs time and never changes a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from megatron.offload.moving.placeholder import without_bytes


class Skipping(Protocol):
    """A pass that has skipped modules."""

    def computed(self, module: int, leaf: int) -> torch.Tensor:
        """The real tensor; computes it if it was not yet."""
        ...

    def compute(self) -> None:
        """Computes everything that was skipped."""
        ...


class SkippedTensor(torch.Tensor):
    """A tensor among the results of a module that was skipped.

    Attributes:
        skipping: the pass that skipped it.
        module: its number in the part.
        leaf: the number of the tensor in its result.
    """

    skipping: Skipping
    module: int
    leaf: int

    def computed(self) -> torch.Tensor:
        """The real tensor."""
        return self.skipping.computed(self.module, self.leaf)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """A look at shape and type; anything else with the real tensor."""
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*computed_in(args), **computed_in(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """For operations that do not ask Python first."""
        return func(*computed_in(args), **computed_in(kwargs or {}))


_LOOKS = frozenset(
    [
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.numel),
        *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.element_size),
        *(torch.Tensor.ndimension, torch.Tensor.nelement, torch.Tensor.__len__),
        *(torch.Tensor.is_contiguous, torch.Tensor.is_inference, torch.is_floating_point),
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf"),
                *("grad_fn", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "_version"),
            )
        ),
    ]
)


def skipped(
    skipping: Skipping,
    module: int,
    leaf: int,
    layout: tuple[Sequence[int], Sequence[int], torch.dtype, torch.device],
) -> SkippedTensor:
    """Stands for one tensor.

    Args:
        skipping: the pass.
        module: its number in the part.
        leaf: the tensor's number in the module's result.
        layout: shape, stride, type and device.
    """
    made = without_bytes(SkippedTensor, *layout)
    made.skipping, made.module, made.leaf = skipping, module, leaf
    return made


def computed_in(value: Any) -> Any:
    """A value with the real tensors in it."""
    return tree_map_only(SkippedTensor, SkippedTensor.computed, value)


class UnfilledLayer:
    """In the place of a layer of a cache of keys and values; the first use fills it.

    A module that was skipped would have filled it.

    Args:
        skipping: the pass.
        layer: the cache's own, without keys and values.
    """

    def __init__(self, skipping: Skipping, layer: Any) -> None:
        vars(self)["_skipping"], vars(self)["_layer"] = skipping, layer

    def _filled(self) -> Any:
        vars(self)["_skipping"].compute()
        return vars(self)["_layer"]

    def _type_of_layer(self) -> type:
        return type(vars(self)["_layer"])

    # Of `isinstance`; mypy takes it for an attribute that can be set.
    __class__: Any = property(_type_of_layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._filled(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._filled(), name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is one of the filled layer."""
        return self._filled().__reduce_ex__(protocol)
