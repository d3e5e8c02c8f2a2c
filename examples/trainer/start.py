# SPDX-License-Identifier: Apache-2.0
"""The first thing that each `pretrain_*.py` calls: `start`.

It checks megatron-core before anything imports it, and keeps warnings away that nobody can act on.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

from megatron.offload.integration.torchrun_report import recorded_errors

from .arguments import check_megatron_core_version
from .errors import UserError, fail


def start(make_task: Callable[[], Any]) -> int:
    """Trains the model of a task.

    Args:
        make_task: Imports the model's file, and with it megatron-core, and makes its task.

    Returns:
        The exit code.
    """
    try:
        check_megatron_core_version()
    except UserError as error:
        fail(str(error))
    import torch

    if not torch.cuda.is_available():
        # megatron-core compiles small functions of experts when it trains them. On a CPU that needs
        # a C++ compiler, and takes longer than it saves.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # megatron-core warns on import about each optional package that is not there.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    # Deprecations that megatron-core 0.16.1 runs into with newer torch: nothing a user can do.
    for message in ("Please use DTensor", r"`torch\.distributed\.\w+` is deprecated"):
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    with recorded_errors():
        task = make_task()
        from .training import pretrain

        pretrain(task)
    return 0
