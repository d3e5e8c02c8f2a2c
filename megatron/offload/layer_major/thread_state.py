# SPDX-License-Identifier: Apache-2.0
"""What torch keeps for each thread, to be set in another thread: `ThreadState`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from megatron.offload.machine.autocast import autocast_depth


class ThreadState:
    """What the thread that makes this has entered, as far as torch shows it.

    That is: a device's current stream, gradients on or off, autocast, modes (of functions, of
    dispatch) and default hooks of saved tensors. Torch does not show profilers, which record their
    own thread alone.

    Args:
        device: whose current stream counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        if self._module is not None:
            self._stream = self._module.current_stream(device)
            self._current = self._module.current_device()  # of the caller: any other one
        self._wants_gradients = torch.is_grad_enabled()
        # The default device is one, and so is what has CUDA mean the CPU where there is no GPU.
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = _get_current_dispatch_mode_stack()
        self._saved_tensors_hooks = _saved_tensors_hooks()
        self._autocast = _Autocast(device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets it in the calling thread, a new one that ends with it."""
        autograd: Any = torch._C._autograd
        with contextlib.ExitStack() as contexts:
            if self._module is not None:
                contexts.enter_context(self._module.stream(self._stream))  # and its device
                contexts.enter_context(self._module.device(self._current))
            contexts.enter_context(torch.set_grad_enabled(self._wants_gradients))
            self._autocast.set()
            # Modes and hooks are not told of it: they know of one entry.
            for one in self._function_modes:
                torch._C._push_on_torch_function_stack(one)
                contexts.callback(torch._C._pop_torch_function_stack)
            for mode in self._dispatch_modes:
                _push_mode(mode)
                contexts.callback(_pop_mode, getattr(mode, "_mode_key", None))
            if self._saved_tensors_hooks is not None:
                autograd._push_saved_tensors_default_hooks(*self._saved_tensors_hooks)
                contexts.callback(autograd._pop_saved_tensors_default_hooks)
            yield


class _Autocast:
    """Autocast's state in the thread that makes this."""

    def __init__(self, device: torch.device) -> None:
        kinds = dict.fromkeys(("cpu", device.type))
        self._states = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._is_nested = autocast_depth() > 0

    def set(self) -> None:
        """Sets it for the calling thread."""
        for kind, is_enabled, dtype in self._states:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches)
        if self._is_nested:  # contexts within are not the outermost ones, which empty the cache
            torch.autocast_increment_nesting()


def _saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The hooks that autograd calls: those that were entered last."""
    autograd: Any = torch._C._autograd
    hooks: tuple[Any, Any] | None = autograd._top_saved_tensors_default_hooks(False)  # not tracing
    return hooks
