# SPDX-License-Identifier: Apache-2.0
"""The training command of a user, of which `rok` measures the curve: `MeasuredCommand`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.commands.launch_command import LEFT_OUT, LaunchCommand, our_flags, without
from megatron.offload.commands.training_runs.start import Start
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron.arguments import add_offload_arguments

# Of our flags, those that all strategies share: where bytes go and how, and the other streams.
_SHARED = (
    *("--activation-offload-min-bytes", "--activation-offload-threads", "--activation-offload-io"),
    *("--activation-offload-inflight", "--activation-offload-ssd-budget"),
    *("--activation-offload-host-budget", "--activation-offload-verify"),
)
_OF_STRATEGIES = (
    *("--micro-batch-size", "--layer-major-units", "--layer-major-order", "--gradient-offload"),
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
    *("--recompute-modules", "--recompute-activations"),
)

_QUIET = ("--eval-iters", "0", "--log-interval", "1")


@dataclass(frozen=True)
class MeasuredCommand:
    """A script with its flags, as far as strategies do not set them.

    Attributes:
        script: in Python.
        start: how it is started on this machine.
        flags: that all trainings share.
        left_out: flags for checkpoints, schedules, and what strategies say.
        passed_on: names of flags that rok does not know; the trainings have them.
        directory: for activations; None: the command has none.
        micro_batch_size: of the command; None likewise.
        num_stages: of its pipeline.
        model: what it says of the model's size, for a title.
    """

    script: Path
    start: Start
    flags: Sequence[str]
    left_out: Sequence[str]
    passed_on: Sequence[str]
    directory: Path | None
    micro_batch_size: int | None
    num_stages: int
    model: str

    @classmethod
    def of(cls, words: Sequence[str]) -> MeasuredCommand:
        """Reads a command, `torchrun ... -m megatron.offload.launch pretrain_gpt.py ...`.

        Raises:
            ConfigurationError: it cannot be measured.
        """
        command = LaunchCommand.of(words)
        script, start = command.start("rok")
        args = argparse.Namespace()
        others = command.read(_parser(), args)
        ours = {name for name in our_flags() if name.startswith(("--activation-", "--layer-"))}
        replaced = (*LEFT_OUT, *_OF_STRATEGIES, *(ours - {*_SHARED}))
        kept, left_out = without(command.flags, replaced)
        if args.offload_settings is not None:
            raise ConfigurationError(
                "rok gives each strategy flags of its own, and --offload-settings would add to "
                "them; give the flags themselves"
            )
        directories = args.activation_offload_dir or ()
        if len(directories) > 1:
            raise ConfigurationError(
                "rok measures with one directory for activations; give one --activation-offload-dir"
            )
        sizes = (
            (args.num_layers, "{} layers"),
            (args.hidden_size, "hidden size {}"),
            (args.seq_length, "sequence length {}"),
        )
        return cls(
            script=script,
            start=start,
            flags=[*kept, *_QUIET],
            left_out=left_out,
            passed_on=[name for name in others if name not in replaced],
            directory=next(iter(directories), None),
            micro_batch_size=args.micro_batch_size,
            num_stages=args.pipeline_model_parallel_size,
            model=", ".join(text.format(size) for size, text in sizes if size is not None),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_offload_arguments(parser)
    for name in ("num-layers", "hidden-size", "seq-length", "micro-batch-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    return parser
