#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/refusals.md, the page of what cannot be had with what, from the tables that refuse.

    tools/write_refusals.py    # after a change in one of these tables

`tests/unit/test_docs.py` fails where the page differs from the tables.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from megatron.offload.integration.megatron import refused
from megatron.offload.integration.torch import refusals

PAGE = Path(__file__).resolve().parents[1] / "docs" / "refusals.md"
_HEAD = """\
# What cannot be combined

Generated from the tables in `megatron/offload/integration/megatron/refused.py` and
`integration/torch/refusals.py`; do not edit. After a change:

```bash
.venv/bin/python tools/write_refusals.py
```

Each row ends a run before a model is built, with one sentence that has the reason and what to do.
The first tables are about Megatron's settings, by the names of their fields; most have a flag of
the same name. What depends on the model, on several settings or on an installed library has
sentences of its own.
"""
_HEADINGS = "| {} | why not | what to do |\n|---|---|---|\n"


def refusals_page() -> str:
    """The text of docs/refusals.md."""
    tables = [
        _table(
            title,
            "with",
            ((name, *one.why(name)) for name in one.settings),
        )
        for title, one in refused.ALL.items()
    ]
    models = ((name, *why.split("; ")) for name, why in refusals.MODELS.items())
    optimizers = ((name, why, "leave it as it is") for name, why in refusals.OPTIMIZERS.items())
    wrappers = (
        (name, "it counts the passes of a whole model", f"use {instead}")
        for name, instead in refusals.STEP_WRAPPERS.items()
    )
    tables += [
        _table("PyTorch: `offload_activations`", "model", models),
        _table("PyTorch: `offload_optimizer`", "optimizer", optimizers),
        _table("PyTorch: `LayerMajor`", "wrapper", wrappers),
    ]
    return _HEAD + "".join(tables)


def _table(title: str, first: str, rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| `{name}` | {_flags(why)} | {_flags(advice)} |\n" for name, why, advice in rows]
    return f"\n## {title}\n\n{_HEADINGS.format(first)}{''.join(lines)}"


def _flags(text: str) -> str:
    return re.sub(r"--[a-z][a-z0-9-]*[a-z0-9]", r"`\g<0>`", text)


def main() -> int:
    """Writes the page; the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(refusals_page())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
