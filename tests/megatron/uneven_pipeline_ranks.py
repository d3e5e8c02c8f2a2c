# SPDX-License-Identifier: Apache-2.0
"""The GPT trainer with a pipeline whose first stage has all layers and whose second stage has the
loss, each in one of two chunks; the other chunks have nothing. test_trainer_layouts.py runs it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "examples") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples"))


def make_task() -> Any:
    """Imports megatron-core, which `start` has checked by then."""
    from trainer.gpt import GPT
    from trainer.model import transformer_config

    class Uneven(GPT):
        """With a setting that the trainer has no flag for."""

        def transformer_config(self, args: argparse.Namespace) -> Any:
            first = ["embedding", *["decoder"] * args.num_layers]
            layout: list[list[str]] = [first, [], [], ["loss"]]  # in the order of passes
            return transformer_config(args, pipeline_model_parallel_layout=layout)

    return Uneven()


if __name__ == "__main__":
    from trainer.start import start

    sys.exit(start(make_task))
