# SPDX-License-Identifier: Apache-2.0
"""Where in the step we are: `Scope`. Attached to every record, so that errors can name it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

_BEFORE_LAYERS = "before_layers"
_AFTER = ".after"
_CALL = "#"


@dataclass(frozen=True)
class Scope:
    """A place in the step. Outside Megatron's schedules chunk and micro-batch are 0."""

    chunk: int = 0  # model chunk of this pipeline stage (0 without virtual pipelining)
    micro_batch: int = 0
    layer: str = ""  # e.g. `decoder.7`: block path and global 1-based layer number
    part: str = ""  # part of the layer, `attention` or `mlp`; empty: the layer is not divided
    # Whether a schedule counts micro-batches; else they are forward passes of a step, for people.
    is_scheduled: bool = dataclasses.field(default=True, compare=False)

    def of_layer(self, layer: str) -> Scope:
        """The same place, in another layer."""
        return Scope(self.chunk, self.micro_batch, layer, self.part, self.is_scheduled)

    def __str__(self) -> str:
        layer = f" layer {self.layer}" if self.layer else ""
        part = f" {self.part}" if self.part else ""
        if not self.is_scheduled:
            return f"forward pass {self.micro_batch + 1}{layer}{part}"
        return f"chunk {self.chunk} micro-batch {self.micro_batch}{layer}{part}"


def name_after(layer: str) -> str:
    """The name of what runs between a layer and the next, or before the first layer (empty)."""
    return layer + _AFTER if layer else _BEFORE_LAYERS


def name_of_call(layer: str, number: int) -> str:
    """The name of a layer's call in a forward pass: the layer's own for the first call only."""
    return layer if number < 2 else f"{layer}{_CALL}{number}"


def layer_of(name: str) -> str:
    """The layer of a name, of any call; empty for what runs between layers."""
    if name == _BEFORE_LAYERS or name.endswith(_AFTER):
        return ""
    return name.partition(_CALL)[0]


def is_behind_layers(name: str) -> bool:
    """Whether a name is of what runs behind a layer: before the next one, or the output layer."""
    return name.endswith(_AFTER)


def span_name(scope: Scope | None) -> str:
    """Short enough for a timeline: `decoder.7 mlp, micro-batch 0`. None: its record has died."""
    if scope is None:
        return "not needed any more"
    layer = f"{scope.layer} {scope.part}".strip() or "outside of layers"
    return f"{layer}, micro-batch {scope.micro_batch}"
