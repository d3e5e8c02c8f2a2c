# SPDX-License-Identifier: Apache-2.0
"""A setting that is also a command-line flag: `flag` makes the field of a `Settings` class.

`OffloadConfig` and `StatesConfig` are made of such fields. Here is how the text of a value is read
and how argparse is told of a flag; which flags there are, and which of them contradict each other,
those classes say.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, field
from pathlib import Path
from typing import Any, ClassVar, Self

from megatron.offload.errors import PREFIX, ConfigurationError
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


class Settings:
    """A dataclass whose fields are made by `flag`: from flags, from keywords, and back.

    Attributes:
        group: the title of its flags in the help.
        prefix: what its sentences begin with.
        other_names: of flags in sentences for who gave keywords, where it is not the field's.
    """

    group: ClassVar[str]
    prefix: ClassVar[str] = PREFIX
    other_names: ClassVar[Mapping[str, str]] = {}

    def check_choices(self) -> None:
        """Raises ConfigurationError where a field has none of its values."""
        for spec in _fields(type(self)):
            choices, value = spec.metadata["choices"], getattr(self, spec.name)
            if choices and value is not None and value not in choices:
                raise ConfigurationError(
                    f"{self.prefix}{spec.metadata['flag']} is {value!r}; choose one of "
                    f"{', '.join(choices)}"
                )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the flags as an argument group. A bad value ends in `parser.error` (exit code 2)."""
        group = parser.add_argument_group(cls.group)
        for spec in _fields(cls):
            add_flag(group, spec)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """The config with these fields; text is read as a flag's value is, `12GiB` as a size.

        Raises:
            ConfigurationError: a field is unknown, a text no value, or they contradict each other.
        """
        fields = {spec.name: spec for spec in _fields(cls)}
        values: dict[str, Any] = {}
        for name, value in settings.items():
            if name not in fields:
                near = difflib.get_close_matches(name, fields, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(fields)}"
                raise ConfigurationError(f"{cls.prefix}there is no setting {name!r}; {hint}")
            if isinstance(value, str):
                value = fields[name].metadata["parse"](value)
            values[name] = value
        return cls(**values)

    @classmethod
    def in_settings(cls, message: str) -> str:
        """A sentence about flags, for somebody who gave settings: with the names of the fields."""
        names = {spec.metadata["flag"]: spec.name for spec in _fields(cls)} | dict(cls.other_names)
        for name in sorted(names, key=len, reverse=True):
            message = message.replace(name, names[name])
        return message

    @classmethod
    def from_flags(cls, flags: Sequence[str]) -> Self:
        """The config that flags on a command line ask for.

        Raises:
            ConfigurationError: the flags contradict each other.
        """
        parser = argparse.ArgumentParser()
        cls.add_arguments(parser)
        return cls.from_args(parser.parse_args(flags))

    @classmethod
    def flags_of(cls, settings: Mapping[str, Any]) -> list[str]:
        """Flags that `from_flags` reads these fields from; defaults are left out."""
        flags: list[str] = []
        for spec in _fields(cls):
            value = settings.get(spec.name, spec.default)
            if value != spec.default:
                parts = value if isinstance(value, tuple) else (value,)
                flags += [spec.metadata["flag"], ",".join(map(str, parts))]
        return flags

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Self:
        """The config that parsed flags ask for.

        Raises:
            ConfigurationError: the flags contradict each other.
        """
        values = {
            spec.name: getattr(args, destination(spec), spec.default) for spec in _fields(cls)
        }
        return cls(**values)


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return dataclasses.fields(kind)


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
            raise argparse.ArgumentTypeError(str(error).removeprefix(PREFIX)) from None

    return convert
