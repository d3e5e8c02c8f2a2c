# SPDX-License-Identifier: Apache-2.0
"""Settings of all streams in one TOML file, for Python and for the flags: `read_settings`.

    directory = "/mnt/nvme0"      # of all tables that name none

    [activations]
    mode = "auto"
    memory_budget_bytes = "12GiB"

    [optimizer_states]            # on the SSD, since there is a directory

    [layer_major]
    units = 4

Names are those of docs/flags.md, column "in Python". What a file does not name stays as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.offload.config import OffloadConfig
from megatron.offload.errors import PREFIX, ConfigurationError
from megatron.offload.flag import Settings, destination
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.states.config import StatesConfig
from megatron.offload.values import parse_paths, quoted

FLAG = "--offload-settings"
_STREAMS: Mapping[str, type[Settings]] = {
    "activations": OffloadConfig,
    "optimizer_states": StatesConfig,
    "parameters": ParametersConfig,
}
_STEPS = "layer_major"
_KEYS = ("directory", *_STREAMS, _STEPS)


def read_settings(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Reads a TOML file of settings; returns them as the arguments of `offload`.

        handle = offload(model, optimizer, **read_settings("offload.toml"))

    Args:
        source: the file, or a mapping of what would be in it. `activations`, `optimizer_states` and
            `parameters` are tables of the settings of `offload_activations`, `offload_optimizer`
            and `offload_parameters`, or true, or a mode; `layer_major` is a table with `units` and
            `order`, or a number of units, or true. `directory` is for all that name none.

    Returns:
        All four of them. What the file does not name is False: it does not move.

    Raises:
        ConfigurationError: the file cannot be read, or one of its settings cannot be; says which.
    """
    given = _tables(source)
    found: dict[str, Any] = {name: given.get(name, False) for name in _STREAMS}
    return {**found, _STEPS: given.get(_STEPS, False)}


def add_settings_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--offload-settings FILE`, which stands for the flags that the file's settings have."""
    group = parser.add_argument_group("settings of all offload in a file")
    group.add_argument(
        FLAG,
        action=_ReadSettings,
        metavar="FILE",
        help="a TOML file that stands for the flags of all offload; flags after it on the command "
        "line come before what it says. Its tables are activations, optimizer_states, parameters "
        "and layer_major, its keys the names that settings have in Python",
    )


class _ReadSettings(argparse.Action):
    """Puts what a file says in the place of the flags."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            given = _tables(str(values), for_flags=True)
        except ConfigurationError as error:
            raise argparse.ArgumentError(self, str(error).removeprefix(PREFIX)) from None
        for name, settings in given.items():
            config: Any = _config(name, settings, for_flags=True)
            for spec in dataclasses.fields(config):
                if spec.name in settings:
                    setattr(namespace, destination(spec), getattr(config, spec.name))
        setattr(namespace, self.dest, str(values))


# -- What is in a file ----------------------------------------------------------------------------


def _tables(
    source: str | os.PathLike[str] | Mapping[str, Any], *, for_flags: bool = False
) -> dict[str, dict[str, Any]]:
    """The settings of what moves, by its name; each has been checked, and says where it goes.

    Args:
        source: a file, or what is in one.
        for_flags: what is off is there too, and directories may be other flags.
    """
    where, given = _read(source)
    for name in given:
        if name not in _KEYS:
            raise ConfigurationError(f"{where}there is no {quoted(name)}; {_hint(name, _KEYS)}")
    directory = given.get("directory")
    tables = {}
    for name in (*_STREAMS, _STEPS):
        value = given.get(name)
        if value is None:
            continue
        table = _steps(value) if name == _STEPS else _stream(value, directory)
        if table is None:
            raise ConfigurationError(
                f"{where}{name} = {quoted(value)} is no table of settings; write [{name}] and a "
                "line for each setting"
            )
        try:
            config: Any = _config(name, table, for_flags=for_flags)
            if "directories" in table:  # as they are called now
                table["directories"] = parse_paths(table["directories"])
        except ConfigurationError as error:
            words = str(error).removeprefix(PREFIX)
            raise ConfigurationError(f"{where}[{name}]: {words}") from None
        # With activations that stay the loss may be in chunks all the same.
        if for_flags or config.enabled or getattr(config, "in_pieces", False):
            tables[name] = table
    return tables


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """What sentences about the source begin with, and what is in it."""
    if isinstance(source, Mapping):
        return "settings: ", source
    try:
        return f"{source}: ", tomllib.loads(Path(source).read_text())
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(
            f"{source}: the file of settings cannot be read: {words}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{source}: this is not TOML: {error}") from None


def _stream(value: Any, directory: Any) -> dict[str, Any] | None:
    """The settings of a stream as its own function takes them; None: these are none."""
    if isinstance(value, Mapping):
        table = dict(value)
    elif isinstance(value, bool):
        table = {} if value else {"mode": "off"}
    elif isinstance(value, str):
        table = {"mode": value}
    else:
        return None
    if "directory" in table and "directories" not in table:
        table["directories"] = table.pop("directory")
    if table.get("mode") not in ("host", "off") and directory is not None:
        table.setdefault("directories", directory)
    table.setdefault("mode", "ssd" if table.get("directories") else "host")
    return table


def _steps(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return {"units": "auto", **value}
    if isinstance(value, bool):
        return {"units": "auto" if value else "off"}
    return {"units": value} if isinstance(value, int | str) else None


def _config(name: str, table: Mapping[str, Any], *, for_flags: bool = False) -> Settings:
    kind: Any = LayerMajorConfig if name == _STEPS else _STREAMS[name]
    needs_some = name != _STEPS and table["mode"] in ("ssd", "tiered", "auto")
    if for_flags and needs_some and "directories" not in table:
        table = {**table, "directories": "."}  # those that another flag names
    try:
        found: Settings = kind.from_settings(table)
    except ConfigurationError as error:  # its words, with the names that the file has
        words = str(error).partition(": ")[2]
        names = {spec.metadata["flag"]: spec.name for spec in dataclasses.fields(kind)}
        for flag in sorted(names, key=len, reverse=True):
            words = words.replace(flag, names[flag])
        words = words.replace("give directories DIR", 'give directory = "DIR"')
        raise ConfigurationError(words) from None
    return found


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
