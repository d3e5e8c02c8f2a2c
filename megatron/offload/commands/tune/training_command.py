# SPDX-License-Identifier: Apache-2.0
"""The training command that is tuned: `TrainingCommand`, what its flags say of it.

It starts a Python script that takes Megatron-style flags, ours among them, and `--metrics-file`:
the bundled trainer, or one of Megatron-LM through the launcher.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.commands.launch_command import LEFT_OUT, LaunchCommand, without
from megatron.offload.commands.training_runs.start import Start
from megatron.offload.config import DEFAULT_INFLIGHT_BYTES, OffloadConfig
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron.arguments import (
    add_offload_arguments,
    config_from_args,
    layer_major_config_from_args,
    states_config_from_args,
)
from megatron.offload.sizes import MIB

# Of a memory budget, what may be on its way to the tiers: two trainings of the same differ by it.
_IN_FLIGHT = 0.02
_LEAST_IN_FLIGHT_BYTES = 4 * MIB  # so that drives have something to do at once

# What is measured instead of what the command has.
_MEASURED = (
    *("--micro-batch-size", "--global-batch-size", "--layer-major-units", "--rampup-batch-size"),
)
_INTERLEAVED = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


@dataclass(frozen=True)
class TrainingCommand:
    """A script with its flags, and what these say.

    Attributes:
        script: in Python.
        start: how it is started on this machine.
        flags: as given, without what was left out, with those that were added.
        left_out: flags for checkpoints, schedules and what is measured.
        passed_on: names of flags that tune does not know; the trainings have them.
        added: belong to the choice: what is measured has them too.
        offload: where its activations go.
        device_budget_bytes: most device memory of a rank; None: the command does not say.
        global_batch_size: of the command; None: it has none.
        seq_length: tokens of a sample; None likewise.
        num_layers: of the model; None likewise.
        model_parallel_size: ranks that have one copy of the model.
        num_stages: of its pipeline.
        recomputes_fully: with Megatron's checkpoints, which layer-major steps do not take.
    """

    script: Path
    start: Start
    flags: Sequence[str]
    left_out: Sequence[str]
    passed_on: Sequence[str]
    added: Sequence[str]
    offload: OffloadConfig
    device_budget_bytes: int | None
    global_batch_size: int | None
    seq_length: int | None
    num_layers: int | None
    model_parallel_size: int
    num_stages: int
    recomputes_fully: bool

    @classmethod
    def of(cls, words: Sequence[str], processes: int | None = None) -> TrainingCommand:
        """Reads a command, `torchrun ... -m megatron.offload.launch pretrain_gpt.py ...`.

        Args:
            processes: as many are started; None: as the command says, or one.

        Raises:
            ConfigurationError: it cannot be tuned.
        """
        if not words:
            raise ConfigurationError(
                "tune needs the training command after --, for example: megatron-offload tune "
                "--tokens-per-step 4096-16384 -- examples/pretrain_gpt.py --num-layers 8"
            )
        command = LaunchCommand.of(words)
        script, start = command.start("tune", processes)
        args = argparse.Namespace()
        passed_on = command.read(_parser(), args)
        flags = list(command.flags)
        offload, states = config_from_args(args), states_config_from_args(args)
        layer_major_config_from_args(args)
        if offload.plans:
            raise ConfigurationError(
                "tune cannot take --activation-offload auto, which needs longer runs and plans "
                "for itself; use ssd, host, tiered or off"
            )
        if states.mode == "auto":
            raise ConfigurationError(
                "tune cannot take --optimizer-state-offload auto, which fills what activations "
                "leave of --device-memory-budget; use ssd, host or tiered with "
                "--optimizer-state-window"
            )
        stages = args.pipeline_model_parallel_size
        for name in _INTERLEAVED:
            if stages > 1 and getattr(args, name) is not None:
                raise ConfigurationError(
                    "tune does not know what interleaved stages keep in memory; drop "
                    f"--{name.replace('_', '-')} to choose for a plain pipeline, or choose by "
                    "megatron-offload plan"
                )
        kept, left_out = without(flags, (*_MEASURED, *LEFT_OUT))
        left_out_names = {word.partition("=")[0] for word in left_out}
        added = _added_flags(offload, states.device_memory_budget_bytes)
        return cls(
            script=script,
            start=start,
            flags=[*kept, *added],
            left_out=left_out,
            passed_on=[name for name in passed_on if name not in left_out_names],
            added=added,
            offload=offload,
            device_budget_bytes=states.device_memory_budget_bytes,
            global_batch_size=args.global_batch_size,
            seq_length=args.seq_length,
            num_layers=args.num_layers,
            model_parallel_size=args.tensor_model_parallel_size
            * args.context_parallel_size
            * stages,
            num_stages=stages,
            recomputes_fully=args.recompute_granularity == "full",
        )

    def data_parallel_size(self) -> int:
        """Copies of the model that the processes hold.

        Raises:
            ConfigurationError: they hold none, or a part of one is left over.
        """
        processes = self.start.processes
        if processes % self.model_parallel_size:
            raise ConfigurationError(
                f"{processes} processes are not a multiple of the {self.model_parallel_size} "
                "ranks that have one copy of the model; change --nproc-per-node of torchrun in "
                "the training command, or --processes of tune"
            )
        return processes // self.model_parallel_size


def _parser() -> argparse.ArgumentParser:
    """What we need of the flags; the script understands the others."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_offload_arguments(parser)
    for name in ("num-layers", "seq-length", "global-batch-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("tensor-model", "context", "pipeline-model"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    parser.add_argument("--num-layers-per-virtual-pipeline-stage", type=int)
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    parser.add_argument("--recompute-granularity")
    return parser


def _added_flags(offload: OffloadConfig, device_budget_bytes: int | None) -> list[str]:
    """A bound of what waits for a drive in device memory, where a budget has little room for it.

    It is a power of two, as people would write it; none where the default is not above it.
    """
    if device_budget_bytes is None or not offload.enabled or offload.inflight_bytes is not None:
        return []
    share = int(device_budget_bytes * _IN_FLIGHT)
    least = max(_LEAST_IN_FLIGHT_BYTES, offload.min_bytes)
    most = max(1 << max(share.bit_length() - 1, 0), 1 << (least - 1).bit_length())
    if most >= DEFAULT_INFLIGHT_BYTES:
        return []
    return ["--activation-offload-inflight", f"{most // MIB}MiB"]
