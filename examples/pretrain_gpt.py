#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Pretrain GPT on megatron-core, with or without a GPU, with or without activation offload.

    python examples/pretrain_gpt.py --mock-data --train-iters 20
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --tensor-model-parallel-size 2 \
        --data-path CORPUS --tokenizer-model TOKENIZER.json --activation-offload ssd

The trainer is in `trainer/`; read `trainer/training.py` first.
"""

from __future__ import annotations

import sys
from typing import Any

from trainer.start import start


def make_task() -> Any:
    """Imports megatron-core, which `start` has checked by then."""
    from trainer.gpt import GPT

    return GPT()


if __name__ == "__main__":
    sys.exit(start(make_task))
