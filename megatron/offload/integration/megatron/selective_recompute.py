# SPDX-License-Identifier: Apache-2.0
"""Selective recompute of a layer's parts, done or only measured: `operating`, `Recompute`, `Timed`.

Of attention: the norm before it, and core attention where that saves its probabilities. Of the MLP:
the norm before it and the activation function. What they leave for backward is a third of a layer's
bytes and more; to run them again takes hardly any time. `LayerHooks` calls it.

Note [Norms whose gradient has several terms]
What goes into a norm goes around it as well. The gradients of both ways are added where it came
from, and the order is another when the norm's have been added up before: for a norm that is one
operation that makes no difference, for `torch.nn.RMSNorm`, which may be several, it does. Such
norms are left alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP as MlpModule

from megatron.offload.activations.placement.policy import SELECTIVE
from megatron.offload.activations.saved.autograd_graph import saved_tensors_between
from megatron.offload.integration.megatron.layer_split import ATTENTION, MLP
from megatron.offload.integration.megatron.recomputation import (
    Function,
    has_parts,
    recomputed,
)
from megatron.offload.integration.own_attributes import replaced
from megatron.offload.planner.profile.profiler import Profiler
from megatron.offload.planner.profile.timings import LayerTimings


class OpRunner(Protocol):
    """Runs one operation of a layer in a way of its own: recomputed in backward, or timed."""

    def run(self, function: Function, *tensors: Any) -> Any:
        """Runs an operation whose result is used only once, as `used` says; returns the result."""
        ...

    def used(self, after: torch.Tensor) -> None:
        """Says that `after` was made of the result of `run`, and nothing else was."""
        ...

    def run_inside(self, function: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs an operation whose result stays in memory whatever becomes of the operation."""
        ...


class Recompute:
    """Runs an operation once more in backward; its result's memory is free in between."""

    def __init__(self, noted: Callable[[Function], Function]) -> None:
        self._noted = noted
        self._checkpoint = CheckpointWithoutOutput(fp8=None)

    def run(self, function: Function, *tensors: Any) -> Any:
        """Runs an operation and keeps its inputs, to run it again in backward."""
        return self._checkpoint.checkpoint(self._noted(function), *tensors)

    def used(self, after: torch.Tensor) -> None:
        """Gives the result's memory back until backward comes to `after`."""
        self._checkpoint.discard_output_and_register_recompute(after)

    def run_inside(self, function: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs an operation so that it saves its inputs only; its result stays."""
        return recomputed(self._noted(function), args, kwargs)


class Timed:
    """Runs an operation as usual and tells the profiler how long it took and what it saved."""

    def __init__(self, profiler: Profiler, timings: LayerTimings, part: str) -> None:
        self._profiler, self._marks, self._part = profiler, timings, part

    def run(self, function: Function, *tensors: Any) -> Any:
        """Runs an operation and tells the profiler of it, its result counted as given back."""
        return self._run(function, tensors, {}, result_stays=False)

    def used(self, after: torch.Tensor) -> None:
        """Does nothing: the result stays in memory."""

    def run_inside(self, function: Function, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs an operation and tells the profiler of it, its result not counted."""
        return self._run(function, args, kwargs, result_stays=True)

    def _run(
        self, function: Function, args: tuple[Any, ...], kwargs: Any, *, result_stays: bool
    ) -> Any:
        began = self._profiler.now()
        result = function(*args, **kwargs)
        ended = self._profiler.now()
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        saved = dict(map(_size, () if result_stays else (result,)))
        for _, _, tensor in saved_tensors_between([result], inputs):
            if tensor is not None and not isinstance(tensor, torch.nn.Parameter):
                saved.update([_size(tensor)])
        stays = dict(map(_size, (*inputs, result) if result_stays else inputs))
        gone = {storage: size for storage, size in saved.items() if storage not in stays}
        # What the operation starts from is kept for it, also if it did not save that itself.
        starts = dict(_size(t) for t in inputs if t.requires_grad and not t.is_leaf)
        more = [size for storage, size in starts.items() if storage not in saved]
        # Megatron copies the second result into the memory of the first.
        extra_bytes = result.untyped_storage().nbytes() + sum(more)
        span = began, ended
        self._profiler.selective(self._marks, self._part, span, gone, more, extra_bytes)
        return result


@contextlib.contextmanager
def operating(
    layer: torch.nn.Module, runners: Mapping[str, Callable[[], OpRunner]]
) -> Iterator[None]:
    """A context around a layer's forward in which operations of some of its parts run otherwise.

    Args:
        layer: any; without such operations nothing happens.
        runners: what makes an `OpRunner` for each operation, by part.
    """
    with contextlib.ExitStack() as stack:
        for part, new in runners.items():
            for function in _operations(layer, part):
                stack.enter_context(function(new()))
        yield


def not_recomputed_alone(layer: torch.nn.Module) -> list[str]:
    """The parts of a layer, as plans name them, that can be recomputed with all the rest only."""
    parts = (ATTENTION, MLP)
    if not has_parts(layer):
        return [*parts, *(part + SELECTIVE for part in parts)]
    return [part + SELECTIVE for part in parts if not any(_operations(layer, part))]


Operation = Callable[[OpRunner], contextlib.AbstractContextManager[None]]


def _operations(layer: Any, part: str) -> Iterator[Operation]:
    """Those of one part that Megatron does not recompute anyway."""
    if part == MLP and getattr(layer, "recompute_mlp", False):
        return
    names = {
        ATTENTION: ("input_layernorm", "self_attention", "recompute_input_layernorm"),
        MLP: ("pre_mlp_layernorm", "mlp", "recompute_pre_mlp_layernorm"),
    }
    norm, part, flag = names[part]
    used: Any = getattr(layer, part, None)
    # Before the norm: that one wraps the whole part.
    has_own = getattr(type(used), "forward", None) is MlpModule.forward
    if part == MLP and has_own and "forward" not in vars(used):  # tiles run again as they are
        yield functools.partial(_activation, used)
    core = getattr(used, "core_attention", None)
    if isinstance(core, DotProductAttention) and not used.checkpoint_core_attention:
        yield functools.partial(_core, core)
    found = getattr(layer, norm, None)
    if _is_one_operation(found) and not getattr(layer, flag, False) and used is not None:
        yield functools.partial(_norm, found, used)


def _is_one_operation(norm: Any) -> bool:
    """See Note [Norms whose gradient has several terms]."""
    if not isinstance(norm, torch.nn.Module) or isinstance(norm, IdentityOp | torch.nn.RMSNorm):
        return False
    return not getattr(getattr(norm, "config", None), "fused_residual_rmsnorm", False)


@contextlib.contextmanager
def _norm(norm: Any, part: Any, runner: OpRunner) -> Iterator[None]:
    normalize, forward = norm.forward, part.forward

    def use(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        runner.used(result[0])
        return result

    run = functools.partial(runner.run, normalize)
    with replaced(norm, forward=run), replaced(part, forward=use):
        yield


@contextlib.contextmanager
def _core(core: Any, runner: OpRunner) -> Iterator[None]:
    forward = core.forward
    with replaced(core, forward=lambda *args, **kwargs: runner.run_inside(forward, args, kwargs)):
        yield


@contextlib.contextmanager
def _activation(mlp: Any, runner: OpRunner) -> Iterator[None]:
    forward = mlp.forward

    def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if any(value is not None for value in (*args, *kwargs.values())):  # scales of experts
            return forward(hidden_states, *args, **kwargs)
        inner, bias = mlp.linear_fc1(hidden_states)
        activated = runner.run(functools.partial(_activated, mlp, forward), inner, bias)
        result, result_bias = mlp.linear_fc2(activated)
        runner.used(result)
        return result, result_bias

    with replaced(mlp, forward=run):
        yield


def _activated(mlp: Any, forward: Function, inner: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """What lies between the two linear layers of an MLP: its forward without them."""
    with replaced(mlp, linear_fc1=_Given((inner, bias)), linear_fc2=_Through()):
        return forward(None)[0]


class _Given(torch.nn.Module):
    """Stands for a linear layer that has run already."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def forward(self, _: None) -> Any:
        return self._result


class _Through(torch.nn.Module):
    """Stands for a linear layer that runs later."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


def _size(tensor: torch.Tensor) -> tuple[int, int]:
    """Which storage, and its bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()
