# SPDX-License-Identifier: Apache-2.0
"""A whole launch command, as it is pasted after `--`: `LaunchCommand`.

`doctor` and `plan` read the flags of it that they know, and name the others: flags that a training
script has of its own are no error. Nothing is run.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.offload.errors import ConfigurationError
from megatron.offload.integration.megatron.arguments import add_offload_arguments

# What our flags begin with, and none of Megatron's: another one is a mistake in writing.
_OURS = re.compile(
    r"--(offload-s|activation-(off|rec|mem|rep|cod|chu|til|bou)|optimizer-s|parameter-o|gradient-off|layer-m)"
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
        parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        parser.add_argument("--nproc-per-node", "--nproc_per_node", dest="of_node", default="")
        parser.add_argument("--nnodes", default="1")
        try:
            found, _ = parser.parse_known_args(list(self.launcher))
        except (argparse.ArgumentError, SystemExit):  # a flag without its value
            return None
        if not (found.of_node.isdecimal() and found.nnodes.isdecimal()):
            return None
        return int(found.of_node) * int(found.nnodes)

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
        known = _our_flags()
        for name in others:
            if _OURS.match(name) and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else "all of ours are in docs/flags.md"
                raise ConfigurationError(f"the launch command has {name}, which is no flag; {hint}")
        return list(others)


def not_looked_at(flags: Sequence[str]) -> str:
    """A line for people: flags of a launch command that a command of ours does not know."""
    return f"not looked at: {', '.join(flags)}"


def _our_flags() -> list[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_offload_arguments(parser)
    return [name for action in parser._actions for name in action.option_strings]
