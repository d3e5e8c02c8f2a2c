# SPDX-License-Identifier: Apache-2.0
"""A whole launch command, as it is pasted after `--`: `LaunchCommand`.

`doctor`, `plan`, `report`, `tune` and `rok` read the flags of it that they know, and name the
others: flags that a training script has of its own are no error. Nothing is run here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.offload.commands.training_runs.start import LAUNCHER, Start
from megatron.offload.errors import ConfigurationError
from megatron.offload.flag import did_you_mean
from megatron.offload.integration.megatron.arguments import add_offload_arguments

# What our flags begin with, and none of Megatron's: another one is a mistake in writing.
_OURS = re.compile(
    r"--(activation-(off|rec|mem|rep|cod|chu|til|bou)|optimizer-s|parameter-o|gradient-off|layer-m"
    r"|offload-s)"
)


_VARIABLE = re.compile(r"[A-Za-z_]\w*=")  # CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun ...
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")

# Flags with their values that trainings which are measured are started without: what they would
# leave behind, and what depends on how long they are.
LEFT_OUT = (
    *("--save", "--load", "--save-interval", "--save-retain-interval", "--use-checkpoint-args"),
    *("--non-persistent-save-interval", "--tensorboard-dir", "--wandb-project", "--metrics-file"),
    *("--activation-offload-trace", "--activation-memory-report", "--wait-for-input"),
    *("--train-iters", "--train-samples", "--rampup-batch-size"),
    *("--exit-interval", "--eval-iters", "--log-interval"),
    *("--lr-warmup-iters", "--lr-decay-iters", "--lr-warmup-samples", "--lr-decay-samples"),
)


@dataclass(frozen=True)
class LaunchCommand:
    """The words of a command, divided at the training script.

    Attributes:
        launcher: what comes before the script: `torchrun --nproc-per-node 8 ...`; may be empty.
        script: the first word that is a Python or shell script; None: flags alone were given.
        flags: what the script is given.
    """

    launcher: tuple[str, ...]
    script: str | None
    flags: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> LaunchCommand:
        """Divides the words of a command, or flags alone."""
        for place, word in enumerate(words):
            if word.endswith((".py", ".sh")) and not word.startswith("--"):
                return cls(tuple(words[:place]), word, tuple(words[place + 1 :]))
        return cls((), None, tuple(words))

    @property
    def num_processes(self) -> int | None:
        """How many torchrun starts on all nodes; None: the launcher does not say."""
        try:
            found = self._torchruns()
        except ConfigurationError:
            return None
        nodes = "1" if found.nnodes == "1:1" else found.nnodes
        if not (found.of_node.isdecimal() and nodes.isdecimal()):
            return None
        return int(found.of_node) * int(nodes)

    def start(self, name: str, processes: int | None = None) -> tuple[Path, Start]:
        """The script, and how it is started on this machine to be measured.

        Args:
            name: of the command that measures.
            processes: as many; None: as the launcher says, or one.

        Raises:
            ConfigurationError: it cannot be.
        """
        if self.script is None:
            raise ConfigurationError(
                f"{name} finds no script in the training command after --; give the command that "
                "you train with, for example torchrun --nproc-per-node 2 -m "
                f"{LAUNCHER} pretrain_gpt.py --num-layers 8"
            )
        script = Path(self.script)
        if script.suffix != ".py":
            raise ConfigurationError(
                f"{name} starts Python scripts, and {script} is none; give the script that it "
                "starts, for example examples/pretrain_gpt.py, and all flags"
            )
        if not script.is_file():
            raise ConfigurationError(
                f"there is no script {script}; the training command after -- has one in it"
            )
        words = [word for word in self.launcher if not _VARIABLE.match(word)]
        program = Path(words[0]).name if words else "python"
        if program != "torchrun" and not program.startswith("python"):
            raise ConfigurationError(
                f"{name} starts trainings of one machine with python or torchrun, and the training "
                f"command begins with {words[0]}; leave out what comes before torchrun"
            )
        found = self._torchruns()
        modules = [one for one in found.module if one not in _TORCHRUN]
        if modules not in ([], [LAUNCHER]):
            raise ConfigurationError(
                f"{name} knows no -m {' -m '.join(modules)} before the script; it starts scripts "
                f"with python, torchrun and -m {LAUNCHER}"
            )
        if found.nnodes not in ("1", "1:1"):
            raise ConfigurationError(
                f"{name} measures on this machine alone, and the training command has --nnodes "
                f"{found.nnodes}; give a division that fits on one node, and --nnodes 1"
            )
        if processes is None and found.of_node and not found.of_node.isdecimal():
            raise ConfigurationError(
                f"{name} cannot tell how many processes --nproc-per-node {found.of_node} are; give "
                "a number"
            )
        number = self.num_processes
        if processes is not None and number not in (None, processes):
            raise ConfigurationError(
                f"--processes {processes} and --nproc-per-node {number} of the training command "
                "contradict each other; drop --processes"
            )
        variables = [word.partition("=") for word in self.launcher if _VARIABLE.match(word)]
        return script, Start(
            processes or number or 1,
            modules[0] if modules else None,
            expects_rank=program == "torchrun" or modules != found.module,
            variables={key: value for key, _, value in variables},
        )

    def _torchruns(self) -> argparse.Namespace:
        """What of the launcher's own flags counts here. Raises ConfigurationError."""
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
        parser.add_argument("--nproc-per-node", "--nproc_per_node", dest="of_node", default="")
        parser.add_argument("--nnodes", default="1")
        parser.add_argument("-m", "--module", action="append", default=[])
        try:
            return parser.parse_known_args(list(self.launcher))[0]
        except (argparse.ArgumentError, SystemExit) as error:  # a flag without its value
            raise ConfigurationError(
                f"what is before the script is not understood ({error}); give each flag its value, "
                f"as --nproc-per-node 8 -m {LAUNCHER}"
            ) from None

    def read(self, parser: argparse.ArgumentParser, into: argparse.Namespace) -> list[str]:
        """Reads the flags that the parser knows into a namespace.

        Args:
            parser: without positional arguments and abbreviations.

        Returns:
            The names of the other flags, each once.

        Raises:
            ConfigurationError: a flag that the parser knows has a value that it does not take, or
                one is written like ours and is none.
        """
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                _, rest = parser.parse_known_args(list(self.flags), into)
        except SystemExit:
            sentence = said.getvalue().strip().rpartition("error: ")[2]
            raise ConfigurationError(f"the launch command is not understood: {sentence}") from None
        others = dict.fromkeys(one.partition("=")[0] for one in rest if one.startswith("--"))
        known = our_flags()
        for name in others:
            if _OURS.match(name) and name not in known:
                hint = did_you_mean(name, known) or "; all of ours are in docs/flags.md"
                raise ConfigurationError(f"the launch command has {name}, which is no flag{hint}")
        return list(others)


def without(flags: Sequence[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """The flags without these and their values; and those."""
    kept: list[str] = []
    left_out: list[str] = []
    into = kept
    for word in flags:
        if word.startswith("--"):
            into = left_out if word.partition("=")[0] in names else kept
        into.append(word)
    return kept, left_out


def not_looked_at(flags: Sequence[str], *, passed_on: bool = False) -> str:
    """A line for people: flags of a launch command that a command of ours does not know.

    Args:
        passed_on: the trainings that are started have them all the same.
    """
    return f"not looked at{', but passed on' if passed_on else ''}: {', '.join(flags)}"


def our_flags() -> list[str]:
    """The names of all offload flags."""
    parser = argparse.ArgumentParser(add_help=False)
    add_offload_arguments(parser)
    return [name for action in parser._actions for name in action.option_strings]
