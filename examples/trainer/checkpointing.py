# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through megatron-core's dist_checkpointing, laid out as Megatron-LM lays them out.

A directory holds `iter_0000010/` and so on, and `latest_checkpointed_iteration.txt`, written last.
A checkpoint has the weights, the optimizer, the schedule's position, the samples consumed and every
rank's random generators: a resumed run repeats the uninterrupted one bit by bit. Read in another
parallel layout, it gives the same weights and optimizer, but starts fresh random generators.
"""

from __future__ import annotations

import argparse
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron.offload.activations.placement.atomic_file import sync_files, write_atomically
from megatron.offload.integration.megatron import ModelStates

from .errors import UserError
from .model import Task, unwrap
from .optimizer import load_optimizer_state, materialize_adam_state

_log = logging.getLogger(__name__)
_TRACKER_FILE = "latest_checkpointed_iteration.txt"
_MOST_DIGITS = 18  # of an iteration
# Flags that a checkpoint fixes, besides the task's own: with other values its tensors do not fit.
_FIXED_FLAGS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "max_position_embeddings",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "disable_bias_linear",
    "untie_embeddings_and_output_weights",
    "bf16",
    "use_distributed_optimizer",
)


@dataclass
class Progress:
    """How far training is."""

    iteration: int = 0
    consumed_samples: int = 0


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds besides `Progress` and the random generators."""

    args: argparse.Namespace
    task: Task
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    states: ModelStates

    @property
    def fixed_flags(self) -> dict[str, Any]:
        """Values of the flags that a checkpoint fixes."""
        names = (*_FIXED_FLAGS, *self.task.fixed_flags)
        return {name: getattr(self.args, name) for name in names}


def check_buckets(chunks: list[DistributedDataParallel]) -> None:
    """Looks for what would make checkpoints wrong.

    Megatron-core 0.16.1 gathers the states of a distributed optimizer without the padding between
    buckets, and then looks for them at the places that they have with it.

    Raises:
        UserError: A bucket of gradients that another one comes after is padded.
    """
    for chunk in chunks:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets[:-1]:
                if bucket.grad_data.numel() != bucket.numel_unpadded:
                    raise UserError(
                        f"--save: megatron-core would save wrong optimizer states, because a "
                        f"bucket of {bucket.numel_unpadded} gradients is padded to "
                        f"{bucket.grad_data.numel()}; choose another --ddp-bucket-size, or leave "
                        "out --overlap-grad-reduce"
                    )


def find_checkpoint(directory: Path) -> Path:
    """The latest checkpoint in a directory.

    Raises:
        UserError: There is none.
    """
    tracker = directory / _TRACKER_FILE
    if not tracker.is_file():
        raise UserError(f"--load {directory} has no checkpoint ({_TRACKER_FILE} is missing there)")
    text = tracker.read_text(errors="replace").strip()
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise UserError(f"--load: {tracker} should hold an iteration, got {text[:40]!r}")
    checkpoint = _checkpoint_directory(directory, int(text))
    if not dist_checkpointing.check_is_distributed_checkpoint(str(checkpoint)):
        raise UserError(f"--load: {checkpoint} is not a checkpoint although {tracker} names it")
    return checkpoint


def save_checkpoint(directory: Path, progress: Progress, state: TrainingState) -> Path:
    """Writes a checkpoint; all ranks call it. Complete only once the tracker file names it.

    The tracker file names no checkpoint that a power failure could still take back.
    """
    checkpoint = _checkpoint_directory(directory, progress.iteration)
    if dist.get_rank() == 0:
        checkpoint.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with state.states.checkpointing():
        _save_content(checkpoint, progress, state)
    dist.barrier()
    if dist.get_rank() == 0:
        sync_files(checkpoint)  # megatron-core waits for the disk with tensors, not with the rest
        tracker = directory / _TRACKER_FILE
        write_atomically(tracker, f"{progress.iteration}\n")
    dist.barrier()
    _log.info("saved %s", checkpoint)
    return checkpoint


def _save_content(checkpoint: Path, progress: Progress, state: TrainingState) -> None:
    content = _content(state, is_loading=False)
    content["progress"] = vars(progress).copy()
    content["layout"] = _layout()
    content["model"] = state.task.name
    content["flags"] = state.fixed_flags
    content["random"] = _random_object(_random_state())
    dist_checkpointing.save(content, str(checkpoint))


def load_checkpoint(directory: Path, state: TrainingState) -> Progress:
    """Reads the latest checkpoint into `state` and into this rank's random generators.

    Raises:
        UserError: There is no checkpoint, or it is of another model.
    """
    checkpoint = find_checkpoint(directory)
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    name = common.get("model", state.task.name)
    if name != state.task.name:
        raise UserError(
            f"--load: {checkpoint} is of {name}, not of {state.task.name}; choose another directory"
        )
    for name, value in state.fixed_flags.items():
        if common["flags"][name] != value:
            raise UserError(
                f"--load: {checkpoint} was made with {name} = {common['flags'][name]}, got "
                f"{value}; give --{name.replace('_', '-')} as it was"
            )
    with state.states.checkpointing():
        materialize_adam_state(state.optimizer, state.states)
        with state.states.loading():
            _load_content(checkpoint, common, state)
    progress = Progress(**common["progress"])
    _log.info("loaded %s", checkpoint)
    return progress


def _load_content(checkpoint: Path, common: dict[str, Any], state: TrainingState) -> None:
    content = _content(state, is_loading=True)
    same_layout = common.get("layout") == _layout()
    if same_layout:
        content["random"] = _random_object(None)
    try:
        loaded = dist_checkpointing.load(content, str(checkpoint))
    except dist_checkpointing.core.CheckpointingException as error:
        reason = str(error)[:200]
        raise UserError(f"--load: {checkpoint} does not fit this model: {reason}") from error
    for index, chunk in enumerate(state.chunks):
        unwrap(chunk).load_state_dict(loaded[_chunk_name(index)])
    load_optimizer_state(state.optimizer, loaded["optimizer"])
    state.scheduler.load_state_dict(loaded["scheduler"])
    if same_layout:
        _set_random_state(loaded["random"])
    else:
        _log.info("%s comes from another parallel layout: random generators start anew", checkpoint)


def check_load(args: argparse.Namespace) -> None:
    """Checks before training that --load has a checkpoint."""
    if args.load is not None:
        find_checkpoint(args.load)


def _checkpoint_directory(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def _chunk_name(index: int) -> str:
    return f"model{index}"


def _content(state: TrainingState, is_loading: bool) -> dict[str, Any]:
    """The sharded state dict of weights, optimizer and schedule."""
    metadata = {
        # Read by any layout, which is what small runs want; the faster formats are tied to one.
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    content: dict[str, Any] = {
        _chunk_name(index): unwrap(chunk).sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(state.chunks)
    }
    weights: dict[str, Any] = {}
    for chunk in content.values():
        weights.update(chunk)
    if len(state.chunks) > 1:
        weights = dict(content)
    content["optimizer"] = state.optimizer.sharded_state_dict(
        weights, is_loading=is_loading, metadata=metadata
    )
    content["scheduler"] = state.scheduler.state_dict()
    return content


# ------------------------------------------------------------------ random generators


def _layout() -> list[int]:
    return [
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    ]


def _random_object(state: dict[str, Any] | None) -> ShardedObject:
    """One random state per rank, placed by the rank's coordinates."""
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    return ShardedObject("random", state, tuple(_layout()), place, replica_id=0)


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
