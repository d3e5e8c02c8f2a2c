# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates as people write them, and back: `parse_size`, `format_size`, `parse_rate`."""

from __future__ import annotations

import re

from megatron.offload.errors import ConfigurationError

KIB, MIB, GIB, TIB, PIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40, 1 << 50

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "pib": PIB,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_size(text: str | int) -> int:
    """Bytes from `1048576`, `512MiB`, `1.5GB` (binary and decimal units, case ignored).

    Raises:
        ConfigurationError: the text is not a size.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigurationError(
            f"{str(text)!r} is not a size; write a number of bytes or a number with a unit, "
            "for example 512MiB or 40GiB"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(num_bytes: float) -> str:
    """`1.5 GiB`: for people; machine-readable output carries plain bytes."""
    for unit, scale in (("PiB", PIB), ("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def parse_rate(text: str | float) -> float:
    """Bytes a second from `500MB/s`, `1.5GiB/s` (or a size without the `/s`).

    Raises:
        ConfigurationError: the text is not a rate above 0.
    """
    rate = parse_size(str(text).strip().removesuffix("/s"))
    if rate <= 0:
        raise ConfigurationError(f"{text!r} lets nothing through; write for example 500MB/s")
    return float(rate)


def parse_budget(text: str | int) -> int | float:
    """Bytes as `parse_size`, or a fraction from 0.0 to 1.0 written with a decimal point.

    Raises:
        ConfigurationError: the text is neither.
    """
    try:
        fraction = float(str(text)) if "." in str(text) else None
    except ValueError:
        fraction = None
    if fraction is None:
        return parse_size(text)
    if not 0.0 <= fraction <= 1.0:
        raise ConfigurationError(
            f"{text} is neither a fraction nor a size; write a number from 0.0 to 1.0, or a size "
            "with a unit, for example 16GiB"
        )
    return fraction
