# SPDX-License-Identifier: Apache-2.0
"""A setting that is also a command-line flag: `flag` makes the field of a dataclass.

`OffloadConfig` is made of such fields. Here is how the text of a value is read and how argparse is
told of a flag; which flags there are, and which of them contradict each other, `config.py` says.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, field
from pathlib import Path
from typing import Any

from megatron.offload.errors import ConfigurationError
from megatron.offload.sizes import KIB, format_size


def flag(
    name: str,
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        name: of the flag, with its dashes.
        default: of the field.
        help: of the flag, without the default.
        parse: the value that a text stands for; raises `ConfigurationError` where it is none.
        choices: the only values.
        metavar: what stands for the value in the help.
    """
    metadata = {
        "flag": name,
        "help": help,
        "parse": parse,
        "choices": choices,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)


def add_flag(group: argparse._ArgumentGroup, spec: Field[Any]) -> None:
    """Adds a field's flag to argparse, under the name that `destination` gives it."""
    meta = spec.metadata
    shown = "" if spec.default in (None, ()) else f" Default: {_shown(spec.default)}."
    options: dict[str, Any] = {
        "dest": destination(spec),
        "default": spec.default,
        "help": meta["help"] + shown,
    }
    if meta["choices"]:
        options["choices"] = meta["choices"]
    else:
        options["type"] = _argparse_type(meta["parse"])
        options["metavar"] = meta["metavar"]
    group.add_argument(meta["flag"], **options)


def destination(spec: Field[Any]) -> str:
    """The attribute of argparse's namespace that has the value of a field's flag."""
    return str(spec.metadata["flag"]).removeprefix("--").replace("-", "_")


# -- Values from text -----------------------------------------------------------------------------


def parse_count(text: str | int) -> int:
    """A whole number of at least 1.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        count = int(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not a whole number") from None
    if count < 1:
        raise ConfigurationError(f"{count} is not allowed; the smallest value is 1")
    return count


def parse_chunks(text: str | int) -> str | int:
    """`off`, `auto`, or a number of tokens.

    Raises:
        ConfigurationError: it is none of these.
    """
    if text in ("off", "auto"):
        return text
    try:
        return parse_count(str(text))
    except ConfigurationError:
        raise ConfigurationError(f"{text!r} is neither off, auto nor a number of tokens") from None


def parse_slowdown(text: str | float) -> float:
    """A part of a step's time, 0.02 for two in a hundred.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        slowdown = float(text)
    except ValueError:
        slowdown = -1.0
    if not 0.0 <= slowdown < float("inf"):
        raise ConfigurationError(
            f"{text} is no slowdown; write the part of a step's time, for example 0.02"
        )
    return slowdown


def parse_path(text: str) -> Path:
    """A path; `~` is the home directory."""
    return Path(text).expanduser()


def parse_paths(text: str) -> tuple[Path, ...]:
    """Paths with commas between them."""
    return tuple(parse_path(part) for part in text.split(",") if part)


# -- For argparse ---------------------------------------------------------------------------------


def _shown(default: Any) -> str:
    if isinstance(default, int) and default >= KIB:
        return format_size(default).replace(" ", "")
    return str(default)


def _argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Turns our error into argparse's, which adds the flag's name and exits with code 2."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(
                str(error).removeprefix("activation offload: ")
            ) from None

    return convert
