#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/replay.md that come from what `tools/bench/replay.py` has measured.

    tools/write_replay.py    # after docs/results/replay-models.json was measured anew

`tests/unit/test_docs.py` fails where the page differs from the file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.replay import DTYPES, REST_HEADER, table_of_the_rest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "replay.md"
MEASURED = ROOT / "docs" / "results" / "replay-models.json"
_NAMES = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "olmo": "OLMo, norms without weight",
    "gpt2": "GPT-2, with its dropout",
    "bert": "BERT without dropout",
    "llama-lora": "Llama with LoRA on all linear layers",
    "mixtral": "Mixtral, 4 experts",
    "qwen3-moe": "Qwen3-MoE, each token to 8 of 32 experts",
}
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}
_TABLE = "<!-- {name}: tools/write_replay.py -->\n{rows}\n<!-- end -->"


def replay_page() -> str:
    """The text of docs/replay.md, with the tables of the figures that are in the file now."""
    models = json.loads(MEASURED.read_text())["models"]
    text = PAGE.read_text()
    for name, rows in (("moved", _moved(models)), ("the rest", _rest(models))):
        wanted = _TABLE.format(name=name, rows="\n".join(rows))
        found = re.compile(re.escape(wanted.partition("\n")[0]) + r"\n.*?<!-- end -->", re.DOTALL)
        text, count = found.subn(lambda _, wanted=wanted: wanted, text)
        assert count == 1, f"{PAGE} has no place for the table {name!r}"
    return text


def _moved(models: dict[str, Any]) -> list[str]:
    """Bytes that move with replay, over those without."""
    rows = [_row("model", *(_SHORT[one] for one in DTYPES)), "|---|---|---|"]
    for model, title in _NAMES.items():
        ratios = (models[f"{model} {dtype}"]["bytes_ratio"] for dtype in DTYPES)
        rows.append(_row(title, *(f"{one:.2f}" for one in ratios)))
    return rows


def _rest(models: dict[str, Any]) -> list[str]:
    """What is not computed again, of bf16 models."""
    found = {_NAMES[name]: models[f"{name} bfloat16"] for name in _NAMES}
    rows = [_row(*REST_HEADER), "|---|---|---|"]
    return rows + [_row(*one) for one in table_of_the_rest(found)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Writes the page; the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(replay_page())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
