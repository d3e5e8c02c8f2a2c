#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what is made of the classes that have the flags: docs/flags.md, the page of all of them,
and megatron/offload/keywords.py, the same as keywords of Python functions, for type checkers.

    tools/write_flags.py    # after a change in a config.py of megatron/offload

`tests/unit/test_docs.py` fails where one of the two differs from the fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron.offload.config import OffloadConfig
from megatron.offload.flag import Settings
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.layer_set import LayerSet
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.sizes import parse_budget, parse_positive_size, parse_rate, parse_size
from megatron.offload.states.config import StatesConfig
from megatron.offload.values import (
    parse_count,
    parse_path,
    parse_paths,
    parse_slowdown,
    parse_threads,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "flags.md"
KEYWORDS = ROOT / "megatron" / "offload" / "keywords.py"
_HEAD = """\
# Flags

Generated from the fields of `OffloadConfig` in `megatron/offload/config.py`, and of the classes in
`states/config.py`, `parameters/config.py` and `layer_major/config.py` there; do not edit. After a
change:

```bash
.venv/bin/python tools/write_flags.py
```

The launcher, the bundled trainer and `megatron-offload doctor` take these flags in addition to
their own; `megatron-offload plan` and `rok` take some of them (see their `--help`).
Sizes are bytes or a number with a unit: `1048576`, `512MiB`, `40GiB` or `40G` (2**30 bytes), `40GB`
(10**9).

In Python the settings are keywords, with the names of the column "in Python", and take the same
values, as text or as numbers and paths: `offload_activations(model, "/mnt/nvme0",
memory_budget_bytes="12GiB", mode="auto")`. Editors complete them, type checkers refuse others.
`--offload-settings FILE` reads all of them from [a file](integrations.md#settings-in-a-file).

`./examples/pretrain_gpt.sh` starts with `--activation-offload ssd` and
`--activation-offload-dir runs/offload`. All other flags are the trainer's and have Megatron-LM's
names: `./examples/pretrain_gpt.sh --help`.
"""
_TABLE = """
## {title}

In Python: `{door}`.

| flag | in Python | default | meaning |
|---|---|---|---|
"""


class _Stream(NamedTuple):
    """A class of settings, and how Python has them.

    Args:
        door: the call that takes them.
        keywords: what the `TypedDict` of them is called; empty: its few are the call's own.
    """

    settings: type[Settings]
    door: str
    keywords: str


_STREAMS = {
    "Activations": _Stream(
        OffloadConfig, "offload_activations(model, directory, ...)", "Activation"
    ),
    "Model states": _Stream(
        StatesConfig, "offload_optimizer(optimizer, directory, ...)", "OptimizerState"
    ),
    "Parameters": _Stream(
        ParametersConfig, "offload_parameters(model, directory, ...)", "Parameter"
    ),
    "Layer-major steps": _Stream(LayerMajorConfig, "LayerMajor(model, ...)", ""),
}
_METHODS = {  # what is called otherwise, or has other values
    "--layer-major-units": "units=N, or None: auto",
    "--layer-major-order": "alternates=True: alternating",
    "--layer-major-eval": "LayerMajor.evaluate(batches, fn)",
}
_DEFAULT = re.compile(r"\s*Default: (.+?)\.(?=\s|$)")


def flags_page() -> str:
    """The text of docs/flags.md."""
    return _HEAD + "".join(_table(title, stream) for title, stream in _STREAMS.items())


def _table(title: str, stream: _Stream) -> str:
    parser = argparse.ArgumentParser(add_help=False)
    stream.settings.add_arguments(parser)
    rows = [f"{_row(action, stream.settings)}\n" for action in parser._actions]
    return _TABLE.format(title=title, door=stream.door) + "".join(rows)


def _row(action: Any, settings: type[Settings]) -> str:
    """A flag's line: its name and values, in Python, its default, its help without the default."""
    meaning, default = str(action.help), "none"
    if found := _DEFAULT.search(meaning):
        meaning, default = meaning[: found.start()] + meaning[found.end() :], found[1]
        if action.default not in (None, ()):
            default = f"`{default}`"
    meaning = re.sub(r"--[a-z][a-z-]*[a-z]", r"`\g<0>`", meaning.removesuffix(".") + ".")
    for choice in action.choices or ():  # each on a line of its own
        meaning = re.sub(rf"(?:^|(?<=\.) ){choice}: ", f"<br>`{choice}`: ", meaning)
    meaning = meaning.removeprefix("<br>")
    meaning = meaning[0].upper() + meaning[1:]
    values = "{" + ",".join(action.choices) + "}" if action.choices else action.metavar
    flag = action.option_strings[0]
    in_python = _METHODS.get(flag, settings.in_settings(flag))
    cells = (f"`{flag} {values}`", f"`{in_python}`", default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# -- Keywords -------------------------------------------------------------------------------------

_KEYWORDS_HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
"""Types of the keywords that the doors for PyTorch take, for editors and type checkers.

Generated from the fields of `OffloadConfig`, `StatesConfig` and `ParametersConfig` by
`tools/write_flags.py`; do not edit. What each means: docs/flags.md, where each has its line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal, TypedDict

_Path = str | os.PathLike[str]
'''
# What may be given for a value, by what reads it.
_TYPES: dict[Callable[[Any], Any], str] = {
    parse_size: "int | str",
    parse_positive_size: "int | str",
    parse_budget: "int | float | str",
    parse_rate: "float | str",
    parse_slowdown: "float | str",
    parse_count: "int | str",
    parse_threads: "int | str",
    parse_path: "_Path",
    parse_paths: "_Path | Iterable[_Path]",
    LayerSet.parse: "str | int",
}


def keywords_file() -> str:
    """The text of megatron/offload/keywords.py."""
    streams = [stream for stream in _STREAMS.values() if stream.keywords]
    return _KEYWORDS_HEAD + "\n".join(map(_keywords_of, streams))


def _keywords_of(stream: _Stream) -> str:
    mode, *others = dataclasses.fields(stream.settings)  # type: ignore[arg-type]
    assert mode.name == "mode", "its keyword has a default of its own: the door's"
    lines = [f"    {spec.name}: {_type_of(spec)}" for spec in others]
    return (
        f"\n{stream.keywords}Mode = {_type_of(mode)}\n\n\n"
        f"class {stream.keywords}Settings(TypedDict, total=False):\n"
        f'    """Of `{stream.settings.__name__}`, all but `mode`; sizes as numbers or text."""\n\n'
        + "\n".join(lines)
        + "\n"
    )


def _type_of(spec: dataclasses.Field[Any]) -> str:
    """What a type checker lets pass for a field."""
    meta = spec.metadata
    if meta["choices"]:
        text = f"Literal[{', '.join(map(_quoted, meta['choices']))}]"
        if {"off", "on"} <= set(meta["choices"]):
            text += " | bool"
    elif meta["metavar"] and meta["metavar"].startswith("{"):  # words, or a number of something
        *words, _ = meta["metavar"].strip("{}").split(",")
        text = f"Literal[{', '.join(map(_quoted, words))}] | int"
    else:
        text = _TYPES[meta["parse"]]
    return f"{text} | None" if spec.default is None else text


def _quoted(word: str) -> str:
    return f'"{word}"'


def main() -> int:
    """Writes both; the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for path, text in ((PAGE, flags_page()), (KEYWORDS, keywords_file())):
        path.write_text(text)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
