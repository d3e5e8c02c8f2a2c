# SPDX-License-Identifier: Apache-2.0
"""An optimizer's own step on the CPU, for parameters on an accelerator: `StepOnHost`.

ZeRO-Offload's way (Ren et al., 2021): states never come to the device. The gradients of each slice
are copied to the host, and so are parameters unless they live with their states. The optimizer
updates twins of these parameters there, and the new values are copied back.

Note [Twins]
While a slice is updated, the next one is copied to page-locked memory. On the device the copies
wait for what was queued before them: the kernels that compute the gradients, and the copies back of
the slice that used the memory before. The host waits for the copies before it updates the twins.
The stream that trains copies the new values back, before it uses the parameters again.

The optimizer's CPU kernels compute, in its own types: a bfloat16 parameter is updated in bfloat16,
as on the device. The bits are not those of the device's kernels. If the optimizer leaves the choice
of kernel open, or asks for one that takes many tensors at a time, we choose the fused kernel, which
reads memory once. Tensors in the groups and states, such as a learning rate on the device, are
copied to the host.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron.offload.device.device import Device
from megatron.offload.moving.layout import Layout, Name, dense_stride
from megatron.offload.states.optimizer_slice import OptimizerSlice, State
from megatron.offload.states.trial import has_gradient
from megatron.offload.tiers.arena import HostArena
from megatron.offload.tiers.mapped import storage_at
from megatron.offload.tiers.purpose import STATES

_GRADIENTS = ("grad", "decoupled_grad")  # attributes of a parameter; the latter is Megatron's
_VALUE = "value"
_SLICES = 2  # in host memory at a time: one is updated, one is being copied
_AMP = ("grad_scale", "found_inf")  # attributes of an optimizer that a gradient scaler sets


class StepOnHost(OptimizerSlice):
    """Runs steps of an optimizer on the CPU, for parameters on an accelerator.

    Args:
        optimizer: whose step runs; it has CPU kernels.
        device: where parameters and gradients are.
        moves_param: whether a parameter is in host memory while it is updated.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: Device,
        moves_param: Callable[[torch.Tensor], bool],
    ) -> None:
        super().__init__(optimizer)
        self._device = device
        self._moves_param = moves_param
        self._memory: list[torch.UntypedStorage] = []  # slices use them in turn
        self._arena: HostArena | None = None
        self._to_come: collections.deque[tuple[Sequence[torch.Tensor], Layout]] = (
            collections.deque()
        )
        self._arriving: _Twins | None = None
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory for twins."""
        return sum(storage.nbytes() for storage in self._memory)

    def begin_step(self, slices: Iterable[Sequence[torch.Tensor]]) -> None:
        """Starts to copy the first slice to the host."""
        slices = list(slices)
        super().begin_step(slices)
        self._to_come = collections.deque(
            (params, Layout(self._tensors(params))) for params in slices
        )
        self._reserve(max((layout.num_bytes for _, layout in self._to_come), default=0))
        self._begin_next()

    def step(
        self, params: Sequence[torch.Tensor], states: Mapping[torch.Tensor, State]
    ) -> dict[torch.Tensor, State]:
        """Updates a slice, while the next one is copied. See `OptimizerSlice`."""
        twins = self._arriving
        assert twins is not None and twins.params is params, "slices come in the order of the step"
        self._begin_next()
        twins.wait_for_copies()
        after = self._run(twins.of_params(), {p: _on_host(s) for p, s in states.items()})
        twins.copy_back()
        return after

    def close(self) -> None:
        """Gives the memory of the twins back."""
        self._memory = []
        if self._arena is not None:
            self._device.wait_for_event(self._device.record_event())
            self._arena.close()
            self._arena = None

    def _tensors(self, params: Sequence[torch.Tensor]) -> dict[Name, torch.Tensor]:
        """The tensors of parameters that are copied to the host."""
        found: dict[Name, torch.Tensor] = {}
        for index, param in enumerate(params):
            for key in _GRADIENTS:
                gradient = getattr(param, key, None)
                if gradient is not None and gradient.layout is torch.strided:
                    found[index, key] = gradient
            if not self._moves_param(param) and (self._updates_all or has_gradient(param)):
                found[index, _VALUE] = param.detach()
        return found

    def _begin_next(self) -> None:
        self._arriving = None
        if self._to_come:
            params, layout = self._to_come.popleft()
            self._memory.append(self._memory.pop(0))
            self._arriving = _Twins(
                params, self._tensors(params), layout, self._memory[0], self._device
            )

    def _reserve(self, num_bytes: int) -> None:
        """Allocates page-locked memory of this size for each slice that is on the host."""
        if self._memory and self._memory[0].nbytes() >= num_bytes:
            return
        self.close()
        self._arena = HostArena(_SLICES * num_bytes, self._device, STATES, "bucket")
        for _ in range(_SLICES):
            offset = self._arena.allocate(num_bytes)
            if offset is None:  # the system refuses, and the arena has warned
                self._memory.append(torch.UntypedStorage(num_bytes))
            else:
                address = self._arena.address(offset)
                self._memory.append(storage_at(address, num_bytes, self._arena))

    def _prepare(self, part: torch.optim.Optimizer) -> None:
        for name in _AMP:
            if isinstance(getattr(part, name, None), torch.Tensor):
                setattr(part, name, getattr(part, name).cpu())
        self._replaced = []
        for group in part.param_groups:
            given = _on_host({key: value for key, value in group.items() if key != "params"})
            if "fused" in group and group["fused"] is not False and group["foreach"] is not False:
                given |= {"fused": True, "foreach": False}
            for key, value in given.items():
                if value is not group[key]:
                    self._replaced.append((group, key, group[key], value))
            group.update(given)

    def _finish(self, part: torch.optim.Optimizer) -> None:
        for group, key, own, given in self._replaced:
            if group[key] is given:
                group[key] = own


class _Twins:
    """Parameters of a slice and their gradients on the CPU, as the optimizer sees them.

    Args:
        params: of the slice.
        tensors: of the parameters, to be copied; queued on the calling thread's stream.
        layout: where they lie in memory.
        memory: usually page-locked; what was queued before may still use it.
        device: of the parameters.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        tensors: Mapping[Name, torch.Tensor],
        layout: Layout,
        memory: torch.UntypedStorage,
        device: Device,
    ) -> None:
        self.params = params
        self._device = device
        self._views = layout.views(memory)
        self._sources = {name: _dense(tensor) for name, tensor in tensors.items()}
        before = device.record_event()
        self._copied: list[Any] = []
        for name, source in self._sources.items():
            address = self._views[name].data_ptr()
            begin = source.storage_offset() * source.itemsize
            part = slice(begin, begin + source.nbytes)
            storage = source.untyped_storage()
            self._copied.append(device.copy_to_host(storage, address, before, part))

    def wait_for_copies(self) -> None:
        """Blocks until the copies are in host memory."""
        for event in self._copied:
            self._device.wait_for_event(event)
        self._sources = {}

    def of_params(self) -> dict[torch.Tensor, torch.Tensor]:
        """The twins with their gradients, by parameter."""
        twins: dict[torch.Tensor, torch.Tensor] = {}
        for index, param in enumerate(self.params):
            twin = self._views.get((index, _VALUE))
            twins[param] = param.detach() if twin is None else twin
            for key in _GRADIENTS:
                gradient = getattr(param, key, None)
                if gradient is not None:
                    copied = self._views.get((index, key))
                    setattr(twins[param], key, gradient.cpu() if copied is None else copied)
        return twins

    def copy_back(self) -> None:
        """Queues copies of the twins' new values to the parameters on the device."""
        for index, param in enumerate(self.params):
            if (index, _VALUE) in self._views:
                param.copy_(self._views[index, _VALUE], non_blocking=True)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose bytes lie side by side in the order of its dimensions."""
    return tensor if tensor.stride() == dense_stride(tensor) else tensor.clone()


def _on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with tensors on other devices copied to the host."""
    return {
        key: value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }
