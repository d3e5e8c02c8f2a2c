# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates as people write them, and back: `parse_size`, `format_size`, `parse_rate`."""

from __future__ import annotations

import decimal
import re

from megatron.offload.errors import ConfigurationError
from megatron.offload.values import as_text, quoted

KIB, MIB, GIB, TIB, PIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40, 1 << 50
MOST_BYTES = 2**63 - 1  # that a file's offset can say

_UNITS = {
    "": 1,
    "b": 1,
    "k": KIB,  # as Slurm, Docker and du read them
    "m": MIB,
    "g": GIB,
    "t": TIB,
    "p": PIB,
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


def parse_size(value: object) -> int:
    """Bytes from `1048576`, `512MiB`, `1.5GB`, `12G` (case ignored).

    `GiB` and `G` are binary, as they are to Slurm and Docker; `GB` is decimal, as on drives.

    Raises:
        ConfigurationError: the value is not a size.
    """
    num_bytes = _num_bytes(as_text(value), value)
    if num_bytes != int(num_bytes) and as_text(value).strip()[-1].isdecimal():
        raise ConfigurationError(
            f"{quoted(value)} is not a size: a byte has no parts; write a whole number of bytes or "
            "a number with a unit, for example 512MiB or 40GiB"
        )
    return int(num_bytes)


def parse_positive_size(value: object) -> int:
    """As `parse_size`, but at least a byte. Raises ConfigurationError."""
    num_bytes = parse_size(value)
    if num_bytes < 1:
        raise ConfigurationError(
            f"{quoted(value)} is less than a byte; write a size, for example 512MiB or 40GiB"
        )
    return num_bytes


def _num_bytes(text: str, value: object) -> decimal.Decimal:
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigurationError(
            f"{quoted(value)} is not a size; write a number of bytes or a number with a unit, "
            "for example 512MiB or 40GiB"
        )
    number, unit = decimal.Decimal(match[1]), _UNITS[match[2].lower()]
    if number > MOST_BYTES or number * unit > MOST_BYTES:
        raise ConfigurationError(
            f"{quoted(value)} is more than any disk or memory has; the largest size is "
            f"{MOST_BYTES} bytes (8 EiB)"
        )
    return number * unit


def format_size(num_bytes: float) -> str:
    """`1.5 GiB`: for people; machine-readable output carries plain bytes."""
    for unit, scale in (("PiB", PIB), ("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def parse_rate(value: object) -> float:
    """Bytes a second from `500MB/s`, `1.5GiB/s` (or a size without the `/s`).

    Raises:
        ConfigurationError: the value is not a rate of at least a byte a second.
    """
    rate = _num_bytes(as_text(value).strip().removesuffix("/s"), value)
    if rate < 1:
        raise ConfigurationError(f"{quoted(value)} lets nothing through; write for example 500MB/s")
    return float(rate)


def parse_budget(value: object) -> int | float:
    """Bytes as `parse_size`, or a fraction from 0.0 to 1.0 written with a decimal point.

    Raises:
        ConfigurationError: the value is neither.
    """
    text = as_text(value)
    try:
        fraction = float(text) if "." in text else None
    except ValueError:
        fraction = None
    if fraction is None:
        return parse_size(value)
    if not 0.0 <= fraction <= 1.0:
        raise ConfigurationError(
            f"{quoted(value)} is neither a fraction nor a size; write a number from 0.0 to 1.0, or "
            "a size with a unit, for example 16GiB"
        )
    return fraction
