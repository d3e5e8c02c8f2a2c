# SPDX-License-Identifier: Apache-2.0
"""Notes with what the CPU's vector math library is called: `VectorCalls`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ONE_VALUE = (torch.device("cpu"), torch.float32, 1)  # too little for a second thread


class VectorCalls(TorchDispatchMode):
    """In this context `found` gets device, dtype and number of values of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.device, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.log.default, torch.ops.aten.tanh.default):
            self.found.append((args[0].device, args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))
