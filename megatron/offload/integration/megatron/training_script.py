# SPDX-License-Identifier: Apache-2.0
"""Offload in an unmodified training script of Megatron-LM: `TrainingScript`.

`megatron/offload/launch.py` connects it, runs the script and closes it. It wraps the few functions
that every `pretrain_*.py` goes through (`PATCH_POINTS`), calls `check`, `install` and `step` as a
trainer does, and shows the counters in the script's own log. It copies nothing of Megatron-LM.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron.offload.errors import ConfigurationError, OffloadError
from megatron.offload.flag import did_you_mean
from megatron.offload.integration.megatron import cpu_runtime, cpu_training_script
from megatron.offload.integration.megatron.arguments import add_offload_arguments, make_plain
from megatron.offload.integration.megatron.connect import device_of
from megatron.offload.integration.megatron.estimate import (
    activation_bytes,
    encoder_decoder_bytes,
)
from megatron.offload.integration.megatron.measured_steps import (
    MeasuredSteps,
    add_measuring_arguments,
    check_measuring,
    wait_for_turn,
)
from megatron.offload.integration.megatron.patch_point import PatchPoint
from megatron.offload.integration.megatron.refused import LAUNCHER
from megatron.offload.integration.megatron.script_log import (
    GET_FLAGS,
    GET_TENSORBOARD,
    GET_WANDB,
    describe,
    write_scalars,
)
from megatron.offload.integration.megatron.whole_training import OffloadedTraining, Requested
from megatron.offload.planner.online.consensus import raise_first

Function = Callable[..., Any]  # of Megatron-LM

_ARGUMENTS, _TRAINING = "megatron.training.arguments", "megatron.training.training"

_ADD_FLAGS = PatchPoint(_ARGUMENTS, "add_megatron_arguments", ("parser",))
_SETUP = PatchPoint(_TRAINING, "setup_model_and_optimizer", ("model_type", "checkpointing_context"))
_STEP = PatchPoint(_TRAINING, "train_step", ("model", "optimizer", "forward_backward_func"))
_LOG = PatchPoint(_TRAINING, "training_log", ("loss_dict", "iteration", "is_first_iteration"))
_PRINT = PatchPoint(_TRAINING, "print_rank_last", ("message",))
_LOAD = PatchPoint(_TRAINING, "load_checkpoint", ("optimizer", "opt_param_scheduler"))
_SAVE = PatchPoint(_TRAINING, "save_checkpoint", ("iteration", "model", "optimizer"))
_MODEL_SETTINGS = PatchPoint(_ARGUMENTS, "core_transformer_config_from_args", ("args",))

# All functions of Megatron-LM that we wrap (the first seven) or call.
PATCH_POINTS = (
    _ADD_FLAGS,
    _SETUP,
    _STEP,
    _LOG,
    _PRINT,
    _LOAD,
    _SAVE,
    GET_FLAGS,
    GET_TENSORBOARD,
    GET_WANDB,
    _MODEL_SETTINGS,
)


class TrainingScript:
    """One run of a training script; connected, it does what the script's flags ask for."""

    def __init__(self) -> None:
        self._restore = contextlib.ExitStack()
        self._offload: OffloadedTraining | None = None  # once the script builds what it trains
        self._measured: MeasuredSteps | None = None
        self._device = torch.device("cpu")
        self._addition = ""  # to the line that Megatron-LM logs next
        self._has_set_up = False

    # -------------------------------------------------------------- on and off

    def connect(self) -> None:
        """Wraps Megatron-LM's functions. Call it before the script runs.

        Raises:
            ConfigurationError: one of them is not as it is known here; nothing was touched then.
        """
        for patch_point in PATCH_POINTS:
            patch_point.find()
        for patch_point, around in (
            (_ADD_FLAGS, self._add_flags),
            (_SETUP, self._set_up),
            (_STEP, self._train_step),
            (_LOG, self._log),
            (_PRINT, self._print),
            (_LOAD, self._load),
            (_SAVE, self._save),
        ):
            original = patch_point.find()
            call = functools.update_wrapper(functools.partial(around, original), original)
            self._restore.callback(patch_point.replace(call))

    def summary(self) -> str:
        """A few lines for the end of the run; empty without offload or without a step."""
        if not self._has_set_up:
            return (
                "activation offload: the script never called setup_model_and_optimizer of "
                f"{_TRAINING}, so nothing was offloaded"
            )
        return self._offload.summary() if self._offload is not None else ""

    def close(self) -> None:
        """Ends offload, gives memory and disk space back, restores Megatron-LM's functions."""
        self._restore.close()
        if self._measured is not None:
            self._measured.close()
        if self._offload is not None:
            self._offload.close()

    # -------------------------------------------------------------- in the place of its functions

    def _add_flags(
        self, original: Function, parser: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        parser = add_measuring_arguments(add_offload_arguments(original(parser)))
        if cpu_runtime.is_active():
            cpu_training_script.set_defaults(parser)
        # Its own would print a thousand lines of usage first.
        parser.error = functools.partial(_refuse_flags, parser)  # type: ignore[method-assign]
        return parser

    def _set_up(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self._has_set_up = True
        flags = GET_FLAGS.find()()
        request = _checked_request(flags)
        if not flags.skip_train:
            self._offload = OffloadedTraining(request.streams, request.run_directory)
        result = original(*args, **kwargs)
        if cpu_runtime.is_active():
            cpu_training_script.keep_sent_tensors(result[0])
        if not flags.skip_train:
            _on_all_ranks(lambda: self._install(request, result[0], result[1]))
        return result

    def _train_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        # Around the schedule alone: what the optimizer does is no part of activations' peak.
        schedule = call.arguments["forward_backward_func"]
        call.arguments["forward_backward_func"] = functools.partial(self._step, schedule)
        wait_for_turn(GET_FLAGS.find()())
        with self._measured.step() if self._measured is not None else contextlib.nullcontext():
            result = original(*call.args, **call.kwargs)
        self._installed().passes.pause()
        return result

    def _log(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        logged = inspect.signature(original).bind(*args, **kwargs).arguments
        metrics = self._largest_metrics()
        self._addition = describe(metrics)
        try:
            result = original(*args, **kwargs)
        finally:
            self._addition = ""
        write_scalars(metrics, logged["iteration"])
        if self._measured is not None:
            flags = GET_FLAGS.find()()
            # Of T5 those of the decoder beside the encoder's; of images none.
            lengths = (getattr(flags, name, None) for name in ("seq_length", "decoder_seq_length"))
            self._measured.write(
                logged,
                metrics,
                self._installed(),
                replicas=flags.data_parallel_size,
                tokens_per_sample=sum(length or 0 for length in lengths),
            )
        return result

    def _print(self, original: Function, message: str) -> Any:
        addition, self._addition = self._addition, ""
        return original(f"{message}{addition}")

    def _load(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        optimizer = inspect.signature(original).bind(*args, **kwargs).arguments["optimizer"]
        if self._offload is not None and optimizer is not None:
            offload = self._offload
            _on_all_ranks(lambda: offload.offload_states(optimizer))
        with self._checkpointing():
            return original(*args, **kwargs)

    def _save(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        with self._checkpointing():
            return original(*args, **kwargs)

    # -------------------------------------------------------------- what they do

    def _checkpointing(self) -> contextlib.AbstractContextManager[object]:
        offload = self._offload
        return contextlib.nullcontext() if offload is None else offload.states.checkpointing()

    def _install(
        self, request: _Request, model_chunks: Sequence[torch.nn.Module], optimizer: Any
    ) -> None:
        assert self._offload is not None
        self._device = device_of(model_chunks)
        if request.streams.activations.enabled:
            _check_blocks(model_chunks)
        self._offload.install(
            model_chunks,
            optimizer,
            reserve_bytes=request.reserve_bytes,
            num_local_ranks=request.num_local_ranks,
        )
        if request.checkpoints is not None:
            self._offload.states.note_checkpoint(f"the last checkpoint in {request.checkpoints}")
        self._measure(GET_FLAGS.find()())

    def _measure(self, flags: argparse.Namespace) -> None:
        """On a CPU, and for a file. Without one Megatron-LM logs a GPU's memory itself."""
        path = getattr(flags, "metrics_file", None)
        if path or self._device.type == "cpu":
            first_step = getattr(flags, "iteration", 0)  # of the checkpoint that was loaded
            self._measured = MeasuredSteps(self._device, path, first_step)

    def _installed(self) -> OffloadedTraining:
        if self._offload is None:
            raise ConfigurationError(
                f"the script trains a model that setup_model_and_optimizer of {_TRAINING} has not "
                "built; it cannot be offloaded by the launcher"
            )
        return self._offload

    def _step(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        passes = self._installed().passes
        measured: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._measured is not None:
            samples = kwargs.get("num_microbatches", 1) * GET_FLAGS.find()().micro_batch_size
            measured = self._measured.passes(samples)
        with measured, passes.step():
            return schedule(*args, **kwargs)

    def _largest_metrics(self) -> dict[str, float]:
        """The last step's counters; of each the largest value of all ranks. Called by all ranks."""
        offload = self._installed()
        metrics: dict[str, float] = dict(offload.passes.statistics)
        metrics |= {f"state_{name}": count for name, count in offload.states.statistics.items()}
        if self._measured is not None:
            metrics |= self._measured.peaks
        if not metrics:
            return {}
        values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
        return dict(zip(metrics, values.tolist(), strict=True))


def _refuse_flags(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """In the place of `ArgumentParser.error`; the launcher shows what is raised.

    Raises:
        ConfigurationError: always.
    """
    what, _, words = message.partition(": ")
    unknown = [word.partition("=")[0] for word in words.split() if word.startswith("-")]
    if what == "unrecognized arguments" and unknown:
        known = parser._option_string_actions
        message = "; ".join(f"there is no flag {one}{did_you_mean(one, known)}" for one in unknown)
    raise ConfigurationError(
        f"{message}; python -m megatron.offload.launch {sys.argv[0]} --help shows all flags"
    )


@dataclass(frozen=True)
class _Request:
    """What the flags ask for on this rank."""

    streams: Requested
    settings: Any = None  # Megatron-LM's TransformerConfig
    reserve_bytes: int = 0
    num_local_ranks: int = 1
    checkpoints: Path | None = None  # where they go
    run_directory: Path | None = None  # where what was measured goes: there, or beside its metrics


def _checked_request(flags: argparse.Namespace) -> _Request:
    """Reads our flags and checks them against Megatron-LM's, before a model is built.

    Called by all ranks.

    Raises:
        ConfigurationError: they do not fit together, or cannot work here.
    """
    request: _Request = _on_all_ranks(lambda: _request(flags))
    if request.settings is None:
        return request
    # Of the ranks that share the disks: pipeline stages do not need the same room.
    reserves = _of_local_ranks(request.reserve_bytes)
    request = dataclasses.replace(request, num_local_ranks=len(reserves))
    _on_all_ranks(
        lambda: request.streams.check_passes(
            request.settings,
            reserve_bytes=-(-sum(reserves) // len(reserves)),
            num_local_ranks=request.num_local_ranks,
        )
    )
    return request


def _request(flags: argparse.Namespace) -> _Request:
    if not hasattr(flags, "activation_offload"):
        raise ConfigurationError(
            "the flags have lost --activation-offload on their way, as with --yaml-cfg, which "
            "replaces all of them; give the model as flags"
        )
    check_measuring(flags)
    if cpu_runtime.is_active():
        cpu_training_script.check_flags(flags)
    streams = Requested.from_args(flags)
    for name, found in (
        ("activation_offload_dir", streams.activations),
        ("optimizer_state_dir", streams.states),
        ("parameter_offload_dir", streams.parameters),
    ):
        setattr(flags, name, ",".join(map(str, found.directories)))
    if streams.activations.plan_file is not None:
        flags.activation_offload_plan = str(streams.activations.plan_file)
    make_plain(flags)
    if not streams.enabled:
        return _Request(streams)
    LAUNCHER.check(flags)
    streams.check_flags(flags)
    save, metrics = getattr(flags, "save", None), getattr(flags, "metrics_file", None)
    checkpoints = Path(save) if save else None
    run_directory = checkpoints or (Path(metrics).parent if metrics else None)
    request = _Request(streams, checkpoints=checkpoints, run_directory=run_directory)
    if not streams.changes_passes:
        return request
    settings = _MODEL_SETTINGS.find()(flags)
    request = dataclasses.replace(request, settings=settings)
    reserve_bytes = _reserve_bytes(flags, request) if streams.activations.enabled else 0
    return dataclasses.replace(request, reserve_bytes=reserve_bytes)


def _reserve_bytes(flags: argparse.Namespace, request: _Request) -> int:
    """Disk space that this rank needs; that of its pipeline stage."""
    micro_batch_size, length = flags.micro_batch_size, flags.seq_length
    samples = micro_batch_size * flags.data_parallel_size
    num_microbatches = max(1, flags.global_batch_size // samples)
    settings, sizes = request.settings, (micro_batch_size, num_microbatches)
    streams = request.streams
    kinds: Any = {"config": streams.activations, "layer_major": streams.layer_major}
    decoder_length = getattr(flags, "decoder_seq_length", None)
    if decoder_length is not None:  # T5: as many layers twice
        return encoder_decoder_bytes(settings, settings, (length, decoder_length), *sizes, **kinds)
    return activation_bytes(settings, length, *sizes, _stage(), **kinds)


def _stage() -> int:
    """This rank's pipeline stage; Megatron-LM has made its groups by now."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0
    return int(parallel_state.get_pipeline_model_parallel_rank())


def _check_blocks(model_chunks: Sequence[torch.nn.Module]) -> None:
    """Raises ConfigurationError for a model without a block of transformer layers."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    modules = [module for chunk in model_chunks for module in chunk.modules()]
    if not any(isinstance(module, TransformerBlock) for module in modules):
        model: Any = model_chunks[0]
        while hasattr(model, "module"):  # wrapped for mixed precision and data parallelism
            model = model.module
        raise ConfigurationError(
            f"{type(model).__name__} has no TransformerBlock of megatron-core, whose layers are "
            "what is offloaded; use --activation-offload off"
        )


# ------------------------------------------------------------------ ranks


def _of_local_ranks(value: int) -> list[int]:
    """The values of all ranks that share this machine. Called by all ranks."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, (socket.gethostname(), value))
    return [number for name, number in values if name == socket.gethostname()]


def _on_all_ranks(action: Callable[[], Any]) -> Any:
    """The action's result. Where it fails on one rank, all of them raise that rank's error.

    A rank that left alone would leave the others in their next collective.
    """
    error, result = None, None
    try:
        result = action()
    except OffloadError as raised:
        error = str(raised)
    errors: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, error)
    raise_first(errors)
    return result
