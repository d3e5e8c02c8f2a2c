# SPDX-License-Identifier: Apache-2.0
"""Trainings with the distributed optimizer whose parameters stay in memory, or wait on a tier;
test_distributed_parameters.py starts it on two ranks. Prints what came of each.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.offload import OffloadConfig
from megatron.offload.errors import InterruptedStepError
from megatron.offload.integration.megatron import (
    ModelParameters,
    cpu_runtime,
    install,
    offload_model_parameters,
    offload_model_states,
)
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.parameters.window import ParameterWindow
from megatron.offload.states.config import StatesConfig
from tests.megatron.model_states_ranks import Training, same
from tests.support.ranks import init_process_group, print_results

LAYERS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUM_STEPS = {"fp32": 4, "bf16": 4, "fp16": 10}  # one of ten is skipped
Before = Callable[[int, ParameterWindow], None]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a whole training came to."""

    steps: list[Any]
    tensors: dict[str, torch.Tensor]  # of weights, main weights and states
    found: dict[str, Any]


class Case:
    """A training, with parameters that move or that stay.

    Args:
        directory: for whatever moves.
        dtype: of parameters, by name.
        is_layer_major: how steps run.
        moves_states: whether optimizer states move too.
    """

    def __init__(
        self, directory: Path, dtype: str, *, is_layer_major: bool, moves_states: bool
    ) -> None:
        self.directory = directory
        self.dtype = dtype
        self.layer_major = LayerMajorConfig(units="auto" if is_layer_major else "off")
        self.states = StatesConfig()
        if moves_states:
            self.states = StatesConfig(
                mode="ssd", directories=(directory,), bucket_bytes=1 << 15, window_bytes=0
            )

    def start(self, mode: str) -> tuple[Training, ModelParameters, Callable[[], None]]:
        """A training whose parameters wait where `mode` says, and what ends it."""
        settings = {"use_distributed_optimizer": True}
        training = Training(settings, DTYPES[self.dtype], LAYERS)
        self.buffers = [
            StorageWeakRef(buffer.param_data.untyped_storage())
            for buffer in training.chunks[0].buffers
        ]
        states = offload_model_states(self.states, training.optimizer)
        parameters = offload_model_parameters(
            ParametersConfig(mode=mode, directories=(self.directory,)),
            training.chunks,
            training.optimizer,
            layer_major=self.layer_major,
            updates_by_units=self.states.enabled,
        )
        installed = install(
            OffloadConfig(), training.chunks, states=states, layer_major=self.layer_major
        )
        step = training.step

        def in_context(number: int) -> None:
            with installed.step():
                step(number)

        training.step = in_context  # type: ignore[method-assign]
        self.expose = lambda: (states.expose(), parameters.expose())

        def end() -> None:
            installed.close()
            parameters.close()
            states.close()

        return training, parameters, end

    def run(self, mode: str, before: Before = lambda number, window: None) -> Result:
        """All steps; the last one after everything has come back to memory."""
        training, parameters, end = self.start(mode)
        num_steps = NUM_STEPS[self.dtype]
        found: dict[str, Any] = {}
        window = window_of(parameters)
        unread: set[int] = set()
        if window is not None:
            note_unread(window, unread)
        for number in range(num_steps):
            if window is not None:
                before(number, window)
            training.step(number)
        self.expose()
        tensors = training.tensors()
        if window is not None:
            window.use(0, 1)  # ends `expose`
            found = {**self._found(parameters, window, training), "unread": sorted(unread)}
        tensors |= read_and_load(training, window)
        tensors |= go_back(training)
        end()
        training.step(num_steps)
        return Result(
            training.found,
            tensors | {f"{name} after": one for name, one in training.tensors().items()},
            found,
        )

    def _found(
        self, parameters: ModelParameters, window: ParameterWindow, training: Training
    ) -> dict[str, Any]:
        for unit in window.units:
            unit.wait_for_write()
        (optimizer,) = training.optimizer.chained_optimizers
        names = ("model_fp32_groups", "shard_fp32_groups")
        if self.dtype != "fp32":
            names = ("model_float16_groups", "shard_float16_groups")
        of_last = {id(param) for param in window.units[-1].params}
        shards = [
            shard
            for params, shards in zip(*(getattr(optimizer, name) for name in names), strict=True)
            for param, shard in zip(params, shards, strict=True)
            if id(param) in of_last
        ]
        return {
            "buffers": sum(not one.expired() for one in self.buffers),
            "num_shards": len(shards),
            "shards": all(bool(shard.isnan().all()) for shard in shards),
            **parameters.statistics,
        }


def window_of(parameters: ModelParameters) -> ParameterWindow | None:
    offload = parameters._offload
    return None if offload is None else offload.window


@torch.no_grad()
def read_and_load(training: Training, window: ParameterWindow | None) -> dict[str, torch.Tensor]:
    """What the optimizer says of its weights and states, and after other ones were loaded."""
    (optimizer,) = training.optimizer.chained_optimizers
    found: dict[str, torch.Tensor] = {}
    for when in ("read", "loaded"):
        state = optimizer.get_parameter_state_dp_reshardable()
        (buckets,) = state[0].values()
        for number, one in enumerate(one for bucket in buckets for one in bucket):
            one["padding"] = False
            for key in ("param", "exp_avg"):
                found[f"{number} {key} {when}"] = one[key].clone()
                one[key] = one[key] + 1
        if when == "read":
            optimizer.load_parameter_state_from_dp_reshardable(state)
        if window is not None:
            for number in (0, LAYERS - 1):  # nothing is shown any more, and all has been away
                window.use(number, 1)
    training.chunks[0].start_param_sync()  # outside of any step
    return found


@torch.no_grad()
def go_back(training: Training) -> dict[str, torch.Tensor]:
    """Weights after a step, and a checkpoint of before, which is read into what is in memory.

    As megatron-core reads one: into the tensors that it describes, then the model takes them, then
    the optimizer. Steps are counted on.
    """
    (optimizer,) = training.optimizer.chained_optimizers
    model: Any = training.chunks[0]
    while hasattr(model, "module"):
        model = model.module
    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }

    def described(is_loading: bool) -> tuple[Any, Any, list[Any]]:
        weights = model.sharded_state_dict(metadata=metadata)
        state = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
        found = [one for part in (weights, state) for one in nested_values(part)]
        return weights, state, [one for one in found if isinstance(one, ShardedTensor)]

    saved = [one.data.clone() for one in described(False)[2]]
    with torch.enable_grad():
        training.step(NUM_STEPS["fp16"] + 1)
    weights, state, tensors = described(True)
    for one, value in zip(tensors, saved, strict=True):
        one.data.copy_(value)
    weights, state = _data_of(weights), _data_of(state["param_state"])
    model.load_state_dict(weights)
    of_params = optimizer.optimizer.state.values()
    steps = [one.pop("step") for one in of_params]  # no checkpoint has them, see `optimizer.py`
    optimizer.load_parameter_state_from_dp_reshardable(state)
    for one, step in zip(of_params, steps, strict=True):
        one["step"] = step
    training.chunks[0].start_param_sync()
    return {f"{name} gone back": p.detach().clone() for name, p in model.named_parameters()}


def _data_of(content: Any) -> Any:
    """A state with tensors in the place of what describes them."""
    if isinstance(content, dict):
        return {name: _data_of(one) for name, one in content.items()}
    if isinstance(content, list):
        return [_data_of(one) for one in content]
    if isinstance(content, LocalNonpersistentObject):
        return content.unwrap()
    if isinstance(content, ShardedTensor):
        return content.data.detach()
    return content.data if isinstance(content, ShardedObject) else content


def note_unread(window: ParameterWindow, unread: set[int]) -> None:
    """Adds the units that are to get memory and are not read."""
    own = window.use

    def use(number: int, direction: int, **settings: Any) -> None:
        unread.update(settings.get("unread", ()))
        own(number, direction, **settings)

    window.use = use  # type: ignore[method-assign]


def fill_a_drive(number: int, window: ParameterWindow) -> None:
    """On one rank only: nothing is taken from the second step on."""
    if number == 1 and dist.get_rank() == 1:
        for tier in window.tiers:
            tier.begin_write = lambda *_: None  # type: ignore[method-assign]


def fail_to_read(number: int, window: ParameterWindow) -> None:
    """On one rank only, while the other one waits to gather with it."""
    if number != 1 or dist.get_rank() != 1:
        return

    def begin_read(tier: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        if not window.is_whole:
            raise OSError(5, "the drive is gone")
        return own(*args, **kwargs)

    for tier in window.tiers:
        tier.begin_read = functools.partial(begin_read, tier, tier.begin_read)  # type: ignore


def interrupted(case: Case, owner: Any, name: str) -> list[str]:
    """What happens behind a step that ends in the second call of a function."""
    training, parameters, end = case.start("ssd")
    training.step(0)
    function, told = getattr(owner, name), []

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        if told:
            raise KeyboardInterrupt
        told.append(args)
        return function(*args, **kwargs)

    setattr(owner, name, interrupt)
    errors = []
    for attempt in (training.step, lambda _: parameters.expose(), training.step):
        try:
            attempt(1)
        except (KeyboardInterrupt, InterruptedStepError) as error:
            errors.append(type(error).__name__)
        setattr(owner, name, function)
    end()
    return errors


def main() -> None:
    """Trains each case with and without."""
    directory, names = Path(sys.argv[1]), sys.argv[2].split(",")
    init_process_group()
    cpu_runtime.activate()
    parallel_state.initialize_model_parallel()
    results: dict[str, Any] = {}
    for name in names:
        dtype, order, moved, *special = name.split()
        case = Case(
            directory,
            dtype,
            is_layer_major=order == "layer-major",
            moves_states=moved == "states",
        )
        if special == ["interrupted"]:
            results[name] = {
                "updates": interrupted(case, ParameterWindow, "changing"),
                "gathers": interrupted(case, dist, "broadcast"),
            }
            continue
        before = {"full": fill_a_drive, "lost": fail_to_read}.get("".join(special))
        off = case.run("off")
        on = case.run("ssd", before or (lambda number, window: None))
        results[name] = {
            "steps": on.steps == off.steps,
            "tensors": same(on.tensors, off.tensors),
            "num_tensors": len(off.tensors),
            "num_steps": len(off.steps),
            **on.found,
        }
    print_results(results)


if __name__ == "__main__":
    main()
