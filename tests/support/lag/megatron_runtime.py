# SPDX-License-Identifier: Apache-2.0
"""megatron-core on the test accelerator, for processes of tests: `activate`.

The package's CPU runtime answers megatron-core's CUDA calls with what they mean on a CPU. Here
those about devices, streams and events go to `torch.lag` instead, and `device="cuda"` is the test
accelerator. What ranks send goes through host memory, since gloo knows no such tensors: who sends
waits for what is to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron.offload.integration.megatron import cpu_runtime
from megatron.offload.integration.megatron.cpu_runtime import Redirection
from tests.support.lag.module import LagModule

_AS_THEY_ARE = (
    *("Stream", "Event", "stream", "set_stream", "current_stream", "default_stream"),
    *("synchronize", "device_count", "empty_cache", "memory_allocated", "max_memory_allocated"),
    *("memory_reserved", "max_memory_reserved", "memory_stats", "reset_peak_memory_stats"),
)


def activate(lag: LagModule) -> torch.device:
    """Redirects what megatron-core asks of CUDA; `device`, where it then trains.

    Call it in the thread that trains, when the process group is there.
    """
    device = torch.device("lag", lag.current_device())
    cpu_runtime.activate()
    cpu_runtime.redirect(_table(lag, device))
    _CudaMeansLag(device).__enter__()
    return device


class _CudaMeansLag(TorchFunctionMode):
    """Rewrites `device="cuda"` in every torch call, before the CPU runtime's mode sees it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = self._device
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], self._device, *args[2:])
        return func(*args, **kwargs)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _table(lag: LagModule, device: torch.device) -> Iterator[Redirection]:
    for name in _AS_THEY_ARE:
        yield Redirection("torch.cuda", name, getattr(lag, name), "the device")
    yield Redirection("torch.cuda", "current_device", lambda: device, "buffers")
    for name in ("all_reduce", "broadcast"):
        yield Redirection("torch.distributed", name, _through_host(getattr(dist, name)), "gloo")
    yield Redirection("torch.distributed", "isend", _send(dist.isend), "gloo")
    yield Redirection("torch.distributed", "irecv", _receive(dist.irecv), "gloo")


class _Done:
    """Of what has ended already; or that puts what came into a tensor."""

    def __init__(self, work: Any, *kept: Any, arrived: Callable[[], Any] = lambda: None) -> None:
        self._work, self._kept, self._arrived = work, kept, arrived

    def wait(self, *timeout: Any) -> bool:
        if self._work is not None:
            self._work.wait(*timeout)
            self._arrived()
            self._work = None
        return True

    def is_completed(self) -> bool:
        return self._work is None


def _through_host(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if tensor.device.type == "cpu":
            return call(tensor, *args, async_op=async_op, **kwargs)
        host = tensor.detach().cpu()
        call(host, *args, **kwargs)
        tensor.detach().copy_(host)
        return _Done(None) if async_op else None

    return called


def _send(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host = tensor.detach().cpu()
        return _Done(call(host, *args, **kwargs), host)

    return called


def _receive(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        work = call(host, *args, **kwargs)
        return _Done(work, arrived=lambda: tensor.detach().copy_(host))

    return called
