#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Pretrain GPT on megatron-core, with or without a GPU, with or without activation offload.

    python examples/pretrain_gpt.py --mock-data --train-iters 20
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --tensor-model-parallel-size 2 \
        --data-path CORPUS --tokenizer-model TOKENIZER.json --activation-offload ssd

The trainer is in `trainer/`; read `trainer/training.py` first.
"""

from __future__ import annotations

import logging
import sys
import warnings

from trainer.arguments import UserError, check_megatron_core_version, fail


def main() -> int:
    """Checks megatron-core before anything imports it, then trains."""
    try:
        check_megatron_core_version()
    except UserError as error:
        fail(str(error))
    # megatron-core warns on import about each optional package that is not there.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    # Deprecations that megatron-core 0.16.1 runs into with newer torch: nothing a user can do.
    for message in ("Please use DTensor", r"`torch\.distributed\.\w+` is deprecated"):
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    from trainer.gpt import GPT
    from trainer.training import pretrain

    pretrain(GPT())
    return 0


if __name__ == "__main__":
    sys.exit(main())
