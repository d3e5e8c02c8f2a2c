# SPDX-License-Identifier: Apache-2.0
"""A choice of layers, as people write it: `LayerSet`. Flags and policies hold one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron.offload.errors import ConfigurationError
from megatron.offload.values import as_text, quoted

_PART = re.compile(r"(?:([A-Za-z_][\w.]*)\.)?(?:(all)|(\d{1,9})(?:-(\d{1,9}))?)")
_NO_END = 10**9  # as the last number: all layers


class LayerRange(NamedTuple):
    """Layers `first` to `last`, both included, of one block or of all."""

    block: str  # `decoder` or `encoder`; empty: any
    first: int
    last: int

    def __str__(self) -> str:
        block = f"{self.block}." if self.block else ""
        if self.last == _NO_END:
            return f"{block}all"
        end = f"-{self.last}" if self.last > self.first else ""
        return f"{block}{self.first}{end}"


@dataclass(frozen=True)
class LayerSet:
    """Layers by their global numbers: `1-4,7`, `encoder.1-6,decoder.2`, `all`, `encoder.all`.

    Megatron counts from 1. Elsewhere numbers are those in the names of modules, from 0.
    """

    ranges: tuple[LayerRange, ...] = ()

    @classmethod
    def parse(cls, value: object) -> LayerSet:
        """The set that a text or a number names.

        Raises:
            ConfigurationError: it names none, or not in this way.
        """
        if isinstance(value, cls):
            return value
        ranges = []
        for part in as_text(value).split(","):
            match = _PART.fullmatch(part.strip())
            first = int(match[3] or 0) if match else 0
            last = int(match[4] or first) if match else 0
            if match and match[2]:
                last = _NO_END
            if match is None or not first <= last:
                raise ConfigurationError(
                    f"{quoted(part.strip())} names no layers; write numbers and ranges, for "
                    "example 1-4,7 or encoder.1-6,decoder.2, or all"
                )
            ranges.append(LayerRange(match[1] or "", first, last))
        return cls(tuple(ranges))

    def __contains__(self, layer: object) -> bool:
        """Whether a layer, named like `decoder.7`, is in the set."""
        block, _, number = str(layer).rpartition(".")
        return number.isdecimal() and any(
            r.block in ("", block) and r.first <= int(number) <= r.last for r in self.ranges
        )

    def __str__(self) -> str:
        return ",".join(str(r) for r in self.ranges)

    def missing(self, layers: Iterable[str]) -> LayerRange | None:
        """The first end of its ranges that is none of these layers; None: all of them are there.

        Args:
            layers: of the whole model, named like `decoder.7`.
        """
        layers = list(layers)
        for one in self.ranges:
            ends = (one._replace(last=one.first), one._replace(first=one.last))
            for end in (one,) if one.last == _NO_END else ends:
                if not any(layer in LayerSet((end,)) for layer in layers):
                    return end
        return None

    def overlap(self, other: LayerSet) -> LayerRange | None:
        """Layers that are in both sets; None if there are none."""
        for one in self.ranges:
            for two in other.ranges:
                first, last = max(one.first, two.first), min(one.last, two.last)
                if first <= last and (not one.block or not two.block or one.block == two.block):
                    return LayerRange(one.block or two.block, first, last)
        return None
