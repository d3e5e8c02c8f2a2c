# SPDX-License-Identifier: Apache-2.0
"""The training command that is tuned: `TrainingCommand`, what its flags say of it.

It is any Python script that takes Megatron-style flags, ours among them, and `--metrics-file`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.commands.training_runs.trainer import Trainer
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

# Flags with one value that the trainings which are measured are started without: what is measured,
# what they would leave behind, and what depends on how long they are.
LEFT_OUT = (
    *("--micro-batch-size", "--global-batch-size", "--layer-major-units", "--rampup-batch-size"),
    *("--save", "--load", "--save-interval", "--tensorboard-dir", "--metrics-file"),
    *("--activation-offload-trace", "--activation-memory-report"),
    *("--train-iters", "--train-samples", "--exit-interval", "--eval-iters", "--log-interval"),
    *("--lr-warmup-iters", "--lr-decay-iters", "--lr-warmup-samples", "--lr-decay-samples"),
)


@dataclass(frozen=True)
class TrainingCommand:
    """A script with its flags, and what these say.

    Attributes:
        script: in Python.
        flags: as given, without those of `LEFT_OUT`, with those that were added.
        left_out: those of them that were given.
        added: belong to the choice: what is measured has them too.
        offload: where its activations go.
        device_budget_bytes: most device memory of a rank; None: the command does not say.
        global_batch_size: of the command; None: it has none.
        seq_length: tokens of a sample; None likewise.
        num_layers: of the model; None likewise.
        model_parallel_size: ranks that have one copy of the model.
        recomputes_fully: with Megatron's checkpoints, which layer-major steps do not take.
    """

    script: Path
    flags: Sequence[str]
    left_out: Sequence[str]
    added: Sequence[str]
    offload: OffloadConfig
    device_budget_bytes: int | None
    global_batch_size: int | None
    seq_length: int | None
    num_layers: int | None
    model_parallel_size: int
    recomputes_fully: bool

    @classmethod
    def of(cls, words: Sequence[str]) -> TrainingCommand:
        """Reads a command, `examples/pretrain_gpt.py --num-layers 4 ...`.

        Raises:
            ConfigurationError: it cannot be tuned.
        """
        if not words:
            raise ConfigurationError(
                "tune needs the training command after --, for example: megatron-offload tune "
                "--tokens-per-step 4096-16384 -- examples/pretrain_gpt.py --num-layers 8"
            )
        script = Path(words[0])
        if not script.is_file():
            raise ConfigurationError(
                f"there is no script {script}; the training command after -- begins with one"
            )
        if script.suffix != ".py":
            raise ConfigurationError(
                f"tune starts Python scripts, and {script} is none; give the script that it "
                "starts, for example examples/pretrain_gpt.py, and all flags"
            )
        flags = list(words[1:])
        args = _read(flags)
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
        if args.pipeline_model_parallel_size > 1:
            raise ConfigurationError(
                "tune needs a model on one pipeline stage: with --pipeline-model-parallel-size "
                "above 1 the number of micro-batches also decides how long stages wait for each "
                "other; drop it, or choose by megatron-offload plan"
            )
        kept, left_out = _without(flags, LEFT_OUT)
        added = _added_flags(offload, states.device_memory_budget_bytes)
        return cls(
            script=script,
            flags=[*kept, *added],
            left_out=left_out,
            added=added,
            offload=offload,
            device_budget_bytes=states.device_memory_budget_bytes,
            global_batch_size=args.global_batch_size,
            seq_length=args.seq_length,
            num_layers=args.num_layers,
            model_parallel_size=args.tensor_model_parallel_size * args.context_parallel_size,
            recomputes_fully=args.recompute_granularity == "full",
        )

    def data_parallel_size(self, processes: int) -> int:
        """Copies of the model that so many processes hold.

        Raises:
            ConfigurationError: they hold none, or a part of one is left over.
        """
        if processes % self.model_parallel_size:
            raise ConfigurationError(
                f"--processes {processes} is not a multiple of the {self.model_parallel_size} "
                "ranks that have one copy of the model; change one of them"
            )
        return processes // self.model_parallel_size


class CommandTrainer(Trainer):
    """Starts the command again and again; its directories are its own."""

    def how_to_run(
        self, flags: Sequence[str], metrics: Path, *, in_turns: bool
    ) -> tuple[list[str], dict[str, str]]:
        """See `Trainer`."""
        turns = ["--wait-for-input"] if in_turns else []
        return [*self.flags, *flags, "--metrics-file", str(metrics), *turns], {}


def _read(flags: Sequence[str]) -> argparse.Namespace:
    """What we need of the flags; the script understands the others."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_offload_arguments(parser)
    for name in ("num-layers", "seq-length", "global-batch-size"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("tensor-model", "context", "pipeline-model"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    parser.add_argument("--recompute-granularity")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_known_args(list(flags))[0]
    except SystemExit:
        sentence = said.getvalue().strip().rpartition("error: ")[2]
        raise ConfigurationError(f"the training command is not understood: {sentence}") from None


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


def _without(flags: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags without these and their values; and those."""
    kept: list[str] = []
    left_out: list[str] = []
    into = kept
    for word in flags:
        if word.startswith("--"):
            into = left_out if word.partition("=")[0] in names else kept
        into.append(word)
    return kept, left_out
