# SPDX-License-Identifier: Apache-2.0
"""Activation placement for transformer training: device memory, recomputation, host DRAM or SSD.

Start reading at `engine.py`; `integration/` shows who calls it.
"""

from megatron.offload.config import OffloadConfig
from megatron.offload.engine import OffloadEngine
from megatron.offload.errors import (
    ChangedInPlaceError,
    ConfigurationError,
    OffloadError,
    StorageError,
)
from megatron.offload.placement.policy import Placement, Policy
from megatron.offload.saved.scope import Scope

__version__ = "0.1.0"

__all__ = [
    "ChangedInPlaceError",
    "ConfigurationError",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadError",
    "Placement",
    "Policy",
    "Scope",
    "StorageError",
]
