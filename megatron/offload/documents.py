# SPDX-License-Identifier: Apache-2.0
"""Files that others have written, people among them: `reading`, `from_json`, `each_line`.

Whatever is wrong with such a file ends in one sentence: that it is cut short, binary, nested
deeply, or has other names, types and numbers than expected. Every reader in the package and in the
trainer is made of these.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron.offload.errors import PREFIX, ConfigurationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What reading, converting and checking raises where a document is not what it should be.
FAULTS = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    msgspec.MsgspecError,
)
_LONGEST_REASON = 300
_MOST_DIGITS = 19  # of a whole number: those of 64 bits


def reason_of(error: BaseException) -> str:
    """What a sentence says of one of `FAULTS`."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is no text: byte {error.start} is no UTF-8"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    text = str(error) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


@contextlib.contextmanager
def reading(what: str, advice: str) -> Iterator[None]:
    """Around code that depends on what a document holds.

    Args:
        what: how the sentence begins: `FILE is no plan`.
        advice: what to do, its end.

    Raises:
        ConfigurationError: something was raised that is the document's fault.
    """
    try:
        yield
    except ConfigurationError:  # it says more
        raise
    except FAULTS as error:
        raise ConfigurationError(f"{what} ({reason_of(error)}); {advice}") from None


@contextlib.contextmanager
def in_file(name: str) -> Iterator[None]:
    """Around the reading of a text that came from a file: the sentence begins with its name."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {str(error).removeprefix(PREFIX)}") from None


def from_json(text: str | bytes, **options: Any) -> Any:
    """What a JSON text says; NaN and infinity are numbers in it.

    Args:
        options: of `json.loads`.

    Raises:
        ValueError, RecursionError: it is none, or has a whole number of more than 64 bits.
    """
    if isinstance(text, bytes):
        text = text.decode()
    return json.loads(text, parse_int=_whole_number, **options)


def _whole_number(digits: str) -> int:
    if len(digits.lstrip("-")) > _MOST_DIGITS:
        raise ValueError(f"the number {digits[:20]}... is too large")
    return int(digits)


def check_finite(value: object) -> None:
    """Raises ValueError if there is a NaN or an infinity in a document."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number to count with")
    if isinstance(value, dict):
        for one in value.values():
            check_finite(one)
    elif isinstance(value, list | tuple):
        for one in value:
            check_finite(one)


def each_line(path: Path, what: str, advice: str, read: Callable[[bytes], T]) -> list[T]:
    """The lines of a file, each read; a last one that was cut short is left out with a warning.

    Args:
        path: of the file.
        what: it should be: `a metrics.jsonl`.
        advice: what to do where it is none.
        read: gives what a line says; may raise one of `FAULTS`.

    Raises:
        ConfigurationError: a line cannot be read.
        OSError: the file cannot be read.
    """
    *whole, rest = path.read_bytes().split(b"\n")
    if rest and not whole:
        whole, rest = [rest], b""
    found = []
    for number, line in enumerate(whole, 1):
        with reading(f"{path} is not {what}: line {number}", advice):
            found.append(read(line))
    if rest:
        try:
            found.append(read(rest))
        except FAULTS as error:
            logger.warning(
                "%s: the last line was cut short, as by a kill or a full disk, and is left out: %s",
                path,
                reason_of(error),
            )
    return found
