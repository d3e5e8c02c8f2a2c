#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/flags.md, the page of all offload flags, from the classes that have them.

    tools/write_flags.py    # after a change in a config.py of megatron/offload

`tests/unit/test_docs.py` fails where the page differs from the fields.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from megatron.offload.config import OffloadConfig
from megatron.offload.flag import Settings
from megatron.offload.layer_major.config import LayerMajorConfig
from megatron.offload.parameters.config import ParametersConfig
from megatron.offload.states.config import StatesConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
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
Sizes are bytes or a number with a unit: `1048576`, `512MiB`, `40GiB`.

`./examples/pretrain_gpt.sh` starts with `--activation-offload ssd` and
`--activation-offload-dir runs/offload`. All other flags are the trainer's and have Megatron-LM's
names: `./examples/pretrain_gpt.sh --help`.
"""
_TABLE = """
## {title}

| flag | default | meaning |
|---|---|---|
"""
_SETTINGS: dict[str, type[Settings]] = {
    "Activations": OffloadConfig,
    "Model states": StatesConfig,
    "Parameters": ParametersConfig,
    "Layer-major steps": LayerMajorConfig,
}
_DEFAULT = re.compile(r"\s*Default: (.+?)\.(?=\s|$)")


def flags_page() -> str:
    """The text of docs/flags.md."""
    return _HEAD + "".join(_table(title, settings) for title, settings in _SETTINGS.items())


def _table(title: str, settings: type[Settings]) -> str:
    parser = argparse.ArgumentParser(add_help=False)
    settings.add_arguments(parser)
    rows = [f"{_row(action)}\n" for action in parser._actions]
    return _TABLE.format(title=title) + "".join(rows)


def _row(action: Any) -> str:
    """A flag's line: its name and values, its default, its help without the default."""
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
    cells = (f"`{action.option_strings[0]} {values}`", default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    """Writes the page; the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(flags_page())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
