# SPDX-License-Identifier: Apache-2.0
"""On which device a model computes: `compute_device`, and `FirstSaved` where nothing shows it yet.

The handle of a model asks before its first pass. Where parameters are says little: between calls
they may wait on the CPU or have no memory at all (accelerate's `cpu_offload` and `device_map`,
FSDP's and DeepSpeed's offload of parameters).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatron.offload.activations.capture.context import SavingContext
from megatron.offload.activations.capture.hooks import PLAIN_TORCH, Packed
from megatron.offload.activations.capture.not_traced import not_traced
from megatron.offload.activations.engine import OffloadEngine
from megatron.offload.activations.saved.resident import ResidentTensor
from megatron.offload.activations.saved.scope import Scope
from megatron.offload.activations.saved.tensor_kind import kind_of
from megatron.offload.device.cuda import is_captured

_CPU = torch.device("cpu")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def compute_device(
    models: Sequence[torch.nn.Module], inputs: Iterable[torch.Tensor]
) -> torch.device | None:
    """The accelerator that the models or their inputs are on, the CPU if there is none to use.

    None: there are several, or one on which nothing is yet; what is saved first shows it.
    """
    own = itertools.chain.from_iterable((*one.parameters(), *one.buffers()) for one in models)
    devices = {one.device for one in itertools.chain(own, inputs)}
    accelerators = {one for one in devices if one.type not in ("cpu", "meta")}
    if len(accelerators) == 1:
        return accelerators.pop()
    return None if accelerators or torch.accelerator.is_available() else _CPU


def likely_device(
    models: Sequence[torch.nn.Module], inputs: Iterable[torch.Tensor]
) -> torch.device:
    """The same for callers who cannot wait: at worst where the first parameter is."""
    found = compute_device(models, inputs)
    if found is not None:
        return found
    of_params = (one.device for model in models for one in model.parameters())
    return next((one for one in of_params if one.type != "meta"), _CPU)


class FirstSaved(SavingContext):
    """The hooks of a forward pass whose device is not known: what is saved first shows it.

    On an accelerator any floating-point tensor counts. On the CPU one that is large enough to move:
    masks and tables for a model on an accelerator are often made there.

    Args:
        opened: opens an engine on the device that it is given.
        min_bytes: of tensors that move.
    """

    def __init__(self, opened: Callable[[torch.device], OffloadEngine], min_bytes: int) -> None:
        torch.autograd.graph.saved_tensors_hooks.__init__(self, self._pack, self._unpack)
        self._opened: Callable[[torch.device], OffloadEngine] | None = opened
        self._min_bytes = min_bytes
        self._engine: OffloadEngine | None = None
        self._small_bytes = 0  # saved before it was clear
        self._seen: torch.device | None = None  # of what was saved first

    def end(self) -> None:
        """The forward pass has ended: what it has saved is small, if it has saved anything."""
        if self._engine is None and self._seen is not None:
            self._open(self._seen)

    def _open(self, device: torch.device) -> None:
        """From now on an engine on this device takes what is saved."""
        opened, self._opened = self._opened, None
        assert opened is not None
        engine = self._engine = opened(device)
        self._begin(engine.hooks, engine.new_batch())
        engine.statistics.small_bytes += self._small_bytes

    def submit(self) -> None:
        """All operations so far have ended: what they saved may be written."""
        if self._engine is not None:
            super().submit()

    @not_traced
    def _pack(self, tensor: torch.Tensor) -> Packed:
        if self._engine is None and not self._is_over and self._is_telling(tensor):
            self._open(tensor.device)
        if self._engine is not None:
            return super()._pack(tensor)
        with PLAIN_TORCH():
            kind = kind_of(tensor)
            if kind.is_all_bytes:
                self._small_bytes += tensor.nbytes
                self._seen = self._seen or tensor.device
            return tensor if kind.is_inference else ResidentTensor(tensor, Scope())

    def _is_telling(self, tensor: torch.Tensor) -> bool:
        with PLAIN_TORCH():
            if type(tensor) not in _PLAIN or not tensor.dim() or not kind_of(tensor).is_all_bytes:
                return False
            if is_captured():  # no engine can be opened meanwhile
                return False
            is_large = tensor.device.type != "cpu" or tensor.nbytes >= self._min_bytes
            return is_large and tensor.is_floating_point()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if self._engine is not None:
            return self._engine.hooks.unpack(packed)
        tensor: torch.Tensor = packed if isinstance(packed, torch.Tensor) else packed.tensor()
        return tensor
