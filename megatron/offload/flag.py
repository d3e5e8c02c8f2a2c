# SPDX-License-Identifier: Apache-2.0
"""A setting that is also a command-line flag: `flag` makes the field of a `Settings` class.

`OffloadConfig` and `StatesConfig` are made of such fields. Here is how every value is checked, as
text or as what a script gives, and how argparse is told of a flag; those classes say which flags
there are, and which of them contradict each other.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, field
from typing import Any, ClassVar, Self

from megatron.offload.directories import resolved_directories
from megatron.offload.errors import PREFIX, ConfigurationError
from megatron.offload.sizes import KIB, format_size
from megatron.offload.values import paths_of, quoted


def flag(
    name: str,
    default: Any,
    help: str,
    *,
    parse: Callable[[object], Any] = str,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        name: of the flag, with its dashes.
        default: of the field.
        help: of the flag, without the default.
        parse: the value that a text stands for, or a number, a path; raises `ConfigurationError`
            where it is none. It accepts what it returns.
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
        options["type"] = argparse_type(meta["parse"])
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
        other_names: of flags in sentences for callers who gave keywords, where these are not the
            fields'.
    """

    group: ClassVar[str]
    prefix: ClassVar[str] = PREFIX
    other_names: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        """Every value goes through the check of its field, however it was given.

        Raises:
            ConfigurationError: one is none that its field may have.
        """
        for spec in _fields(type(self)):
            value = getattr(self, spec.name)
            try:
                checked = _checked(spec, value)
            except ConfigurationError as error:
                words = str(error).removeprefix(PREFIX)
                raise ConfigurationError(f"{self.prefix}{spec.metadata['flag']}: {words}") from None
            object.__setattr__(self, spec.name, checked)  # frozen for all others

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
            ConfigurationError: a field is unknown, a value none, or they contradict each other.
        """
        fields = {spec.name: spec for spec in _fields(cls)}
        for name in settings:
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(fields)}"
                raise ConfigurationError(f"{cls.prefix}there is no setting {name!r}; {hint}")
        return cls(**settings)

    @classmethod
    def of_door(cls, directory: object, mode: str | None, settings: Mapping[str, Any]) -> Self:
        """The config that the arguments of a door for PyTorch models ask for.

        Args:
            directory: one, several, or None.
            mode: None: `ssd` with a directory, `host` without one.
            settings: fields by name.

        Raises:
            ConfigurationError: as `from_settings`.
        """
        named = settings.get("directories", ())
        if directory is not None:
            if "directories" in settings:
                raise ConfigurationError(
                    f"{cls.prefix}directory and directories are the same setting; give one of them"
                )
            try:
                named = paths_of(directory)
            except ConfigurationError as error:
                words = str(error).removeprefix(PREFIX)
                raise ConfigurationError(f"{cls.prefix}directory: {words}") from None
        if mode is None:
            mode = "ssd" if named else "host"
        return cls.from_settings({**settings, "mode": mode, "directories": named})

    def resolved(self) -> Self:
        """This config with the directories themselves in place of their names.

        From here on each is the directory that it is now, whatever becomes of links.

        Raises:
            ConfigurationError: one of them cannot be used, or two are the same.
        """
        of: Any = self
        if not of.uses_ssd:
            return self
        (spec,) = (one for one in _fields(type(self)) if one.name == "directories")
        real = resolved_directories(of.directories, self.prefix, spec.metadata["flag"])
        return dataclasses.replace(of, directories=real)

    @classmethod
    def in_settings(cls, message: str) -> str:
        """A sentence about flags, for a caller who gave settings: with the names of the fields."""
        names = {spec.metadata["flag"]: spec.name for spec in _fields(cls)} | dict(cls.other_names)
        for name in sorted(names, key=len, reverse=True):
            message = message.replace(name, names[name])
        return message

    @classmethod
    @contextlib.contextmanager
    def speaking_of_settings(cls) -> Iterator[None]:
        """A context for callers who gave settings: errors in it have the names of the fields."""
        try:
            yield
        except ConfigurationError as error:
            raise ConfigurationError(cls.in_settings(str(error))) from None

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
        for spec in _fields(cls):  # no directories, as Megatron's checkpoints hold them
            if values[spec.name] in ("", None) and spec.default == ():
                values[spec.name] = spec.default
        return cls(**values)


def _checked(spec: Field[Any], value: object) -> Any:
    """The value as the field has it. Raises ConfigurationError: the field may not have it."""
    if value is None and spec.default is None:
        return None
    choices = spec.metadata["choices"]
    if not choices:
        return spec.metadata["parse"](value)
    # A bare `off` in a YAML file is False, `on` is True.
    word = ("on" if value else "off") if isinstance(value, bool) else value
    for choice in choices:
        if isinstance(word, str) and word == choice:
            return choice
    raise ConfigurationError(
        f"{quoted(value)} is none of its values; choose one of {', '.join(choices)}"
    )


def _fields(kind: Any) -> tuple[Field[Any], ...]:
    return dataclasses.fields(kind)


# -- For argparse ---------------------------------------------------------------------------------


def _shown(default: Any) -> str:
    if isinstance(default, int) and default >= KIB:
        return format_size(default).replace(" ", "")
    return str(default)


def argparse_type(parse: Callable[[object], Any]) -> Callable[[str], Any]:
    """Turns our error into argparse's, which adds the flag's name and exits with code 2."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(PREFIX)) from None

    return convert


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a flag that is none: the one of the known ones that is nearest.

    Empty where none is near.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
