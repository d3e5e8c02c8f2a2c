# SPDX-License-Identifier: Apache-2.0
"""The value of a setting, from whatever a person or a script gives: text, a number, a path.

The fields of `Settings` are checked by `parse_*` here, in `sizes.py` and in `layer_set.py`. A
number goes the way of its text, so that both are taken, or refused, alike. None of them touches a
file.
"""

from __future__ import annotations

import decimal
import numbers
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron.offload.errors import ConfigurationError

MOST_COUNT = 2**31 - 1
MOST_THREADS = 1024  # of a directory: each has a stack, and on an accelerator 16 MiB
_LONGEST_QUOTE = 80
_COUNT = re.compile(r"\s*([+-]?)0*(\d+)\s*")


def quoted(value: object) -> str:
    """A value as a sentence shows it: short, and whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a class of others, or a number of thousands of digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 3]}..."


def as_text(value: object) -> str:
    """What a person would write for a value; what is neither text nor a number reads as none."""
    if isinstance(value, str):
        return str(value)
    try:
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return str(int(value))
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return format(decimal.Decimal(repr(float(value))), "f")  # never 1e+16
    except (ValueError, ArithmeticError):  # thousands of digits
        pass
    return quoted(value)


def parse_count(value: object, most: int = MOST_COUNT) -> int:
    """A whole number of at least 1.

    Raises:
        ConfigurationError: it is none.
    """
    match = _COUNT.fullmatch(as_text(value))
    if match is None:
        raise ConfigurationError(f"{quoted(value)} is not a whole number")
    sign, digits = match.groups()
    if sign == "-" or int(digits[:20]) < 1:
        shown = as_text(value).strip()
        raise ConfigurationError(f"{shown} is not allowed; the smallest value is 1")
    if len(digits) > 20 or int(digits) > most:
        raise ConfigurationError(f"{quoted(value)} is not allowed; the largest value is {most}")
    return int(digits)


def parse_threads(value: object) -> int:
    """A number of threads. Raises ConfigurationError: it is none."""
    return parse_count(value, MOST_THREADS)


def count_or_word(noun: str) -> Callable[[object], str | int]:
    """Reads `off`, `auto`, or a number of what the noun says."""

    def parse(value: object) -> str | int:
        if value is False:  # a bare `off` in a YAML file
            return "off"
        text = as_text(value)
        if text in ("off", "auto"):
            return text
        try:
            return parse_count(value)
        except ConfigurationError:
            raise ConfigurationError(
                f"{quoted(value)} is neither off, auto nor a number of {noun}"
            ) from None

    return parse


def parse_slowdown(value: object) -> float:
    """A part of a step's time, 0.02 for two in a hundred.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        slowdown = float(as_text(value))
    except ValueError:
        slowdown = -1.0
    if not 0.0 <= slowdown < float("inf"):
        raise ConfigurationError(
            f"{quoted(value)} is no slowdown; write the part of a step's time, for example 0.02"
        )
    return slowdown


def parse_path(value: object) -> Path:
    """An absolute path; `~` is the home directory. The working directory may change later.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigurationError(f"{quoted(value)} is no path; give text or a pathlib.Path")
    try:
        text = os.fspath(value)
        if isinstance(text, bytes):
            text = os.fsdecode(text)
        if not text:
            raise ConfigurationError(
                "a path is empty; name a file or directory (is a variable of the shell not set?)"
            )
        if "\0" in text:
            raise ConfigurationError(f"{quoted(text)} is no path: it has a NUL byte in it")
        return Path(text).expanduser().absolute()
    except ConfigurationError:
        raise
    except Exception as error:  # `~no_such_user`; no working directory; a caller's own class
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"{quoted(value)} is no path that can be found ({reason}); give an absolute one"
        ) from None


def parse_paths(value: object) -> tuple[Path, ...]:
    """Paths: one, text with commas between several, or a list of them.

    Raises:
        ConfigurationError: one of them is none.
    """
    if isinstance(value, str):
        return tuple(parse_path(part) for part in value.split(","))
    return paths_of(value)


def paths_of(values: object) -> tuple[Path, ...]:
    """One path or each of several, commas and all.

    Raises:
        ConfigurationError: one of them is none.
    """
    if isinstance(values, str | os.PathLike):
        return (parse_path(values),)
    if not isinstance(values, Iterable) or isinstance(values, bytes | bytearray):
        raise ConfigurationError(
            f"{quoted(values)} is no path; give text, a pathlib.Path, or a list of them"
        )
    try:
        each = list(values)
    except Exception as error:  # an iterator of others
        raise ConfigurationError(f"{quoted(values)} gives no paths: {error}") from None
    return tuple(parse_path(one) for one in each)
