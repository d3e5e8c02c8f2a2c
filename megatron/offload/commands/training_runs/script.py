# SPDX-License-Identifier: Apache-2.0
"""Starts a script that uses the door to measure it: `ScriptTrainer`, `flags_of_script`.

Any training script with `offload_activations` in it. It runs as it is; an environment variable
tells the door which settings to replace, see `integration/torch/measured_run.py`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.commands.training_runs.run import RunError
from megatron.offload.commands.training_runs.trainer import PLACEMENT_FLAGS, Trainer
from megatron.offload.config import OffloadConfig
from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.torch.measured_run import MeasuredRun

_TAIL_LINES = 15
_PATIENCE_S = 600.0


def add_script_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds `--script` and `--script-args`."""
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="a training script of your own with offload_activations in it",
    )
    parser.add_argument(
        "--script-args", default="", metavar="TEXT", help="arguments of the script, in one string"
    )


def check_script(script: Path) -> None:
    """Raises ConfigurationError where there is no such file."""
    if not script.is_file():
        raise ConfigurationError(f"there is no script {script}")


@dataclass(frozen=True)
class ScriptTrainer(Trainer):
    """Starts a script again and again, with other placements each time. `flags` are its own.

    Attributes:
        offload_flags: that all trainings share.
    """

    offload_flags: Sequence[str] = ()

    def how_to_run(
        self, flags: Sequence[str], metrics: Path, *, in_turns: bool
    ) -> tuple[list[str], dict[str, str]]:
        """See `Trainer`. The door in the script reads the flags, not the script itself.

        Without flags it places activations as it says itself.
        """
        if not flags:
            as_it_says = MeasuredRun(metrics_file=str(metrics), run_directory=str(metrics.parent))
            return list(self.flags), as_it_says.environment()
        parser = argparse.ArgumentParser()
        OffloadConfig.add_arguments(parser)
        parser.add_argument("--recompute-granularity")
        asked, _ = parser.parse_known_args(
            [*flags, *self.offload_flags]
        )  # the rest is for the trainer of this checkout
        if asked.recompute_granularity is not None:  # all of them
            flags = ["--activation-recompute-layers", "all"]
            if asked.activation_offload == "off":  # and what they save stays
                flags += PLACEMENT_FLAGS["keep"]
            else:  # and what they start from goes there
                flags += ["--activation-recompute-input", asked.activation_offload]
                flags += ["--activation-offload", asked.activation_offload, *self.offload_flags]
            asked, _ = parser.parse_known_args(flags)
        config = OffloadConfig.from_args(
            argparse.Namespace(**{**vars(asked), "activation_offload_dir": (self.offload_dir,)})
        )
        run = MeasuredRun(
            flags=tuple(OffloadConfig.flags_of(vars(config))),
            metrics_file=str(metrics),
            run_directory=str(metrics.parent),
            in_turns=in_turns,
        )
        return list(self.flags), run.environment()


def flags_of_script(script: Path, arguments: str) -> list[str]:
    """The flags that stand for the settings with which a script calls the door.

    Runs it up to that call.

    Raises:
        ConfigurationError: there is no such file.
        RunError: it ends before.
    """
    check_script(script)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "flags"
        variables = MeasuredRun(flags_file=str(file)).environment()
        try:
            done = subprocess.run(
                [sys.executable, str(script), *shlex.split(arguments)],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RunError(
                f"{script} did not come to offload_activations in {_PATIENCE_S:.0f} s"
            ) from None
        if file.is_file():
            return file.read_text(errors="surrogateescape").split("\n")[:-1]
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-_TAIL_LINES:])
        raise RunError(
            f"{script} ended with exit code {done.returncode} and did not call "
            f"offload_activations; the end of its output:\n{tail}"
        )
