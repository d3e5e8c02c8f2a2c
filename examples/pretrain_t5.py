#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Pretrain T5 on megatron-core, with or without a GPU, with or without activation offload.

    python examples/pretrain_t5.py --data-path CORPUS --tokenizer-model TOKENIZER.json
    torchrun --nproc-per-node 2 examples/pretrain_t5.py --tensor-model-parallel-size 2 \
        --data-path CORPUS --tokenizer-model TOKENIZER.json --activation-offload ssd

CORPUS is made with `tools/preprocess_data.py --split-sentences`, which also makes the tokenizer.
The trainer is in `trainer/`; read `trainer/training.py` first.
"""

from __future__ import annotations

import sys
from typing import Any

from trainer.start import start


def make_task() -> Any:
    """Imports megatron-core, which `start` has checked by then."""
    from trainer.t5 import T5

    return T5()


if __name__ == "__main__":
    sys.exit(start(make_task))
