# SPDX-License-Identifier: Apache-2.0
"""Every setting of activation offload, once: `OffloadConfig`.

The command-line flags, their help texts and the checks of their values all come from the fields
of this dataclass (`integration/megatron/arguments.py` builds the argparse group). Never touches
the file system; `storage` checks directories when it opens them.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.offload.errors import ConfigurationError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
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
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def _parse_count(text: str | int) -> int:
    try:
        count = int(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not a whole number") from None
    if count < 1:
        raise ConfigurationError(f"{count} is not allowed; the smallest value is 1")
    return count


def _parse_directories(text: str) -> tuple[Path, ...]:
    return tuple(Path(part).expanduser() for part in text.split(",") if part)


def _flag(
    name: str,
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag."""
    metadata = {
        "flag": name,
        "help": help,
        "parse": parse,
        "choices": choices,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class OffloadConfig:
    """Where activations go and within which bounds. Sizes in bytes.

    Raises:
        ConfigurationError: the values contradict each other (checked on construction).
    """

    mode: str = _flag(
        "--activation-offload",
        "off",
        "off: activations stay in device memory. ssd: every activation of at least "
        "--activation-offload-min-bytes is written to --activation-offload-dir during the forward "
        "pass and read back before the backward pass needs it. Results are bit-identical.",
        choices=("off", "ssd"),
    )
    directories: tuple[Path, ...] = _flag(
        "--activation-offload-dir",
        (),
        "directory on the SSD for activations. Each rank keeps one unlinked file there, so nothing "
        "is left behind however the run ends.",
        parse=_parse_directories,
        metavar="DIR",
    )
    min_bytes: int = _flag(
        "--activation-offload-min-bytes",
        MIB,
        "smaller storages stay in device memory: they hold few bytes and cost as many operations.",
        parse=parse_size,
        metavar="SIZE",
    )
    threads: int = _flag(
        "--activation-offload-threads",
        4,
        "I/O threads of each rank: how many reads and writes the drive sees at once.",
        parse=_parse_count,
        metavar="N",
    )
    inflight_bytes: int = _flag(
        "--activation-offload-inflight",
        512 * MIB,
        "most bytes on their way to the SSD at any time, and most bytes read ahead of the backward "
        "pass. Beyond it the forward pass waits for the drive instead of letting memory grow.",
        parse=parse_size,
        metavar="SIZE",
    )
    ssd_budget_bytes: int | None = _flag(
        "--activation-offload-ssd-budget",
        None,
        "most bytes of SSD space that a rank may take. Default: what the model's shape asks for. "
        "Activations beyond it stay in device memory.",
        parse=parse_size,
        metavar="SIZE",
    )
    io: str = _flag(
        "--activation-offload-io",
        "auto",
        "direct: O_DIRECT, past the page cache, or an error where the file system lacks it. "
        "buffered: through the page cache. auto: direct where it works, else buffered with a line "
        "in the log.",
        choices=("auto", "direct", "buffered"),
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            choices = spec.metadata["choices"]
            value = getattr(self, spec.name)
            if choices and value not in choices:
                raise ConfigurationError(
                    f"{spec.metadata['flag']} is {value!r}; choose one of {', '.join(choices)}"
                )
        if self.mode == "ssd" and not self.directories:
            raise ConfigurationError(
                "--activation-offload ssd needs a place on an SSD; "
                "give it with --activation-offload-dir DIR"
            )
        if len(self.directories) > 1:
            raise ConfigurationError(
                f"--activation-offload-dir names {len(self.directories)} directories; "
                "this version writes to one; give one"
            )
        if self.inflight_bytes < self.min_bytes:
            raise ConfigurationError(
                f"--activation-offload-inflight ({format_size(self.inflight_bytes)}) is below "
                f"--activation-offload-min-bytes ({format_size(self.min_bytes)}), so nothing could "
                "ever be written; raise the former"
            )

    @property
    def enabled(self) -> bool:
        """Whether any activation may leave device memory."""
        return self.mode != "off"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the flags as an argument group. A bad value ends in `parser.error` (exit code 2)."""
        group = parser.add_argument_group("activation offload")
        for spec in dataclasses.fields(cls):
            meta = spec.metadata
            shown = "" if spec.default in (None, ()) else f" Default: {_shown(spec.default)}."
            options: dict[str, Any] = {
                "dest": _destination(meta["flag"]),
                "default": spec.default,
                "help": meta["help"] + shown,
            }
            if meta["choices"]:
                options["choices"] = meta["choices"]
            else:
                options["type"] = _argparse_type(meta["parse"])
                options["metavar"] = meta["metavar"]
            group.add_argument(meta["flag"], **options)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> OffloadConfig:
        """The config that parsed flags ask for.

        Raises:
            ConfigurationError: the flags contradict each other.
        """
        values: dict[str, Any] = {
            spec.name: getattr(args, _destination(spec.metadata["flag"]), spec.default)
            for spec in dataclasses.fields(cls)
        }
        return cls(**values)


def _destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


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
