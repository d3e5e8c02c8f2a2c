# SPDX-License-Identifier: Apache-2.0
"""What code runs within: a backward pass, a transform, the call of a module. Torch is asked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack

from megatron.offload.machine.transform import in_transform


def can_hook() -> bool:
    """Whether autograd takes hooks here: not in a backward pass, nor in a torch.func transform."""
    if in_backward() or in_transform():
        return False
    autograd: Any = torch._C._autograd
    return bool(autograd._saved_tensors_hooks_is_enabled())


def compiles_backward() -> bool:
    """Whether compiled autograd takes the next backward pass."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(compiled_autograd, "compiled_autograd_enabled", False)


def is_recorded() -> bool:
    """Whether torch writes down what runs here, to run it elsewhere (`torch.export`, ONNX,
    `torch.jit.trace`): what we do in between is no part of it."""
    return torch.compiler.is_exporting() or torch._C._is_tracing()


def in_forward_mode() -> bool:
    """Whether gradients are computed in forward mode, which ends before a backward pass begins."""
    return torch.autograd.forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


_KERNELS = {
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def attention_kernels() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes contexts in which attention may take the kernels of now; see `sdpa_kernel` of torch."""
    allowed = _allowed()

    def context() -> contextlib.AbstractContextManager[None]:
        same = allowed == _allowed()
        return contextlib.nullcontext() if same else sdpa_kernel(allowed)

    return context


def _allowed() -> list[SDPBackend]:
    return [kernel for kernel, is_enabled in _KERNELS.items() if is_enabled()]


def modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes contexts in which torch makes tensors of the default type, and in which its functions
    go through the modes (`TorchFunctionMode`, `torch.device` as a context), of now."""
    dtype, entered = torch.get_default_dtype(), _get_current_function_mode_stack()

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        present_dtype, present = torch.get_default_dtype(), _get_current_function_mode_stack()
        with contextlib.ExitStack() as stack:
            for one in entered:
                if not any(one is other for other in present):  # and the mode is not told of it
                    torch._C._push_on_torch_function_stack(one)
                    stack.callback(torch._C._pop_torch_function_stack)
            if dtype is not present_dtype:
                torch.set_default_dtype(dtype)
                stack.callback(torch.set_default_dtype, present_dtype)
            yield

    return context


def computed_weights() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes contexts that have the weights of now which `parametrize.cached` has computed."""
    state: Any = parametrize
    enabled, weights = state._cache_enabled, dict(state._cache)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        present = state._cache_enabled, state._cache
        state._cache_enabled, state._cache = enabled, dict(weights)
        try:
            yield
        finally:
            state._cache_enabled, state._cache = present

    return context


_CALL = torch.nn.Module._call_impl.__code__


def frame_of_module_call() -> FrameType | None:
    """The frame of the module call that has called us; None: it is not among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def is_running(wanted: FrameType | None) -> bool:
    """Whether a frame is among the callers; None counts as one that is."""
    frame: FrameType | None = sys._getframe(1)
    while wanted is not None and frame is not None and frame is not wanted:
        frame = frame.f_back
    return wanted is None or frame is wanted
