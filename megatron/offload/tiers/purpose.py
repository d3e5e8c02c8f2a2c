# SPDX-License-Identifier: Apache-2.0
"""What a tier is opened for, as its sentences say it: `Purpose`.

Activations, optimizer states, parameters with their gradients, and features of frozen parts go to
tiers of the same kinds, each with flags of their own. A warning must say which of them it is about,
and which flag helps.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.offload.errors import (
    FEATURES_PREFIX,
    PARAMETERS_PREFIX,
    PREFIX,
    STATES_PREFIX,
    ConfigurationError,
)


@dataclass(frozen=True)
class Purpose:
    """Whose bytes a tier holds.

    Attributes:
        prefix: the beginning of every sentence.
        bytes_name: what it holds, in sentences.
        flags: the beginning of the names of its flags.
        checksum_flag: the setting that asks for checksums, or that there always are some.
        in_pages: it holds few and large storages of whole pages, which stay in memory long.
    """

    prefix: str
    bytes_name: str
    flags: str
    checksum_flag: str
    in_pages: bool = False

    def flag(self, name: str) -> str:
        """One of its flags: `dir`, `io`, `threads`, `window`, `ssd-budget` or `host-budget`."""
        return self.flags + name

    @property
    def thread_name(self) -> str:
        """The beginning of the names of its threads."""
        return self.prefix.removesuffix(": ").replace(" ", "-")

    def refusal(self, sentence: str) -> ConfigurationError:
        """The error for settings that cannot work."""
        return ConfigurationError(self.prefix + sentence)


_ALWAYS = "a checksum of all that is written, which is the only copy,"
ACTIVATIONS = Purpose(
    PREFIX, "the activations", "--activation-offload-", "--activation-offload-verify checksum"
)
STATES = Purpose(
    STATES_PREFIX,
    "the optimizer states",
    "--optimizer-state-",
    _ALWAYS,
    in_pages=True,
)
PARAMETERS = Purpose(
    PARAMETERS_PREFIX,
    "the parameters",
    "--parameter-offload-",
    _ALWAYS,
    in_pages=True,
)
FEATURES = Purpose(
    FEATURES_PREFIX,
    "the frozen features",
    "",  # they have settings only
    "",
)
