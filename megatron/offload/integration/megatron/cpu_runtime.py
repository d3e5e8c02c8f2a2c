# SPDX-License-Identifier: Apache-2.0
"""The CPU runtime: megatron-core 0.16.1 on machines without CUDA, over gloo.

Owns a table of redirections, each with its reason, that answers the CUDA calls which megatron-core
makes unconditionally with their CPU meaning. A launcher calls `activate()` once, before any model
is built. It never runs where CUDA is available, and it never pretends that CUDA is:
`torch.cuda.is_available()` goes on answering False.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from megatron.offload.device.cuda import has_cuda
from megatron.offload.machine import vector_math

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_MISSING = object()


# ------------------------------------------------------------------ tensors: device and type


def _names_cuda(device: Any) -> bool:
    """Whether `device` (string, torch.device or bare index) means a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites `device="cuda"` to the CPU in every torch call of the thread that entered it.

    Backward of a CPU graph runs in the calling thread, so what is recomputed is covered as well.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and _names_cuda(device):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and not isinstance(args[1], torch.Tensor):
            if isinstance(args[1], str | torch.device) and _names_cuda(args[1]):
                args = (args[0], _CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The optimizers sort parameters by `type() == "torch.cuda.FloatTensor"` and the like.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Torch's own, with the mode: torch leaves it for the time of a call that the mode sees."""
    with _CudaMeansCpu():
        return _engine_run_backward(*args, **kwargs)


# ------------------------------------------------------------------ streams and events


def _answer(value: Any) -> Callable[..., Any]:
    """A function that takes anything and answers `value`."""
    return lambda *args, **kwargs: value


class _Event:
    """An event that has always already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = synchronize = _answer(None)
    query = _answer(True)
    elapsed_time = _answer(0.0)


class _Stream(contextlib.AbstractContextManager[Any]):
    """A stream on which everything has already run: CPU work is synchronous."""

    device = _CPU
    device_index = 0
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    wait_stream = wait_event = synchronize = _answer(None)
    query = _answer(True)
    __exit__ = _answer(None)


_THE_STREAM = _Stream()


# -------------------------------------------------------------- megatron-core's own patch points


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _as_numpy_if_wanted(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


class _Fp8Off:
    """Stands where Transformer Engine's FP8 state would be: FP8 is off."""

    is_fp8_enabled = staticmethod(_answer(False))
    get_fp8_recipe = staticmethod(_answer(None))


def _norm_for_sequence_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets WrappedTorchNorm build under sequence parallelism.

    Torch's norms work on a slice of the sequence; what is missing is only the mark on their
    parameters that makes `finalize_model_grads` sum their gradients over the tensor-parallel group.
    """

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if config.sequence_parallel:
            config = copy.copy(config)
            config.sequence_parallel = False
            norm = original(cls, config, *args, **kwargs)
            for parameter in norm.parameters():
                parameter.sequence_parallel = True
            return norm
        return original(cls, config, *args, **kwargs)

    return new


# ------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Redirection:
    """One symbol of another package, and what stands in for it on a CPU.

    Attributes:
        owner: Import path of the module, or `module:Class`, that holds the symbol.
        name: The attribute on the owner; it may be absent there (a stub is then added).
        replacement: What stands there while the runtime is active.
        reason: What in megatron-core needs it.
    """

    owner: str
    name: str
    replacement: Any
    reason: str

    def resolve_owner(self) -> Any:
        """Imports the module, or finds the class, whose attribute is redirected."""
        module, _, attribute = self.owner.partition(":")
        owner = importlib.import_module(module)
        return getattr(owner, attribute) if attribute else owner


def _table() -> Iterable[Redirection]:
    """Every redirection. Only what megatron-core 0.16.1 reaches on the paths we support."""
    random = "megatron.core.tensor_parallel.random"
    norm = "megatron.core.transformer.torch_norm:WrappedTorchNorm"
    norm_class = Redirection(norm, "__new__", None, "").resolve_owner()
    memory = "memory logging and buffers"
    yield from (
        Redirection("torch.cuda", name, replacement, reason)
        for name, replacement, reason in (
            ("is_available", _answer(False), "may count devices: PYTORCH_NVML_BASED_CUDA_CHECK"),
            ("current_device", _answer(_CPU), "device of every buffer that core allocates"),
            ("set_device", _answer(None), "launchers"),
            ("device_count", _answer(1), "launchers"),
            ("synchronize", _answer(None), "point-to-point communication, timers, checkpoints"),
            ("get_rng_state", _get_rng_state, "the tracker's add() and fork()"),
            ("set_rng_state", _set_rng_state, "the tracker's add() and fork()"),
            ("manual_seed", _manual_seed, "the tracker's add(), model_parallel_cuda_manual_seed"),
            ("Stream", _Stream, "DDP's communication stream, schedules"),
            ("Event", _Event, "timers, checkpoints"),
            ("stream", _answer(contextlib.nullcontext()), "DDP's overlapped reduction"),
            ("current_stream", _answer(_THE_STREAM), "schedules, checkpoints"),
            ("default_stream", _answer(_THE_STREAM), "DDP's overlapped reduction"),
            ("set_stream", _answer(None), "schedules"),
            ("empty_cache", _answer(None), memory),
            ("memory_allocated", _answer(0), memory),
            ("max_memory_allocated", _answer(0), memory),
            ("memory_reserved", _answer(0), memory),
            ("max_memory_reserved", _answer(0), memory),
            ("memory_stats", lambda *args, **kwargs: defaultdict(int), memory),
            ("reset_peak_memory_stats", _answer(None), memory),
            ("get_device_capability", _answer((8, 0)), "feature tests of fusions"),
        )
    )
    yield Redirection(
        "torch.autograd",
        "_engine_run_backward",
        _run_backward,
        "what is recomputed in torch's backward() names CUDA too; Megatron's own backward, which "
        "interleaved and layer-major schedules do not use, needs none of this",
    )
    yield Redirection("torch.cuda.nvtx", "range_push", _answer(0), "profiling ranges")
    yield Redirection("torch.cuda.nvtx", "range_pop", _answer(0), "profiling ranges")
    yield Redirection(
        random, "_get_cuda_rng_state", _get_rng_state, "reaches into torch._C's CUDA generators"
    )
    yield Redirection(
        random, "_set_cuda_rng_state", _set_rng_state, "reaches into torch._C's CUDA generators"
    )
    yield Redirection(
        norm,
        "__new__",
        staticmethod(_norm_for_sequence_parallel(norm_class.__new__)),
        "asserts that sequence parallelism is off",
    )
    if not importlib.import_module(random).HAVE_TE:
        # CheckpointWithoutOutput takes `fp8=False` for "not None" and goes the FP8 way.
        reason = "selective recomputation asks for FP8 state although FP8 is off"
        nothing = _answer(contextlib.nullcontext())
        yield Redirection(random, "FP8GlobalStateManager", _Fp8Off, reason)
        yield Redirection(random, "activation_recompute_forward", nothing, reason)
        yield Redirection(random, "fp8_autocast", nothing, reason)
    moe = "megatron.core.transformer.moe.moe_utils"
    if not importlib.import_module(moe).HAVE_TE:
        yield Redirection(moe, "te_general_gemm", None, "routers ask for it without importing it")
    yield Redirection(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _as_numpy_if_wanted,
        "leaves a tensor that is on the CPU a tensor, where all-to-all takes numbers",
    )


# ------------------------------------------------------------------ on and off


_undo = contextlib.ExitStack()  # of what is redirected at present
_active = False


def _redirect(redirections: Iterable[Redirection], undo: contextlib.ExitStack) -> None:
    for redirection in list(redirections):
        owner = redirection.resolve_owner()
        before = inspect.getattr_static(owner, redirection.name, _MISSING)
        setattr(owner, redirection.name, redirection.replacement)
        undo.callback(_restore, owner, redirection.name, before)


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def activate() -> bool:
    """Redirects megatron-core's CUDA calls to the CPU where there is no CUDA.

    Call it before any model is built, in the thread that trains. Calling it again changes nothing.

    Returns:
        Whether the runtime is on; False where CUDA is available, and then nothing was touched.
    """
    global _active
    if has_cuda():
        return False
    if not _active:
        with contextlib.ExitStack() as undo:
            _redirect(_table(), undo)
            undo.enter_context(_CudaMeansCpu())
            _undo.push(undo.pop_all())
        vector_math.first_call()
        _active = True
        _log.info("CPU runtime on: no CUDA here, megatron-core's CUDA calls go to the CPU")
    return True


def redirect(redirections: Iterable[Redirection]) -> None:
    """Redirects more, for a program that asks for more than megatron-core does.

    The runtime must be on; `deactivate` puts these back as well.
    """
    assert _active, "the CPU runtime is off"
    with contextlib.ExitStack() as undo:
        _redirect(redirections, undo)
        _undo.push(undo.pop_all())


def is_active() -> bool:
    """Whether CUDA calls are redirected at present."""
    return _active


def deactivate() -> None:
    """Puts every redirected symbol back. Nothing happens when the runtime is off."""
    global _active
    _active = False
    _undo.close()
