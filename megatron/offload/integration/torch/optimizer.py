# SPDX-License-Identifier: Apache-2.0
"""The front door for optimizers: `offload_optimizer`, one line in a training script.

It checks the optimizer and puts its states on tiers. From then on the optimizer's `step` reads,
updates and writes them bucket by bucket, and `state_dict` and `load_state_dict` work as before.
"""

from __future__ import annotations

import functools
import os
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import torch

from megatron.offload.device.cpu import CpuDevice
from megatron.offload.device.open import open_device
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.memory_by_tier import (
    MemoryRow,
    held_by_parameters,
    held_by_states,
    memory_table,
    state_bytes,
)
from megatron.offload.integration.open_parameters import (
    by_units,
    changing,
    gradient_tier_of,
    tier_of,
    unit_of,
)
from megatron.offload.integration.open_streams import OPEN, Handle, StepBy
from megatron.offload.integration.own_attributes import put
from megatron.offload.integration.torch.ranks import local_world_size
from megatron.offload.integration.torch.refusals import OPTIMIZERS
from megatron.offload.keywords import OptimizerStateMode, OptimizerStateSettings
from megatron.offload.states.auto_window import AutoWindow
from megatron.offload.states.config import StatesConfig
from megatron.offload.states.lazy_state import with_lazy_states
from megatron.offload.states.open import open_state_tiers
from megatron.offload.states.optimizer_slice import OptimizerSlice, without_hooks
from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.states.space import expected_bytes
from megatron.offload.states.step_on_host import StepOnHost
from megatron.offload.states.summary import states_summary
from megatron.offload.states.unsliced_state import check_state_keys
from megatron.offload.stats.endurance import Endurance
from megatron.offload.tiers.wear import WEAR


class OptimizerOffload(Handle):
    """Offload of an optimizer's states, from `offload_optimizer` until `close`.

    Attributes:
        states: what moves them.
        auto: with mode `auto`, decides how much of them is in memory.

    Args:
        optimizer: whose states move.
        config: with mode `off` nothing is touched.
        moves_param: whether a parameter moves with its states.
        updated: told of parameters once they are updated.
        stands_for: gives the parameter of the model that one of the optimizer updates.
        order: of parameters in buckets; see `OptimizerStates`.
        prefetches: whether reads begin in backward, when its gradients come; else the caller calls
            `states.prefetch`.
        num_parts: optimizers of this process whose states move, and that share its memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: StatesConfig,
        *,
        moves_param: Callable[[torch.Tensor], bool] = lambda param: False,
        updated: Callable[[Sequence[torch.Tensor]], None] = lambda params: None,
        stands_for: Callable[[torch.Tensor], torch.Tensor] = lambda param: param,
        order: Callable[[torch.Tensor], int] = unit_of,
        prefetches: bool = True,
        num_parts: int = 1,
    ) -> None:
        self.states: OptimizerStates | None = None
        self.auto: AutoWindow | None = None
        self._optimizer = optimizer
        self._undo: list[Callable[[], object]] = []
        self._config = config
        self._runs_on_host = False
        self._written_before = WEAR.written()
        if not config.enabled:
            return
        check_state_keys(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not params:
            raise ConfigurationError(
                f"{StatesConfig.prefix}this {type(optimizer).__name__} has no parameters, so "
                "nothing of it can move; give it parameters before, or leave its states alone"
            )
        device = open_device(params[0].device, StatesConfig.prefix)
        budget_bytes = config.device_memory_budget_bytes
        step_by: OptimizerSlice | None = None
        if config.step_on == "cpu" and not device.is_host:
            _check_has_cpu_step(optimizer)
            step_by = StepOnHost(optimizer, device, moves_param)
            self._runs_on_host = True
            device, budget_bytes = CpuDevice(), None  # states take nothing of the device's
        sizes = expected_bytes(optimizer, moves_param)
        tiers = open_state_tiers(config, device, sizes=sizes, num_local_ranks=local_world_size())
        try:
            self.states = OptimizerStates(
                optimizer,
                tiers,
                device,
                bucket_bytes=config.bucket_bytes,
                # Else the window is a tier: see Note [The window] of the states.
                window_bytes=config.window_bytes if device.is_host else 0,
                moves_param=moves_param,
                updated=updated,
                changing=changing,
                slices_of=functools.partial(by_units, stands_for=stands_for),
                order=order,
                step_by=step_by,
            )
            if config.mode == "auto":
                self.auto = AutoWindow(
                    self.states,
                    device,
                    budget_bytes,
                    write_limit_bytes_per_s=config.write_bytes_per_s,
                    num_sharing=num_parts * (local_world_size() if device.is_host else 1),
                )
            self._hook(optimizer, self.states)
            if prefetches:
                self._prefetch_half_way(optimizer, self.states)
        except BaseException:
            self.close()
            for tier in tiers:
                tier.close()
            raise

    def close(self, *, restore: bool = True) -> None:
        """Leaves the optimizer as it was.

        Args:
            restore: brings all states back to memory; without, those that are away are gone.

        Raises:
            LostStateError: states could not be read back.
        """
        states, self.states = self.states, None
        if states is None:
            return
        for undo in self._undo:
            undo()
        states.close(restore=restore)

    @property
    def statistics(self) -> dict[str, int | float]:
        """What moved since the beginning, in bytes, and what steps have waited for, in seconds."""
        if self.states is None:
            return {}
        every = [tier.statistics for tier in self.states.tiers]
        return {
            "state_bytes": self.states.num_bytes,
            "memory_bytes": self.states.memory_bytes,
            "read_bytes": sum(one.reads.total_bytes for one in every),
            "written_bytes": sum(one.writes.total_bytes for one in every),
            "stall_s": self.states.meter.stall_s,
        }

    def report(self) -> str:
        """Where weights, gradients and states are, and what the steps took, as lines of text."""
        groups = self._optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        rows = held_by_parameters(params, tier_of, gradient_tier_of)
        if self.states is None:
            rows.append(MemoryRow("optimizer states", state_bytes([self._optimizer])))
            return memory_table(rows, heading="memory")
        rows.append(held_by_states([self.states]))
        table = memory_table(rows, heading="memory")
        rated_bytes = self._config.drive_endurance_bytes
        endurance = Endurance(rated_bytes, local_world_size())
        summary = states_summary([self.states], endurance, WEAR.since(self._written_before))
        return f"{table}\n{summary}" if summary else table

    def _hook(self, optimizer: torch.optim.Optimizer, states: OptimizerStates) -> None:
        offload, kind = self, type(optimizer)

        def step(
            self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **others: Any
        ) -> Any:
            if offload.states is None:  # other code has kept this step over `close`
                given = () if closure is None else (closure,)
                return without_hooks(kind.step)(self, *given, **others)
            if others:
                raise ConfigurationError(
                    f"{StatesConfig.prefix}step() was called with {', '.join(others)}, and a step "
                    "in slices takes a closure alone; put it into the optimizer's param_groups or "
                    "its attributes, or keep its states in memory"
                )
            if torch.compiler.is_compiling():
                _refuse_compiled()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                states.step()
            if offload.auto is not None:
                offload.auto.after_step()
            self._opt_called = True  # type: ignore[attr-defined]  # a scheduler looks for it
            return loss

        own_step = vars(optimizer).get("step")
        if own_step is not None:  # a scheduler's, which has put marks on it
            step.__dict__.update(own_step.__dict__)
        hooked = torch.optim.Optimizer.profile_hook_step(step)
        OPEN.steps[optimizer] = StepBy.PARTS_ON_HOST if self._runs_on_host else StepBy.PARTS
        self._undo.append(lambda: OPEN.steps.pop(optimizer, None))

        def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
            with states.loading(at_once=True):
                kind.load_state_dict(self, with_lazy_states(self, state_dict))

        def getstate(self: torch.optim.Optimizer) -> Any:  # of a copy, and of what is pickled
            states.expose()
            return kind.__getstate__(self)

        replaced: dict[str, Callable[..., Any]] = {
            "step": hooked,
            "load_state_dict": load_state_dict,
            "__getstate__": getstate,
        }
        for name, function in replaced.items():
            self._undo.append(put(optimizer, name, types.MethodType(function, optimizer)))
        showing = optimizer.register_state_dict_pre_hook(lambda _: states.expose())
        self._undo.append(showing.remove)

    def _hook_wrapper(self, wrapper: torch.optim.Optimizer) -> None:
        """Has a wrapper of Accelerate's call the step that the optimizer has now.

        With a gradient scaler it puts the one that it has found, when it was made, on the optimizer
        in each step.
        """
        if self.states is not None and hasattr(wrapper, "_optimizer_original_step_method"):
            from accelerate.optimizer import patch_optimizer_step

            step = self._optimizer.step
            patched = patch_optimizer_step(wrapper, step)
            self._undo.append(put(wrapper, "_optimizer_original_step_method", step))
            self._undo.append(put(wrapper, "_optimizer_patched_step_method", patched))

    def _prefetch_half_way(self, optimizer: torch.optim.Optimizer, states: OptimizerStates) -> None:
        last = _half_way(group["params"] for group in optimizer.param_groups)
        if last is not None:
            # Weakly: autograd's hooks are no part of what the garbage collector sees, and a handle
            # that is dropped would live on with its optimizer.
            found = weakref.ref(states)

            def prefetch(_: torch.Tensor) -> None:
                states = found()
                if states is not None:
                    states.prefetch()

            # A subclass may refuse what is not its own.
            with torch._C.DisableTorchFunctionSubclass():
                hook = last.register_post_accumulate_grad_hook(prefetch)
            self._undo.append(hook.remove)
            weakref.finalize(states, hook.remove).atexit = False  # of a handle that is dropped


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_compiled() -> None:
    raise ConfigurationError(
        f"{StatesConfig.prefix}torch.compile has compiled the step of this optimizer, and a graph "
        "needs all states in memory; call optimizer.step itself"
    )


def _half_way(groups: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor | None:
    """The parameter whose gradient comes when about half of backward is over.

    States that are read from then on come in time, and take memory that activations have left.
    Where gradients are accumulated, that is in the first backward pass.
    """
    params = [p for group in groups for p in group if p.requires_grad and p.is_leaf]
    left = sum(param.nbytes for param in params) / 2
    for param in params:
        left -= param.nbytes
        if left <= 0:
            return param
    return None


def _check_has_cpu_step(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError where an optimizer's step runs on its accelerator alone."""
    kind = type(optimizer)
    if any(one.__name__ == "FusedAdam" for one in kind.__mro__):
        why = f"{kind.__module__}.{kind.__name__} has no CPU kernel; use torch.optim.AdamW"
    elif any(group.get("capturable") for group in optimizer.param_groups):
        why = "with capturable=True it is made for CUDA graphs; leave that away"
    else:
        return
    raise ConfigurationError(
        f"--optimizer-step-on cpu cannot run this optimizer's step: {why}, or use "
        "--optimizer-step-on device"
    )


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    directory: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    mode: OptimizerStateMode | None = None,
    **settings: Unpack[OptimizerStateSettings],
) -> OptimizerOffload:
    """Keeps an optimizer's states on SSDs or in host memory between its steps.

        offload_optimizer(optimizer, "/mnt/nvme0")

    is all that a training loop needs. Weights, states and checkpoints stay the same, bit for bit.

    Args:
        optimizer: any that updates each parameter by its gradient and state alone: Adam, AdamW,
            SGD and most others. It may have states already.
        directory: an existing directory on an SSD, or several on different SSDs.
        mode: `ssd`, `host` or `tiered`, see docs/flags.md. Default: `ssd` with a directory, `host`
            without one. `off` does nothing, so that a script needs no second way.
        settings: any other field of `StatesConfig` by its name; sizes as numbers or as text:
            `window_bytes="1GiB"`.

    Returns:
        A handle with `statistics`, `report()` and `close()`, also a context manager.

    Raises:
        ConfigurationError: the directory, a setting or the optimizer cannot work; says why.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer; give the optimizer whose "
            "`step` updates the parameters"
        )
    given, optimizer = optimizer, _innermost(optimizer)
    for one in type(optimizer).__mro__:
        if one.__name__ in OPTIMIZERS:
            raise ConfigurationError(
                f"{StatesConfig.prefix}those of {one.__name__} cannot be offloaded: "
                f"{OPTIMIZERS[one.__name__]}"
            )
    _check_has_no_other(optimizer)
    if optimizer in OPEN.steps:
        raise ConfigurationError(
            f"{StatesConfig.prefix}those of this optimizer are offloaded already; call close() of "
            "the first handle before"
        )
    _check_has_own_step(optimizer)
    with StatesConfig.speaking_of_settings():
        config = StatesConfig.of_door(directory, mode, settings).resolved()
        offload = OptimizerOffload(optimizer, config)
    offload._hook_wrapper(given)
    return offload


def _check_has_no_other(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError for an optimizer whose step runs another one's."""
    for name, value in vars(optimizer).items():
        values = value if isinstance(value, list | tuple) else [value]
        for other in values:
            if isinstance(other, torch.optim.Optimizer):
                kind, its = type(optimizer).__name__, type(other).__name__
                raise ConfigurationError(
                    f"{StatesConfig.prefix}those of {kind} cannot be offloaded: its step runs that "
                    f"of another optimizer ({name}, {its}), which would be run once for each "
                    f"bucket; offload the states of {its} instead, if {kind} only calls its step"
                )


def _check_has_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigurationError where other code has put a step in the place of the class's."""
    own = vars(optimizer).get("step")
    if getattr(own, "_wrapped_by_lr_sched", False):  # which calls what it has in it
        own = getattr(own, "__wrapped__", None)
    if own is not None and getattr(own, "__func__", own) is not type(optimizer).step:
        raise ConfigurationError(
            f"{StatesConfig.prefix}other code has put a step of its own in the place of that of "
            f"{type(optimizer).__name__} (optimizer.step = ...), and it would not run, because "
            "states are updated part by part; call offload_optimizer before that code"
        )


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that Accelerate, or another wrapper that is an optimizer too, has in it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        if type(optimizer).__name__ in OPTIMIZERS:
            break
        optimizer = inner
    return optimizer
