# SPDX-License-Identifier: Apache-2.0
"""The states of Megatron's optimizers on tiers: `offload_model_states`.

A trainer calls it once its optimizer is built. exp_avg and exp_avg_sq move, and main weights where
Megatron keeps some beside the model's. The step stays Megatron's own: gradients, norm, clipping and
loss scale as before, then the inner optimizer's step, which now goes bucket by bucket, and each
bucket's main weights to the model (`main_weights.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from megatron.offload.integration.megatron.main_weights import (
    COPY,
    PAIRS,
    MainWeights,
    optimizers_in,
)
from megatron.offload.integration.megatron.scaling import scale_in_place
from megatron.offload.integration.megatron.state_settings import (
    check_inner_optimizer,
    check_state_settings,
)
from megatron.offload.integration.megatron.versions import check_version
from megatron.offload.integration.own_attributes import beginning_with, put, within
from megatron.offload.integration.torch.optimizer import OptimizerOffload
from megatron.offload.integration.torch.ranks import local_world_size
from megatron.offload.machine.memory_limit import memory_limit
from megatron.offload.states.auto_window import AutoWindow, NoWindow
from megatron.offload.states.config import StatesConfig
from megatron.offload.states.in_files import InFiles
from megatron.offload.states.optimizer_states import OptimizerStates
from megatron.offload.states.summary import states_summary
from megatron.offload.stats.endurance import Endurance
from megatron.offload.tiers.host_budget import host_budget_bytes
from megatron.offload.tiers.purpose import STATES
from megatron.offload.tiers.wear import WEAR

_COPYING = "reload_model_params"  # the model's weights to main weights, and no states
# Functions that read states, and functions that change them. Those of ChainedOptimizer call its
# members'.
READING = (
    "state_dict",
    "sharded_state_dict",
    "save_parameter_state",
    "get_parameter_state_dp_zero",
    "get_parameter_state_dp_reshardable",
)
LOADING = (
    "load_state_dict",
    "load_parameter_state",
    "load_parameter_state_from_dp_zero",
    "load_parameter_state_from_dp_reshardable",
    "load_parameter_state_from_fs_model_space",
    "load_parameter_state_from_fully_reshardable",
    _COPYING,
)
_MOVING = ("offload_to_cpu", "restore_from_cpu")


class ModelStates:
    """Offload of a Megatron optimizer's states, from `offload_model_states` until `close`.

    Attributes:
        enabled: whether states are to move; a rank that trains nothing has none all the same.
        parts: one for each optimizer that has parameters: of experts there is another one.

    Args:
        directories: that states are in, if they are on drives.
        rated_bytes: that each drive is rated to endure; None: not known.
        undo: called at the end.
        is_auto: how much of them is in memory is decided in the first steps.
    """

    def __init__(
        self,
        parts: Sequence[_Part] = (),
        *,
        enabled: bool = False,
        is_auto: bool = False,
        directories: Sequence[Path] = (),
        rated_bytes: int | None = None,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        self.enabled = enabled
        self._undo = undo
        self._is_auto = is_auto
        self.parts = list(parts)
        self._directories = list(directories)
        self._written_before = WEAR.written()
        self._rated_bytes = rated_bytes

    @property
    def states(self) -> list[OptimizerStates]:
        """What moves them, one for each part; none with offload off."""
        return [part.states for part in self.parts]

    @property
    def statistics(self) -> dict[str, int]:
        """Bytes of all states, those in memory now, and those moved so far; empty with off."""
        if not self.enabled:
            return {}
        tiers = [tier.statistics for states in self.states for tier in states.tiers]
        return {
            "bytes": sum(states.num_bytes for states in self.states),
            "memory_bytes": sum(states.memory_bytes for states in self.states),
            "written_bytes": sum(one.writes.total_bytes for one in tiers),
            "read_bytes": sum(one.reads.total_bytes for one in tiers),
        }

    @property
    def auto(self) -> AutoWindow | NoWindow | None:
        """Divides memory with activations; None without mode `auto`.

        It has nothing to divide where a rank has several optimizers: each decides for itself.
        """
        if not self._is_auto:
            return None
        found = self.parts[0].auto if len(self.parts) == 1 else None
        return found or NoWindow()

    def summary(self, *, with_drives: bool = True) -> str:
        """A few lines for the end of a run; empty if there was no step.

        Args:
            with_drives: also says how long the drives last; False if another summary does.
        """
        endurance = Endurance(self._rated_bytes, local_world_size()) if with_drives else None
        return states_summary(self.states, endurance, WEAR.since(self._written_before))

    def prefetch(self) -> None:
        """The step is near: begins to read what it needs first. The last backward pass calls it."""
        for states in self.states:
            states.prefetch()

    def expose(self) -> None:
        """Shows all states, main weights too, in their places until the next step."""
        for states in self.states:
            states.expose()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around whatever writes states or main weights itself, without Megatron's functions."""
        with contextlib.ExitStack() as stack:
            for states in self.states:
                stack.enter_context(states.loading())
            yield

    def checkpointing(self) -> AbstractContextManager[object]:
        """Around a checkpoint's saving and loading: what Megatron gathers is in files.

        Its distributed optimizer makes a copy of all states on the host, in some formats.
        """
        return InFiles(self._directories) if self._directories else contextlib.nullcontext()

    def make_states(self, make: Callable[[torch.optim.Optimizer], None]) -> None:
        """Makes states before the first step, a few at a time, so that a checkpoint can be loaded.

        Args:
            make: fills the state of an inner optimizer; each time of one with some parameters only.
        """
        for states in self.states:
            states.make_states(make)

    def note_checkpoint(self, path: str | Path) -> None:
        """Notes the checkpoint that an error names if states are lost."""
        for states in self.states:
            states.checkpoint = str(path)

    def close(self, *, restore: bool = True) -> None:
        """Leaves the optimizer as it was and gives the disk space back.

        Args:
            restore: brings all states back to memory; without, those that are away are gone.

        Raises:
            LostStateError: states could not be read back.
        """
        self._undo()
        error: Exception | None = None
        while self.parts:
            try:
                self.parts.pop().close(restore=restore)
            except Exception as one:
                error = error or one
        if error is not None:
            raise error


def check_model_states(config: StatesConfig, settings: Any) -> None:
    """Checks what can be found wrong before an optimizer is built.

    Args:
        config: what the flags ask for.
        settings: Megatron's `OptimizerConfig`, or the flags that make one.

    Raises:
        ConfigurationError: the version or a setting cannot work.
    """
    if config.enabled:
        check_version()
        check_state_settings(settings)


def offload_model_states(config: StatesConfig, optimizer: Any) -> ModelStates:
    """Keeps the states of a Megatron optimizer where `config` says.

    Args:
        config: with mode `off` every call of the result does nothing, and nothing is touched.
        optimizer: what `get_megatron_optimizer` gave. It may have states already.

    Raises:
        ConfigurationError: the optimizer, a setting or the directory cannot work; says why.
    """
    if not config.enabled:
        return ModelStates()
    check_version()
    found = optimizers_in(optimizer)
    for one in found:
        _check_is_known(one)
    members = [one for one in found if _state_bytes(one)]
    for one in members:
        check_state_settings(one.config)
        check_inner_optimizer(one)
    whole = sum(map(_state_bytes, members))
    parts: list[_Part] = []
    try:
        shares = [_share(config, _state_bytes(one), whole) for one in members]
        for one, own in zip(members, shares, strict=True):
            parts.append(_Part(one, own, len(members)))
    except BaseException:
        for part in parts:
            part.close()
        raise
    return ModelStates(
        parts,
        enabled=True,
        is_auto=config.mode == "auto",
        directories=config.resolved().directories if config.uses_ssd else (),
        rated_bytes=config.drive_endurance_bytes,
        undo=scale_in_place(),
    )


def _check_is_known(optimizer: Any) -> None:
    """Raises ConfigurationError for a Megatron optimizer whose main weights we cannot find."""
    kind = type(optimizer).__name__
    if kind not in PAIRS:
        raise STATES.refusal(
            f"{kind} cannot be combined with state offload: which weights it keeps is not known; "
            "use the optimizers of get_megatron_optimizer, or --optimizer-state-offload off"
        )


class _Part:
    """One Megatron optimizer with one optimizer of torch's kind inside."""

    def __init__(self, optimizer: Any, config: StatesConfig, num_parts: int) -> None:
        self._optimizer = optimizer
        weights = MainWeights(optimizer)
        self._undo = contextlib.ExitStack()
        self._offload = OptimizerOffload(
            optimizer.optimizer,
            config,
            moves_param=weights.is_main_weight,
            updated=weights.copy,
            stands_for=weights.model_param,
            order=weights.order,
            prefetches=False,  # `LastBackward` does, and not before the last micro-batch
            num_parts=num_parts,
        )
        assert self._offload.states is not None
        self.states: OptimizerStates = self._offload.states
        self.auto = self._offload.auto
        if weights.pairs:
            self._put(COPY, lambda: None)  # see Note [Main weights go to the model at once]
        for name in READING:
            self._within(name, beginning_with(self.states.expose))
        for name in LOADING:
            is_whole = name != _COPYING
            self._within(name, functools.partial(self.states.loading, is_whole=is_whole))
        make = getattr(optimizer, "init_state_fn", None)
        if make is not None:
            self._put("init_state_fn", functools.partial(self._make_states, make))
        for name in _MOVING:
            if hasattr(optimizer, name):
                self._put(name, functools.partial(_refuse_to_move, name))

    def close(self, *, restore: bool = True) -> None:
        """As `ModelStates.close`."""
        self._undo.close()
        self._offload.close(restore=restore)

    def _make_states(self, make: Callable[..., None], _: Any, settings: Any = None) -> None:
        """Megatron's function that makes states to load into, for a few parameters at a time."""
        self.states.make_states(lambda part: make(part, settings))
        self.states.expose()

    def _put(self, name: str, function: Callable[..., Any]) -> None:
        self._undo.callback(put(self._optimizer, name, function))

    def _within(self, name: str, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._undo.callback(within(self._optimizer, name, around))


def _refuse_to_move(name: str) -> None:
    raise STATES.refusal(
        f"{name} of Megatron's optimizer cannot move states that are offloaded; "
        "use --optimizer-state-offload off"
    )


def _state_bytes(optimizer: Any) -> int:
    """About the bytes of states of one optimizer: they share a budget in this proportion."""
    groups = optimizer.optimizer.param_groups
    return sum(param.nbytes for group in groups for param in group["params"])


def _share(config: StatesConfig, part: int, whole: int) -> StatesConfig:
    """A configuration with this part of its budgets."""
    if part == whole:
        return config
    changes: dict[str, Any] = {"window_bytes": config.window_bytes * part // whole}
    if config.uses_host:
        asked = host_budget_bytes(config.host_budget, local_world_size(), memory_limit(), STATES)
        changes["host_budget"] = asked * part // whole
    if config.ssd_budget_bytes is not None:
        changes["ssd_budget_bytes"] = config.ssd_budget_bytes * part // whole
    if config.write_bytes_per_s is not None:
        changes["write_bytes_per_s"] = config.write_bytes_per_s * part / whole
    return dataclasses.replace(config, **changes)
