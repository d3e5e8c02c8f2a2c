# SPDX-License-Identifier: Apache-2.0
"""Large tensors that a library makes on its way to a checkpoint, in files: `InFiles`.

States on drives may be larger than memory, and a library that gathers them to save them makes a
second copy. Within this mode such copies are in mapped files without a name, whose pages the system
writes out when it needs the memory.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import MIB, format_size
from megatron.offload.tiers.file import UnlinkedFile
from megatron.offload.tiers.mapped import FileRange, map_ranges, storage_at
from megatron.offload.tiers.purpose import STATES

logger = logging.getLogger(__name__)

_LARGE_BYTES = MIB
_MAKING: tuple[Callable[..., Any], ...] = (torch.zeros, torch.empty)
_COPYING: tuple[Callable[..., Any], ...] = (torch.clone, torch.Tensor.clone, torch.Tensor.cpu)


class InFiles(TorchFunctionMode):
    """A mode in which `zeros`, `empty`, `cat`, `clone` and `cpu` put large CPU results into files.

    It holds for the thread that enters it. Where no file can be made, tensors are in memory.

    Args:
        directories: on drives; used in turn.
        large_bytes: smallest size of a tensor that goes to a file.
    """

    def __init__(self, directories: Sequence[Path], large_bytes: int = _LARGE_BYTES) -> None:
        super().__init__()
        self._directories = list(directories)
        self._large_bytes = large_bytes
        self._num_files = 0

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one of torch's functions."""
        named = dict(kwargs or {})
        result = None
        if function in _MAKING and _is_on_cpu(named):
            result = self._new(function(*args, **{**named, "device": "meta"}))
        elif function in _COPYING and len(args) == 1 and not named and _is_dense(args[0]):
            is_there = args[0].device.type == "cpu" and function is torch.Tensor.cpu
            result = None if is_there else self._filled(args[0])
        elif function is torch.cat and len(args) == 1 and not named and _are_flat(args[0]):
            total = sum(one.numel() for one in args[0])
            result = self._new(torch.empty(total, dtype=args[0][0].dtype, device="meta"))
            if result is not None:
                torch.cat(args[0], out=result)
        return function(*args, **named) if result is None else result

    def _filled(self, source: torch.Tensor) -> torch.Tensor | None:
        made = self._new(torch.empty_like(source, device="meta"))
        return None if made is None else made.copy_(source)

    def _new(self, like: torch.Tensor) -> torch.Tensor | None:
        """A tensor of zeros in a file, like a meta tensor; None if it is to be in memory."""
        if like.nbytes < self._large_bytes or like.requires_grad:
            return None
        num_bytes = -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        directory = self._directories[self._num_files % len(self._directories)]
        try:
            with contextlib.closing(UnlinkedFile(directory, "buffered", STATES)) as file:
                file.grow(num_bytes)
                whole = map_ranges(
                    [FileRange(file.fd, 0, num_bytes)],
                    None,
                    f"{STATES.prefix}those on their way to a checkpoint (file in {directory})",
                )
        except (OSError, ConfigurationError) as error:
            logger.warning(
                "optimizer states: %s on their way to a checkpoint are in memory: %s has no file "
                "for them (%s)",
                format_size(like.nbytes),
                directory,
                str(error),
            )
            return None
        self._num_files += 1
        storage = storage_at(whole.data_ptr(), like.nbytes, whole)
        return torch.empty(0, dtype=like.dtype, device=storage.device).set_(
            storage, 0, like.shape, like.stride()
        )


def _is_on_cpu(named: Mapping[str, Any]) -> bool:
    if named.get("out") is not None or named.get("pin_memory"):
        return False
    device = named.get("device")
    return torch.device(torch.get_default_device() if device is None else device).type == "cpu"


def _are_flat(tensors: Any) -> bool:
    """Whether these are vectors on the host, all of one type."""
    return (
        isinstance(tensors, list | tuple)
        and all(_is_dense(one) and one.dim() == 1 for one in tensors)
        and {(one.device.type, one.dtype) for one in tensors} == {("cpu", tensors[0].dtype)}
    )


def _is_dense(tensor: Any) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.requires_grad
    )
