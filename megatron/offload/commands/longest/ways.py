# SPDX-License-Identifier: Apache-2.0
"""What is done against memory, step by step: `Way`, `WAYS`."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.offload.commands.training_runs.trainer import PLACEMENT_FLAGS

_AGAIN = ("--activation-recompute-layers", "all")
_INPUTS_ON_SSD = (
    *("--activation-offload", "ssd", *_AGAIN),
    *("--activation-recompute-input", "ssd"),
)
_CHUNKED = (*_INPUTS_ON_SSD, "--activation-chunked-loss", "auto")


@dataclass(frozen=True)
class Way:
    """Settings of the door, in place of a script's own.

    Attributes:
        title: in tables and pictures.
        flags: that stand for the settings; empty: those of the script hold.
    """

    title: str
    flags: tuple[str, ...]


WAYS = {
    "none": Way("all stays", tuple(PLACEMENT_FLAGS["off"])),
    "checkpointing": Way("checkpointing", (*PLACEMENT_FLAGS["keep"], *_AGAIN)),
    "checkpointing-host": Way(
        "checkpointing, inputs on host",
        (
            *("--activation-offload", "host", *_AGAIN),
            *("--activation-recompute-input", "host"),
        ),
    ),
    "ssd": Way("all on ssd", ("--activation-offload", "ssd")),
    "inputs": Way("checkpointing, inputs on ssd", _INPUTS_ON_SSD),
    "chunked": Way("+ loss over chunks", _CHUNKED),
    "tiled": Way("+ MLPs over tiles", (*_CHUNKED, "--activation-tiled-mlp", "auto")),
    "script": Way("as the script says", ()),
}
DEFAULT_WAYS = ("none", "checkpointing", "ssd", "inputs", "chunked", "tiled")
