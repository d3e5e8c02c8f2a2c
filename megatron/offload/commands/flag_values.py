# SPDX-License-Identifier: Apache-2.0
"""Values of the commands' flags: types for argparse, made of what reads settings elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

from megatron.offload.errors import ConfigurationError
from megatron.offload.flag import argparse_type
from megatron.offload.sizes import parse_size
from megatron.offload.values import parse_count, quoted

count = argparse_type(parse_count)
size = argparse_type(parse_size)


def counts(text: str) -> list[int]:
    """Whole numbers from 1 up with commas between them, each once, the smallest first."""
    return sorted({count(part) for part in text.split(",")})


def known_names(kind: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """A type of known names with commas between them, each once."""

    def parse(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        choices = f"choose from {', '.join(known)}"
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {kind} {name!r}; {choices}")
        if not found:
            raise argparse.ArgumentTypeError(f"no {kind}; {choices}")
        return list(dict.fromkeys(found))

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """A type of numbers from the least to the most, both included."""

    def parse(text: object) -> float:
        try:
            found = float(str(text))
        except ValueError:
            found = float("nan")
        if not least <= found <= most:
            raise ConfigurationError(f"{quoted(text)} is no number from {least:g} to {most:g}")
        return found

    return argparse_type(parse)
